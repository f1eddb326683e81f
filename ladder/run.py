"""`ladder run`: its arguments, its plan, a new or resumed run, and its tables."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import typer
from rich.text import Text

from harness.isolation.roster import StageInfo
from harness.problems import cost
from harness.problems.problem import PEERS_FROM, REAL_D, SEED, Problem
from harness.records import checkout
from harness.records.jsonl import Writer
from harness.records.schema import FAILURES, Record, key
from harness.records.units import show_time
from harness.runs.comparison import run_cells
from harness.runs.plan import (
    Cell,
    Comparison,
    Limits,
    default_memory,
    each_inputs,
    plan_grid,
    plan_tour,
)
from harness.runs.suites import SUITES
from harness.views import cell_tables, lines
from harness.views.table import make_page
from ladder import options, problems, resuming
from ladder.arguments import RUN_SHAPE, choose, stages_and_device, wants_gradients
from ladder.expect import as_expected, read_expected
from ladder.help import as_typed
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

SLOW = 1e10  # FLOPs of a call from which each step is a line of its own, where there is no bar


def what_next() -> str:
    """The last lines of a tour: a command that works as typed, and a page."""
    if (yours := checkout.to_be_written()) is not None:  # a course's copy
        return f"Next, the stage that is yours: {as_typed(f'lab start {yours}')}\nHow: docs/lab.md"
    return (
        f"Next, what mends stage 4: {as_typed('diff 4 5')}\n"
        "Stage by stage: docs/walkthrough/index.md"
    )


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
    expect: options.Expect = None,
) -> int:
    """Measure stages on problems; without any option, the tour."""
    if resume is not None:
        return resume_run(context)
    return new_run({name: context.params[name] for name in DEFAULTS}, stage or [], out, expect)


# the defaults of the arguments that are kept with a run's records
DEFAULTS = resuming.defaults(run_command, "expect") | {"inputs": "normal"}


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


def new_run(given: Record, own: Sequence[Path], out: Path | None, expect: Path | None) -> int:
    """Plan a run, write its env line, and carry it out."""
    check_out(out, "--resume goes on with it, or name another")
    if given["inputs"] is None:  # a user's own stage is measured with all inputs
        given["inputs"] = "normal"
        if own and given["suite"] is None and not describes_none(given):
            given["inputs"] = options.ALL
    limits = make_limits(given)
    # bad arguments are reported before the stages are loaded, which takes seconds
    make_cells(given, [], given["device"] or "cpu")
    stages, device = stages_and_device(
        given["device"], own, limits.budget, limits.memory, wants_gradients(given)
    )
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
    expected = read_expected(expect, plan)
    with begin("", out, device, kept, described, plan) as writer:
        return measure_cells(cells, [], writer, limits, expected)


def resume_run(context: typer.Context) -> int:
    """Resume the run in the file of --resume: measure the cells that it lacks."""
    with resuming.resumed(context, DEFAULTS, make_limits) as begun:
        cells = [
            Cell(begun.stages[cell["stage"], cell["name"]], Problem.from_json(cell), cell["paired"])
            for cell in begun.env["plan"]
        ]
        expected = read_expected(context.params["expect"], begun.env["plan"])
        return measure_cells(cells, begun.done, begun.writer, begun.limits, expected)


def make_limits(given: Record) -> Limits:
    """The limits of a cell from --budget and --memory."""
    budget, memory = options.seconds(given["budget"], "budget"), given["memory"]
    return Limits(budget, default_memory() if memory is None else options.size(memory))


def measure_cells(
    cells: Sequence[Cell], done: list[Record], writer: Writer, limits: Limits,
    expected: Mapping[str, Record] | None,
) -> int:  # fmt: skip
    """Measure the remaining cells, show progress and the tables; returns the exit code."""
    progress = Progress(len(cells), len(done), quiet=True)

    def watch(comparison: Comparison, step: str) -> None:
        problem, names = comparison.problem, ", ".join(x.name for x in comparison.stages)
        slow = cost.flops(problem) > SLOW
        progress.begun(f"{names}, N = {problem.nk}, d = {problem.d}: {step}", line=slow)

    def tell(record: Record, printed: str) -> None:
        direction = f", {record['direction']}" if record["direction"] != "fwd" else ""
        turns = ", in turns" if record["paired"] else ""
        what = f"{record['stage']} {record['name']}, N = {record['nk']}{direction}{turns}"
        time = show_time(record["time_ms"])
        interpreted = record["mode"] == "interpreted" and record["time_ms"] is not None
        result = f"{record['status']} {time}{' interpreted' * interpreted}"
        progress.finished(f"{what}, d = {record['d']}", result, record["name"], printed)

    with ended_early() as errors, progress:
        run_cells(cells, done, writer, limits, tell, watch)
    env, records = open_results(writer.path)  # shown from the file, as by later commands
    order = {key(cell.to_json()): index for index, cell in enumerate(cells)}
    records.sort(key=lambda record: order[key(record)])
    page = make_page()
    if records:
        cell_tables.show(env, records, "rich", page)
    note("records", writer.path)
    left = len(cells) - len(records)
    resuming.say_left(errors, "run", f"{left} of {len(cells)} cells", writer.path)
    if not errors and describes_none(env["arguments"]):
        folder = writer.path.with_name(f"{writer.path.stem}-plots")
        draw("plots", lambda: lines.plot(env, records, folder))
        if records and env["arguments"].get("suite") is None:
            for line in cell_tables.closing(env, records):
                page.print(Text(line), soft_wrap=not page.is_terminal)
            page.print(Text(what_next()), soft_wrap=True)
    failed = any(record["status"] in FAILURES for record in records)
    return exit_code(errors, not as_expected(expected, records) or failed)
