"""`ladder bench`: its arguments, its plan, a new or resumed run, and its tables and plots."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer

from course.suites import SUITES
from harness.isolation.roster import read_stages
from harness.problems.problem import PEERS_FROM, SEED, Problem
from harness.records import environment, files, units
from harness.records.jsonl import WriteFailed, Writer
from harness.records.schema import BadRecord, Record, key
from harness.runs import plan
from harness.runs.comparison import run_cells
from harness.views import cell_tables, table
from ladder import measuring, options, problems, resuming, show
from ladder.arguments import choose, stages_and_device, wants_gradients
from ladder.options import UserError, whole

OURS_FAILED = ("wrong", "crashed")
REASON = 100  # characters of a reason, on stderr

# defaults: device -> problems that take such a machine minutes
USUAL: dict[str, dict[str, Any]] = {
    "cuda": {
        "dtype": "float16", "d": "64,128", "n": "1024,2048,4096,8192,16384", "tokens": 16384,
        "hidden": 2048,
    },
    "cpu": {"dtype": "float32", "d": "16", "n": "64,128,256", "tokens": 256, "hidden": 32},
}  # fmt: skip


def bench_command(
    context: typer.Context,
    mode: options.Mode = "fwd",
    dtype: options.BenchDtype = None,
    causal: options.Causal = "both",
    d: options.Ds = None,
    n: options.Ns = None,
    nq: options.Nq = None,
    tokens: options.Tokens = None,
    hidden: options.Hidden = None,
    b: options.BenchB = None,
    h: options.BenchH = None,
    hk: options.Hk = None,
    seqlens: options.Seqlens = None,
    stages: options.BenchStages = None,
    stage: options.StageFiles = None,
    warmup: options.Warmup = 5,
    repeat: options.Repeat = 30,
    graph: options.Graph = False,
    inputs: options.AllSynthetic = None,
    seed: options.Seed = SEED,
    device: options.Device = None,
    budget: options.BenchBudget = 120.0,
    suite: options.BenchSuite = None,
    out: options.Out = None,
    plot: options.Plot = None,
    ceilings: options.Ceilings = None,
    resume: options.Resume = None,
) -> int:
    """Time stages in turns, in one process: speed-ups."""
    view = View("bench", plot, ceilings)
    if resume is not None:
        return resume_bench(context, view, DEFAULTS, make_limits)
    return new_bench(resuming.kept(context, DEFAULTS), stage or [], out, view)


# the defaults of the arguments that are kept with the records
DEFAULTS = resuming.defaults(bench_command, "plot", "ceilings")


class View:
    """The output of `ladder COMMAND`: tables, and the CSV and plots that were asked for.

    `ceilings`: a file that `ladder ceilings` wrote on the same machine.
    """

    def __init__(self, command: str, plots: Path | None, ceilings: Path | None) -> None:
        self.command, self.plots, self.ceilings = command, plots, show.Ceilings.read(ceilings)

    def show(self, path: Path, csv: Path | None, write: bool = True) -> list[Record]:
        """Show the records in `path`, and `write` the CSV and the plots; returns the records."""
        env, records = measuring.open_results(path)
        self.ceilings.check(env)
        show.finish(path, env, records, self.ceilings)
        if records and csv is not None and write:
            with measuring.writing(csv):
                files.write(csv, table.as_csv(cell_tables.flat_rows(env, records)))
            measuring.note("csv", csv)
        if records and self.plots is not None and write:
            with measuring.writing(self.plots, "--plot"):
                written = show.plots(env, records, self.plots, self.ceilings)
            measuring.note("plots", ", ".join(map(str, written)) or "nothing to plot")
        return records


def csv_path(path: Path) -> Path:
    """The file for the CSV of the records in `path`: in the same folder, with the same stem."""
    beside = path.with_suffix(".csv")
    if beside == path:
        raise UserError(f"{path}: its CSV would be written over it; call the records .jsonl")
    return beside


def new_bench(given: Record, own: Sequence[Path], out: Path | None, view: View) -> int:
    """Plan the run, carry it out, and show it. Returns the exit code."""
    measuring.check_out(out)
    measuring.check_out(csv_path(out) if out is not None else None)
    if given["inputs"] is None:
        given["inputs"] = options.ALL if own and given["suite"] is None else "normal"
    check_problems(given)
    memory = plan.default_memory()
    stages, device = stages_and_device(
        given["device"], own, given["budget"], memory, wants_gradients(given), twins=True
    )
    if given["graph"] and device != "cuda":
        raise UserError("--graph: got a CPU, expected a GPU: CUDA graphs are replayed there")
    wanted = given["stages"]
    if wanted is not None:  # first: a peer that needs a GPU explains more than sizes for a CPU
        chosen = choose(stages, wanted.split(","), "--stages", own, named=True)
        named = [stage.path for stage in chosen]
    wanted_problems = make_problems(given, device)
    takes = (given["suite"] and SUITES[given["suite"]].takes) or plan.fits
    if wanted is None:
        others = [stage for stage in stages if stage.path not in own]
        usual = plan.usual_stages(others, wanted_problems)
        if takes is not plan.fits:
            usual = [s for s in others if any(takes(s, problem) for problem in wanted_problems)]
        chosen = [stage for stage in stages if stage in usual or stage.path in own]
        named = list(own)
    limits = make_limits({**given, "device": device})
    cells = plan.plan_comparisons(chosen, wanted_problems, named, takes)
    if not cells:
        raise UserError("bench: none of the stages takes any of these problems")
    if reason := plan.why_too_long(cells, limits):
        raise UserError(f"bench: {reason}")
    kept = {**given, "command": "bench", "stage": [s.name for s in chosen if s.path in own]}
    described = [stage.to_json() for stage in chosen]
    planned = [cell.to_json() for cell in cells]
    check = view.ceilings.check
    with measuring.begin("bench-", out, device, kept, described, planned, check) as writer:
        return measure(cells, limits, [], writer, view)


def resume_bench(
    context: typer.Context, view: View, usual: Record,
    limits_of: Callable[[Record], plan.Limits], read: resuming.Reader = read_stages,
) -> int:  # fmt: skip
    """Resume the run in the file of --resume: measure the comparisons that aren't whole in it.

    The arguments are those of `resuming.resumed`.
    """
    with resuming.resumed(context, usual, limits_of, read) as begun:
        path, done = begun.writer.path, begun.done
        view.ceilings.check(begun.env)
        csv_path(path)  # now, not when minutes of measuring are done
        cells = plan.read_cells(begun.env["plan"], begun.stages)
        comparisons = plan.group(cells, begun.limits)
        entries = [cell.key for cell in cells]
        if list(map(key, done)) != entries[: len(done)]:
            raise BadRecord(f"{path}: its records are not in its plan's order; start a new run")
        left = plan.unfinished(comparisons, done)
        # the first of them may have some records: its stages are measured in turns, anew
        begun.writer.keep(len(entries) - sum(len(each.cells) for each in left))
        return measure(cells, begun.limits, done, begun.writer, view)


def measure(
    cells: Sequence[plan.Cell], limits: plan.Limits, done: Sequence[Record], writer: Writer,
    view: View,
) -> int:  # fmt: skip
    """Measure the comparisons that aren't whole in `done`, and show all; returns the exit code."""
    comparisons, begun = plan.group(cells, limits), time.monotonic()
    left = plan.unfinished(comparisons, done)

    def where(problem: Problem) -> str:
        masked = " causal" if problem.causal else ""
        what = f"{problem.direction}{masked} d = {problem.d}, N = {problem.nk}"
        what += f", Nq = {problem.nq}" * (problem.nq != problem.nk)
        return f"{time.monotonic() - begun:.0f} s: {what}"

    def watch(comparison: plan.Comparison, step: str) -> None:
        progress.begun(f"{where(comparison.problem)}: {step}")

    def tell(comparison: plan.Comparison, records: Sequence[Record], said: Sequence[str]) -> None:
        results = ", ".join(f"{record['name']} {outcome(record)}" for record in records)
        progress.finished(where(comparison.problem), results, view.command, "".join(said))

    progress = measuring.Progress(len(comparisons), len(comparisons) - len(left))
    with measuring.ended_early() as errors, progress:
        run_cells([cell for each in left for cell in each.cells], [], writer, limits, tell, watch)
    whole = not any(isinstance(error, WriteFailed) for error in errors)
    records = view.show(writer.path, csv_path(writer.path), whole)
    missing = f"{len(plan.unfinished(comparisons, records))} of {len(comparisons)} comparisons"
    resuming.say_left(errors, view.command, missing, writer.path, cells)
    ours = [record for record in records if record["stage"] < PEERS_FROM]
    failed = any(record["status"] in OURS_FAILED for record in ours)
    return measuring.exit_code(errors, failed)


def outcome(record: Record) -> str:
    """A record in a few words, for the progress lines."""
    if record["status"] != "ok":
        return f"{record['status']} ({record['reason'][:REASON]})"
    time, why = record["time_ms"], record["reason"].partition(":")[0]  # interpreted, or no speed
    return units.show_time(time) if time else why


def check_problems(given: Record) -> None:
    """Raise UserError for bad problems at once, before the stages are loaded, which takes seconds.

    Where the device isn't known yet, its default sizes aren't either: whether they are too small is
    checked later.
    """
    if given["device"] is None and given["suite"] is None:
        lengths = options.key_lengths(given["seqlens"]) or (0,)
        for size, whole, least in (("b", "tokens", len(lengths)), ("h", "hidden", given["hk"])):
            if given[whole] is None:
                given = {**given, size: given[size] or least or 1}
    make_problems(given, given["device"] or "cuda")


def make_limits(given: Record) -> plan.Limits:
    """The limits of each stage, and the number of its samples, on the device in `given`."""
    memory = plan.default_memory()
    if given["device"] == "cuda":
        # main memory is needed for libraries and for outputs sent to the judge only
        memory = (environment.memory_bytes() or 2 * memory) // 2
    warmup = whole(1)(given["warmup"], "warmup")
    rounds = whole(2)(given["repeat"], "repeat")
    seconds = options.seconds(given["budget"], "budget")
    return plan.Limits(seconds, memory, warmup, rounds, bool(given["graph"]))


def make_problems(given: Record, device: str) -> list[Problem]:
    """The problems that the arguments describe on `device`."""
    use = {**given, **{k: given[k] or usual for k, usual in USUAL[device].items()}}
    if given["suite"] is not None:
        named = {name: given[name] for name in ("inputs", "seed", "seqlens")}
        of_suite = SUITES[given["suite"]].problems(
            problems.make_base(device, use["dtype"], **named)
        )
        rows = problems.queries(given)
        chosen = [problem for problem in of_suite if not rows or problem.nq in rows]
        return plan.each_inputs(chosen, options.SYNTHETIC)
    if given["graph"] and set(problems.modes(given)) != {"fwd"}:
        raise UserError(f"--graph: got --mode {given['mode']}, expected fwd: no other is captured")
    return problems.described(use, device, options.SYNTHETIC)
