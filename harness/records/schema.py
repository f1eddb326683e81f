"""The schema of records: a dataclass for each kind, in this one place.

A field's annotation says what its value may be: a Literal where the values are few, `| None` where
JSON has null. Fields with a default are younger than the first records: a record without them is
read as if it had the default.
"""

import functools
import json
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from harness.problems.problem import Problem

SCHEMA_VERSION = 1

Device = Literal["cpu", "cuda"]
DType = Literal["float16", "bfloat16", "float32", "float64"]
Precision = Literal["ieee", "tf32", "float16", "bfloat16", "float32", "float64"]
Inputs = Literal["normal", "peaky", "real"]
Direction = Literal["fwd", "bwd", "train"]
Mode = Literal["native", "interpreted", "compiled"]
Status = Literal["ok", "wrong", "wrong-by-design", "skipped", "crashed", "timeout", "out-of-memory"]
Meter = Literal["cuda-allocator", "process-rss"]

Record = dict[str, Any]

STATUSES: tuple[str, ...] = get_args(Status)
FAILURES = ("wrong", "crashed", "timeout", "out-of-memory")
DIRECTIONS: tuple[str, ...] = get_args(Direction)
METERS: tuple[str, ...] = get_args(Meter)
PROBLEM = tuple(field.name for field in fields(Problem))  # what makes a problem


class BadRecord(ValueError):
    """A line of a results file is not a record; the message says which line and why."""


@dataclass(kw_only=True)
class Env:
    """The first line of a file: the whole plan, the machine and its software."""

    kind: Literal["env"]
    schema: int
    plan: list  # a dict for each cell: stage, name, and the problem's fields
    rungs: list  # number, name, title, sha256 ... of each stage in the plan
    arguments: dict
    device: Device
    device_name: str
    cpu: str
    cores: int
    memory_bytes: int | None
    python: str
    torch: str | None
    triton: str | None
    numpy: str | None
    driver: str | None
    system: str
    commit: str | None
    sources: str  # a digest of the project's code, for a tree without git
    date: str


@dataclass(kw_only=True)
class StageOnProblem:
    """What most kinds begin with: a stage, and the fields of harness/problems/problem.py."""

    stage: int
    name: str
    inputs: Inputs
    seed: int
    b: int
    h: int
    hk: int
    nq: int
    nk: int
    d: int
    dtype: DType
    precision: Precision
    causal: bool
    seqlens_k: list | None
    device: Device
    direction: Direction
    page_size: int | None = None  # keys per page of a paged cache; null where contiguous


@dataclass(kw_only=True)
class Measured(StageOnProblem):
    """What `ladder run` and `ladder bench` both measure."""

    mode: Mode
    status: Status
    reason: str  # empty where there is nothing to explain
    time_ms: float | None  # median of a call
    time_iqr_ms: float | None  # null where there was one sample
    samples: int
    first_call_ms: float | None  # holds compilation
    sm_clock_mhz: int | None  # of the GPU, right after the samples
    peak_bytes: int | None  # above the inputs
    memory_meter: Meter | None
    err_f64_max: float | None
    err_f64_rel: float | None
    flops: int
    # ms of each round, in order, where contestants took turns: all of a problem share the rounds
    rounds_ms: list | None = None
    # kernel -> the configuration that the tuner launched it with; null where nothing was tuned
    launch_configs: dict | None = None


# what records from before these fields lack: read as null
LATER = tuple(field.name for field in fields(Measured) if field.default is None)


@dataclass(kw_only=True)
class Cell(Measured):
    """One stage on one problem, as `ladder run` measures it."""

    kind: Literal["cell"]
    err_stage3_max: float | None
    err_stage3_rel: float | None
    hbm_bytes: int
    paired: bool


@dataclass(kw_only=True)
class Bench(Measured):
    """One contestant on one problem of `ladder bench`: all in one process, in turns."""

    kind: Literal["bench"]
    tflops: float | None  # flops over time, 10^12 per second
    tokens_per_s: float | None  # b nq over time
    speedup: dict  # a timed peer's name -> its time over this one's
    skip_ratio: float | None  # of (q block, KV tile) pairs, never visited; or null
    warmup: int  # calls before the rounds
    repeat: int  # rounds
    # the fewest that anybody moves, the same for all contestants: q, k, v read, o written
    hbm_bytes: int | None = None


@dataclass(kw_only=True)
class Ceiling:
    """What a machine can do at the best (harness/runs/ceilings.py)."""

    kind: Literal["ceiling"]
    what: Literal["matmul", "copy", "read"]
    dtype: DType | None  # null where only bytes are moved: bytes are bytes
    precision: Precision | None
    threads: int | None  # of a CPU; null on a GPU
    size: int  # matmul: the side of the square matrices; copy: bytes read + written; read: bytes
    value: float
    unit: Literal["TFLOP/s", "TB/s"]
    time_ms: float  # median of a call
    time_iqr_ms: float | None
    samples: int
    device: Device
    how: str | None = None  # the fastest of several ways to read; null where there is one way


@dataclass(kw_only=True)
class Model:
    """One stage as a real model's attention, on one text (`ladder model`)."""

    kind: Literal["model"]
    stage: int
    name: str
    device: Device
    dtype: DType
    mode: Mode
    tokens: int  # of the text, [CLS] and [SEP] counted
    status: Status
    reason: str
    cosine: float | None  # of the sentence embedding with SDPA's
    max_hidden_diff: float | None  # of the last hidden state from SDPA's
    rel_hidden_diff: float | None
    layer_hidden_diffs: list | None  # the largest one after each layer
    err_f64_max: float | None  # of the last hidden state from the float64 model's
    err_f64_rel: float | None
    time_ms: float | None  # median of a forward pass of the whole model
    time_iqr_ms: float | None
    sdpa_time_ms: float | None  # with SDPA, in turns with it, in one process
    sdpa_time_iqr_ms: float | None
    samples: int


@dataclass(kw_only=True)
class Io(StageOnProblem):
    """One kernel of one call of a stage, as the profiler counted it (harness/runs/traffic.py)."""

    kind: Literal["io"]
    launch: int  # its place among the call's kernels
    kernel: str
    time_ms: float
    dram_read_bytes: int
    dram_write_bytes: int
    predicted_bytes: int  # of the whole call, harness/problems/cost.py


@dataclass(kw_only=True)
class Train:
    """One small GPT trained with one attention from one seed (`ladder train`)."""

    kind: Literal["train"]
    stage: int
    name: str
    reference: bool  # one of SDPA's backends, which the others are compared with
    device: Device
    dtype: DType  # of q, k, v; the weights are float32
    mode: Mode
    size: str  # of the model: SHAPES in harness/training/plan.py
    seed: int
    steps: int  # that were asked for
    parameters: int | None
    status: Status  # of the training alone: harness/training/curves.py judges the curves
    reason: str
    losses: list  # of each step that was done, nats per character; all finite
    val_loss: float | None  # on text that it was not trained on, after the end
    tokens_per_s: float | None  # null where interpreted, and of very few steps


@dataclass(kw_only=True)
class Generate:
    """Tokens that the small GPT wrote with a stage after one context, without a cache and with."""

    kind: Literal["generate"]
    stage: int
    name: str
    device: Device
    mode: Mode
    page_size: int | None  # of the cache; null where contiguous
    parameters: int
    context: int  # tokens before those that it wrote
    tokens: int
    text: str  # as written with the cache
    same: bool  # whether the text without a cache is the same
    tokens_per_s: float | None  # null where interpreted
    cached_tokens_per_s: float | None
    bytes_per_token: int  # counted: the weights, and q, k, v, o in each layer
    cached_bytes_per_token: int


@dataclass(kw_only=True)
class Sanitizer:
    """One run of a tool of compute-sanitizer over the kernels (tools/sanitize.py)."""

    kind: Literal["sanitizer"]
    tool: Literal["memcheck", "racecheck"]
    version: str
    ran: list  # a line for each stage, head dimension and dtype that came to its end
    summary: str  # the tool's own last line
    errors: int | None  # or hazards; null where the tool itself failed
    seconds: float


@dataclass(kw_only=True)
class Tuning:
    """One kernel of a tuned stage on one problem, in every configuration (tools/tuner_key.py)."""

    kind: Literal["tuning"]
    kernel: str
    b: int
    h: int
    nq: int
    nk: int
    d: int
    dtype: DType
    precision: Precision
    causal: bool
    configs: list  # that the card could launch
    tuner_ms: list  # of each, as the tuner times it
    time_ms: list  # of each, in more rounds


@dataclass(kw_only=True)
class Pitfall(StageOnProblem):
    """A mistake made in a stage on purpose, and what came out of it (tools/pitfalls.py)."""

    kind: Literal["pitfall"]
    name: str  # of the mistake
    source: str  # who warns of it, or makes it
    lesson: str
    mode: Mode
    changes: list  # [the stage's text, the wrong one], ...
    raised: str  # the last line of an error; empty where it ran
    exact: bool  # by the rule for stages (harness/measures/accuracy.py)
    reason: str  # why not
    rows: int  # of all its outputs
    rows_wrong: int  # of them, off by more than an exact stage's may be
    err_f64_max: float | None  # null where there is none
    shipped_err_f64_max: float  # of the stage as it is


# kind of record -> its schema; a file is an env line, then lines of one other kind
SCHEMAS: dict[str, type] = {
    schema.__name__.lower(): schema
    for schema in (
        Env,
        Cell,
        Bench,
        Ceiling,
        Model,
        Io,
        Train,
        Generate,
        Sanitizer,
        Tuning,
        Pitfall,
    )
}


@functools.cache
def rules(schema: type) -> dict[str, tuple[tuple[type, ...], tuple[str, ...]]]:
    """Field -> the types that its value may have, and the values that it may take where few."""
    return {name: rule(hint) for name, hint in get_type_hints(schema).items()}


def rule(hint: Any) -> tuple[tuple[type, ...], tuple[str, ...]]:
    """The types and the values that an annotation allows; an int will do for a float."""
    if get_origin(hint) is Literal:
        return (str,), get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        allowed = [rule(part) for part in get_args(hint)]
        return sum((some for some, _ in allowed), ()), sum((few for _, few in allowed), ())
    return ((int, float) if hint is float else (hint,)), ()


def check_record(record: Mapping[str, Any]) -> None:
    """Raise BadRecord unless `record` is of a kind of ours, with just its schema's fields."""
    schema = SCHEMAS.get(str(record.get("kind")))
    if schema is None:
        raise BadRecord(f"kind: got {record.get('kind')!r}, expected one of {', '.join(SCHEMAS)}")
    needed = [field.name for field in fields(schema) if field.default is MISSING]
    if missing := [name for name in needed if name not in record]:
        raise BadRecord(f"no field {missing[0]!r}")
    known = rules(schema)
    if strange := [name for name in record if name not in known]:
        raise BadRecord(f"unknown field {strange[0]!r}")
    for name, value in record.items():
        allowed, few = known[name]
        # bool is an int to Python, not here
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            names = " or ".join("null" if t is type(None) else t.__name__ for t in allowed)
            raise BadRecord(f"{name}: got {value!r}, expected {names}")
        if few and value is not None and value not in few:
            raise BadRecord(f"{name}: got {value!r}, expected one of {', '.join(few)}")
    for time in record.get("rounds_ms") or ():  # ratios are made of them
        if not isinstance(time, (int, float)) or isinstance(time, bool) or not 0 < time < math.inf:
            raise BadRecord(f"rounds_ms: got {time!r}, expected a time above 0")


def fill(record: dict[str, Any]) -> dict[str, Any]:
    """`record`, checked, with the defaults of the fields that are younger than it."""
    for field in fields(SCHEMAS[record["kind"]]):
        if field.name not in record:
            record[field.name] = field.default
    return record


def key(cell: Mapping[str, Any]) -> str:
    """What a cell is, as text: stage and problem, the same for a planned and a measured cell."""
    # a plan from before a problem had a field lacks it
    return json.dumps([cell.get(field) for field in ("stage", "name", "paired", *PROBLEM)])
