"""Records: their schema, in this one place, and the JSONL file that holds a run.

A run is a JSON object a line: first the env line, with the whole plan, then a line a cell, each
appended and flushed when it is measured. A run killed at any moment loses the cell under way at
the most; a torn last line is dropped when the run is resumed.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from harness.problems.problem import DEVICES, DTYPES, INPUTS, PRECISIONS, Problem

SCHEMA_VERSION = 1

STATUSES = ("ok", "wrong", "wrong-by-design", "skipped", "crashed", "timeout", "out-of-memory")
FAILURES = ("wrong", "crashed", "timeout", "out-of-memory")
MODES = ("native", "interpreted", "compiled")
METERS = ("cuda-allocator", "process-rss")
DIRECTIONS = ("fwd", "bwd", "train")
CEILINGS = ("matmul", "copy")

# what makes a problem: harness/problems/problem.py's fields
PROBLEM = tuple(Problem.__dataclass_fields__)

Record = dict[str, Any]

number = (int, float)
nothing = type(None)

# field -> the types that its value may have, and the values it may take where they are few
CELL: dict[str, tuple[tuple[type, ...], tuple[str, ...] | None]] = {
    "kind": ((str,), ("cell",)),
    "stage": ((int,), None),
    "name": ((str,), None),
    "inputs": ((str,), INPUTS),
    "seed": ((int,), None),
    "b": ((int,), None),
    "h": ((int,), None),
    "hk": ((int,), None),
    "nq": ((int,), None),
    "nk": ((int,), None),
    "d": ((int,), None),
    "dtype": ((str,), DTYPES),
    "causal": ((bool,), None),
    "seqlens_k": ((list, nothing), None),
    "device": ((str,), DEVICES),
    "mode": ((str,), MODES),
    "status": ((str,), STATUSES),
    "reason": ((str,), None),  # empty where there is nothing to explain
    "time_ms": ((*number, nothing), None),  # median of a call
    "time_iqr_ms": ((*number, nothing), None),  # null where there was one sample
    "samples": ((int,), None),
    "first_call_ms": ((*number, nothing), None),  # holds compilation
    "sm_clock_mhz": ((int, nothing), None),  # of the GPU, right after the samples
    "peak_bytes": ((int, nothing), None),  # above the inputs
    "memory_meter": ((str, nothing), METERS),
    "precision": ((str,), (*PRECISIONS, *DTYPES)),
    "err_stage3_max": ((*number, nothing), None),
    "err_stage3_rel": ((*number, nothing), None),
    "err_f64_max": ((*number, nothing), None),
    "err_f64_rel": ((*number, nothing), None),
    "flops": ((int,), None),
    "hbm_bytes": ((int,), None),
    "direction": ((str,), DIRECTIONS),
    "paired": ((bool,), None),
}

ENV: dict[str, tuple[tuple[type, ...], tuple[str, ...] | None]] = {
    "kind": ((str,), ("env",)),
    "schema": ((int,), None),
    "plan": ((list,), None),  # a dict a cell: stage, name, and the problem's fields
    "rungs": ((list,), None),  # number, name, title, sha256 ... of each stage in the plan
    "arguments": ((dict,), None),
    "device": ((str,), DEVICES),
    "device_name": ((str,), None),
    "cpu": ((str,), None),
    "cores": ((int,), None),
    "memory_bytes": ((int, nothing), None),
    "python": ((str,), None),
    "torch": ((str, nothing), None),
    "triton": ((str, nothing), None),
    "numpy": ((str, nothing), None),
    "driver": ((str, nothing), None),
    "system": ((str,), None),
    "commit": ((str, nothing), None),
    "sources": ((str,), None),  # a digest of the project's code, for a tree without git
    "date": ((str,), None),
}

# what a machine can do at the best: harness/runs/ceilings.py
CEILING: dict[str, tuple[tuple[type, ...], tuple[str, ...] | None]] = {
    "kind": ((str,), ("ceiling",)),
    "what": ((str,), CEILINGS),
    "dtype": ((str, nothing), DTYPES),  # null for a copy: bytes are bytes
    "precision": ((str, nothing), (*PRECISIONS, *DTYPES)),
    "threads": ((int, nothing), None),  # of a CPU; null on a GPU
    "size": ((int,), None),  # matmul: the side of the square matrices; copy: bytes read + written
    "value": (number, None),
    "unit": ((str,), ("TFLOP/s", "TB/s")),
    "time_ms": (number, None),  # median of a call
    "time_iqr_ms": ((*number, nothing), None),
    "samples": ((int,), None),
    "device": ((str,), DEVICES),
}

# one stage as a real model's attention, on one text (harness/minilm/run.py)
MODEL: dict[str, tuple[tuple[type, ...], tuple[str, ...] | None]] = {
    "kind": ((str,), ("model",)),
    "stage": ((int,), None),
    "name": ((str,), None),
    "device": ((str,), DEVICES),
    "dtype": ((str,), DTYPES),
    "mode": ((str,), MODES),
    "tokens": ((int,), None),  # of the text, [CLS] and [SEP] counted
    "status": ((str,), STATUSES),
    "reason": ((str,), None),
    "cosine": ((*number, nothing), None),  # of the sentence embedding with SDPA's
    "max_hidden_diff": ((*number, nothing), None),  # of the last hidden state from SDPA's
    "rel_hidden_diff": ((*number, nothing), None),
    "layer_hidden_diffs": ((list, nothing), None),  # the largest one after each layer
    "err_f64_max": ((*number, nothing), None),  # of the last hidden state from the float64 model's
    "err_f64_rel": ((*number, nothing), None),
    "time_ms": ((*number, nothing), None),  # median of a forward pass of the whole model
    "time_iqr_ms": ((*number, nothing), None),
    "sdpa_time_ms": ((*number, nothing), None),  # with SDPA, in turns with it, in one process
    "sdpa_time_iqr_ms": ((*number, nothing), None),
    "samples": ((int,), None),
}


# one kernel of one call of a stage, as the profiler counted it (harness/runs/traffic.py)
IO: dict[str, tuple[tuple[type, ...], tuple[str, ...] | None]] = {
    "kind": ((str,), ("io",)),
    **{field: CELL[field] for field in ("stage", "name", *PROBLEM)},
    "launch": ((int,), None),  # its place among the call's kernels
    "kernel": ((str,), None),
    "time_ms": (number, None),
    "dram_read_bytes": ((int,), None),
    "dram_write_bytes": ((int,), None),
    "predicted_bytes": ((int,), None),  # of the whole call, harness/problems/cost.py
}

# one contestant on one problem of `ladder bench` (harness/runs/contest.py): all of them in one
# process, taking turns, so that the ratios are fair
BENCH: dict[str, tuple[tuple[type, ...], tuple[str, ...] | None]] = {
    "kind": ((str,), ("bench",)),
    **{field: CELL[field] for field in ("stage", "name", *PROBLEM, "mode", "status", "reason")},
    **{field: CELL[field] for field in ("time_ms", "time_iqr_ms", "samples", "first_call_ms")},
    **{field: CELL[field] for field in ("sm_clock_mhz", "peak_bytes", "memory_meter")},
    **{field: CELL[field] for field in ("err_f64_max", "err_f64_rel", "flops")},
    "tflops": ((*number, nothing), None),  # flops over time, 10^12 a second
    "tokens_per_s": ((*number, nothing), None),  # b nq over time
    "speedup": ((dict,), None),  # a timed peer's name -> its time over this one's
    "skip_ratio": ((*number, nothing), None),  # of (q block, KV tile) pairs, never visited; or null
    "warmup": ((int,), None),  # calls before the rounds
    "repeat": ((int,), None),  # rounds
}

# one small GPT trained with one attention from one seed (harness/training/trainer.py)
TRAIN: dict[str, tuple[tuple[type, ...], tuple[str, ...] | None]] = {
    "kind": ((str,), ("train",)),
    "stage": ((int,), None),
    "name": ((str,), None),
    "reference": ((bool,), None),  # one of SDPA's backends, which the others are held against
    "device": ((str,), DEVICES),
    "dtype": ((str,), DTYPES),  # of q, k, v; the weights are float32
    "mode": ((str,), MODES),
    "size": ((str,), None),  # of the model: harness/training/gpt.py's SHAPES
    "seed": ((int,), None),
    "steps": ((int,), None),  # that were asked for
    "parameters": ((int, nothing), None),
    "status": (
        (str,),
        STATUSES,
    ),  # of the training alone: curves are judged by harness/training/curves.py
    "reason": ((str,), None),
    "losses": ((list,), None),  # of each step that was done, nats a character; all finite
    "val_loss": ((*number, nothing), None),  # on text that it was not trained on, after the end
    "tokens_per_s": ((*number, nothing), None),  # null where interpreted, and of very few steps
}

# one run of a tool of compute-sanitizer over the kernels (tools/sanitize.py)
SANITIZER: dict[str, tuple[tuple[type, ...], tuple[str, ...] | None]] = {
    "kind": ((str,), ("sanitizer",)),
    "tool": ((str,), ("memcheck", "racecheck")),
    "version": ((str,), None),
    "ran": ((list,), None),  # a line a stage, head dimension and dtype that came to its end
    "summary": ((str,), None),  # the tool's own last line
    "errors": ((int, nothing), None),  # or hazards; null where the tool itself failed
    "seconds": (number, None),
}

# a mistake made in a stage on purpose, and what came out of it (tools/pitfalls.py)
PITFALL: dict[str, tuple[tuple[type, ...], tuple[str, ...] | None]] = {
    "kind": ((str,), ("pitfall",)),
    "name": ((str,), None),  # of the mistake
    "source": ((str,), None),  # who warns of it, or makes it
    "lesson": ((str,), None),
    **{field: CELL[field] for field in ("stage", *PROBLEM, "mode")},
    "changes": ((list,), None),  # [the stage's text, the wrong one], ...
    "raised": ((str,), None),  # the last line of an error; empty where it ran
    "exact": ((bool,), None),  # by the rule for stages (harness/measures/accuracy.py)
    "reason": ((str,), None),  # why not
    "rows": ((int,), None),  # of all its outputs
    "rows_wrong": ((int,), None),  # of them, off by more than an exact stage's may be
    "err_f64_max": ((*number, nothing), None),  # null where there is none
    "shipped_err_f64_max": (number, None),  # of the stage as it is
}

# kind of record -> its schema; a file is an env line, then lines of one other kind
SCHEMAS = {
    "env": ENV, "cell": CELL, "ceiling": CEILING, "model": MODEL, "io": IO, "bench": BENCH,
    "train": TRAIN, "sanitizer": SANITIZER, "pitfall": PITFALL,
}  # fmt: skip


class BadRecord(ValueError):
    """A line of a results file is not a record; the message says which line and why."""


class WriteFailed(Exception):
    """A run's file takes no more: the message names it and says why. What it holds is whole."""


def check_record(record: Mapping[str, Any]) -> None:
    """Raise BadRecord unless `record` is of a kind of ours, with just its schema's fields."""
    schema = SCHEMAS.get(str(record.get("kind")))
    if schema is None:
        raise BadRecord(f"kind: got {record.get('kind')!r}, expected one of {', '.join(SCHEMAS)}")
    if missing := [field for field in schema if field not in record]:
        raise BadRecord(f"no field {missing[0]!r}")
    if strange := [field for field in record if field not in schema]:
        raise BadRecord(f"unknown field {strange[0]!r}")
    for field, (types, choices) in schema.items():
        value = record[field]
        # bool is an int to Python, not here
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            names = " or ".join("null" if t is nothing else t.__name__ for t in types)
            raise BadRecord(f"{field}: got {value!r}, expected {names}")
        if choices and value is not None and value not in choices:
            raise BadRecord(f"{field}: got {value!r}, expected one of {', '.join(choices)}")


def key(cell: Mapping[str, Any]) -> str:
    """What a cell is, as text: stage and problem, the same for a planned and a measured cell."""
    return json.dumps([cell[field] for field in ("stage", "name", "paired", *PROBLEM)])


def dump_line(record: Mapping[str, Any]) -> bytes:
    """A checked record as a line of JSON. NaN and infinity have no place in it."""
    check_record(record)
    return (json.dumps(record, allow_nan=False) + "\n").encode()


def read(
    path: str | os.PathLike[str], kind: str = "cell"
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The env record of a results file and its records, all of `kind`.

    A torn last line is passed over. Raises BadRecord where any other line is no such record,
    OSError where there is no such file.
    """
    data = Path(path).read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    records = []
    for count, line in enumerate(whole.splitlines(), start=1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise BadRecord(f"got {type(record).__name__}, expected an object")
            check_record(record)
        except (BadRecord, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise BadRecord(f"{path}: line {count} is not a record of ours: {error}") from error
        expected = "env" if count == 1 else kind
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
