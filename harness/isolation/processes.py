"""The machine's processes: who has started whom, what they hold, and how they are ended.

Only Linux tells; elsewhere a child is all that is known of what it starts.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# what prctl is asked for (Linux)
DIE_WITH_PARENT, DUMPABLE, ADOPT = 1, 4, 36
ROUNDS = 1000  # of ending processes; more than any of them can start meanwhile


def processes() -> dict[int, tuple[int, int]]:
    """Each process that is no zombie -> its parent, and when it began (Linux)."""
    found: dict[int, tuple[int, int]] = {}
    if sys.platform != "linux":
        return found
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        try:
            state, parent, *more = (path / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:  # it has just ended
            continue
        if state != b"Z":
            found[int(path.name)] = int(parent), int(more[17])
    return found


def family(pid: int | None) -> dict[int, int]:
    """The processes under `pid`, children and theirs -> when each began."""
    known = processes()
    found: dict[int, int] = {}
    fresh = set() if pid is None else {pid}
    while fresh:
        fresh = {each for each, (parent, _) in known.items() if parent in fresh} - found.keys()
        found |= {each: known[each][1] for each in fresh}
    return found


def end_family(pid: int) -> None:
    """End all processes under `pid`, and those that they start meanwhile."""
    for _ in range(ROUNDS):
        if not (found := family(pid)):
            return
        for each in found:
            end_process(each)
        time.sleep(0.001)


def end_process(pid: int) -> None:
    """End a process, where it is there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def ask_kernel(what: int, value: int) -> None:
    """Call prctl (Linux)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(what, value, 0, 0, 0)


def kept_waiting(pid: int | None) -> float:
    """Seconds that a process has been ready to run, and others had the processors (Linux).

    Its children's, too: what stands over a worker waits for it, and for nothing else.
    """
    pids = [pid, *family(pid)]
    waits = 0.0
    for each in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            waits += 1e-9 * int(Path(f"/proc/{each}/schedstat").read_text().split()[1])
    return waits


def resident_bytes(pids: Sequence[int | None], kind: str) -> int:
    """The resident sets of processes in bytes, 0 where they can't be told.

    `kind`: 'Rss', or 'Pss', which shares out the pages that several hold.
    """
    held = 0
    for pid in pids:
        try:
            if kind == "Rss":
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                held += pages * os.sysconf("SC_PAGE_SIZE")
            else:
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
                held += 1024 * int(rollup.partition("Pss:")[2].split()[0])
        except (OSError, IndexError):
            with contextlib.suppress(Exception):  # not installed, or the process has just ended
                import psutil

                held += int(psutil.Process(pid).memory_info().rss)
    return held
