"""`ladder train`: its arguments, what it says on the way, and its table and plot."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from harness.commands import options
from harness.commands.arguments import (
    check_numbers,
    check_out,
    create,
    default_out,
    ended_by,
    hide_gpus,
    known_device,
    leave,
    numbers_and_files,
    open_results,
    refuse_others,
    show_printed,
)
from harness.commands.options import UserError, long_dtype
from harness.isolation.roster import StageInfo, read_stages
from harness.problems.problem import PEERS_FROM
from harness.records import environment
from harness.records.jsonl import WriteFailed
from harness.records.schema import Record
from harness.runs.plan import default_memory
from harness.training import curves, trainer
from harness.training import plan as train_plan
from harness.views import table, training

QUIET = 10.0  # seconds between two lines of progress


def train_command(
    context: typer.Context,
    stage: options.TrainStage = None,
    device: options.Device = None,
    size: options.Size = None,
    dtype: options.TrainDtype = None,
    steps: options.Steps = None,
    seeds: options.Seeds = None,
    seed: options.FirstSeed = 0,
    out: options.Out = None,
    show: options.TrainShow = None,
) -> int:
    """Train a small GPT with a stage, its loss beside SDPA's."""
    if show is not None:
        refuse_others(context, ("show",), "--show trains nothing")
        env, records = open_results(show, "train")
        curves.check(records)
        return finish(env, records, show)
    if not stage:
        raise UserError("--stage: got none, expected a stage's number or file, such as --stage 3")
    numbers, own = numbers_and_files(stage)
    check_out(out)
    hide_gpus(device)
    machine = default_memory(environment.memory_bytes())
    stages = read_stages(own, trainer.STEP_LIMIT, machine)
    device = known_device(device, stages)
    size = size or train_plan.DEFAULT_SIZES[device]
    dtype = long_dtype(dtype or train_plan.DEFAULT_DTYPES[device])
    problem = train_plan.make_problem(size, dtype, device)
    backends = train_plan.from_backends(device)
    chosen = choose(stages, numbers, own, backends)
    asked = [train_plan.from_stage(info, problem) for info in chosen]
    if asked and all(one.skip for one in asked):
        raise UserError(why_none(asked, stages))
    contestants = [*backends, *asked]
    if steps is None:
        steps = default_steps(contestants, device)
    seeds = seeds or train_plan.DEFAULT_SEEDS[device]
    plan = train_plan.Plan(size, steps, range(seed, seed + seeds), problem)
    arguments = {
        "command": "train", "stage": [info.name for info in chosen], "device": device, "size": size,
        "dtype": dtype, "steps": steps, "seeds": seeds, "seed": seed,
    }  # fmt: skip
    env = environment.make_env(
        device, plan.to_json(contestants), [one.declared for one in contestants], arguments
    )
    out = out or default_out("train")
    monitor = Monitor(len(contestants) * seeds)
    memory = default_memory(environment.memory_bytes())
    with create(out, env) as writer:
        ended = ended_by(
            lambda: trainer.run(contestants, plan, memory, writer, monitor.progress, monitor.report)
        )
    env, records = open_results(out, "train")  # what is shown is what can be shown again
    if ended is None:
        return finish(env, records, out)
    if records:
        finish(env, records, out, draw=not isinstance(ended, WriteFailed))
    else:
        table.page().print(Text(f"{out}: nothing was trained to its end"), soft_wrap=True)
    return leave(ended)


def choose(
    stages: Sequence[StageInfo],
    numbers: Sequence[int],
    own: Sequence[Path],
    backends: Sequence[train_plan.Trainee],
) -> list[StageInfo]:
    """The stages that --stage names; UserError where one isn't known, or is SDPA itself."""
    beside = {(backend.stage, backend.name) for backend in backends}
    known = {stage.number for stage in stages if (stage.number, stage.name) not in beside}
    check_numbers(numbers, known, "--stage", "a file or some of")
    chosen = [stage for stage in stages if stage.number in numbers or stage.path in own]
    for stage in chosen:
        if (stage.number, stage.name) in beside:
            raise UserError(f"--stage: {stage.number} {stage.name} is SDPA, which runs in any case")
    return chosen


def why_none(asked: Sequence[train_plan.Trainee], stages: Sequence[StageInfo]) -> str:
    """Why none of the stages that were `asked` for can be trained with, and which ones can."""
    reasons = [f"{one.stage} {one.name} can't be trained with: {one.skip}" for one in asked]
    able = [str(stage.number) for stage in stages if stage.gradients and stage.number < PEERS_FROM]
    return f"--stage: {'; '.join(reasons)}. Stages {', '.join(able)} carry gradients"


def default_steps(contestants: Sequence[train_plan.Trainee], device: str) -> int:
    """So many steps as are worth while: few where a contestant is interpreted, or goes by rows."""
    for one in contestants:
        if one.skip is None and (one.mode == "interpreted" or one.by_rows):
            steps = train_plan.INTERPRETED_STEPS
            by_rows = "takes no causal mask and is asked row by row"
            why = "is interpreted" if one.mode == "interpreted" else by_rows
            print(
                f"{one.stage} {one.name} {why}, a step takes seconds: {steps} steps for all; "
                "--steps says otherwise",
                file=sys.stderr,
            )
            return steps
    return train_plan.DEFAULT_STEPS[device]


def finish(env: Record, records: Sequence[Record], path: Path, draw: bool = True) -> int:
    """Print the table, `draw` the plot beside the records in `path`; returns the exit code."""
    if not records:
        raise UserError(f"{path}: no record in it: nothing was trained to its end")
    page = table.page()
    page.print(training.in_terminal(env, records))
    page.print(Text(f"records: {path}"), soft_wrap=True)
    picture = path.with_name(f"{path.stem}-plots") / "loss.png"
    try:
        if draw and training.plot(env, records, picture):
            page.print(Text(f"plot:    {picture}"), soft_wrap=True)
    except (ImportError, OSError) as error:
        page.print(Text(f"no plot: {error}"), soft_wrap=True)
    return 1 if any(verdict.failed for verdict in curves.judge(records)) else 0


class Monitor:
    """Progress on stderr: a line whenever a contestant is done with a seed, or none came long."""

    def __init__(self, total: int) -> None:
        self.done, self.total = 0, total
        self.console = Console(stderr=True)
        self.last = time.monotonic()

    def progress(self, record: Record) -> None:
        """Some more steps of `record` are done."""
        if time.monotonic() - self.last >= QUIET:
            self.say(record, f"step {len(record['losses'])} of {record['steps']}")

    def report(self, record: Record, printed: str) -> None:
        """A contestant is done with a seed."""
        self.done += 1
        self.say(record, record["status"])
        show_printed(self.console, record["name"], printed)

    def say(self, record: Record, what: str) -> None:
        self.last = time.monotonic()
        loss = f", loss {record['losses'][-1]:.4f}" if record["losses"] else ""
        line = f"[{self.done}/{self.total}] {record['stage']} {record['name']}, seed "
        print(f"{line}{record['seed']}: {what}{loss}", file=sys.stderr, flush=True)
