"""The JSONL file that holds a run: the env line with the plan, then one line for each record.

Each line is flushed when it is measured: a run killed at any moment loses at most the cell under
way, and a torn last line is dropped when the run is resumed.
"""

import contextlib
import json
import math
import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from harness.records.schema import BadRecord, Record, check_record, check_stages


class WriteFailed(Exception):
    """A run's file takes no more: the message names it and says why. What it holds is whole."""


def dump_line(record: Mapping[str, Any]) -> bytes:
    """A checked record as a line of JSON. NaN and infinity have no place in it."""
    line = json.dumps(record, allow_nan=False)
    check_record(record)
    return (line + "\n").encode()


def parse(line: bytes) -> Record:
    """The record in a line, safe to show. Raises BadRecord."""
    try:
        record = json.loads(line, parse_int=number, parse_float=number, parse_constant=number)
        if not isinstance(record, dict):
            raise BadRecord(f"got {type(record).__name__}, expected an object")
        return check_record(record)
    except RecursionError:
        raise BadRecord("its lists and objects are nested too deep") from None
    except ValueError as error:  # of JSON, of UTF-8, or ours
        raise BadRecord(str(error)) from error


def number(text: str) -> int | float:
    """A number of JSON, where it is finite and no larger than a float can be."""
    value = float(text)
    if not math.isfinite(value):
        raise BadRecord(f"got the number {reprlib.repr(text)}, expected a finite one")
    return int(text) if text.lstrip("-").isdigit() else value


def read(path: str | os.PathLike[str], kind: str = "cell") -> tuple[Record, list[Record]]:
    """The env record of a results file and its records, all of `kind`, as `check_record` has them.

    A torn last line is passed over. Raises BadRecord where any other line is no such record, or
    names a stage that the env line doesn't; OSError where there is no such file.
    """
    data = Path(path).read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    records: list[Record] = []
    for count, line in enumerate(whole.splitlines(), start=1):
        expected = kind if records else "env"
        try:
            record = parse(line)
            if record["kind"] == expected:
                check_stages(record, records[0] if records else record)
        except BadRecord as error:
            raise BadRecord(f"{path}: line {count} is not a record of ours: {error}") from error
        if record["kind"] != expected:
            got = record["kind"]
            raise BadRecord(f"{path}: line {count} is of kind {got!r}, expected {expected!r}")
        records.append(record)
    if not records:
        raise BadRecord(f"{path}: no whole line in it: nothing was measured, start the run again")
    return records[0], records[1:]


class Writer:
    """Appends records to a results file: one writer a file at a time, each line flushed to disk."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self.handle = handle

    @classmethod
    def create(cls, path: Path, env: Mapping[str, Any]) -> "Writer":
        """A new file with its env line. Raises FileExistsError rather than write over a run."""
        if path.exists():
            raise FileExistsError(f"{path} is there already")
        path.parent.mkdir(parents=True, exist_ok=True)
        # whole or not at all: a run killed here leaves no file that has a torn env line
        draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
        try:
            draft.write_bytes(dump_line(env))
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
        return cls.reopen(path)

    @classmethod
    def reopen(cls, path: Path) -> "Writer":
        """An existing file, less a torn last line.

        Raises BlockingIOError while another writes it, BadRecord where it is no run: a file that
        is not ours is left as it is.
        """
        handle = os.open(path, os.O_RDWR | os.O_APPEND)
        try:
            lock(handle)
            read(path)
        except (OSError, BadRecord):
            os.close(handle)
            raise
        data = path.read_bytes()
        os.ftruncate(handle, data.rfind(b"\n") + 1)
        return cls(path, handle)

    def append(self, *records: Mapping[str, Any]) -> None:
        """Write records, a line each, and wait until they are on the disk.

        Raises WriteFailed where the disk is full, or has another reason: the lines that still went
        in whole are kept, a torn one is not.
        """
        data = b"".join(dump_line(record) for record in records)
        start, done = os.fstat(self.handle).st_size, 0
        try:
            while done < len(data):  # a disk takes what it has room for, and refuses the next
                done += os.write(self.handle, data[done:])
            os.fsync(self.handle)
        except OSError as error:
            with contextlib.suppress(OSError):  # then a reader passes the torn line over
                os.ftruncate(self.handle, start + data.rfind(b"\n", 0, done) + 1)
            reason = error.strerror or error
            raise WriteFailed(
                f"{self.path} can't be written any more: {reason}; what was measured before is in "
                "it, so make room and measure the rest"
            ) from error

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self.handle)


def lock(handle: int) -> None:
    """Take the file for this process until it ends; BlockingIOError where another has it."""
    try:
        import fcntl
    except ImportError:  # Windows: two writers of one file are the user's own affair
        return
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
