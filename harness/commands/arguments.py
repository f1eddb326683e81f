"""What the commands share: one clear line for what is wrong, devices, stages, files of records."""

import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from harness.commands.options import UserError, integers
from harness.isolation.roster import StageInfo, why_absent
from harness.problems.problem import YARDSTICK, Problem
from harness.records.jsonl import WriteFailed, Writer, read
from harness.records.schema import Record

RUNS = Path("runs")
PRINTED_LINES = 20  # of what a stage prints, shown a cell
INTERRUPTED = 130  # the exit code after a Ctrl-C

Ended = KeyboardInterrupt | WriteFailed | None  # what ended a run early, if anything


def complain(message: str) -> int:
    """Say what was wrong in one line on stderr; returns the exit code for it."""
    print(f"ladder: {' '.join(message.split())}", file=sys.stderr)
    return 2


def bad_value(error: Exception, message: str) -> str:
    """What to say of typer's usage `error`: its `message`, or what came and what was expected.

    Of a value that it can't convert, typer says only what was expected.
    """
    found: list[dict[str, str]] = getattr(error.__cause__, "errors", list)()
    if not found or not (param := getattr(error, "param", None)):
        return message
    expected = found[0]["msg"].removeprefix("Input should be ").partition(",")[0]
    return f"{param.opts[0]}: got {found[0]['input']!r}, expected: {expected}"


def key_heads(hk: int | None, h: int) -> int:
    """How many heads k and v have: `h`, or --hk, which must divide it."""
    if hk is None:
        return h
    if hk < 1 or h % hk:
        raise UserError(
            f"--hk: got {hk}, expected a number that divides the {h} head{'s' * (h > 1)} of q"
        )
    return hk


def check_key_lengths(problem: Problem) -> None:
    """Raise UserError unless --seqlens has a length for each batch entry, and as many keys."""
    lengths = problem.seqlens_k
    if lengths is None:
        return
    if len(lengths) != problem.b:
        shown = ",".join(map(str, lengths))
        raise UserError(
            f"--seqlens: got {shown}, expected a length for each batch entry, and the batch size "
            f"is {problem.b}: give --b {len(lengths)}, or as many lengths"
        )
    if max(lengths) > problem.nk:
        raise UserError(
            f"--seqlens: got {max(lengths)}, expected at most N = {problem.nk}, the number of keys"
        )


def hide_gpus(device: str | None) -> None:
    """With --device cpu hide the GPUs from all that follows, so that kernels are interpreted."""
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def why_no_cuda(stages: Sequence[StageInfo]) -> str | None:
    """Why the yardstick can't run on a GPU, or None where it can."""
    yardstick = next(stage for stage in stages if stage.number == YARDSTICK and stage.ours)
    return yardstick.unavailable["cuda"]


def known_device(device: str | None, stages: Sequence[StageInfo]) -> str:
    """`device`; where none was asked for, 'cuda' if the yardstick runs there, else 'cpu'.

    Raises UserError where 'cuda' was asked for and the yardstick can't run there.
    """
    reason = why_no_cuda(stages)
    if device == "cuda" and reason:
        raise UserError(f"--device: got cuda, but {reason}")
    return device or ("cpu" if reason else "cuda")


def typed(context: typer.Context) -> list[str]:
    """The options that were given on the command line, by name."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]


def refuse_others(context: typer.Context, taken: Sequence[str], why: str) -> None:
    """Raise UserError, which says `why`, where an option was given that is none of `taken`."""
    for name in typed(context):
        if name not in taken:
            raise UserError(f"--{name}: {why}; leave it away")


def numbers_and_files(stage: Sequence[str]) -> tuple[list[int], list[Path]]:
    """The values of a --stage that takes both: stages' numbers, and stages' files."""
    by_number = [value for value in stage if re.fullmatch(r"[\d,\s]*", value)]
    numbers = integers(",".join(by_number), "--stage", 0) if by_number else []
    return numbers, [Path(value) for value in stage if value not in by_number]


def check_numbers(
    numbers: Sequence[int], known: Iterable[int], option: str, expected: str = "some of"
) -> None:
    """Raise UserError where one of `numbers` is no stage's among `known`."""
    ordered = sorted(set(known))
    if missing := [number for number in numbers if number not in ordered]:
        check_peer(str(missing[0]), option)
        names = ", ".join(map(str, ordered))
        raise UserError(f"{option}: got {missing[0]}, expected {expected} {names}")


def check_peer(asked: str, option: str) -> None:
    """Raise UserError where `asked` is the number or name of a peer that can't run here."""
    if reason := why_absent(asked):
        raise UserError(f"{option}: {asked} needs a GPU that it can use; {reason}")


def open_results(file: Path, kind: str = "cell") -> tuple[Record, list[Record]]:
    """The env and the records of `kind` of a results file; UserError where it can't be read."""
    try:
        return read(file, kind)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None


def check_out(out: Path | None) -> None:
    """Raise UserError where the file that --out names exists already."""
    if out is not None and out.exists():
        raise UserError(f"--out: {out} is there already: name another")


def default_out(command: str) -> Path:
    """A new file under runs/, named by the command and the time."""
    return RUNS / f"{command}-{datetime.now():%Y%m%d-%H%M%S}.jsonl"


def create(out: Path, env: Record) -> Writer:
    """A new results file with its env line; UserError where it can't be written."""
    try:
        return Writer.create(out, env)
    except OSError as error:
        raise UserError(f"--out: {out} can't be written: {error.strerror or error}") from None


def ended_by(work: Callable[[], object]) -> Ended:
    """Carry `work` out; what ended it early, so that what is done can be shown before `leave`."""
    try:
        work()
    except (KeyboardInterrupt, WriteFailed) as ended:
        return ended
    return None


def leave(ended: KeyboardInterrupt | WriteFailed) -> int:
    """The exit code after a Ctrl-C; a record that couldn't be written is raised again."""
    if isinstance(ended, WriteFailed):
        raise ended
    return INTERRUPTED


def show_printed(console: Console, name: str, printed: str) -> None:
    """The last lines of what a stage printed, its name before each."""
    lines = printed.splitlines()
    if len(lines) > PRINTED_LINES:
        lines = [f"... {len(lines) - PRINTED_LINES} lines before", *lines[-PRINTED_LINES:]]
    for line in lines:
        clean = "".join(c for c in line if c.isprintable())
        console.print(Text(f"{name} | {clean}", style="dim"), soft_wrap=True)
