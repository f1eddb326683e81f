"""`ladder ring`: attention over several GPUs, stage 10 in turns with what else there is."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from harness.isolation.roster import StageInfo, read_rank_peers, read_stages
from harness.problems.cost import flops
from harness.problems.problem import SEED, Problem
from harness.records.schema import Record
from harness.runs import plan
from harness.views import rings
from harness.views.table import make_page
from ladder import bench, measuring, options, problems, resuming
from ladder.arguments import choose, stages_and_device, wants_gradients
from ladder.options import UserError

# defaults: device -> problems that take such a machine minutes, or show that all is right
USUAL: dict[str, dict[str, Any]] = {
    "cuda": {"dtype": "bfloat16", "d": "128", "n": "32768,65536,131072", "h": 16},
    "cpu": {"dtype": "float32", "d": "16", "n": "96", "h": 6},
}


def ring_command(
    context: typer.Context,
    world: options.World = 2,
    mode: options.Mode = "fwd",
    dtype: options.RingDtype = None,
    causal: options.Causal = "both",
    d: options.Ds = None,
    n: options.Ns = None,
    b: options.B = 1,
    h: options.RingH = None,
    hk: options.Hk = None,
    stages: options.RingStages = None,
    stage: options.StageFiles = None,
    warmup: options.Warmup = 3,
    repeat: options.Repeat = 20,
    inputs: options.Synthetic = "normal",
    seed: options.Seed = SEED,
    device: options.Device = None,
    budget: options.BenchBudget = 60.0,
    out: options.Out = None,
    plot: options.Plot = None,
    resume: options.Resume = None,
    predict: options.Predict = False,
) -> int:
    """Time attention over several GPUs in turns, a process each."""
    view = bench.View("ring", plot, None)
    if resume is not None:
        return bench.resume_bench(context, view, DEFAULTS, make_limits, read_all)
    given = resuming.kept(context, DEFAULTS)
    if predict:
        return show_clusters(given)
    measuring.check_out(out)
    measuring.check_out(bench.csv_path(out) if out is not None else None)
    make_problems(given, device or "cuda")  # before the stages are loaded, which takes seconds
    own, memory = stage or [], plan.default_memory()
    everyone, device = stages_and_device(device, own, budget, memory, wants_gradients(given))
    able = [each for each in everyone if "world" in each.options or each.path in own]
    able += read_rank_peers()
    if not able:
        raise UserError("ring: no stage here is for several ranks, as stage 10 is")
    chosen = choose(able, stages.split(","), "--stages", own, named=True) if stages else able
    wanted = make_problems(given, device)
    cells = [plan.Cell(each, problem, paired=True) for problem in wanted for each in chosen]
    kept = {**given, "command": "ring", "stage": [s.name for s in chosen if s.path in own]}
    described, planned = ([each.to_json() for each in group] for group in (chosen, cells))
    with measuring.begin("ring-", out, device, kept, described, planned) as writer:
        limits = make_limits({**given, "device": device})
        return bench.measure(cells, limits, [], writer, view)


def show_clusters(given: Record) -> int:
    """Print what the cost model says of clusters, a table for each d."""
    for problem in {each.d: each for each in make_problems(given, "cuda")}.values():
        if problem.dtype not in rings.RATED:
            expected = f"expected {' or '.join(rings.RATED)}, whose rate is known"
            raise UserError(f"--dtype: got {given['dtype']}, {expected}")
        make_page().print(rings.cluster_table(replace(problem, direction="fwd")))
    return 0


# the defaults of the arguments that are kept with the records
DEFAULTS = resuming.defaults(ring_command, "plot", "predict")


def make_limits(given: Record) -> plan.Limits:
    """The limits of each contestant, as `ladder bench` has them."""
    return bench.make_limits({**given, "graph": False})


def make_problems(given: Record, device: str) -> list[Problem]:
    """The problems that the arguments describe on `device`, over all ranks, the cheapest first."""
    use = {**given, **{name: given[name] or usual for name, usual in USUAL[device].items()}}
    made = problems.described({**use, "nq": None, "seqlens": None}, device, options.SYNTHETIC)
    return sorted((replace(problem, world=given["world"]) for problem in made), key=flops)


def read_all(own: Sequence[Path], load: float, memory: int) -> list[StageInfo]:
    """All stages, and what several ranks are compared with."""
    return [*read_stages(own, load, memory), *read_rank_peers()]
