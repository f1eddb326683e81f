"""The `ladder` command. Exit codes: 0 all well, 1 a cell failed, 2 bad arguments.

All cells ok, skipped or wrong by design is well; wrong, crashed, timed out or out of memory is not.
"""

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from harness.commands import doctor as doctor_view
from harness.commands.bench import bench_command
from harness.commands.figures import figures_command
from harness.commands.options import (
    INTERRUPTED,
    MAX_D,
    MAX_SEED,
    RUNS,
    SHORT_DTYPES,
    UserError,
    check_numbers,
    check_out,
    complain,
    create,
    default_out,
    ended_by,
    integers,
    known_device,
    leave,
    numbers_and_files,
    one_of,
    open_results,
    settle_device,
    size,
    why_no_cuda,
)
from harness.commands.printed import show_printed
from harness.commands.trace import trace_command
from harness.commands.train import train_command
from harness.isolation.child import ChildFailed
from harness.isolation.roster import BadStage, StageInfo, read_stages
from harness.lessons import diff as diff_view
from harness.minilm import run as model_run
from harness.minilm import weights as model_weights
from harness.problems.directions import OUTPUTS
from harness.problems.problem import (
    DTYPES,
    INPUTS,
    PEERS_FROM,
    PRECISIONS,
    REAL_D,
    SEED,
    Problem,
)
from harness.problems.real_inputs import HEADS, LAYERS, MAX_N
from harness.records import environment, units
from harness.records.results import FAILURES, BadRecord, Record, WriteFailed, Writer, key, read
from harness.report import pages
from harness.runs import ceilings, traffic
from harness.runs.plan import Cell, Limits, default_memory, plan_grid, plan_tour
from harness.runs.runner import run
from harness.runs.suites import CELL_SUITES
from harness.views import cell_tables, lines, machine, minilm, roofline

app = typer.Typer(
    help="Exact attention, each stage faster than the last, all measured by one harness.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit. Whatever the user got wrong is one line, never a traceback."""
    try:
        result = app(args=arguments, standalone_mode=False, prog_name="ladder")
        code = result if isinstance(result, int) else 0
    except (UserError, BadStage, BadRecord, WriteFailed) as error:
        code = complain(str(error))
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:  # `ladder table FILE | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer's own usage errors have it
            raise
        message = error.format_message()
        if type(error).__name__ == "NoArgsIsHelpError":  # `ladder` alone: the message is the help
            print(message, file=sys.stderr)
            code = 2
        else:
            code = complain(message)
    sys.exit(code)


def make_problem(arguments: dict[str, Any], device: str) -> Problem:
    """The problem that the arguments of `ladder run` describe, its N still 1."""
    inputs = one_of(arguments["inputs"], "--inputs", INPUTS)
    dtype = SHORT_DTYPES.get(arguments["dtype"], arguments["dtype"])
    one_of(dtype, "--dtype", DTYPES)
    precision = one_of(arguments["precision"], "--precision", PRECISIONS)
    if dtype != "float32":
        if precision == "tf32":
            raise UserError(f"--precision: got tf32 with {dtype}, expected it with float32")
        precision = dtype
    d = arguments["d"] if arguments["d"] is not None else REAL_D if inputs == "real" else 64
    b, h = arguments["b"], arguments["h"]
    for option, value, most in (("--d", d, MAX_D), ("--b", b, None), ("--h", h, None)):
        integers(str(value), option, 1, most)
    if inputs == "real":
        if d != REAL_D:
            raise UserError(f"--d: got {d}, real inputs have {REAL_D}")
        for option, value, most in (("--b", b, LAYERS), ("--h", h, HEADS)):
            if value > most:
                raise UserError(f"{option}: got {value}, real inputs have at most {most}")
    return Problem(
        inputs=inputs, seed=arguments["seed"], b=b, h=h, hk=h, nq=1, nk=1, d=d,
        dtype=dtype, precision=precision, causal=arguments["causal"], seqlens_k=None,
        device=device, direction=one_of(arguments["direction"], "--direction", tuple(OUTPUTS)),
    )  # fmt: skip


def make_cells(arguments: dict[str, Any], stages: Sequence[StageInfo], device: str) -> list[Cell]:
    """The cells that the arguments ask for: the tour where no problem is described."""
    base = make_problem(arguments, device)
    described = [name for name in SHAPE if arguments[name] != DEFAULTS[name]]
    if arguments["suite"] is not None:
        one_of(arguments["suite"], "--suite", tuple(CELL_SUITES))
        described += ["direction"] if base.direction != "fwd" else []
        if described:
            raise UserError(f"--{described[0]}: a suite's problems are its own; leave it away")
        return CELL_SUITES[arguments["suite"]](stages, base)
    if not described:
        return plan_tour(stages, base)
    sizes = integers("64" if arguments["n"] is None else arguments["n"], "--n", 1)
    if base.inputs == "real" and max(sizes) > MAX_N:
        raise UserError(f"--n: got {max(sizes)}, real inputs have at most {MAX_N} tokens")
    nq = arguments["nq"]
    if nq is not None:
        integers(str(nq), "--nq", 1, MAX_N if base.inputs == "real" else None)
    problems = [replace(base, nq=n if nq is None else nq, nk=n) for n in sizes]
    return plan_grid(stages, problems, arguments["paired"])


SHAPE = ("n", "nq", "d", "b", "h", "dtype", "precision", "causal", "inputs")
DEFAULTS: dict[str, Any] = {
    "stages": None, "n": None, "nq": None, "d": None, "b": 1, "h": 1, "dtype": "float32",
    "precision": "ieee", "causal": False, "inputs": "normal", "device": None, "seed": SEED,
    "budget": 60.0, "memory": None, "paired": False, "suite": None, "direction": "fwd",
}  # fmt: skip


@app.command("run")
def run_command(
    stages: Annotated[
        str | None, typer.Option(help="stages by number, such as 0,1,5; all of ours by default")
    ] = DEFAULTS["stages"],
    n: Annotated[str | None, typer.Option(help="numbers of keys, such as 8,16,32")] = DEFAULTS["n"],
    nq: Annotated[int | None, typer.Option(help="number of queries; N by default")] = DEFAULTS[
        "nq"
    ],
    d: Annotated[
        int | None, typer.Option(help="head dimension, 1 to 256; 64 by default, 32 for real inputs")
    ] = DEFAULTS["d"],
    b: Annotated[int, typer.Option(help="batch size")] = DEFAULTS["b"],
    h: Annotated[int, typer.Option(help="number of heads")] = DEFAULTS["h"],
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = DEFAULTS["dtype"],
    precision: Annotated[
        str, typer.Option(help="how float32 is multiplied on a GPU: ieee or tf32")
    ] = DEFAULTS["precision"],
    causal: Annotated[
        bool, typer.Option("--causal", help="query i sees keys up to i + Nk - Nq")
    ] = DEFAULTS["causal"],
    inputs: Annotated[str, typer.Option(help="normal, peaky or real")] = DEFAULTS["inputs"],
    direction: Annotated[
        str, typer.Option(help="fwd; bwd: dq, dk, dv alone; train: both, of stages with gradients")
    ] = DEFAULTS["direction"],
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; cuda by default where there is a GPU")
    ] = DEFAULTS["device"],
    seed: Annotated[int, typer.Option(help="the one seed of all inputs", min=0)] = DEFAULTS["seed"],
    budget: Annotated[
        float, typer.Option(help="seconds that a cell may take from its first call on")
    ] = DEFAULTS["budget"],
    memory: Annotated[
        str | None,
        typer.Option(help="memory of a cell, such as 2G; by default 4 GiB or half the machine's"),
    ] = DEFAULTS["memory"],
    paired: Annotated[
        bool,
        typer.Option("--paired", help="also time the stages in turns, in one process, for ratios"),
    ] = DEFAULTS["paired"],
    suite: Annotated[
        str | None, typer.Option(help=f"the problems of a source's table: {', '.join(CELL_SUITES)}")
    ] = DEFAULTS["suite"],
    stage: Annotated[
        list[Path] | None,
        typer.Option(help="a stage's file, as one more row; may be repeated", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="where the records go; a new file under runs/ by default")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="finish the run that this file holds, as it was begun")
    ] = None,
) -> int:
    """Measure stages on problems. With no option at all: the tour."""
    given = {
        "stages": stages, "n": n, "nq": nq, "d": d, "b": b, "h": h, "dtype": dtype,
        "precision": precision, "causal": causal, "inputs": inputs, "device": device,
        "seed": seed, "budget": budget, "memory": memory, "paired": paired,
        "suite": suite, "direction": direction,
    }  # fmt: skip
    if not 0 < budget < math.inf:
        raise UserError(f"--budget: got {budget:g}, expected a number of seconds above 0")
    if seed > MAX_SEED:
        raise UserError(f"--seed: got {seed}, expected a whole number from 0 to {MAX_SEED}")
    if resume is not None:
        if out is not None:
            raise UserError("--out: a resumed run goes on in its own file; leave --out away")
        return resume_run(resume, given, stage or [])
    return new_run(given, stage or [], out)


def new_run(given: dict[str, Any], own: Sequence[Path], out: Path | None) -> int:
    """Plan a run, write its env line, and carry it out."""
    if out is not None and out.exists():
        raise UserError(f"--out: {out} is there already: --resume goes on with it, or name another")
    device = settle_device(given["device"])
    limits = make_limits(given)
    # what can be known to be wrong is said before seconds are spent on looking at the stages
    make_cells(given, [], device or "cpu")
    if given["stages"] is not None:
        integers(given["stages"], "--stages", 0)
    stages = read_stages(own)
    device = known_device(device, stages)
    # others' kernels come into suites and the tour, elsewhere when they are asked for
    peers = all(given[name] == DEFAULTS[name] for name in SHAPE)
    chosen = choose(stages, given["stages"], own, peers)
    if given["stages"] is None and given["direction"] != "fwd":
        # a stage that is named is asked all the same, and its row says what it lacks
        chosen = [stage for stage in chosen if stage.gradients or stage.path in resolved(own)]
    cells = make_cells(given, chosen, device)
    env = environment.make_env(
        device,
        [cell.to_json() for cell in cells],
        [stage.to_json() for stage in chosen],
        {**given, "stage": [stage.name for stage in chosen if stage.path in resolved(own)]},
    )
    if out is None:
        out = RUNS / f"{datetime.now():%Y%m%d-%H%M%S}.jsonl"
    with create(out, env) as writer:
        return carry_out(cells, env, [], writer, limits)


def resume_run(path: Path, given: dict[str, Any], own: Sequence[Path]) -> int:
    """Go on with the run in `path`: same arguments, device, software and commit, or not at all."""
    if not path.is_file():
        raise UserError(f"--resume: {path}: no such file")
    try:
        writer = Writer.reopen(path)
    except BlockingIOError:
        raise UserError(f"--resume: {path} is being written by another run") from None
    except OSError as error:
        raise UserError(f"--resume: {path} can't be written: {error.strerror or error}") from None
    with writer:
        env, done = read(path)
        before = {**DEFAULTS, **env["arguments"]}
        for name, value in given.items():
            if value not in (DEFAULTS[name], before[name]):
                raise UserError(
                    f"--resume: --{name} was {before[name]} when {path} was begun and is {value} "
                    "now; a run goes on as it was begun, so leave it away"
                )
        given = {name: before[name] for name in given}
        settle_device(env["device"])
        stages = read_stages(own)
        chosen = match_stages(path, env, stages)
        plan = [
            (cell["stage"], cell["name"], Problem.from_json(cell), cell["paired"])
            for cell in env["plan"]
        ]
        cells = [
            Cell(chosen[stage, name], problem, paired) for stage, name, problem, paired in plan
        ]
        same_machine(path, env)
        return carry_out(cells, env, done, writer, make_limits(given))


def match_stages(
    path: Path, env: Record, stages: Sequence[StageInfo]
) -> dict[tuple[int, str], StageInfo]:
    """The stages that a run's env line names, each unchanged since."""
    known = {(stage.number, stage.name): stage for stage in stages}
    for stage in env["rungs"]:
        found = known.get((stage["stage"], stage["name"]))
        if found is None:
            raise UserError(
                f"--resume: stage {stage['stage']} ({stage['name']}) of {path} is not one of ours; "
                "name its file with --stage"
            )
        if found.sha256 != stage["sha256"]:
            raise UserError(
                f"--resume: {found.path.name} has changed since {path} was begun; start a new run"
            )
    return known


def same_machine(path: Path, env: Record) -> None:
    """Raise UserError where the machine, its software or the code is not what began the run."""
    now = environment.make_env(env["device"], [], [], {})
    for field in ("device_name", "cpu", "cores", "python", "torch", "triton", "numpy", "driver",
                  "commit", "sources"):  # fmt: skip
        if now[field] != env[field]:
            raise UserError(
                f"--resume: {path} was begun with {field.replace('_', ' ')} {env[field]}, here it "
                f"is {now[field]}; start a new run"
            )


def make_limits(given: dict[str, Any]) -> Limits:
    """The limits of a cell from --budget and --memory."""
    memory = given["memory"]
    return Limits(
        given["budget"],
        size(memory) if memory is not None else default_memory(environment.memory_bytes()),
    )


def resolved(paths: Sequence[Path]) -> list[Path]:
    return [*paths, *(path.resolve() for path in paths)]


def choose(
    stages: Sequence[StageInfo], wanted: str | None, own: Sequence[Path], peers: bool
) -> list[StageInfo]:
    """The stages that --stages names, and always those of --stage; by default ours, and `peers`."""
    if wanted is None:
        return [stage for stage in stages if peers or stage.number < PEERS_FROM]
    numbers = integers(wanted, "--stages", 0)
    check_numbers(numbers, [stage.number for stage in stages], "--stages")
    return [stage for stage in stages if stage.number in numbers or stage.path in own]


def carry_out(
    cells: Sequence[Cell], env: Record, done: list[Record], writer: Writer, limits: Limits
) -> int:
    """Measure what is left, show progress, and end with the table. Returns the exit code."""
    records = list(done)
    progress = Monitor(len(cells), len(done))

    def measure() -> None:
        with progress:
            run(cells, done, writer, limits, lambda cell, said: progress.tell(cell, said, records))

    ended = ended_by(measure)
    order = {key(cell.to_json()): index for index, cell in enumerate(cells)}
    records.sort(key=lambda record: order[key(record)])
    console = cell_tables.page()
    if records:
        cell_tables.show(env, records, "rich", console)
    console.print(Text(f"records: {writer.path}"), soft_wrap=True)
    if isinstance(ended, KeyboardInterrupt):
        left = len(cells) - len(records)
        print(f"interrupted, {left} of {len(cells)} cells left: "
              f"ladder run --resume {writer.path}", file=sys.stderr)  # fmt: skip
    if ended is not None:
        return leave(ended)
    if all(env["arguments"][name] == DEFAULTS[name] for name in SHAPE):
        try:
            written = lines.plot(env, records, writer.path.with_name(f"{writer.path.stem}-plots"))
            shown = ", ".join(str(path) for path in written)
            console.print(Text(f"plots:   {shown}"), soft_wrap=True)
        except (ImportError, OSError) as error:
            console.print(Text(f"no plot: {error}"), soft_wrap=True)
    return 1 if any(record["status"] in FAILURES for record in records) else 0


class Monitor:
    """Progress on stderr: a bar on a terminal, a line a cell elsewhere; and what stages print."""

    def __init__(self, total: int, done: int) -> None:
        self.total, self.done = total, done
        self.console = Console(stderr=True)
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(), console=self.console, transient=True,
            disable=not self.console.is_terminal,
        )  # fmt: skip
        self.task = self.bar.add_task("measuring", total=total, completed=done)

    def __enter__(self) -> "Monitor":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def tell(self, record: Record, printed: str, records: list[Record]) -> None:
        """One cell is done."""
        records.append(record)
        self.done += 1
        turns = ", in turns" if record["paired"] else ""
        direction = f", {record['direction']}" if record["direction"] != "fwd" else ""
        what = f"{record['stage']} {record['name']}, N = {record['nk']}{direction}{turns}"
        self.bar.update(self.task, completed=self.done, description=what)
        if not self.console.is_terminal:
            time = units.show_time(record["time_ms"])
            if record["mode"] == "interpreted":
                time += " interpreted"
            line = (
                f"[{self.done}/{self.total}] {what}, d = {record['d']}: {record['status']} {time}"
            )
            print(line, file=sys.stderr, flush=True)
        show_printed(self.console, record["name"], printed)


@app.command("model")
def model_command(
    stage: Annotated[
        list[str],
        typer.Option(help="a stage by number, or a stage's file; may be repeated"),
    ],
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; cuda by default where there is a GPU")
    ] = None,
    dtype: Annotated[str, typer.Option(help=", ".join(model_run.DTYPES))] = "float32",
    text: Annotated[
        Path | None, typer.Option(help="a text, its first 512 tokens, instead of ours")
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="the model from a file that tools/pack_model_weights.py made"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="where the records go; a new file under runs/ by default")
    ] = None,
) -> int:
    """Put stages into a real model, MiniLM, as its attention: embeddings, differences, times."""
    dtype = one_of(SHORT_DTYPES.get(dtype, dtype), "--dtype", model_run.DTYPES)
    numbers, own = numbers_and_files(stage)
    check_out(out)
    if text is not None and weights is not None:
        raise UserError("--text: got --weights too, whose file has our texts and no tokenizer")
    device = settle_device(device)
    try:
        version = model_weights.check_transformers()
        if weights is None:
            found = model_weights.package_weights()
        else:
            found = model_weights.packed_weights(weights)
        given = [model_weights.text_of(text)] if text is not None else None
        stages = read_stages(own)
        device = known_device(device, stages)
        known = [info.number for info in stages]
        check_numbers(numbers, known, "--stage", "a file or some of")
        chosen = [info for info in stages if info.number in numbers or info.path in own]
        texts = given or model_weights.our_texts(found, device)
        cells = model_run.make_cells(chosen, texts, dtype, device)
        env = environment.make_env(
            device,
            [cell.to_json() for cell in cells],
            [info.to_json() for info in chosen],
            {
                "stage": [info.name for info in chosen], "device": device, "dtype": dtype,
                "text": "ours" if text is None else "given",
                "weights": found.origin, "transformers": version,
            },
        )  # fmt: skip
        out = out or default_out("model")
        console = Console(stderr=True)

        def tell(record: Record, printed: str) -> None:
            what = f"{record['stage']} {record['name']}, {record['tokens']} tokens"
            time = units.show_time(record["time_ms"])
            print(f"{what}: {record['status']} {time}", file=sys.stderr, flush=True)
            show_printed(console, record["name"], printed)

        memory = make_limits(DEFAULTS).memory
        records = model_run.run(cells, found, memory, lambda: create(out, env), tell)
    except model_weights.ModelError as error:
        raise UserError(str(error)) from None
    page = cell_tables.page()
    page.print(minilm.rich_tables(env, records, page.width))
    page.print(Text(f"records: {out}"), soft_wrap=True)
    return 1 if any(record["status"] in FAILURES for record in records) else 0


@app.command("table")
def table_command(
    file: Annotated[Path, typer.Argument(help="a results file, JSONL")],
    form: Annotated[str, typer.Option("--format", help="rich, markdown, csv or json")] = "rich",
) -> int:
    """Show the tables of a run again, from its records alone."""
    one_of(form, "--format", cell_tables.FORMATS)
    env, cells = open_results(file)
    cell_tables.show(env, cells, form, cell_tables.page())
    return 0


@app.command("plot")
def plot_command(
    file: Annotated[Path, typer.Argument(help="a results file, JSONL")],
    out: Annotated[Path, typer.Option(help="the folder for time.png, memory.png, error.png")],
) -> int:
    """Plot time, memory and error against N, from records alone."""
    env, cells = open_results(file)
    try:
        written = lines.plot(env, cells, out)
    except ImportError as error:
        raise UserError(f"plots need matplotlib: {error}; pip install matplotlib") from None
    except OSError as error:
        raise UserError(f"--out: {out}: {error.strerror}") from None
    if not written:
        raise UserError(f"{file}: no cell in it has anything to plot")
    for path in written:
        print(path)
    return 0


@app.command("ceilings")
def ceilings_command(
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; cuda by default where there is a GPU")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="where the records go; a new file under runs/ by default")
    ] = None,
) -> int:
    """Measure what this machine can do at the best: matrix products and copies."""
    check_out(out)
    device = settle_device(device)
    try:
        reason = ceilings.why_no_gpu() if device != "cpu" else None
    except ChildFailed as error:
        reason = f"the GPU can't be asked: {error.reason}"
    if device == "cuda" and reason:
        raise UserError(f"--device: got cuda, but {reason}")
    device = device or ("cpu" if reason else "cuda")
    env = environment.make_env(device, [], [], {"command": "ceilings", "device": device})
    out = out or default_out("ceilings")
    writer = create(out, env)
    wanted = ceilings.plan(device)
    records = []
    with writer:
        for index, (ceiling, found) in enumerate(zip(wanted, ceilings.measure(wanted)), start=1):
            if isinstance(found, str):
                said = f"failed: {found}"
            else:
                writer.append(found)
                records.append(found)
                said = units.show_rate(found["value"], found["unit"])
            title = machine.ceiling_title(asdict(ceiling))
            print(f"[{index}/{len(wanted)}] {title}: {said}", file=sys.stderr, flush=True)
    console = cell_tables.page()
    machine.show_ceilings(env, records, console)
    console.print(Text(f"records: {out}"), soft_wrap=True)
    return int(len(records) < len(wanted))


@app.command("roofline")
def roofline_command(
    file: Annotated[Path, typer.Argument(help="a results file, JSONL")],
    ceilings_file: Annotated[
        Path, typer.Option("--ceilings", help="what `ladder ceilings` wrote on the same machine")
    ],
    out: Annotated[Path, typer.Option(help="the folder for roofline.png, or roofline-dark.png")],
    dark: Annotated[
        bool, typer.Option("--dark", help="for a dark page: light ink, no background")
    ] = False,
) -> int:
    """Put every stage of a run under the roofs of its machine, from records alone."""
    env, cells = open_results(file)
    ceilings_env, roofs = open_results(ceilings_file, "ceiling")
    try:
        roofline.same_machine(env, ceilings_env)
    except roofline.NoRoof as error:
        raise UserError(f"--ceilings: {ceilings_file}: {error}") from None
    panels = roofline.panels(cells, roofs)
    if not panels:
        raise UserError(f"{file}: no cell in it has a place under a roof: ok, and not interpreted")
    try:
        written = roofline.draw(env, panels, out, dark)
    except ImportError as error:
        raise UserError(f"plots need matplotlib: {error}; pip install matplotlib") from None
    except OSError as error:
        raise UserError(f"--out: {out}: {error.strerror}") from None
    console = cell_tables.page()
    roofline.show(env, panels, console)
    console.print(Text(f"plot: {written}"), soft_wrap=True)
    return 0


@app.command("io")
def io_command(
    stages: Annotated[str, typer.Option(help="stages by number")] = "3,4,5",
    n: Annotated[str, typer.Option(help="numbers of keys and queries")] = "1024,4096",
    d: Annotated[int, typer.Option(help="head dimension", min=1, max=MAX_D)] = 64,
    b: Annotated[int, typer.Option(help="batch size", min=1)] = 8,
    h: Annotated[int, typer.Option(help="number of heads: GPT-2's by default", min=1)] = 12,
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "float16",
    out: Annotated[
        Path | None, typer.Option(help="where the records go; a new file under runs/ by default")
    ] = None,
) -> int:
    """Count the bytes that stages really move, beside those predicted (needs ncu)."""
    check_out(out)
    sizes = integers(n, "--n", 1)
    shape = {**DEFAULTS, "d": d, "b": b, "h": h, "dtype": dtype}
    base = make_problem(shape, "cuda")
    integers(stages, "--stages", 0)
    infos = read_stages()
    if reason := why_no_cuda(infos):
        raise UserError(f"io: a GPU is needed, but {reason}")
    chosen = choose(infos, stages, (), False)
    arguments = {"command": "io", "n": n, "d": d, "b": b, "h": h, "dtype": dtype}
    env = environment.make_env("cuda", [], [stage.to_json() for stage in chosen], arguments)
    path = out or default_out("io")
    records: list[Record] = []
    with create(path, env) as writer:
        for problem in (replace(base, nq=size, nk=size) for size in sizes):
            for stage in chosen:
                if why := stage.why_skip(problem):
                    print(f"{stage.number} {stage.name}: skipped: {why}", file=sys.stderr)
                    continue
                try:
                    found = list(traffic.profile(stage, problem))
                except traffic.NoProfiler as error:
                    raise UserError(f"io: {error}") from None
                writer.append(*found)
                records += found
    console = cell_tables.page()
    names = cell_tables.titles(env)
    console.print(machine.traffic_table(records, names))
    console.print(Text(f"records: {path}"), soft_wrap=True)
    try:
        picture = path.with_suffix(".png")
        machine.plot_traffic(records, names, picture)
        console.print(Text(f"plot:    {picture}"), soft_wrap=True)
    except ImportError as error:
        console.print(Text(f"no plot: {error}"), soft_wrap=True)
    return 0


@app.command("list")
def list_command() -> int:
    """List the stages: number, name and idea."""
    shown = Table(box=None, padding=(0, 1), pad_edge=False, header_style="underline")
    for header in ("#", "stage", "the one idea", "still hurts"):
        shown.add_column(header, justify="right" if header == "#" else "left")
    for stage in read_stages():
        shown.add_row(
            str(stage.number), Text(stage.title), Text(stage.idea), Text(stage.still_hurts)
        )
    cell_tables.page().print(shown)
    return 0


@app.command("doctor")
def doctor_command() -> int:
    """Say what runs on this machine and what doesn't, and why."""
    try:
        stages = read_stages()
    except BadStage as error:
        doctor_view.show([], cell_tables.page())
        print(f"no stage runs here: {error}", file=sys.stderr)
        return 1
    doctor_view.show(stages, cell_tables.page())
    return 0 if doctor_view.healthy(stages) else 1


@app.command("diff")
def diff_command(
    old: Annotated[int, typer.Argument(help="a stage's number")],
    new: Annotated[int, typer.Argument(help="another's")],
) -> int:
    """Show what changed from one stage to another: the lesson."""
    files = {int(path.stem[1:3]): path for path in built_in()}
    for number in (old, new):
        if number not in files:
            there = ", ".join(str(number) for number in files)
            raise UserError(f"diff: got {number}, expected some of {there}")
    console = cell_tables.page()
    for line in diff_view.changes(files[old], files[new]):
        console.print(line, soft_wrap=True)
    return 0


@app.command("readme")
def readme_command(
    check: Annotated[
        bool, typer.Option("--check", help="write nothing; exit code 1 where README is stale")
    ] = False,
) -> int:
    """Make the tables and pictures of README and docs again from the records under results/."""
    stale = []
    for page in pages.PAGES:
        before = page.read_text()
        after = pages.generate(before, page)
        if before != after:
            stale.append(page)
            if not check:
                page.write_text(after)
    if check:
        for page in stale:
            name = page.relative_to(pages.ROOT)
            print(f"{name} differs from results/: run `ladder readme`", file=sys.stderr)
        return int(bool(stale))
    for path in pages.draw(pages.ROOT / "docs" / "figures"):
        print(path.relative_to(pages.ROOT))
    return 0


app.command("trace")(trace_command)
app.command("figures")(figures_command)
app.command("bench")(bench_command)
app.command("train")(train_command)


def built_in() -> list[Path]:
    """The built-in stages' files, without loading one."""
    from harness.isolation.roster import built_in_files

    return built_in_files()
