"""The schema of records: one dataclass for each kind.

A field's annotation says what its value may be (harness/records/values.py). Fields with a default
were added later: an older record without them is read as if it had the default.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, make_dataclass
from typing import Annotated, Any, Final, Literal

from harness.problems.problem import Device, Direction, DType, Inputs, Problem
from harness.records import values
from harness.records.values import (
    Bytes,
    Code,
    Count,
    Loss,
    Name,
    Rate,
    Size,
    Spread,
    Time,
    bad,
    check_fields,
)  # fmt: skip

BadRecord = values.BadRecord
SCHEMA_VERSION: Final = 1

Precision = Literal["ieee", "tf32", "float16", "bfloat16", "float32", "float64"]
Mode = Literal["native", "interpreted", "compiled"]
Status = Literal["ok", "wrong", "wrong-by-design", "skipped", "crashed", "timeout", "out-of-memory"]
Meter = Literal["cuda-allocator", "process-rss"]
# 'bf16x6': six products of bfloat16 for one (stages/common/products.py)
Products = Literal["bf16x6", "tf32", "ieee"]
Configs = dict[str, dict[str, int]]  # kernel -> its launch configuration
Record = dict[str, Any]

FAILURES = ("wrong", "crashed", "timeout", "out-of-memory")
PROBLEM = tuple(field.name for field in fields(Problem))  # the fields that define a problem
# those that older records and plans lack -> what they mean then
LATER = {each.name: each.default for each in fields(Problem) if each.default is not MISSING}


@dataclass(kw_only=True)
class Named:
    """What identifies a stage."""

    stage: int
    name: Name


@dataclass(kw_only=True)
class Rung(Named):
    """A stage of a run, in its env line; SDPA's backends in `ladder train` have a title only."""

    title: Name
    exact_up_to: int | None = None
    few_queries: bool = False
    sha256: str = ""
    syntax_sha256: str = ""  # in older records, of one file
    code: str = ""  # harness/records/code.py: code_of


@dataclass(kw_only=True)
class Env:
    """The first line of a file: the whole plan, the machine and its software."""

    kind: Literal["env"]
    schema: int
    plan: list[dict[str, Any]]  # what is to be measured: of cells, Planned
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
    versions: dict[str, str] | None = None  # of what peers are made of, on a GPU: peer_versions


@dataclass(kw_only=True)
class StageOnProblem(Named):
    """The common fields of most kinds: a stage, and the fields of harness/problems/problem.py."""

    b: Size
    h: Size
    nq: Size
    nk: Size
    d: Size
    dtype: DType
    precision: Precision
    causal: bool
    inputs: Inputs
    seed: int
    hk: Size
    seqlens_k: list[int] | None
    device: Device
    direction: Direction
    page_size: Size | None = None  # keys per page of a paged cache; null where contiguous
    world: Size = 1  # processes that compute it together, with a part of the sequence each


@dataclass(kw_only=True)
class Tried:
    """How a stage ran, and its status."""

    mode: Mode
    status: Status
    reason: str  # empty where there is nothing to explain


@dataclass(kw_only=True)
class Planned(StageOnProblem):
    """A cell that is to be measured, for `--resume`."""

    paired: bool  # whether it takes turns with others in one process: a comparison


@dataclass(kw_only=True)
class Cell(Planned, Tried):
    """One stage or peer on one problem, as `ladder run` and `ladder bench` measure it.

    Older files of `ladder bench` have records of the kind `bench`: `as_today` makes cells of them.
    """

    kind: Literal["cell"]
    time_ms: Time | None  # median of a call
    time_iqr_ms: Spread | None  # null where there was one sample
    samples: int
    first_call_ms: Time | None  # compilation included
    sm_clock_mhz: int | None  # of the GPU, right after the samples
    peak_bytes: int | None  # above the inputs
    memory_meter: Meter | None
    err_stage3_max: float | None
    err_stage3_rel: float | None
    err_f64_max: float | None
    err_f64_rel: float | None
    flops: int
    hbm_bytes: Bytes | None  # the fewest that it can move; null in files from before stage 8
    # ms of each round, in order, where stages took turns: all those of a problem share the rounds
    rounds_ms: list[Time] | None = None
    launch_ms: Time | None = None  # Python's for a call, on a GPU: harness/measures/timing.py
    # kernel -> the configuration that the tuner launched it with; null where nothing was tuned
    launch_configs: Configs | None = None
    products: Products | None = None  # how a kernel of ours multiplied float32 on a GPU
    skip_ratio: float | None = None  # share of (q block, KV tile) pairs never visited
    # of a world above 1, where times are those of the slowest rank and peaks the largest of a rank
    x_one_gpu: Rate | None = None  # how many times as fast as one GPU with the same kernels
    link_gb_s: Rate | None = None  # what each GPU sends its neighbour at a time, 10^9 bytes per s
    link_us: Rate | None = None  # of the smallest message


@dataclass(kw_only=True)
class Ceiling:
    """The highest rate of one operation on a machine (harness/runs/ceilings.py)."""

    kind: Literal["ceiling"]
    what: Literal["matmul", "copy", "read"]
    dtype: DType | None  # null where bytes are only moved
    precision: Precision | None
    threads: Size | None  # of a CPU; null on a GPU
    size: Size  # matmul: the side of the square matrices; copy: bytes read + written; read: bytes
    value: Annotated[float, 1e-15, 1e15]
    unit: Literal["TFLOP/s", "TB/s"]
    time_ms: Time  # median of a call
    time_iqr_ms: Spread | None
    samples: int
    device: Device
    how: str | None = None  # the fastest method to read; null where there is only one method


@dataclass(kw_only=True)
class Model(Named, Tried):
    """One stage as the attention of a real model, on one text (`ladder model`)."""

    kind: Literal["model"]
    device: Device
    dtype: DType
    tokens: Size  # of the text, with [CLS] and [SEP]
    cosine: float | None  # between the sentence embedding and SDPA's
    max_hidden_diff: float | None  # between the last hidden state and SDPA's
    rel_hidden_diff: float | None
    layer_hidden_diffs: list[float] | None  # the largest one after each layer
    err_f64_max: float | None  # between the last hidden state and the float64 model's
    err_f64_rel: float | None
    time_ms: Time | None  # median of a forward pass of the whole model
    time_iqr_ms: Spread | None
    sdpa_time_ms: Time | None  # with SDPA, in turns with it, in one process
    sdpa_time_iqr_ms: Spread | None
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
    reference: bool  # whether it is one of SDPA's backends, the references
    device: Device
    dtype: DType  # of q, k, v; the weights are float32
    size: Name  # of the model: SHAPES in attention_ladder/models/training/plan.py
    seed: int
    steps: Annotated[int, 1, 10**6]  # planned
    parameters: int | None
    # the status is about the training run only: models/training/curves.py judges the curves
    losses: list[Loss]  # of each step done, in nats per character; all finite
    val_loss: Loss | None  # after training, on held-out text
    tokens_per_s: Rate | None  # null where interpreted or after very few steps


@dataclass(kw_only=True)
class Generate(Named):
    """Tokens generated by the small GPT with a stage from one context, without a cache and with."""

    kind: Literal["generate"]
    device: Device
    mode: Mode
    page_size: Size | None  # of the cache; null where contiguous
    parameters: Size
    context: Size  # number of tokens before the generated ones
    tokens: Size
    text: str  # as generated with the cache
    same: bool  # whether the text without a cache is the same
    tokens_per_s: Rate | None  # null where interpreted
    cached_tokens_per_s: Rate | None
    bytes_per_token: Bytes  # counted: the weights, and q, k, v, o in each layer
    cached_bytes_per_token: Bytes
    # with the cache, by replays of a CUDA graph; null on a CPU, and without pages
    graph_tokens_per_s: Rate | None = None


@dataclass(kw_only=True)
class Span:
    """One part of a consumer's work on a KV tile; in cycles, from where the shown part begins."""

    consumer: Count
    part: Name
    start: int
    end: int


# kind of record that a file of tools/ writes -> what it is about, and its further fields, which
# that file explains
TOOLS: dict[str, tuple[tuple[type, ...], dict[str, Any]]] = {
    "sanitizer": ((), {  # sanitize.py
        "tool": str, "version": str, "ran": list[str], "summary": str, "errors": int | None,
        "seconds": float,
    }),
    "share": ((StageOnProblem,), {  # product.py
        "flops": int, "product": list[int], "time_ms": Time, "rounds_ms": list[Time],
        "product_ms": Time, "product_rounds_ms": list[Time],
    }),
    "host": ((StageOnProblem,), {  # host_times.py
        "call": str, "launch_ms": Time, "reference_ms": Time,
    }),
    "loop": ((Named,), {  # read_loops.py
        "d": Size, "dtype": DType, "given": Size, "registers": Size, "instructions": Size,
        "exponentials": Size, "products": Size, "groups": Size, "spills": Count,
    }),
    "timeline": ((StageOnProblem,), {  # timeline.py
        "cycles": dict[str, Rate], "tile_cycles": Rate, "tiles": Size, "shown_cycles": Size,
        "spans": list[Span],
    }),
    "pitfall": ((StageOnProblem,), {  # pitfalls.py
        "source": str, "lesson": str, "mode": Mode, "changes": list[list[Code]], "raised": str,
        "exact": bool, "reason": str, "rows": int, "rows_wrong": int, "err_f64_max": float | None,
        "shipped_err_f64_max": float,
    }),
}  # fmt: skip
# kind of record -> its schema; a file has an env line, then lines of one other kind
SCHEMAS: dict[str, type] = {
    **{x.__name__.lower(): x for x in (Env, Cell, Ceiling, Model, Io, Train, Generate)},
    **{
        kind: make_dataclass(kind, [("kind", str), *own.items()], bases=about, kw_only=True)
        for kind, (about, own) in TOOLS.items()
    },
}
# kinds whose tables take stages' titles from the env line
OF_STAGES = ("cell", "model", "io", "train", "generate", "share", "host", "loop", "timeline")
FOLLOW = ("tflops", "tokens_per_s", "speedup", "warmup", "repeat")  # in an older `bench` record
LACKING = ("err_stage3_max", "err_stage3_rel", "hbm_bytes")  # there, the last in the oldest alone


def as_today(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """A record, or the env line, of `ladder bench` as it is written today; any other as it is.

    Older ones were of a kind `bench` with fields that follow from others, and so was their plan.
    """
    if record.get("kind") == "bench":
        kept = {name: value for name, value in record.items() if name not in FOLLOW}
        return {**kept, "kind": "cell", "paired": True, **{n: kept.get(n) for n in LACKING}}
    arguments, plan = record.get("arguments"), record.get("plan")
    of_bench = isinstance(arguments, dict) and arguments.get("command") == "bench"
    if of_bench and isinstance(plan, list) and all(isinstance(each, dict) for each in plan):
        return {**record, "plan": [{"paired": True, **each} for each in plan]}
    return record


def check_record(record: Mapping[str, Any]) -> Record:
    """Check a record against the schema of its kind; raises BadRecord, which names what is wrong.

    Returns it with its texts made safe for a terminal (harness/records/units.py), and with the
    defaults of fields that were added later.
    """
    record = as_today(record)
    schema = SCHEMAS.get(str(record.get("kind")))
    if schema is None:
        raise bad("kind", record.get("kind"), f"one of {', '.join(SCHEMAS)}")
    if schema is Env and record.get("schema", SCHEMA_VERSION) != SCHEMA_VERSION:
        only = f"{SCHEMA_VERSION}, the one that this ladder reads; is it older than the file?"
        raise bad("schema", record["schema"], only)
    found = check_fields(record, schema)
    if issubclass(schema, StageOnProblem):
        check_problem(found)
    later = {f.name: f.default for f in fields(schema) if f.default is not MISSING}
    return found | {name: later[name] for name in later if name not in found}


def check_problem(record: Mapping[str, Any], where: str = "") -> None:
    """Raise BadRecord unless the sizes of a problem are consistent."""
    if record["h"] % record["hk"]:
        raise bad(f"{where}hk", record["hk"], f"a divisor of h, which is {record['h']}")
    lengths = record["seqlens_k"]
    if lengths is not None and (len(lengths) != record["b"] or max(lengths) > record["nk"]):
        expected = f"{record['b']} numbers, none above {record['nk']}"
        raise bad(f"{where}seqlens_k", lengths, expected)


def check_stages(record: Mapping[str, Any], env: Record) -> None:
    """Raise BadRecord where `record`, or the plan of an env line, names an unknown stage."""
    known = [(rung["stage"], rung["name"]) for rung in env["rungs"]]
    named = env["plan"] if record is env else [record] if record["kind"] in OF_STAGES else []
    for each in named:
        if (who := (each.get("stage"), each.get("name"))) not in known:
            raise bad("stage and name", who, "one of the rungs of line 1")


def check_plan(env: Record) -> None:
    """Raise BadRecord unless the plan in an env line is one of cells."""
    for index, planned in enumerate(env["plan"]):
        where = f"plan[{index}]."
        check_problem(check_fields(planned, Planned, where), where)


def key(cell: Mapping[str, Any]) -> str:
    """A text that identifies a cell by stage and problem, the same for planned and measured."""
    named = ("stage", "name", "paired", *PROBLEM)
    return json.dumps([cell.get(field, LATER.get(field)) for field in named])
