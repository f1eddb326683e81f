"""`ladder run`: the arguments, the plan, the run or its resumption, and the tables."""

import inspect
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from harness.commands import options
from harness.commands.arguments import (
    RUNS,
    check_key_lengths,
    check_numbers,
    create,
    ended_by,
    hide_gpus,
    key_heads,
    known_device,
    leave,
    show_printed,
    typed,
)
from harness.commands.options import (
    UserError,
    integers,
    key_lengths,
    long_dtype,
    size,
    whole,
)
from harness.isolation.roster import StageInfo, read_stages
from harness.problems.problem import PEERS_FROM, REAL_D, SEED, Problem
from harness.problems.real_inputs import HEADS, LAYERS, MAX_N
from harness.records import environment
from harness.records.jsonl import Writer, read
from harness.records.schema import FAILURES, Record, key
from harness.runs.plan import (
    Cell,
    Limits,
    default_memory,
    each_inputs,
    plan_grid,
    plan_tour,
)
from harness.runs.runner import run
from harness.runs.suites import CELL_SUITES
from harness.views import cell_tables, lines, table


def make_problem(arguments: dict[str, Any], device: str) -> Problem:
    """The problem that the arguments of `ladder run` describe, its N still 1."""
    inputs, precision = arguments["inputs"], arguments["precision"]
    dtype = long_dtype(arguments["dtype"])
    if dtype != "float32":
        if precision == "tf32":
            raise UserError(f"--precision: got tf32 with {dtype}, expected it with float32")
        precision = dtype
    d = arguments["d"] if arguments["d"] is not None else REAL_D if inputs == "real" else 64
    b, h = arguments["b"], arguments["h"]
    hk = key_heads(arguments["hk"], h)
    if inputs == "real":
        if d != REAL_D:
            raise UserError(f"--d: got {d}, real inputs have {REAL_D}")
        for option, value, most in (("--b", b, LAYERS), ("--h", h, HEADS)):
            if value > most:
                raise UserError(f"{option}: got {value}, real inputs have at most {most}")
        if hk != h:
            raise UserError(f"--hk: got {hk}, real inputs have as many key heads as heads: {h}")
    return Problem(
        inputs=inputs, seed=arguments["seed"], b=b, h=h, hk=hk, nq=1, nk=1, d=d,
        dtype=dtype, precision=precision, causal=arguments["causal"],
        seqlens_k=key_lengths(arguments["seqlens"]), device=device,
        direction=arguments["direction"],
    )  # fmt: skip


def make_cells(arguments: dict[str, Any], stages: Sequence[StageInfo], device: str) -> list[Cell]:
    """The cells that the arguments ask for: the tour where no problem is described."""
    base = make_problem(arguments, device)
    described = [name for name in SHAPE if arguments[name] != DEFAULTS[name]]
    if arguments["suite"] is not None:
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
    if nq is not None and base.inputs == "real":
        whole(nq, "--nq", 1, MAX_N)
    problems = [
        problem
        for n in sizes
        for problem in each_inputs(replace(base, nq=n if nq is None else nq, nk=n))
    ]
    for problem in problems:
        check_key_lengths(problem)
    return plan_grid(stages, problems, arguments["paired"])


SHAPE = ("n", "nq", "d", "b", "h", "hk", "dtype", "precision", "causal", "seqlens", "inputs")


def run_command(
    context: typer.Context,
    stages: options.Stages = None,
    n: options.N = None,
    nq: options.Nq = None,
    d: options.D = None,
    b: options.B = 1,
    h: options.H = 1,
    hk: options.Hk = None,
    dtype: options.Dtype = "float32",
    precision: options.Precision = "ieee",
    causal: options.Causal = False,
    seqlens: options.Seqlens = None,
    inputs: options.Inputs = None,
    direction: options.Direction = "fwd",
    device: options.Device = None,
    seed: options.Seed = SEED,
    budget: options.Budget = 60.0,
    memory: options.Memory = None,
    paired: options.Paired = False,
    suite: options.CellSuite = None,
    stage: options.StageFiles = None,
    out: options.Out = None,
    resume: options.Resume = None,
) -> int:
    """Measure stages on problems; without any option, the tour."""
    given = {name: context.params[name] for name in DEFAULTS}
    if resume is not None:
        if out is not None:
            raise UserError("--out: a resumed run goes on in its own file; leave --out away")
        again = {name: given[name] for name in typed(context) if name in given}
        return resume_run(resume, again, stage or [])
    return new_run(given, stage or [], out)


# what describes a run, and is kept with its records
DEFAULTS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(run_command).parameters.items()
    if name not in ("context", "stage", "out", "resume")
} | {"inputs": "normal"}


def new_run(given: dict[str, Any], own: Sequence[Path], out: Path | None) -> int:
    """Plan a run, write its env line, and carry it out."""
    if out is not None and out.exists():
        raise UserError(f"--out: {out} is there already: --resume goes on with it, or name another")
    if given["inputs"] is None:  # somebody's own file is asked with all of them
        described = any(given[name] != DEFAULTS[name] for name in SHAPE if name != "inputs")
        given["inputs"] = "all" if own and described and given["suite"] is None else "normal"
    device = given["device"]
    hide_gpus(device)
    limits = make_limits(given)
    # what can be known to be wrong is said before seconds are spent on looking at the stages
    make_cells(given, [], device or "cpu")
    stages = read_stages(own, limits.budget, limits.memory)
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


def resume_run(path: Path, again: dict[str, Any], own: Sequence[Path]) -> int:
    """Go on with the run in `path`: same arguments, device, software and commit, or not at all.

    `again`: the options on the command line, which may only repeat what the run was begun with.
    """
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
        for name, value in again.items():
            if value != before[name]:
                then = "not given" if before[name] is None else before[name]
                raise UserError(
                    f"--resume: --{name} was {then} when {path} was begun and is {value} "
                    "now; a run goes on as it was begun, so leave it away"
                )
        given = {name: before[name] for name in DEFAULTS}
        hide_gpus(env["device"])
        limits = make_limits(given)
        stages = read_stages(own, limits.budget, limits.memory)
        chosen = match_stages(path, env, stages)
        plan = [
            (cell["stage"], cell["name"], Problem.from_json(cell), cell["paired"])
            for cell in env["plan"]
        ]
        cells = [
            Cell(chosen[stage, name], problem, paired) for stage, name, problem, paired in plan
        ]
        same_machine(path, env)
        return carry_out(cells, env, done, writer, limits)


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
    console = table.page()
    if records:
        cell_tables.show(env, records, "rich", console)
    console.print(Text(f"records: {writer.path}"), soft_wrap=True)
    if isinstance(ended, KeyboardInterrupt):
        left = len(cells) - len(records)
        print(f"interrupted, {left} of {len(cells)} cells left: "
              f"ladder run --resume {writer.path}", file=sys.stderr)  # fmt: skip
    if ended is not None:
        return leave(ended)
    if all(env["arguments"].get(name, DEFAULTS[name]) == DEFAULTS[name] for name in SHAPE):
        try:
            written = lines.plot(env, records, writer.path.with_name(f"{writer.path.stem}-plots"))
            shown = ", ".join(str(path) for path in written)
            console.print(Text(f"plots:   {shown}"), soft_wrap=True)
        except (ImportError, OSError) as error:
            console.print(Text(f"no plot: {error}"), soft_wrap=True)
        if records and env["arguments"].get("suite") is None:
            for line in cell_tables.closing(env, records):
                console.print(Text(line), soft_wrap=True)
    return 1 if any(record["status"] in FAILURES for record in records) else 0


class Monitor:
    """Progress on stderr: a bar on a terminal, else one line per cell; and what stages print."""

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
            time = cell_tables.show_time(record["time_ms"])
            if record["mode"] == "interpreted":
                time += " interpreted"
            line = (
                f"[{self.done}/{self.total}] {what}, d = {record['d']}: {record['status']} {time}"
            )
            print(line, file=sys.stderr, flush=True)
        show_printed(self.console, record["name"], printed)
