"""The folder of a process's temporary files, which is removed with all in it when it ends."""

import atexit
import errno
import functools
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

LONGEST_SOCKET: Final = 103  # bytes of a socket's name on any system
NAME: Final = 24  # of those, that multiprocessing adds to its folder
SHORT: Final = ("/tmp", "/var/tmp", "/dev/shm")  # where TMPDIR is too long
TRIES: Final = 20  # of removing a folder: what has just been killed may still write to it


@functools.cache
def scratch() -> str:
    """The folder, made when it is first needed. Raises OSError where none can be made."""
    try:
        return own_folder(None)
    except FileNotFoundError as error:
        raise OSError(
            error.errno, f"{error.strerror}: name a folder that can be written to", "TMPDIR"
        ) from None


def own_folder(parent: str | None) -> str:
    """Make a folder that is removed at the end of this process."""
    folder = tempfile.mkdtemp(prefix="ladder-", dir=parent)
    atexit.register(remove, folder, os.getpid())
    return folder


def remove(folder: str, pid: int) -> None:
    """Remove a folder, if this process is the one that made it."""
    if os.getpid() != pid:
        return
    for _ in range(TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        if not Path(folder).exists():
            return
        time.sleep(0.01)


def short_folder() -> str:
    """A folder whose name leaves room for a socket's: ours, else one in a folder of SHORT."""
    if len(os.fsencode(scratch())) + NAME <= LONGEST_SOCKET:
        return scratch()
    for parent in SHORT:
        try:
            return own_folder(parent)
        except OSError:
            continue
    room = LONGEST_SOCKET - NAME - len("/ladder-12345678")
    raise OSError(
        errno.ENAMETOOLONG,
        f"its {len(os.fsencode(tempfile.gettempdir()))} characters leave no room for the name of a "
        f"socket, and there is no room in {', '.join(SHORT)}: name a folder of at most {room}",
        "TMPDIR",
    )
