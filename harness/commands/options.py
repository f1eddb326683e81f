"""The options of the commands, each declared once: its type, its help, and what it may be."""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.minilm.run import DTYPES as MODEL_DTYPES
from harness.problems.directions import OUTPUTS
from harness.problems.problem import DEVICES, DTYPES, INPUTS, PRECISIONS
from harness.records.schema import DIRECTIONS
from harness.runs.suites import BENCH_SUITES, CELL_SUITES
from harness.training.plan import DTYPES as TRAIN_DTYPES
from harness.training.plan import SHAPES
from harness.views.cell_tables import FORMATS

MAX_D = 256
MAX_SEED = 2**63 - 1  # the largest that torch's generator takes for sure
MAX_STEPS, MAX_SEEDS = 100_000, 100
MAX_TRACE_N = 1024
CAUSAL = {"off": (False,), "on": (True,), "both": (False, True)}
SYNTHETIC = ("normal", "peaky")
SHORT_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}

Check = Callable[[typer.Context, typer.CallbackParam, Any], Any]


class UserError(Exception):
    """Bad arguments: one clear line for the person who typed them, and exit code 2."""


def integers(text: str, option: str, least: int, most: int | None = None) -> list[int]:
    """'8,16,32' -> [8, 16, 32], each in least..most, each once."""
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
    expected = f"expected whole numbers {bounds}, with commas between them"
    numbers: list[int] = []
    for part in text.split(","):
        if not re.fullmatch(r"\s*\d{1,9}\s*", part):
            raise UserError(f"{option}: got {text!r}, {expected}")
        value = int(part)
        if value < least or (most is not None and value > most):
            raise UserError(f"{option}: got {value}, {expected}")
        if value not in numbers:
            numbers.append(value)
    return numbers


def words(text: str, option: str, allowed: Sequence[str]) -> list[str]:
    """'fwd,bwd' -> ['fwd', 'bwd'], each one of the allowed, each once."""
    found = [one_of(part.strip(), option, allowed) for part in text.split(",")]
    return list(dict.fromkeys(found))


def whole(value: int, option: str, least: int, most: int | None = None) -> int:
    """`value`, where it is in least..most."""
    if value < least or (most is not None and value > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise UserError(f"{option}: got {value}, expected a whole number {bounds}")
    return value


def key_lengths(text: str | None) -> tuple[int, ...] | None:
    """--seqlens: '10,64' -> (10, 64), the valid keys of each batch entry; None where not given."""
    if text is None:
        return None
    parts = text.split(",")
    if not all(re.fullmatch(r"\s*\d{1,9}\s*", part) for part in parts):
        raise UserError(
            f"--seqlens: got {text!r}, expected a whole number of keys for each batch entry, with "
            "commas between them"
        )
    return tuple(int(part) for part in parts)


def one_of(value: str, option: str, allowed: Sequence[str]) -> str:
    """`value`, where it is one of the allowed."""
    if value not in allowed:
        raise UserError(f"{option}: got {value!r}, expected one of {', '.join(allowed)}")
    return value


def size(text: str) -> int:
    """'200M', '4GiB' or a number of bytes -> bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", text.lower())
    if not match or float(match[1]) * UNITS[match[2]] < 1:
        raise UserError(f"--memory: got {text!r}, expected a size such as 500M or 4G")
    return int(float(match[1]) * UNITS[match[2]])


def long_dtype(dtype: str) -> str:
    """'fp16' -> 'float16'; a name that is long already as it is."""
    return SHORT_DTYPES.get(dtype, dtype)


def checked(check: Callable[[Any, str], object]) -> Check:
    """Call `check` with an option's value, where it has one, and its name; the value stays.

    Not where --show is given: that has no use for the option, whatever its value.
    """

    def callback(context: typer.Context, param: typer.CallbackParam, value: Any) -> Any:
        if value is not None and context.params.get("show") is None:
            check(value, param.opts[0])
        return value

    return callback


def choice(allowed: Sequence[str]) -> Check:
    """Check that a text is one of the allowed."""
    return checked(lambda value, option: one_of(value, option, allowed))


def dtypes(allowed: Sequence[str]) -> Check:
    """Check that a dtype, which may be a short name, is one of the allowed."""
    return checked(lambda value, option: one_of(long_dtype(value), option, allowed))


def within(least: int, most: int | None = None) -> Check:
    """Check that a number is in least..most."""
    return checked(lambda value, option: whole(value, option, least, most))


def listed(least: int, most: int | None = None) -> Check:
    """Check that a text is whole numbers in least..most, with commas between them."""
    return checked(lambda value, option: integers(value, option, least, most))


def seconds(value: float, option: str) -> None:
    """Raise UserError unless the number is of seconds above 0."""
    if not 0 < value < math.inf:
        raise UserError(f"{option}: got {value:g}, expected a number of seconds above 0")


def option(help: str, check: Check | None = None, *names: str, **more: Any) -> Any:
    """An option with its help text; `check` sees its value before the command does."""
    return typer.Option(*names, help=help, callback=check, **more)


# the options of several commands
Device = Annotated[
    str | None, option("cpu or cuda; cuda by default where there is a GPU", choice(DEVICES))
]
Out = Annotated[Path | None, option("where the records go; a new file under runs/ by default")]
StageOrFile = Annotated[
    list[str], option("the stage to put in: its number, or its file", metavar="N")
]
Seqlens = Annotated[
    str | None,
    option(
        "valid keys of each batch entry, such as 10,64; all N by default",
        checked(lambda value, _: key_lengths(value)),
    ),
]
Seed = Annotated[int, option("the one seed of all inputs", within(0, MAX_SEED), min=0)]
ResultsFile = Annotated[Path, typer.Argument(help="a results file, JSONL")]

# run
Stages = Annotated[
    str | None, option("stages by number, such as 0,1,5; all of ours by default", listed(0))
]
N = Annotated[str | None, option("numbers of keys, such as 8,16,32", listed(1))]
Nq = Annotated[int | None, option("number of queries; N by default", within(1))]
D = Annotated[
    int | None,
    option("head dimension, 1 to 256; 64 by default, 32 for real inputs", within(1, MAX_D)),
]
B = Annotated[int, option("batch size", within(1))]
H = Annotated[int, option("number of heads", within(1))]
Hk = Annotated[int | None, option("heads of k and v, a divisor of --h; as many by default")]
Dtype = Annotated[str, option(", ".join(DTYPES), dtypes(DTYPES))]
Precision = Annotated[
    str, option("how float32 is multiplied on a GPU: ieee or tf32", choice(PRECISIONS))
]
Causal = Annotated[bool, option("query i sees keys up to i + Nk - Nq", None, "--causal")]
Inputs = Annotated[str, option("normal, peaky or real", choice(INPUTS))]
Direction = Annotated[
    str,
    option("fwd; bwd: dq, dk, dv alone; train: both, of stages with gradients",
           choice(tuple(OUTPUTS))),
]  # fmt: skip
Budget = Annotated[
    float, option("seconds that a cell may take from its first call on", checked(seconds))
]
Memory = Annotated[
    str | None,
    option(
        "memory of a cell, such as 2G; by default 4 GiB or half the machine's",
        checked(lambda value, _: size(value)),
    ),
]
Paired = Annotated[
    bool, option("also time the stages in turns, in one process, for ratios", None, "--paired")
]
CellSuite = Annotated[
    str | None,
    option(
        f"the problems of a source's table: {', '.join(CELL_SUITES)}", choice(tuple(CELL_SUITES))
    ),
]
StageFiles = Annotated[
    list[Path] | None,
    option("a stage's file, as one more row; may be repeated", show_default=False),
]
Resume = Annotated[Path | None, option("finish the run that this file holds, as it was begun")]

# bench
Modes = Annotated[
    str | None,
    option(
        "some of fwd, bwd, train, commas between; fwd by default",
        checked(lambda value, option: words(value, option, DIRECTIONS)),
    ),
]
BenchDtype = Annotated[
    str | None, option(f"{', '.join(DTYPES)}; float16 on a GPU, else float32", dtypes(DTYPES))
]
Masks = Annotated[str | None, option("on, off or both (by default)", choice(tuple(CAUSAL)))]
Ds = Annotated[str | None, option("head dimensions, such as 64,128", listed(1, MAX_D))]
Ns = Annotated[str | None, option("numbers of queries and keys", listed(1))]
Tokens = Annotated[int | None, option("B = tokens // N; 16384 on a GPU, else 256", min=1)]
Hidden = Annotated[int | None, option("H = hidden // d; 2048 on a GPU, else 32", min=1)]
BenchB = Annotated[int | None, option("batch size, instead of --tokens", min=1)]
BenchH = Annotated[int | None, option("heads, instead of --hidden", min=1)]
BenchHk = Annotated[int | None, option("heads of k and v, a divisor of q's; as many by default")]
Contestants = Annotated[
    str | None,
    option(
        "stages and peers by number or name, such as 3,6,sdpa_flash; by default 3, the newest that "
        "fits, and all peers"
    ),
]
Impl = Annotated[str | None, typer.Option(hidden=True)]  # the name of old of --stages
ContestantFiles = Annotated[
    list[Path] | None, option("a stage's file, as one more; may be repeated", show_default=False)
]
Warmup = Annotated[int, option("calls of each before the rounds", min=1)]
Repeat = Annotated[int, option("rounds: samples of each", min=2)]
SyntheticInputs = Annotated[str, option("normal or peaky", choice(SYNTHETIC))]
BenchBudget = Annotated[
    float, option("seconds that one may take for its check, and for its rounds", checked(seconds))
]
ProblemSuite = Annotated[
    str | None,
    option(f"problems that belong together: {', '.join(BENCH_SUITES)}", choice(BENCH_SUITES)),
]
BenchOut = Annotated[
    Path | None,
    option("where the records go, a new file under runs/ by default; with --show, the CSV"),
]
Plots = Annotated[Path | None, option("also plot, into this folder", show_default=False)]
BenchCeilings = Annotated[
    Path | None, option("what `ladder ceilings` wrote here, for % of the matrix rate")
]
BenchShow = Annotated[
    Path | None, option("measure nothing: the views of this file of records", is_eager=True)
]

# train and model
TrainStage = Annotated[
    list[str] | None, option("the stage to train with: its number, or its file", metavar="N")
]
Size = Annotated[
    str | None,
    option(f"{' or '.join(SHAPES)}; small by default on a GPU", choice(tuple(SHAPES))),
]
TrainDtype = Annotated[
    str | None,
    option("of q, k, v; bfloat16 by default on a GPU, float32 on a CPU", dtypes(TRAIN_DTYPES)),
]
Steps = Annotated[
    int | None,
    option("500 by default on a GPU, 300 on a CPU, 3 where one is interpreted",
           within(1, MAX_STEPS)),
]  # fmt: skip
Seeds = Annotated[
    int | None, option("how many seeds; 3 by default on a GPU, 1 on a CPU", within(1, MAX_SEEDS))
]
FirstSeed = Annotated[
    int, option("the first seed; the others follow it", within(0, MAX_SEED - MAX_SEEDS))
]
TrainShow = Annotated[
    Path | None, option("train nothing: table and plot of this file again", is_eager=True)
]
ModelDtype = Annotated[str, option(", ".join(MODEL_DTYPES), dtypes(MODEL_DTYPES))]
TextFile = Annotated[Path | None, option("a text, its first 512 tokens, instead of ours")]
Weights = Annotated[
    Path | None, option("the model from a file that tools/pack_model_weights.py made")
]

# generate
GenerateStage = Annotated[
    str | None, option("the stage to write with, its number or file; 8 on a GPU, else 3")
]
NewTokens = Annotated[
    int | None, option("how many to write; 32 by default, 4 interpreted", within(4, 100_000))
]
Contexts = Annotated[
    str | None,
    option("tokens before those: 32,64,128,256 by default, 256,1024,4096 on a GPU", listed(1)),
]
Prompt = Annotated[str, option("what the text before ends with")]
Load = Annotated[Path | None, option("train nothing: the model of this file")]
Save = Annotated[Path | None, option("keep the model in this file")]
GenerateShow = Annotated[
    Path | None, option("write nothing: table and plot of this file again", is_eager=True)
]

# io
IoStages = Annotated[str, option("stages by number", listed(0))]
IoN = Annotated[str, option("numbers of keys and queries", listed(1))]
IoD = Annotated[int, option("head dimension", min=1, max=MAX_D)]
IoB = Annotated[int, option("batch size", min=1)]
IoH = Annotated[int, option("number of heads: GPT-2's by default", min=1)]

# trace
TraceN = Annotated[int, option("number of keys, and of queries", within(1, MAX_TRACE_N))]
Tile = Annotated[int, option("keys a tile", within(1, MAX_TRACE_N))]
TraceRow = Annotated[int, option("the query row, 0 to n - 1")]
TraceD = Annotated[int, option("head dimension", within(1, MAX_D))]
TraceSeed = Annotated[int, option("the one seed of q, k and v", within(0, MAX_SEED))]
TraceCausal = Annotated[bool, option("row i sees keys 0 to i only", None, "--causal")]
TraceFormat = Annotated[str, option("text or json", choice(("text", "json")), "--format")]

# what shows records again
TableFormat = Annotated[str, option("rich, markdown, csv or json", choice(FORMATS), "--format")]
PlotFolder = Annotated[Path, option("the folder for time.png, memory.png, error.png")]
Ceilings = Annotated[
    Path, option("what `ladder ceilings` wrote on the same machine", None, "--ceilings")
]
RooflineFolder = Annotated[Path, option("the folder for roofline.png, or roofline-dark.png")]
Dark = Annotated[bool, option("for a dark page: light ink on near-black", None, "--dark")]
Whole = Annotated[bool, option("the whole files, not the kernels alone", None, "--whole")]
CheckPages = Annotated[
    bool, option("write nothing; exit code 1 where README is stale", None, "--check")
]
Figures = Annotated[Path | None, option("the folder for them; docs/figures by default")]
FigureCeilings = Annotated[
    Path | None, option("what `ladder ceilings` wrote; the H200's committed record by default")
]
CheckFigures = Annotated[
    bool, option("draw nothing; exit code 1 where a picture is stale", None, "--check")
]
