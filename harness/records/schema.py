"""The schema of records: a dataclass for each kind, in this one place.

A field's annotation says what its value may be (harness/records/values.py). Fields with a default
are younger than the first records: a record without them is read as if it had the default.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Literal, get_args

from harness.problems.problem import Problem
from harness.records import values
from harness.records.values import Bytes, Code, Loss, Name, Rate, Size, Time, bad, check_fields

BadRecord = values.BadRecord
rules = values.rules
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


@dataclass(kw_only=True)
class Named:
    """What stages are known by."""

    stage: int
    name: Name


@dataclass(kw_only=True)
class Rung(Named):
    """A stage of a run, as its env line keeps it; a trainer's contestant has the title alone."""

    title: Name
    exact_up_to: int | None = None
    few_queries: bool = False
    sha256: str = ""
    syntax_sha256: str = ""


@dataclass(kw_only=True)
class Env:
    """The first line of a file: the whole plan, the machine and its software."""

    kind: Literal["env"]
    schema: int
    plan: list[dict[str, Any]]  # what is to be measured: of `ladder run` each is a Planned
    rungs: list[Rung]  # each stage in the plan
    arguments: dict[str, Any]
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
class Shape:
    """The sizes of a problem, and how it is computed."""

    b: Size
    h: Size
    nq: Size
    nk: Size
    d: Size
    dtype: DType
    precision: Precision
    causal: bool


@dataclass(kw_only=True)
class StageOnProblem(Named, Shape):
    """What most kinds begin with: a stage, and the fields of harness/problems/problem.py."""

    inputs: Inputs
    seed: int
    hk: Size
    seqlens_k: list[int] | None
    device: Device
    direction: Direction
    page_size: Size | None = None  # keys per page of a paged cache; null where contiguous


@dataclass(kw_only=True)
class Tried:
    """How a stage runs, and what came of it."""

    mode: Mode
    status: Status
    reason: str  # empty where there is nothing to explain


@dataclass(kw_only=True)
class Planned(StageOnProblem):
    """What `ladder run` is to measure, for `--resume`."""

    paired: bool


@dataclass(kw_only=True)
class Measured(StageOnProblem, Tried):
    """What `ladder run` and `ladder bench` both measure."""

    time_ms: Time | None  # median of a call
    time_iqr_ms: float | None  # null where there was one sample
    samples: int
    first_call_ms: Time | None  # holds compilation
    sm_clock_mhz: int | None  # of the GPU, right after the samples
    peak_bytes: int | None  # above the inputs
    memory_meter: Meter | None
    err_f64_max: float | None
    err_f64_rel: float | None
    flops: int
    # ms of each round, in order, where contestants took turns: all of a problem share the rounds
    rounds_ms: list[Time] | None = None
    # kernel -> the configuration that the tuner launched it with; null where nothing was tuned
    launch_configs: dict[str, Any] | None = None


# what records from before these fields lack: read as null
LATER = tuple(field.name for field in fields(Measured) if field.default is None)


@dataclass(kw_only=True)
class Cell(Measured):
    """One stage on one problem, as `ladder run` measures it."""

    kind: Literal["cell"]
    err_stage3_max: float | None
    err_stage3_rel: float | None
    hbm_bytes: Bytes
    paired: bool


@dataclass(kw_only=True)
class Bench(Measured):
    """One contestant on one problem of `ladder bench`: all in one process, in turns."""

    kind: Literal["bench"]
    tflops: Rate | None  # flops over time, 10^12 per second
    tokens_per_s: Rate | None  # b nq over time
    speedup: dict[str, float]  # a timed peer's name -> its time over this one's
    skip_ratio: float | None  # of (q block, KV tile) pairs, never visited; or null
    warmup: int  # calls before the rounds
    repeat: int  # rounds
    # the fewest that anybody moves, the same for all contestants: q, k, v read, o written
    hbm_bytes: Bytes | None = None


@dataclass(kw_only=True)
class Ceiling:
    """What a machine can do at the best (harness/runs/ceilings.py)."""

    kind: Literal["ceiling"]
    what: Literal["matmul", "copy", "read"]
    dtype: DType | None  # null where only bytes are moved: bytes are bytes
    precision: Precision | None
    threads: Size | None  # of a CPU; null on a GPU
    size: Size  # matmul: the side of the square matrices; copy: bytes read + written; read: bytes
    value: Annotated[float, 1e-15, 1e15]
    unit: Literal["TFLOP/s", "TB/s"]
    time_ms: Time  # median of a call
    time_iqr_ms: float | None
    samples: int
    device: Device
    how: str | None = None  # the fastest of several ways to read; null where there is one way


@dataclass(kw_only=True)
class Model(Named, Tried):
    """One stage as a real model's attention, on one text (`ladder model`)."""

    kind: Literal["model"]
    device: Device
    dtype: DType
    tokens: Size  # of the text, [CLS] and [SEP] counted
    cosine: float | None  # of the sentence embedding with SDPA's
    max_hidden_diff: float | None  # of the last hidden state from SDPA's
    rel_hidden_diff: float | None
    layer_hidden_diffs: list[float] | None  # the largest one after each layer
    err_f64_max: float | None  # of the last hidden state from the float64 model's
    err_f64_rel: float | None
    time_ms: Time | None  # median of a forward pass of the whole model
    time_iqr_ms: float | None
    sdpa_time_ms: Time | None  # with SDPA, in turns with it, in one process
    sdpa_time_iqr_ms: float | None
    samples: int


@dataclass(kw_only=True)
class Io(StageOnProblem):
    """One kernel of one call of a stage, as the profiler counted it (harness/runs/traffic.py)."""

    kind: Literal["io"]
    launch: int  # its place among the call's kernels
    kernel: str
    time_ms: Time
    dram_read_bytes: int
    dram_write_bytes: int
    predicted_bytes: Bytes  # of the whole call, harness/problems/cost.py
    waits: dict[str, float] | None = None  # reason -> share of the time between two instructions
    units: dict[str, float] | None = None  # of a multiprocessor -> share of its peak


@dataclass(kw_only=True)
class Train(Named, Tried):
    """One small GPT trained with one attention from one seed (`ladder train`)."""

    kind: Literal["train"]
    reference: bool  # one of SDPA's backends, which the others are compared with
    device: Device
    dtype: DType  # of q, k, v; the weights are float32
    size: Name  # of the model: SHAPES in models/training/plan.py
    seed: int
    steps: Annotated[int, 1, 10**6]  # that were asked for
    parameters: int | None
    # its status is of the training alone: models/training/curves.py judges the curves
    losses: list[Loss]  # of each step that was done, nats per character; all finite
    val_loss: Loss | None  # on text that it was not trained on, after the end
    tokens_per_s: Rate | None  # null where interpreted, and of very few steps


@dataclass(kw_only=True)
class Generate(Named):
    """Tokens that the small GPT wrote with a stage after one context, without a cache and with."""

    kind: Literal["generate"]
    device: Device
    mode: Mode
    page_size: Size | None  # of the cache; null where contiguous
    parameters: Size
    context: Size  # tokens before those that it wrote
    tokens: Size
    text: str  # as written with the cache
    same: bool  # whether the text without a cache is the same
    tokens_per_s: Rate | None  # null where interpreted
    cached_tokens_per_s: Rate | None
    bytes_per_token: Bytes  # counted: the weights, and q, k, v, o in each layer
    cached_bytes_per_token: Bytes


@dataclass(kw_only=True)
class Sanitizer:
    """One run of a tool of compute-sanitizer over the kernels (tools/sanitize.py)."""

    kind: Literal["sanitizer"]
    tool: Literal["memcheck", "racecheck"]
    version: str
    ran: list[str]  # a line for each stage, head dimension and dtype that came to its end
    summary: str  # the tool's own last line
    errors: int | None  # or hazards; null where the tool itself failed
    seconds: float


@dataclass(kw_only=True)
class Tuning(Shape):
    """One kernel of a tuned stage on one problem, in every configuration (tools/tuner_key.py)."""

    kind: Literal["tuning"]
    kernel: str
    configs: list[dict[str, int]]  # that the card could launch
    tuner_ms: list[Time]  # of each, as the tuner times it
    time_ms: list[Time]  # of each, in more rounds


@dataclass(kw_only=True)
class Pitfall(StageOnProblem):
    """A mistake made in a stage on purpose, and what came out of it (tools/pitfalls.py)."""

    kind: Literal["pitfall"]  # and the name is the mistake's
    source: str  # who warns of it, or makes it
    lesson: str
    mode: Mode
    changes: list[list[Code]]  # [the stage's text, the wrong one], ...
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


# their tables name stages as the env line has them
OF_STAGES = ("cell", "bench", "model", "io", "train")


def check_record(record: Mapping[str, Any]) -> Record:
    """`record` as it may be shown, where it is of a kind of ours, with just its schema's fields.

    Its texts are made safe for a terminal (harness/records/units.py), and it has the defaults of
    the fields that are younger than it. Raises BadRecord, which names what is wrong.
    """
    schema = SCHEMAS.get(str(record.get("kind")))
    if schema is None:
        raise bad("kind", record.get("kind"), f"one of {', '.join(SCHEMAS)}")
    if schema is Env and record.get("schema", SCHEMA_VERSION) != SCHEMA_VERSION:
        only = f"{SCHEMA_VERSION}, the one that this ladder reads; is it older than the file?"
        raise bad("schema", record["schema"], only)
    found = check_fields(record, schema)
    if issubclass(schema, StageOnProblem):
        check_problem(found)
    if schema is Bench and (found["time_ms"] is None) != (found["tflops"] is None):
        raise bad("tflops", found["tflops"], "a rate where there is a time_ms, and there alone")
    return {f.name: f.default for f in fields(schema) if f.default is not MISSING} | found


def check_problem(record: Mapping[str, Any], where: str = "") -> None:
    """Raise BadRecord unless the sizes of a problem go together."""
    if record["h"] % record["hk"]:
        raise bad(f"{where}hk", record["hk"], f"a divisor of h, which is {record['h']}")
    lengths = record["seqlens_k"]
    if lengths is not None and (len(lengths) != record["b"] or max(lengths) > record["nk"]):
        expected = f"{record['b']} numbers, none above {record['nk']}"
        raise bad(f"{where}seqlens_k", lengths, expected)


def check_stages(record: Mapping[str, Any], env: Record) -> None:
    """Raise BadRecord where the env line knows no such stage; of itself, as its plan's."""
    known = [(rung["stage"], rung["name"]) for rung in env["rungs"]]
    named = env["plan"] if record is env else [record] if record["kind"] in OF_STAGES else []
    for each in named:
        if (who := (each.get("stage"), each.get("name"))) not in known:
            raise bad("stage and name", who, "one of the rungs of line 1")


def check_plan(env: Record) -> None:
    """Raise BadRecord unless the plan in an env line is one of `ladder run`."""
    for index, cell in enumerate(env["plan"]):
        where = f"plan[{index}]."
        check_problem(check_fields(cell, Planned, where), where)


def key(cell: Mapping[str, Any]) -> str:
    """What a cell is, as text: stage and problem, the same for a planned and a measured cell."""
    # a plan from before a problem had a field lacks it
    return json.dumps([cell.get(field) for field in ("stage", "name", "paired", *PROBLEM)])
