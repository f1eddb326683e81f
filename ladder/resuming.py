"""`--resume` of `ladder run` and `ladder bench`: a run goes on as it was begun, or not at all."""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from harness.isolation.roster import StageInfo, read_stages
from harness.records import environment
from harness.records.code import label
from harness.records.jsonl import Writer, read
from harness.records.schema import BadRecord, Record, check_plan, key
from harness.runs.plan import Cell, Limits
from ladder import old
from ladder.arguments import prepare_children, typed, wants_gradients
from ladder.help import as_typed
from ladder.options import UserError

Reader = Callable[[Sequence[Path], float, int], list[StageInfo]]


@dataclass(frozen=True)
class Begun:
    """A run that was begun and broken off: its file, its records so far, its stages and limits."""

    writer: Writer
    env: Record
    done: list[Record]
    stages: dict[tuple[int, str], StageInfo]  # by number and name
    limits: Limits


def defaults(command: Callable[..., Any], *not_kept: str) -> Record:
    """The defaults of a command's arguments, without those that aren't kept with its records."""
    parameters = inspect.signature(command).parameters
    but = ("context", "stage", "out", "resume", *not_kept)
    return {name: each.default for name, each in parameters.items() if name not in but}


def kept(context: typer.Context, usual: Record) -> Record:
    """The arguments of a command that are kept with its records."""
    return {name: context.params[name] for name in usual}


@contextmanager
def resumed(
    context: typer.Context, usual: Record, make_limits: Callable[[Record], Limits],
    read_all: Reader = read_stages,
) -> Iterator[Begun]:  # fmt: skip
    """Open the run in the file of --resume; its device, software, commit and stages must be here.

    The options on the command line must equal those that the run was begun with; `usual`: the
    `defaults` of the command. `make_limits` is called with the run's arguments and its device,
    `read_all` with the files of --stage and the limits for loading them.
    Raises UserError or BadRecord where the run can't go on.
    """
    command, path = str(context.command.name), context.params["resume"]
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
        before = {**usual, **old.arguments(env["arguments"])}
        limits = check_begun(command, path, env, done, make_limits, before)
        for name in typed(context):
            value = context.params[name]
            if name in usual and value != before[name]:
                then = "not given" if before[name] is None else before[name]
                raise UserError(
                    f"--resume: --{name} was {then} when {path} was begun and is {value} "
                    "now; a run goes on as it was begun, so leave it away"
                )
        prepare_children(env["device"], wants_gradients(before))
        own = context.params["stage"] or []
        stages = match_stages(path, env, read_all(own, limits.budget, limits.memory))
        same_machine(path, env)
        yield Begun(writer, env, done, stages, limits)


def check_begun(
    command: str, path: Path, env: Record, done: Sequence[Record],
    make_limits: Callable[[Record], Limits], arguments: Record,
) -> Limits:  # fmt: skip
    """The limits of the run in the file; BadRecord where it can't be resumed."""
    try:
        if arguments.get("command", "run") != command:
            raise BadRecord(f"it was begun by another command than `ladder {command}`")
        check_plan(env)
        limits = make_limits({**arguments, "device": env["device"]})
    except (BadRecord, UserError, TypeError, AttributeError) as error:
        raise BadRecord(f"{path}: line 1 is no run to go on with: {error}") from error
    plan = {key(planned) for planned in env["plan"]}
    if strange := [record for record in done if key(record) not in plan]:
        name, n = strange[0]["name"], strange[0]["nk"]
        raise BadRecord(f"{path}: {name} at N = {n} is in no line of its plan; start a new run")
    return limits


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
        imports_changed = not found.ours and found.code != stage.get("code", found.code)
        if imports_changed or found.sha256 != stage.get("sha256"):
            raise UserError(
                f"--resume: {label(found.path)}, or a file that it imports, has changed since "
                f"{path} was begun; start a new run"
            )
    return known


def same_machine(path: Path, env: Record) -> None:
    """Raise UserError where the machine, its software or the code differs from the run's."""
    now = environment.make_env(env["device"], [], [], {})
    for field in ("device_name", "cpu", "cores", "python", "torch", "triton", "numpy", "driver",
                  "commit", "sources", "versions"):  # fmt: skip
        if now[field] != env.get(field, now[field]):
            raise UserError(
                f"--resume: {path} was begun with {field.replace('_', ' ')} {env[field]}, here it "
                f"is {now[field]}; start a new run"
            )


def say_left(
    errors: Sequence[BaseException], command: str, left: str, path: Path, cells: Sequence[Cell]
) -> None:
    """After a Ctrl-C, print what is left, and the command that goes on with it, on stderr."""
    if any(isinstance(error, KeyboardInterrupt) for error in errors):
        own = dict.fromkeys(cell.stage.path for cell in cells if not cell.stage.ours)
        options = [("--resume", path), *(("--stage", file) for file in own)]
        again = as_typed(command, *(str(word) for option in options for word in option))
        print(f"interrupted, {left} left: {again}", file=sys.stderr)
