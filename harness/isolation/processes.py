"""The machine's processes: their descendants, their memory, and how to end them.

Descendants are known on Linux only.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

# options of prctl (Linux): PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER
DIE_WITH_PARENT, DUMPABLE, SUBREAPER = 1, 4, 36
MEMORY_SLACK: Final = 1 << 29  # bytes: stacks of torch's threads, the interpreter's own growth
ROUNDS: Final = 1000  # of ending processes, against those that start new ones meanwhile


def descendants(pid: int | None) -> set[int]:
    """The ids of all descendants of the process `pid` that are no zombies (Linux)."""
    parents: dict[int, int] = {}
    # at the end of each process this takes a while, and with pathlib twice as long
    names = os.listdir("/proc") if sys.platform == "linux" else []  # noqa: PTH208
    for name in filter(str.isdecimal, names):
        # an OSError: it has just ended
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
            state, parent, *_ = file.read().rpartition(b")")[2].split(maxsplit=2)
            if state != b"Z":
                parents[int(name)] = int(parent)
    found: set[int] = set()
    fresh = set() if pid is None else {pid}
    while fresh:
        fresh = {each for each, parent in parents.items() if parent in fresh} - found
        found |= fresh
    return found


def end_descendants(pid: int) -> None:
    """End all descendants of `pid`, and those that they start meanwhile."""
    for _ in range(ROUNDS):
        if not (found := descendants(pid)):
            return
        for each in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGKILL)
        time.sleep(0.001)


def ask_kernel(what: int, value: int) -> None:
    """Call prctl (Linux)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(what, value, 0, 0, 0)


def resident_bytes(pids: Sequence[int | None], kind: str) -> int:
    """The resident memory of processes in bytes, 0 where it isn't known.

    `kind`: 'Rss', or 'Pss', which divides a shared page among the processes that share it.
    """
    total = 0
    for pid in pids:
        try:
            if kind == "Rss":
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                total += pages * os.sysconf("SC_PAGE_SIZE")
            else:
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
                total += 1024 * int(rollup.partition("Pss:")[2].split()[0])
        except (OSError, IndexError):
            with contextlib.suppress(Exception):  # not installed, or the process has just ended
                import psutil

                total += int(psutil.Process(pid).memory_info().rss)
    return total


def set_data_limit(memory: int) -> None:
    """Make an allocation far beyond `memory` bytes fail at once (Linux only).

    The parent watches the resident memory; this stops a single huge allocation before it starts.
    """
    from harness.measures.memory import status_bytes  # imports torch

    if (data := status_bytes("VmData")) is not None:
        import resource

        limit = data + memory + MEMORY_SLACK
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
