"""The options of the commands, each declared once: type, help text and allowed values."""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from attention_ladder.models.minilm.run import DTYPES as MODEL_DTYPES
from attention_ladder.models.training.plan import DTYPES as TRAIN_DTYPES
from attention_ladder.models.training.plan import SHAPES
from course.suites import names as suites
from harness.problems.problem import DEVICES, DIRECTIONS, DTYPES, INPUTS, PRECISIONS

MAX_D = 256
MAX_SEED = 2**63 - 1  # the largest that torch's generator takes for sure
MAX_STEPS, MAX_SEEDS = 100_000, 100
MAX_TRACE_N = 1024
CAUSAL = {"off": (False,), "on": (True,), "both": (False, True)}
FORMATS = ("rich", "markdown", "csv", "json")  # of tables: the first is for people
SYNTHETIC = ("normal", "peaky")
ALL = "all"  # of the inputs
SHORT_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}

# reads an option's value; its arguments are the value and the option's name, for UserError
Reader = Callable[[Any, str], Any]


class UserError(Exception):
    """Bad arguments: one line for the user, and exit code 2."""


def bounds(least: int, most: int | None) -> str:
    """The bounds in words: 'of at least 1' or 'from 1 to 256'."""
    return f"of at least {least}" if most is None else f"from {least} to {most}"


def whole(least: int, most: int | None = None) -> Reader:
    """Make a reader of a number in least..most."""

    def read(value: int, option: str) -> int:
        if value < least or (most is not None and value > most):
            expected = f"expected a whole number {bounds(least, most)}"
            raise UserError(f"{option}: got {value}, {expected}")
        return value

    return read


def integers(least: int, most: int | None = None, expected: str = "") -> Reader:
    """Make a reader of '8,16,32' as [8, 16, 32], each in least..most."""
    what = expected or f"whole numbers {bounds(least, most)}"

    def read(text: str, option: str) -> list[int]:
        parts = text.split(",")
        if not all(re.fullmatch(r"\s*\d{1,9}\s*", part, re.ASCII) for part in parts):
            size = ", of nine digits at most" * bool(re.search(r"\d{10}", text))
            expected = f"expected {what}{size}, with commas between them"
            raise UserError(f"{option}: got {text!r}, {expected}")
        numbers = [int(part) for part in parts]
        for value in numbers:
            if value < least or (most is not None and value > most):
                raise UserError(f"{option}: got {value}, expected {what}, with commas between them")
        return numbers

    return read


def one_of(*allowed: str) -> Reader:
    """Make a reader of one of `allowed`; a dtype may be given by its short name."""

    def read(text: str, option: str) -> str:
        if long_dtype(text) not in allowed:
            raise UserError(f"{option}: got {text!r}, expected one of {', '.join(allowed)}")
        return text

    return read


def some_of(*allowed: str) -> Reader:
    """Make a reader of 'fwd,bwd' as ['fwd', 'bwd'], each one of `allowed`."""
    one = one_of(*allowed)
    return lambda text, option: [one(part.strip(), option) for part in text.split(",")]


def key_lengths(text: str | None, option: str = "--seqlens") -> tuple[int, ...] | None:
    """Read '10,64' as (10, 64), the valid keys of each batch entry; None where not given."""
    expected = "a whole number of keys for each batch entry"
    return None if text is None else tuple(integers(0, expected=expected)(text, option))


def size(text: str, option: str = "--memory") -> int:
    """Read '200M', '4GiB' or a number of bytes as bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", text.lower(), re.ASCII)
    if not match or not 1 <= float(match[1]) * UNITS[match[2]] < 1 << 63:
        raise UserError(f"{option}: got {text!r}, expected a size such as 500M or 4G")
    return int(float(match[1]) * UNITS[match[2]])


def seconds(value: float, option: str) -> float:
    """Read a number of seconds above 0."""
    if not 0 < value < math.inf:
        raise UserError(f"{option}: got {value:g}, expected a number of seconds above 0")
    return value


def stage_files(values: Sequence[Path], option: str) -> None:
    """Raise UserError where a stage is given by number, which is for another option."""
    for value in map(str, values):
        if re.fullmatch(r"[\d,\s]+", value) and not Path(value).exists():
            raise UserError(
                f"{option}: got {value}, expected a stage's file; by number it is --stages {value}"
            )


def long_dtype(dtype: str) -> str:
    """The long name of a dtype: 'float16' for 'fp16'."""
    return SHORT_DTYPES.get(dtype, dtype)


def option(help: str, read: Reader | None = None, *names: str, **more: Any) -> Any:
    """Declare an option with its help text.

    `read` checks the value before the command begins. The command and its records get the value as
    it was typed.
    """

    def check(param: typer.CallbackParam, value: Any) -> Any:
        if read is not None and value is not None:
            read(value, param.opts[0])
        return value

    return typer.Option(*names, help=help, callback=check, **more)


# the options of several commands
Device = Annotated[
    str | None, option("cpu or cuda; cuda by default where there is a GPU", one_of(*DEVICES))
]
Stages = Annotated[
    str | None, option("stages by number, such as 0,1,5; all of ours by default", integers(0))
]
StageFiles = Annotated[
    list[Path] | None,
    option("a stage's file, as one more row; may be repeated", stage_files, show_default=False),
]
OneStage = Annotated[list[str], option("the stage to put in: its number, or its file", metavar="N")]
N = Annotated[str | None, option("numbers of keys, such as 8,16,32", integers(1))]
Ns = Annotated[str | None, option("numbers of keys, and of queries", integers(1))]
D = Annotated[
    int | None,
    option("head dimension, 1 to 256; 64 by default, 32 for real inputs", whole(1, MAX_D)),
]
OneD = Annotated[int, option("head dimension", whole(1, MAX_D))]
B = Annotated[int, option("batch size", whole(1))]
H = Annotated[int, option("number of heads", whole(1))]
Hk = Annotated[int | None, option("heads of k and v, a divisor of q's; as many by default")]
Dtype = Annotated[str, option(", ".join(DTYPES), one_of(*DTYPES))]
Seqlens = Annotated[
    str | None,
    option("valid keys of each batch entry, such as 10,64; all N by default", key_lengths),
]
Mode = Annotated[
    str,
    option("some of fwd; bwd: dq, dk, dv alone; train: both, of stages with gradients",
           some_of(*DIRECTIONS)),
]  # fmt: skip
Causal = Annotated[
    str, option("on: query i sees keys up to i + Nk - Nq; off; both", one_of(*CAUSAL))
]
Nq = Annotated[
    str | None,
    option("numbers of queries, such as 1,8; N by default; of a suite, its problems with so many",
           integers(1)),
]  # fmt: skip
Plot = Annotated[Path | None, option("also plot, into this folder", show_default=False)]
Synthetic = Annotated[str, option("normal or peaky", one_of(*SYNTHETIC))]
Seed = Annotated[int, option("the seed of all inputs", whole(0, MAX_SEED), min=0)]
Out = Annotated[Path | None, option("where the records go; a new file under runs/ by default")]
Resume = Annotated[Path | None, option("finish the run in this file, with the same arguments")]
Expect = Annotated[
    Path | None, option("exit code 1 where a status isn't the one in this file of another run")
]

# run
Precision = Annotated[
    str, option("how float32 is multiplied on a GPU: ieee or tf32", one_of(*PRECISIONS))
]
Inputs = Annotated[
    str | None,
    option("normal, peaky, real, or all that fit; all by default with --stage, else normal",
           one_of(*INPUTS, ALL)),
]  # fmt: skip
Budget = Annotated[float, option("seconds that a cell may take from its first call on", seconds)]
Memory = Annotated[
    str | None, option("memory of a cell, such as 2G; by default 4 GiB or half the machine's", size)
]
Paired = Annotated[
    bool, option("also time the stages in turns, in one process, for ratios", None, "--paired")
]
RunSuite = Annotated[
    str | None,
    option(f"the problems of a source's table: {', '.join(suites('run'))}",
           one_of(*suites("run"))),
]  # fmt: skip

# bench
BenchDtype = Annotated[
    str | None, option(f"{', '.join(DTYPES)}; float16 on a GPU, else float32", one_of(*DTYPES))
]
Ds = Annotated[str | None, option("head dimensions, such as 64,128", integers(1, MAX_D))]
Tokens = Annotated[int | None, option("B = tokens // N; 16384 on a GPU, else 256", whole(1))]
Hidden = Annotated[int | None, option("H = hidden // d; 2048 on a GPU, else 32", whole(1))]
BenchB = Annotated[int | None, option("batch size, instead of --tokens", whole(1))]
BenchH = Annotated[int | None, option("heads, instead of --hidden", whole(1))]
BenchStages = Annotated[
    str | None,
    option(
        "stages and peers by number or name, such as 3,6,sdpa_flash; by default 3, the newest that "
        "fits, and all peers"
    ),
]
Warmup = Annotated[int, option("calls of each before the rounds", whole(1))]
Repeat = Annotated[int, option("rounds: samples of each", whole(2))]
Graph = Annotated[
    bool, option("on a GPU, replay each call as a CUDA graph: forward only", None, "--graph")
]
AllSynthetic = Annotated[
    str | None,
    option("normal, peaky or all; all by default with --stage, else normal",
           one_of(*SYNTHETIC, ALL)),
]  # fmt: skip
BenchBudget = Annotated[
    float, option("seconds that a stage may take for its check, and again for its rounds", seconds)
]
BenchSuite = Annotated[
    str | None,
    option(f"problems that belong together: {', '.join(suites('bench'))}",
           one_of(*suites("bench"))),
]  # fmt: skip

# ring
World = Annotated[int, option("ranks: GPUs, or on a CPU processes", whole(2, 64))]
RingDtype = Annotated[
    str | None, option(f"{', '.join(DTYPES)}; bfloat16 on GPUs, else float32", one_of(*DTYPES))
]
RingStages = Annotated[str | None, option("contestants by number or name; all by default")]
RingH = Annotated[int | None, option("number of heads; 16 on GPUs, else 6", whole(1))]
Predict = Annotated[
    bool, option("measure nothing: show what the cost model says of clusters", None, "--predict")
]

# train and model
TrainStage = Annotated[
    list[str] | None, option("the stage to train with: its number, or its file", metavar="N")
]
Size = Annotated[
    str | None, option(f"{' or '.join(SHAPES)}; small by default on a GPU", one_of(*SHAPES))
]
TrainDtype = Annotated[
    str | None,
    option("of q, k, v; bfloat16 by default on a GPU, float32 on a CPU", one_of(*TRAIN_DTYPES)),
]
Steps = Annotated[
    int | None,
    option("500 by default on a GPU, 300 on a CPU, 3 where one is interpreted",
           whole(1, MAX_STEPS)),
]  # fmt: skip
Seeds = Annotated[
    int | None, option("how many seeds; 3 by default on a GPU, 1 on a CPU", whole(1, MAX_SEEDS))
]
FirstSeed = Annotated[
    int, option("the first seed; the others follow it", whole(0, MAX_SEED - MAX_SEEDS))
]
ModelDtype = Annotated[str, option(", ".join(MODEL_DTYPES), one_of(*MODEL_DTYPES))]
TextFile = Annotated[Path | None, option("a text, its first 512 tokens, instead of ours")]
Weights = Annotated[
    Path | None, option("the model from a file that tools/pack_model_weights.py made")
]

# generate
GenerateStage = Annotated[
    str | None, option("the stage to write with, its number or file; 8 on a GPU, else 3")
]
NewTokens = Annotated[
    int | None,
    option("how many tokens to write; 32 by default, 4 interpreted", whole(4, 100_000)),
]
Contexts = Annotated[
    str | None,
    option("tokens before those: 32,64,128,256 by default, 256,1024,4096 on a GPU", integers(1)),
]
Prompt = Annotated[str, option("the end of the text before the generated tokens")]
Load = Annotated[Path | None, option("train nothing: load the model from this file")]
Save = Annotated[Path | None, option("keep the model in this file, for `ladder generate --load`")]

# io
IoStages = Annotated[str, option("stages by number", integers(0))]
IoNs = Annotated[str, option("numbers of keys, and of queries", integers(1))]

# trace
TraceN = Annotated[int, option("number of keys, and of queries", whole(1, MAX_TRACE_N))]
Tile = Annotated[int, option("keys per tile", whole(1, MAX_TRACE_N))]
TraceRow = Annotated[int, option("the query row, 0 to n - 1")]
TraceSeed = Annotated[int, option("the seed of q, k and v", whole(0, MAX_SEED))]
TraceCausal = Annotated[str, option("on: row i sees keys 0 to i only; off", one_of("on", "off"))]
TraceSplits = Annotated[
    int | None, option("walk so many parts of the keys, and merge them: stage 8", whole(1, 64))
]
TraceFormat = Annotated[str, option("text or json", one_of("text", "json"), "--format")]

# commands that show records again
Shown = Annotated[list[Path], typer.Argument(help="files of records, JSONL, each of any kind")]
TableFormat = Annotated[str, option("rich, markdown, csv or json", one_of(*FORMATS), "--format")]
RooflineFolder = Annotated[
    Path | None,
    option("with --ceilings: stages under their roofs, in this folder", None, "--roofline",
           show_default=False),
]  # fmt: skip
Ceilings = Annotated[
    Path | None,
    option("what `ladder ceilings` wrote on the same machine: shares of its rates", None,
           "--ceilings", show_default=False),
]  # fmt: skip
Dark = Annotated[bool, option("for a dark page: light ink on near-black", None, "--dark")]
Whole = Annotated[bool, option("the whole files, not the kernels alone", None, "--whole")]
CheckPages = Annotated[
    bool, option("write nothing; exit code 1 where README is stale", None, "--check")
]
Figures = Annotated[Path | None, option("the folder for it; docs/figures by default")]
FigureCeilings = Annotated[
    Path | None, option("what `ladder ceilings` wrote; the H200's committed record by default")
]
Reported = Annotated[
    list[Path] | None,
    typer.Argument(help="files of records, JSONL; all of results/ by default", show_default=False),
]
Report = Annotated[Path, option("the page's file; what is there is replaced", None, "--out")]
CheckFigures = Annotated[
    bool, option("draw nothing; exit code 1 where a picture is stale", None, "--check")
]
