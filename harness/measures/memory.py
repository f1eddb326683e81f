"""Measure the peak memory of a call, above what was allocated before it.

On a GPU it is the peak of torch's CUDA allocator. On a CPU it is the peak of the process's resident
set: its high-water mark is reset (a `5` to /proc/self/clear_refs), the call runs, and the mark is
read. That counts Python, torch and C++ alike. It must be the first full call in its process, or the
memory freed before must be returned to the system (`give_back`): a call that reuses pages which an
allocator has kept would not raise the mark.
"""

import contextlib
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import torch

from harness.records.schema import Meter

T = TypeVar("T")

STATUS: Final = Path("/proc/self/status")
CLEAR_REFS: Final = Path("/proc/self/clear_refs")


def measure_peak(call: Callable[[], T], device: str) -> tuple[T, int | None, Meter | None]:
    """Run `call`; returns its result, its peak in bytes, and the meter.

    The meter is 'cuda-allocator' or 'process-rss'. Both are None on a CPU whose system
    keeps no high-water mark (macOS).
    """
    return measure_cuda(call) if device == "cuda" else measure_rss(call)


def measure_cuda(call: Callable[[], T]) -> tuple[T, int | None, Meter | None]:
    """The allocator's peak during `call` above what is allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - before, "cuda-allocator"


def measure_rss(call: Callable[[], T]) -> tuple[T, int | None, Meter | None]:
    """The resident set's high-water mark during `call` above what is resident before it."""
    try:
        CLEAR_REFS.write_text("5")
        before = status_bytes("VmRSS")
    except OSError:
        return call(), None, None
    result = call()
    peak = status_bytes("VmHWM")
    if before is None or peak is None:
        return result, None, None
    return result, max(0, peak - before), "process-rss"


def give_back() -> None:
    """Return freed memory to the system: Python's garbage, and pages kept by the C allocator.

    Where the C library isn't glibc, its allocator may keep pages.
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def status_bytes(field: str) -> int | None:
    """A field of /proc/self/status in bytes, None where it isn't there (Linux has it)."""
    with contextlib.suppress(FileNotFoundError):
        for line in STATUS.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return 1024 * int(line.split()[1])
    return None
