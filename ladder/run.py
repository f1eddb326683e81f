"""`ladder run`: its arguments, its plan, a new or resumed run, and its tables."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import typer
from rich.text import Text

from course.suites import SUITES
from harness.isolation.roster import StageInfo
from harness.problems import cost
from harness.problems.problem import PEERS_FROM, REAL_D, SEED
from harness.records import checkout
from harness.records.jsonl import Writer
from harness.records.schema import FAILURES, Record, key
from harness.records.units import show_time
from harness.runs import plan
from harness.runs.comparison import run_cells
from harness.runs.plan import Cell, Comparison, Limits
from harness.views.groups import numbers
from harness.views.table import make_page
from ladder import measuring, old, options, problems, resuming, show
from ladder.arguments import RUN_SHAPE, choose, stages_and_device, wants_gradients
from ladder.closing import closing
from ladder.expect import as_expected, read_expected
from ladder.help import as_typed
from ladder.options import UserError

SLOW = 1e10  # FLOPs of a call from which each step is a line of its own, where there is no bar


def what_next(seen: set[int]) -> str:
    """The last lines of a tour of these stages: a command that works as typed, and a page."""
    if (yours := checkout.to_be_written()) is not None:  # a course's copy
        start = as_typed("lab", "start", str(yours))
        return f"Next, the stage that is yours: {start}\nHow: docs/lab.md"
    mends = f"Next, what mends stage 4: {as_typed('diff', '4', '5')}\n" if 4 in seen else ""
    return f"{mends}Stage by stage: docs/walkthrough/index.md"


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
    causal: options.Causal = "off",
    seqlens: options.Seqlens = None,
    inputs: options.Inputs = None,
    mode: options.Mode = "fwd",
    device: options.Device = None,
    seed: options.Seed = SEED,
    budget: options.Budget = 60.0,
    memory: options.Memory = None,
    paired: options.Paired = False,
    suite: options.RunSuite = None,
    stage: options.StageFiles = None,
    out: options.Out = None,
    resume: options.Resume = None,
    expect: options.Expect = None,
) -> int:
    """Measure stages on problems; without any option, the tour."""
    if resume is not None:
        return resume_run(context)
    return new_run(resuming.kept(context, DEFAULTS), stage or [], out, expect)


# the defaults of the arguments that are kept with a run's records
DEFAULTS = resuming.defaults(run_command, "expect") | {"inputs": "normal"}


def describes_none(arguments: Record) -> bool:
    """Whether a run's arguments describe no problem, so that it is the tour or a suite."""
    return all(arguments.get(name, DEFAULTS[name]) == DEFAULTS[name] for name in RUN_SHAPE)


def make_cells(
    given: Record, stages: Sequence[StageInfo], device: str, own: Sequence[Path] = ()
) -> list[Cell]:
    """Plan the cells of a suite, of the described problems, or else of the tour.

    A stage without gradients takes part in other modes than fwd only if it is named, or in `own`:
    with a row that says why not.
    """
    seeded = {name: given[name] for name in ("inputs", "seed")}
    base = problems.make_base(device, given["dtype"], **seeded)
    if given["suite"] is not None:
        return SUITES[given["suite"]].cells(stages, base)
    if not describes_none(given):
        usual_d = REAL_D if given["inputs"] == "real" else 64
        sizes = {"d": given["d"] or usual_d, "n": given["n"] or "64"}
        described = problems.described(given | sizes, device)
        cells = plan.plan_grid(stages, described, given["paired"])
    elif given["paired"]:
        raise UserError(
            "--paired: the tour has each stage alone; describe a problem, such as --n 64, or "
            "leave it away"
        )
    else:
        tours = [replace(base, direction=mode) for mode in problems.modes(given)]
        cells = [cell for tour in tours for cell in plan.plan_tour(stages, tour)]
    return [
        cell
        for cell in cells
        if cell.problem.direction == "fwd"
        or cell.stage.gradients
        or cell.stage.path in own
        or given["stages"] is not None
    ]


def new_run(given: Record, own: Sequence[Path], out: Path | None, expect: Path | None) -> int:
    """Plan a run, write its env line, and carry it out."""
    measuring.check_out(out, "--resume goes on with it, or name another")
    if given["inputs"] is None:  # a user's own stage is measured with all inputs
        given["inputs"] = "normal"
        if own and given["suite"] is None and not describes_none(given):
            given["inputs"] = options.ALL
    limits = make_limits(given)
    # bad arguments are reported before the stages are loaded, which takes seconds
    make_cells(given, [], given["device"] or "cpu")
    stages, device = stages_and_device(
        given["device"], own, limits.budget, limits.memory, wants_gradients(given), twins=True
    )
    if given["stages"] is not None:
        chosen = choose(stages, given["stages"].split(","), "--stages", own)
    else:
        # peers take part in suites and the tour, elsewhere only if named
        peers = describes_none(given)
        chosen = [
            s for s in stages
            if s.path in own
            # a stage of several ranks is another stage here, where it is alone
            or ((peers or s.number < PEERS_FROM) and "world" not in s.options)
        ]  # fmt: skip
    cells = make_cells(given, chosen, device, own)
    left_out = {stage.number for stage in chosen} - {cell.stage.number for cell in cells}
    problems_of = "the tour" if given["suite"] is None else f"--suite {given['suite']}"
    said = f"run: {problems_of} has no problem for {numbers(left_out)}"
    said += ": describe one in place of it, such as --n 64"
    if not cells:
        raise UserError(said)
    if left_out and given["stages"] is not None:
        print(f"ladder: {said}", file=sys.stderr)
    kept = {**given, "stage": [stage.name for stage in chosen if stage.path in own]}
    planned, measured = [cell.to_json() for cell in cells], {cell.stage.path for cell in cells}
    described = [stage.to_json() for stage in chosen if stage.path in measured]
    expected = read_expected(expect, planned)
    with measuring.begin("", out, device, kept, described, planned) as writer:
        return measure_cells(cells, [], writer, limits, expected)


def resume_run(context: typer.Context) -> int:
    """Resume the run in the file of --resume: measure the cells that it lacks."""
    with resuming.resumed(context, DEFAULTS, make_limits) as begun:
        cells = plan.read_cells(begun.env["plan"], begun.stages)
        expected = read_expected(context.params["expect"], begun.env["plan"])
        return measure_cells(cells, begun.done, begun.writer, begun.limits, expected)


def make_limits(given: Record) -> Limits:
    """The limits of a cell from --budget and --memory."""
    budget, memory = options.seconds(given["budget"], "budget"), given["memory"]
    return Limits(budget, plan.default_memory() if memory is None else options.size(memory))


def measure_cells(
    cells: Sequence[Cell], done: list[Record], writer: Writer, limits: Limits,
    expected: Mapping[str, Record] | None = None,
) -> int:  # fmt: skip
    """Measure the remaining cells, show progress and the tables; returns the exit code."""
    progress = measuring.Progress(len(cells), len(done), quiet=True)

    def watch(comparison: Comparison, step: str) -> None:
        problem, names = comparison.problem, ", ".join(x.name for x in comparison.stages)
        slow = cost.flops(problem) > SLOW
        progress.begun(f"{names}, N = {problem.nk}, d = {problem.d}: {step}", line=slow)

    def tell_all(_: Comparison, records: Sequence[Record], printed: Sequence[str]) -> None:
        for record, text in zip(records, printed, strict=True):
            tell(record, text)

    def tell(record: Record, printed: str) -> None:
        direction = f", {record['direction']}" if record["direction"] != "fwd" else ""
        turns = ", in turns" if record["paired"] else ""
        what = f"{record['stage']} {record['name']}, N = {record['nk']}{direction}{turns}"
        time = show_time(record["time_ms"])
        interpreted = record["mode"] == "interpreted" and record["time_ms"] is not None
        result = f"{record['status']} {time}{' interpreted' * interpreted}"
        progress.finished(f"{what}, d = {record['d']}", result, record["name"], printed)

    with measuring.ended_early() as errors, progress:
        run_cells(cells, done, writer, limits, tell_all, watch)
    # shown from the file, as by later commands
    env, records = measuring.open_results(writer.path)
    order = {cell.key: index for index, cell in enumerate(cells)}
    records.sort(key=lambda record: order[key(record)])
    show.finish(writer.path, env, records)
    left = f"{len(cells) - len(records)} of {len(cells)} cells"
    resuming.say_left(errors, "run", left, writer.path, cells)
    if not errors and describes_none(old.arguments(env["arguments"])):
        folder = writer.path.with_name(f"{writer.path.stem}-plots")
        measuring.draw("plots", partial(show.plots, env, records, folder))
        if records and env["arguments"].get("suite") is None:
            page = make_page()
            for line in closing(env, records):
                page.print(Text(line), soft_wrap=not page.is_terminal)
            page.print(Text(what_next({x["stage"] for x in records})), soft_wrap=True)
    failed = any(record["status"] in FAILURES for record in records)
    return measuring.exit_code(errors, not as_expected(expected, records) or failed)
