"""`ladder bench`: the arguments, the run, and its views. Exit codes as of the other commands."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from harness.commands import options
from harness.commands.arguments import (
    check_key_lengths,
    check_out,
    check_peer,
    create,
    default_out,
    ended_by,
    hide_gpus,
    key_heads,
    known_device,
    leave,
    open_results,
    refuse_others,
)
from harness.commands.bench_progress import Progress, why_too_long
from harness.commands.options import (
    MAX_D,
    UserError,
    integers,
    key_lengths,
    long_dtype,
    words,
)
from harness.isolation.roster import StageInfo, read_stages
from harness.problems.problem import PEERS_FROM, SEED, Problem
from harness.records import environment
from harness.records.jsonl import WriteFailed
from harness.records.schema import DIRECTIONS
from harness.runs import plan, runner
from harness.runs.suites import SUITE_STAGES, suite_problems
from harness.views import contest_plots, contests, roofline, table

OURS_FAILED = ("wrong", "crashed")

# what isn't given: device -> the problems that a machine like it is done with in minutes
USUAL: dict[str, dict[str, Any]] = {
    "cuda": {
        "dtype": "float16", "d": "64,128", "n": "1024,2048,4096,8192,16384", "tokens": 16384,
        "hidden": 2048,
    },
    "cpu": {"dtype": "float32", "d": "16", "n": "64,128,256", "tokens": 256, "hidden": 32},
}  # fmt: skip
SHOWN = ("show", "out", "plots", "ceilings")  # what --show goes with
NOT_KEPT = ("stage", *SHOWN)  # not among the arguments that are kept with the records
# what describes problems, of which a suite has its own
SHAPE = ("mode", "dtype", "causal", "d", "n", "tokens", "hidden", "b", "h", "hk", "seqlens")

Record = dict[str, Any]


def bench_command(
    context: typer.Context,
    mode: options.Modes = None,
    dtype: options.BenchDtype = None,
    causal: options.Masks = None,
    d: options.Ds = None,
    n: options.Ns = None,
    tokens: options.Tokens = None,
    hidden: options.Hidden = None,
    b: options.BenchB = None,
    h: options.BenchH = None,
    hk: options.BenchHk = None,
    seqlens: options.Seqlens = None,
    stages: options.Contestants = None,
    impl: options.Impl = None,
    stage: options.ContestantFiles = None,
    warmup: options.Warmup = 5,
    repeat: options.Repeat = 30,
    inputs: options.SyntheticInputs = "normal",
    seed: options.Seed = SEED,
    device: options.Device = None,
    budget: options.BenchBudget = 120.0,
    suite: options.ProblemSuite = None,
    out: options.BenchOut = None,
    plots: options.Plots = None,
    ceilings: options.BenchCeilings = None,
    show: options.BenchShow = None,
) -> int:
    """Time contestants in turns, in one process: speed-ups."""
    given = {name: context.params[name] for name in context.params if name not in NOT_KEPT}
    view = View(plots, ceilings)
    if show is None:
        return measure(given, stage or [], out, view)
    refuse_others(context, SHOWN, "--show measures nothing")
    if out is not None and out.suffix != ".csv":
        raise UserError(f"--out: got {out}, expected a name in .csv: --show writes nothing else")
    check_out(out)
    env, records = open_results(show, "bench")
    view.check(env)
    view.show(env, records, show)
    view.write(env, records, out)
    return 0


class View:
    """What is to be seen of a run: the tables, and CSV and plots where asked for.

    `ceilings`: what `ladder ceilings` wrote on the same machine.
    """

    def __init__(self, plots: Path | None, ceilings: Path | None) -> None:
        self.plots, self.file = plots, ceilings
        self.env, self.ceilings = open_results(ceilings, "ceiling") if ceilings else ({}, [])

    def check(self, env: Record) -> None:
        """Raise UserError where the ceilings are another machine's."""
        if self.file is not None:
            try:
                roofline.same_machine(env, self.env)
            except roofline.NoRoof as error:
                raise UserError(f"--ceilings: {self.file}: {error}") from None

    def show(self, env: Record, records: Sequence[Record], path: Path) -> None:
        """Print the tables. `path`: the file of the records."""
        page = table.page()
        page.width = min(page.width, contests.WIDTH)
        if not records:
            page.print(Text(f"{path}: nothing was measured"), soft_wrap=True)
            return
        page.print(contests.rich_tables(env, records, self.ceilings))
        page.print(Text(f"records: {path}"), soft_wrap=True)

    def write(self, env: Record, records: Sequence[Record], csv: Path | None) -> None:
        """Write the CSV, where it has a name, and the plots; nothing of no records."""
        if not records:
            return
        page, writing = table.page(), csv
        try:
            if csv is not None:
                csv.write_text(contests.as_csv(env, records))
                page.print(Text(f"csv:     {csv}"), soft_wrap=True)
            writing = self.plots
            if self.plots is not None:
                written = contest_plots.plot(env, records, self.plots, self.ceilings)
                shown = ", ".join(str(plot) for plot in written) or "nothing to plot"
                page.print(Text(f"plots:   {shown}"), soft_wrap=True)
        except ImportError as error:
            page.print(Text(f"no plot: {error}"), soft_wrap=True)
        except OSError as error:
            what = error.filename or writing  # a full disk doesn't say which
            raise UserError(f"{what} can't be written: {error.strerror}") from None


def csv_path(path: Path) -> Path:
    """Where the CSV of the records in `path` goes: beside them, under the same stem."""
    beside = path.with_suffix(".csv")
    if beside == path:
        raise UserError(f"{path}: its CSV would be written over it; call the records .jsonl")
    return beside


def measure(given: Record, own: Sequence[Path], out: Path | None, view: View) -> int:
    """Plan the run, carry it out, and show it. Returns the exit code."""
    option = "--stages" if given["impl"] is None else "--impl"
    if given["impl"] is not None and given["stages"] is not None:
        raise UserError("--impl: it is the old name of --stages; leave it away")
    wanted = given["stages"] if given["impl"] is None else given["impl"]
    check_out(out)
    check_out(csv_path(out) if out is not None else None)
    device = given["device"]
    hide_gpus(device)
    check_problems(given, device)
    stages = read_stages(own)
    device = known_device(device, stages)
    problems = make_problems(given, device)
    if wanted is None:
        chosen, asked = usual(stages, own, problems, given["suite"]), list(own)
    else:
        chosen = choose(stages, wanted, option, own)
        asked = [stage.path for stage in chosen]
    comparisons = plan.plan_comparisons(chosen, problems, asked, make_limits(given, device))
    if not comparisons:
        raise UserError("bench: none of the stages takes any of these problems")
    if reason := why_too_long(comparisons):
        raise UserError(f"bench: {reason}")
    env = environment.make_env(
        device,
        [entry for comparison in comparisons for entry in comparison.to_json()],
        [stage.to_json() for stage in chosen],
        {**given, "command": "bench", "stage": [r.name for r in chosen if r.path in own]},
    )
    view.check(env)
    out = out or default_out("bench")
    with create(out, env) as writer, Progress(len(comparisons)) as progress:
        ended = ended_by(
            lambda: runner.run_comparisons(comparisons, writer, progress.tell, progress.watch)
        )
    env, records = open_results(out, "bench")  # what is shown is what can be shown again
    view.show(env, records, out)
    if not isinstance(ended, WriteFailed):
        view.write(env, records, csv_path(out))
    if ended is not None:
        return leave(ended)
    ours = [record for record in records if record["stage"] < PEERS_FROM]
    return int(any(record["status"] in OURS_FAILED for record in ours))


def check_problems(given: Record, device: str | None) -> None:
    """Say at once what is wrong with the problems, before seconds are spent on the stages.

    Where the device isn't known yet, neither are the sizes that go with it: what they are too small
    for is said when they are.
    """
    if device is None and given["suite"] is None:
        lengths = key_lengths(given["seqlens"]) or (0,)
        for size, whole, least in (("b", "tokens", len(lengths)), ("h", "hidden", given["hk"])):
            if given[whole] is None:
                given = {**given, size: given[size] or least or 1}
    make_problems(given, device or "cuda")


def make_limits(given: Record, device: str) -> plan.Limits:
    """What each stage may take, and how many samples are taken of it."""
    machine = environment.memory_bytes()
    memory = plan.default_memory(machine)
    if device == "cuda" and machine:
        # it is libraries, and outputs on their way to the judge: what a stage takes is the GPU's
        memory = machine // 2
    return plan.Limits(given["budget"], memory, given["warmup"], given["repeat"])


def make_problems(given: Record, device: str) -> list[Problem]:
    """The problems that the arguments describe on `device`."""
    usual = USUAL[device]
    dtype = long_dtype(given["dtype"] or usual["dtype"])
    base = Problem(
        inputs=given["inputs"], seed=given["seed"], b=1, h=1, hk=1, nq=1, nk=1, d=1, dtype=dtype,
        precision="ieee" if dtype == "float32" else dtype, causal=False,
        seqlens_k=key_lengths(given["seqlens"]), device=device,
    )  # fmt: skip
    if given["suite"] is not None:
        if own := [name for name in SHAPE if given[name] is not None]:
            raise UserError(f"--{own[0]}: a suite's problems are its own; leave it away")
        return suite_problems(given["suite"], base)
    directions = words(given["mode"] or "fwd", "--mode", DIRECTIONS)
    causal = options.CAUSAL[given["causal"] or "both"]
    ds = integers(given["d"] or usual["d"], "--d", 1, MAX_D)
    ns = integers(given["n"] or usual["n"], "--n", 1)
    sizes = plan.Sizes(
        given["tokens"] or usual["tokens"], given["hidden"] or usual["hidden"], given["b"],
        given["h"], given["hk"],
    )  # fmt: skip
    for n in ns:
        if given["b"] is None and n > sizes.tokens:
            raise UserError(
                f"--n: got {n}, expected at most the {sizes.tokens} tokens of a batch: raise "
                "--tokens, or give --b"
            )
    for d in ds:
        if given["h"] is None and sizes.hidden % d:
            raise UserError(
                f"--d: got {d}, expected a divisor of {sizes.hidden}, the size of all heads: "
                "change --hidden, or give --h"
            )
    problems = plan.make_problems(base, directions, causal, ds, ns, sizes)
    for problem in problems:
        key_heads(given["hk"], problem.h)
        check_key_lengths(problem)
    return problems


def usual(
    stages: Sequence[StageInfo], own: Sequence[Path], problems: Sequence[Problem], suite: str | None
) -> list[StageInfo]:
    """Who competes where no stages are named; and those of --stage."""
    others = [stage for stage in stages if stage.path not in own]
    if numbers := SUITE_STAGES.get(str(suite)):
        wanted = [stage for stage in others if stage.number in numbers]
    else:
        wanted = plan.usual_stages(others, problems)
    return [stage for stage in stages if stage in wanted or stage.path in own]


def choose(
    infos: Sequence[StageInfo], stages: str, option: str, own: Sequence[Path]
) -> list[StageInfo]:
    """The stages and peers that `stages` names by number or name; and those of --stage.

    Raises UserError, which names `option`, where one isn't known, and says why of a peer.
    """
    parts = [part.strip() for part in stages.split(",")]
    for part in parts:
        if not any(part in (str(stage.number), stage.name) for stage in infos):
            check_peer(part, option)
            known = ", ".join(f"{stage.number} ({stage.name})" for stage in infos)
            raise UserError(f"{option}: got {part!r}, expected some of {known}")
    return [
        stage
        for stage in infos
        if str(stage.number) in parts or stage.name in parts or stage.path in own
    ]
