"""The JSONL file of a run: the env line with the plan, then one line for each record.

Each line is flushed as soon as it is measured: a run that is killed loses at most the cell being
measured. An incomplete last line is dropped when the run is resumed.
"""

import contextlib
import json
import math
import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.records.files import lock, whole
from harness.records.schema import BadRecord, Record, check_record, check_stages, key


class WriteFailed(Exception):
    """A run's file can't be written any more; the message says why. Its lines are all complete."""


def dump_line(record: Mapping[str, Any]) -> bytes:
    """Check a record and write it as a line of JSON; ValueError where it has NaN or infinity."""
    line = json.dumps(record, allow_nan=False)
    check_record(record)
    return (line + "\n").encode()


def parse(line: bytes) -> Record:
    """Read the record in a line, its texts safe to print. Raises BadRecord."""
    try:
        record = json.loads(line, parse_int=number, parse_float=number, parse_constant=number)
        if not isinstance(record, dict):
            raise BadRecord(f"got {type(record).__name__}, expected an object")
        return check_record(record)
    except RecursionError:
        raise BadRecord("its lists and objects are nested too deep") from None
    except ValueError as error:  # from JSON, from UTF-8, or a BadRecord
        raise BadRecord(str(error)) from error


def number(text: str) -> int | float:
    """Read a number of JSON; BadRecord where it is not finite as a float."""
    value = float(text)
    if not math.isfinite(value):
        raise BadRecord(f"got the number {reprlib.repr(text)}, expected a finite one")
    return int(text) if text.lstrip("-").isdigit() else value


def read(path: str | os.PathLike[str], kind: str | None = "cell") -> tuple[Record, list[Record]]:
    """Read a results file: its env record and its records of `kind`, from `check_record`.

    None: of whatever kind the first of them is. An incomplete last line is ignored. Raises
    BadRecord where any other line is not such a record, or names a stage that the env line doesn't;
    OSError where there is no such file.
    """
    data = Path(path).read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    records: list[Record] = []
    seen: dict[str, int] = {}  # cell -> its line
    for count, line in enumerate(whole.splitlines(), start=1):
        try:
            record = parse(line)
            if records and kind is None and record["kind"] != "env":
                kind = record["kind"]
            expected = kind if records else "env"
            if record["kind"] == expected:
                check_stages(record, records[0] if records else record)
        except BadRecord as error:
            raise BadRecord(f"{path}: line {count} is not a record of ours: {error}") from error
        if record["kind"] != expected:
            got, wanted = record["kind"], repr(expected) if expected else "any but this one"
            raise BadRecord(f"{path}: line {count} is of kind {got!r}, expected {wanted}")
        if record["kind"] == "cell" and (first := seen.setdefault(key(record), count)) < count:
            raise BadRecord(f"{path}: line {count} is the cell of line {first} once more")
        records.append(record)
    if not records:
        raise BadRecord(f"{path}: no whole line in it: nothing was measured, start the run again")
    return records[0], records[1:]


class Writer:
    """Appends records to a results file: one writer per file, each line flushed to disk."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path = path
        self.handle = handle

    @classmethod
    def create(cls, path: Path, env: Mapping[str, Any]) -> "Writer":
        """Create a file with its env line. Raises FileExistsError rather than overwrite a run."""
        if path.exists():
            raise FileExistsError(f"{path} is there already")
        # written in one step: a run killed here leaves no file with an incomplete env line
        with whole(path, new=True) as draft:
            draft.write_bytes(dump_line(env))
        return cls.reopen(path)

    @classmethod
    def reopen(cls, path: Path) -> "Writer":
        """Open an existing file of cells, and cut off an incomplete last line.

        Raises BlockingIOError while another process writes it, and BadRecord where it is not a
        run's file, which is then left as it is.
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
        """Write records, one line each, and wait until they are on the disk.

        Raises WriteFailed where the disk is full or fails otherwise: lines that were written
        completely are kept, an incomplete one is removed.
        """
        data = b"".join(dump_line(record) for record in records)
        start, done = os.fstat(self.handle).st_size, 0
        try:
            while done < len(data):  # a full disk takes a part, then refuses the rest
                done += os.write(self.handle, data[done:])
            os.fsync(self.handle)
        except OSError as error:
            with contextlib.suppress(OSError):  # if not, readers ignore the incomplete line
                os.ftruncate(self.handle, start + data.rfind(b"\n", 0, done) + 1)
            reason = error.strerror or error
            raise WriteFailed(
                f"{self.path} can't be written any more: {reason}; what was measured before is in "
                "it, so make room and measure the rest"
            ) from error

    def keep(self, records: int) -> None:
        """Cut off all lines but the env line and the first `records` after it."""
        lines = self.path.read_bytes().splitlines(keepends=True)
        os.ftruncate(self.handle, sum(map(len, lines[: 1 + records])))

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.handle)
