"""How a call's peak memory is measured, above what is held before it, and nothing else.

On a GPU it is what torch's CUDA allocator says. On a CPU it is the process's own resident set: its
high-water mark is reset (a `5` to /proc/self/clear_refs), the call runs, and the mark is read
again: that sees Python, torch and C++ alike. It must be the first full call in its process, or what
came before it must be given back (`give_back`): memory that an allocator has kept would not show.
"""

import contextlib
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")


def measure_peak(call: Callable[[], T], device: str) -> tuple[T, int | None, str | None]:
    """What `call` returns, its peak in bytes, and the meter: 'cuda-allocator' or 'process-rss'.

    The peak and the meter are None on a CPU where the kernel keeps no high-water mark (macOS).
    """
    return measure_cuda(call) if device == "cuda" else measure_rss(call)


def measure_cuda(call: Callable[[], T]) -> tuple[T, int | None, str | None]:
    """The allocator's peak during `call` above what is allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - before, "cuda-allocator"


def measure_rss(call: Callable[[], T]) -> tuple[T, int | None, str | None]:
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
    """Return to the system what is freed but kept: Python's garbage, and the C allocator's pages.

    Where the C library isn't glibc nothing is told to give pages back, and some may be kept.
    """
    gc.collect()
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def status_bytes(field: str) -> int | None:
    """A field of /proc/self/status in bytes, None where it isn't kept."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    return None
