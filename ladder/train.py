"""`ladder train`: its arguments, its progress, and its table and plot."""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.text import Text

from attention_ladder.models.training import curves, trainer
from attention_ladder.models.training import plan as train_plan
from harness.isolation.roster import StageInfo
from harness.problems.problem import PEERS_FROM
from harness.records.jsonl import WriteFailed
from harness.records.schema import Record
from harness.runs.plan import default_memory
from harness.views.table import make_page
from ladder import measuring, options, show
from ladder.arguments import choose, numbers_and_files, stages_and_device
from ladder.options import UserError, long_dtype

QUIET = 10.0  # seconds between two lines of progress


def train_command(
    stage: options.TrainStage = None,
    device: options.Device = None,
    size: options.Size = None,
    dtype: options.TrainDtype = None,
    steps: options.Steps = None,
    seeds: options.Seeds = None,
    seed: options.FirstSeed = 0,
    save: options.Save = None,
    out: options.Out = None,
) -> int:
    """Train a small GPT with a stage, its loss beside SDPA's."""
    if not stage:
        raise UserError("--stage: got none, expected a stage's number or file, such as --stage 3")
    numbers, own = numbers_and_files(stage)
    if odd := [path for path in own if path.suffix != ".py" and not path.exists()]:
        expected = "a stage's number, such as 7, or its .py file; SDPA's backends run in any case"
        raise UserError(f"--stage: got {odd[0]}, expected {expected}")
    measuring.check_out(out)
    measuring.check_save(save)
    stages, device = stages_and_device(device, own, trainer.STEP_LIMIT, default_memory())
    size = size or train_plan.DEFAULT_SIZES[device]
    dtype = long_dtype(dtype or train_plan.DEFAULT_DTYPES[device])
    problem = train_plan.make_problem(size, dtype, device)
    backends = train_plan.from_backends(device)
    beside = {(backend.stage, backend.name) for backend in backends}
    others = [info for info in stages if (info.number, info.name) not in beside]
    chosen = choose(others, numbers, "--stage", own, "a file or ")
    trainees = [train_plan.from_stage(info, problem) for info in chosen]
    if trainees and all(one.skip for one in trainees):
        raise UserError(why_none(trainees, stages))
    if save is not None and trainees:
        trainees[0] = replace(trainees[0], save=save)
    trainees = [*backends, *trainees]
    steps = steps or default_steps(trainees, device)
    seeds = seeds or train_plan.DEFAULT_SEEDS[device]
    plan = train_plan.Plan(size, steps, range(seed, seed + seeds), problem)
    arguments = {
        "command": "train", "stage": [info.name for info in chosen], "device": device, "size": size,
        "dtype": dtype, "steps": steps, "seeds": seeds, "seed": seed,
    }  # fmt: skip
    progress = measuring.Progress(len(trainees) * seeds)
    last_line = time.monotonic()

    def name(record: Record) -> str:
        return f"{record['stage']} {record['name']}, seed {record['seed']}"

    def loss(record: Record) -> str:
        return f", loss {record['losses'][-1]:.4f}" if record["losses"] else ""

    def step(record: Record) -> None:
        nonlocal last_line
        if time.monotonic() - last_line >= QUIET:
            last_line = time.monotonic()
            done = f"step {len(record['losses'])} of {record['steps']}"
            progress.begun(f"{name(record)}: {done}{loss(record)}")

    def tell(record: Record, printed: str) -> None:
        nonlocal last_line
        last_line = time.monotonic()
        result = f"{record['status']}{loss(record)}"
        progress.finished(name(record), result, record["name"], printed)

    unsaved: list[str] = []
    planned, declared = plan.to_json(trainees), [one.declared for one in trainees]
    with measuring.begin("train-", out, device, arguments, declared, planned) as writer:
        with measuring.ended_early() as errors, progress:
            trainer.run(trainees, plan, default_memory(), writer, step, tell, unsaved.append)
        if save is not None and save.exists():
            measuring.note("model", save)
        if not measuring.open_results(writer.path, "train")[1] and errors:
            nothing = f"{writer.path}: nothing was trained to its end"
            make_page().print(Text(nothing), soft_wrap=True)
            return measuring.exit_code(errors, failed=False)
        plots = not any(isinstance(error, WriteFailed) for error in errors)
        code = measuring.exit_code(errors, finish(writer.path, plots))
        if unsaved:
            raise UserError(
                f"--save: {save}: the model can't be written: {unsaved[0]}; its training is "
                "recorded"
            )
        return code


def why_none(trainees: Sequence[train_plan.Trainee], stages: Sequence[StageInfo]) -> str:
    """Say why none of the `trainees` can be trained with, and which stages can."""
    reasons = [f"{one.stage} {one.name} can't be trained with: {one.skip}" for one in trainees]
    able = [str(stage.number) for stage in stages if stage.gradients and stage.number < PEERS_FROM]
    return f"--stage: {'; '.join(reasons)}. Stages {', '.join(able)} carry gradients"


def default_steps(trainees: Sequence[train_plan.Trainee], device: str) -> int:
    """The default number of steps: few where a stage is interpreted or called row by row."""
    for one in trainees:
        if one.skip is None and (one.mode == "interpreted" or one.by_rows):
            steps = train_plan.INTERPRETED_STEPS
            by_rows = "takes no causal mask and is called row by row"
            why = "is interpreted" if one.mode == "interpreted" else by_rows
            print(
                f"{one.stage} {one.name} {why}, a step takes seconds: {steps} steps for all; "
                "--steps says otherwise",
                file=sys.stderr,
            )
            return steps
    return train_plan.DEFAULT_STEPS[device]


def finish(path: Path, plot: bool = True) -> bool:
    """Show the records in `path`, draw the plot; returns whether a training failed."""
    env, records = show.open_any(path)
    show.finish(path, env, records)
    if plot:
        folder = path.with_name(f"{path.stem}-plots")
        measuring.draw("plot", partial(show.plots, env, records, folder))
    return any(verdict.failed for verdict in curves.judge(records))
