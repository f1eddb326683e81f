"""Files that are written whole or not at all, and by one process at a time."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows: nothing keeps two writers of one file apart
    fcntl = None  # type: ignore[assignment]

OPENED = ("/dev/std", "/dev/fd/", "/proc/")  # names of what is open already


@contextlib.contextmanager
def whole(path: Path, new: bool = False) -> Iterator[Path]:
    """Yield the name of a draft, which takes the place of `path` at the end if all went well.

    Whoever reads `path` meanwhile reads what was there before. Its folder is made; its mode is
    kept, and so is a link to it. What can't be replaced (a pipe, a device) is yielded itself.
    `new`: raises FileExistsError where `path` is there, at the beginning or at the end.
    """
    if str(path.absolute()).startswith(OPENED) or (path.exists() and not path.is_file()):
        yield path
        return
    if new and os.path.lexists(path):
        raise FileExistsError(f"{path} is there already")
    path.parent.mkdir(parents=True, exist_ok=True)
    given, path = path, path.resolve()
    if path.exists() and not os.access(path.parent, os.W_OK):  # no draft can lie beside it
        yield path
        return
    # the suffix tells libraries the format
    draft = path.with_name(f".draft-{secrets.token_hex(6)}{path.suffix}")
    try:
        yield draft
        if new:
            path.touch(exist_ok=False)
        else:
            with contextlib.suppress(OSError):
                shutil.copymode(path, draft)
        put(draft, path)
    except OSError as error:
        if error.filename in (None, str(draft)):  # None: a full disk
            error.filename = str(given)
        raise
    finally:
        draft.unlink(missing_ok=True)


def put(draft: Path, path: Path) -> None:
    """Move a draft to its place."""
    try:
        draft.replace(path)
    except OSError:  # a file that a container mounts by itself can be written, but not replaced
        if not path.is_file():
            raise
        shutil.copyfile(draft, path)


def write(path: Path, data: str | bytes) -> None:
    """Write a file whole or not at all; a text in UTF-8, its line ends as they are."""
    with whole(path) as draft:
        draft.write_bytes(data.encode() if isinstance(data, str) else data)


class Owned:
    """A file that no other process may own, and which this one replaces, until it is closed.

    Raises BlockingIOError where another process has it; `new`: FileExistsError where it is there.
    """

    def __init__(self, path: Path, new: bool = False) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = opened(path, new)

    def replace(self, data: bytes) -> None:
        """Replace the file; what lies under its name is whole, and locked, at every moment.

        The data are on the disk then.
        """
        with whole(self.path) as draft:
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                with contextlib.suppress(OSError):  # a device has no disk
                    os.fsync(file.fileno())
            fresh = None if fcntl is None or draft == self.path else draft.open("rb+")
            if fresh is not None:
                lock(fresh.fileno())
        if fresh is not None and not same(fresh, self.path):  # copied: the old one stays
            fresh.close()
        elif fresh is not None:
            self.close()
            self.file = fresh

    def close(self) -> None:
        """Let others have the file."""
        if self.file is not None:
            self.file.close()


def opened(path: Path, new: bool = False) -> BinaryIO | None:
    """Open a file that this process then owns, and make it where it isn't there.

    None where the system has no locks, or the file is none that can be replaced.
    """
    if fcntl is None or (path.exists() and not path.is_file()):
        return None
    while True:
        flags = os.O_RDWR | os.O_CREAT | (os.O_EXCL if new else 0)
        file = os.fdopen(os.open(path, flags, 0o666), "rb+")
        try:
            lock(file.fileno())
            if same(file, path):
                return file
        except OSError:
            file.close()
            raise
        file.close()  # its owner has replaced it meanwhile


def same(file: BinaryIO, path: Path) -> bool:
    """Whether an open file is what lies under the name `path`."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def lock(handle: int) -> None:
    """Lock a file until it is closed; BlockingIOError where another process has locked it.

    Nothing happens where the system, or the file system, has no locks.
    """
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:  # some clusters' file systems
            return
