"""`ladder run`: its arguments, its plan, a new or resumed run, and its tables."""

import inspect
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from harness.isolation.roster import StageInfo, read_stages
from harness.problems.problem import PEERS_FROM, REAL_D, SEED, Problem
from harness.records import environment
from harness.records.jsonl import Writer, read
from harness.records.schema import FAILURES, BadRecord, Record, check_plan, key
from harness.records.units import show_time
from harness.runs.comparison import run_cells
from harness.runs.plan import Cell, Limits, default_memory, each_inputs, plan_grid, plan_tour
from harness.runs.suites import SUITES
from harness.views import cell_tables, lines
from harness.views.page import make_page
from ladder import options, problems
from ladder.arguments import RUN_SHAPE, choose, prepare_children, stages_and_device, typed
from ladder.measuring import (
    Progress,
    begin,
    check_out,
    draw,
    ended_early,
    exit_code,
    note,
    open_results,
)
from ladder.options import UserError


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
        repeated = {name: given[name] for name in typed(context) if name in given}
        return resume_run(resume, repeated, stage or [])
    return new_run(given, stage or [], out)


# the defaults of the arguments that are kept with a run's records
DEFAULTS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(run_command).parameters.items()
    if name not in ("context", "stage", "out", "resume")
} | {"inputs": "normal"}


def describes_none(arguments: Record) -> bool:
    """Whether a run's arguments describe no problem, so that it is the tour or a suite."""
    return all(arguments.get(name, DEFAULTS[name]) == DEFAULTS[name] for name in RUN_SHAPE)


def make_cells(given: Record, stages: Sequence[StageInfo], device: str) -> list[Cell]:
    """Plan the cells of a suite, of the described problems, or else of the tour."""
    usual_d = REAL_D if given["inputs"] == "real" else 64
    named = ("b", "h", "hk", "inputs", "seed", "precision", "causal", "seqlens", "direction")
    base = problems.make_base(
        device, given["dtype"], d=given["d"] or usual_d, **{name: given[name] for name in named}
    )
    if given["suite"] is not None:
        return SUITES[given["suite"]].cells(stages, base)
    if describes_none(given):
        if given["paired"]:
            raise UserError(
                "--paired: the tour has each stage alone; describe a problem, such as --n 64, or "
                "leave it away"
            )
        return plan_tour(stages, base)
    sizes = dict.fromkeys(options.integers(1)(given["n"] or "64", "--n"))
    described = each_inputs(replace(base, nq=given["nq"] or n, nk=n) for n in sizes)
    for problem in described:
        problems.check(problem)
    return plan_grid(stages, described, given["paired"])


def new_run(given: Record, own: Sequence[Path], out: Path | None) -> int:
    """Plan a run, write its env line, and carry it out."""
    check_out(out, "--resume goes on with it, or name another")
    if given["inputs"] is None:  # a user's own stage is measured with all inputs
        given["inputs"] = "normal"
        if own and given["suite"] is None and not describes_none(given):
            given["inputs"] = options.ALL
    limits = make_limits(given)
    # bad arguments are reported before the stages are loaded, which takes seconds
    make_cells(given, [], given["device"] or "cpu")
    stages, device = stages_and_device(given["device"], own, limits.budget, limits.memory)
    if given["stages"] is not None:
        chosen = choose(stages, given["stages"].split(","), "--stages", own)
    else:
        # peers take part in suites and the tour, elsewhere only if named; stages without gradients
        # take part in other directions than forward only if named, with a row that says why not
        peers, forward = describes_none(given), given["direction"] == "fwd"
        chosen = [
            stage
            for stage in stages
            if stage.path in own
            or ((peers or stage.number < PEERS_FROM) and (forward or stage.gradients))
        ]
    cells = make_cells(given, chosen, device)
    if not cells:
        raise UserError("run: none of the stages takes part: leave --stages away")
    kept = {**given, "stage": [stage.name for stage in chosen if stage.path in own]}
    plan, described = [cell.to_json() for cell in cells], [stage.to_json() for stage in chosen]
    with begin("", out, device, kept, described, plan) as writer:
        return measure_cells(cells, [], writer, limits)


def resume_run(path: Path, repeated: Record, own: Sequence[Path]) -> int:
    """Resume the run in `path`; its arguments, device, software and commit must be the same.

    `repeated`: the options on the command line, which must equal those that the run was begun with.
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
        check_begun(path, env, done)
        before = {**DEFAULTS, **env["arguments"]}
        for name, value in repeated.items():
            if value != before[name]:
                then = "not given" if before[name] is None else before[name]
                raise UserError(
                    f"--resume: --{name} was {then} when {path} was begun and is {value} "
                    "now; a run goes on as it was begun, so leave it away"
                )
        prepare_children(env["device"])
        limits = make_limits(before)
        known = match_stages(path, env, read_stages(own, limits.budget, limits.memory))
        cells = [
            Cell(known[cell["stage"], cell["name"]], Problem.from_json(cell), cell["paired"])
            for cell in env["plan"]
        ]
        same_machine(path, env)
        return measure_cells(cells, done, writer, limits)


def check_begun(path: Path, env: Record, done: Sequence[Record]) -> None:
    """Raise BadRecord where the run in the file can't be resumed."""
    try:
        check_plan(env)
        options.seconds(env["arguments"].get("budget", DEFAULTS["budget"]), "budget")
        options.size(env["arguments"].get("memory") or "4G")
    except (BadRecord, UserError, TypeError, AttributeError) as error:
        raise BadRecord(f"{path}: line 1 is no run to go on with: {error}") from error
    plan = {key(cell) for cell in env["plan"]}
    if strange := [record for record in done if key(record) not in plan]:
        name, n = strange[0]["name"], strange[0]["nk"]
        raise BadRecord(f"{path}: {name} at N = {n} is in no line of its plan; start a new run")


def match_stages(
    path: Path, env: Record, stages: Sequence[StageInfo]
) -> dict[tuple[int, str], StageInfo]:
    """The stages by number and name; UserError where one in the env line is missing or changed."""
    known = {(stage.number, stage.name): stage for stage in stages}
    for stage in env["rungs"]:
        found = known.get((stage["stage"], stage["name"]))
        if found is None:
            raise UserError(
                f"--resume: stage {stage['stage']} ({stage['name']}) of {path} is not one of ours; "
                "name its file with --stage"
            )
        if found.sha256 != stage.get("sha256"):
            raise UserError(
                f"--resume: {found.path.name} has changed since {path} was begun; start a new run"
            )
    return known


def same_machine(path: Path, env: Record) -> None:
    """Raise UserError where the machine, its software or the code differs from the run's."""
    now = environment.make_env(env["device"], [], [], {})
    for field in ("device_name", "cpu", "cores", "python", "torch", "triton", "numpy", "driver",
                  "commit", "sources"):  # fmt: skip
        if now[field] != env[field]:
            raise UserError(
                f"--resume: {path} was begun with {field.replace('_', ' ')} {env[field]}, here it "
                f"is {now[field]}; start a new run"
            )


def make_limits(given: Record) -> Limits:
    """The limits of a cell from --budget and --memory."""
    memory = given["memory"]
    return Limits(given["budget"], default_memory() if memory is None else options.size(memory))


def measure_cells(cells: Sequence[Cell], done: list[Record], writer: Writer, limits: Limits) -> int:
    """Measure the remaining cells, show progress and the tables; returns the exit code."""
    progress = Progress(len(cells), len(done), quiet=True)

    def tell(record: Record, printed: str) -> None:
        direction = f", {record['direction']}" if record["direction"] != "fwd" else ""
        turns = ", in turns" if record["paired"] else ""
        what = f"{record['stage']} {record['name']}, N = {record['nk']}{direction}{turns}"
        time = show_time(record["time_ms"])
        interpreted = record["mode"] == "interpreted" and record["time_ms"] is not None
        result = f"{record['status']} {time}{' interpreted' * interpreted}"
        progress.finished(f"{what}, d = {record['d']}", result, record["name"], printed)

    with ended_early() as errors, progress:
        run_cells(cells, done, writer, limits, tell)
    env, records = open_results(writer.path)  # shown from the file, as by later commands
    order = {key(cell.to_json()): index for index, cell in enumerate(cells)}
    records.sort(key=lambda record: order[key(record)])
    page = make_page()
    if records:
        cell_tables.show(env, records, "rich", page)
    note("records", writer.path)
    if any(isinstance(error, KeyboardInterrupt) for error in errors):
        left = len(cells) - len(records)
        print(f"interrupted, {left} of {len(cells)} cells left: "
              f"ladder run --resume {writer.path}", file=sys.stderr)  # fmt: skip
    if not errors and describes_none(env["arguments"]):
        folder = writer.path.with_name(f"{writer.path.stem}-plots")
        draw("plots", lambda: lines.plot(env, records, folder))
        if records and env["arguments"].get("suite") is None:
            for line in cell_tables.closing(env, records):
                page.print(line, soft_wrap=True, markup=False, highlight=False)
    return exit_code(errors, any(record["status"] in FAILURES for record in records))
