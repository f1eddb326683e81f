"""`ladder lab`: write a stage yourself, with a stub, hints and checks; export for a class."""

import re
from pathlib import Path
from typing import Annotated

import typer

from harness.records import checkout
from ladder import options
from ladder.arguments import prepare_children
from ladder.help import Command, Groups, examples
from ladder.options import UserError, option

LABS = 8  # the last stage that has a lab

Stage = Annotated[int, typer.Argument(help="the stage's number", metavar="STAGE")]
Numpy = Annotated[bool, option("stage 5 in NumPy, where there is no Triton", None, "--numpy")]

lab = typer.Typer(
    cls=Groups,
    help="Write a stage yourself: a stub, hints, checks.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=examples("ladder lab start 5", "ladder lab hint 5", "ladder lab check mine_5.py"),
)


def known(stage: int) -> int:
    """The number of a stage that has a lab; UserError where it has none."""
    return int(options.whole(0, LABS)(stage, "STAGE"))


def start_command(
    stage: Stage,
    to: Annotated[Path | None, option("the file, for stage 2 the folder; mine_STAGE")] = None,
    size: Annotated[
        str, option("small: gaps of one line; large: one for the whole loop",
                    options.one_of("small", "large")),
    ] = "small",
    numpy: Numpy = False,
) -> int:  # fmt: skip
    """Write a stub: a stage's file without the parts that you write."""
    from course.lab import labs

    said = labs.about()[known(stage)]
    path = to or Path(f"mine_{stage}" if stage == 2 else f"mine_{stage}.py")
    try:
        labs.start(stage, path, size, numpy)
    except labs.NoLab as error:
        raise UserError(str(error)) from None
    where = path / "value_graph.hpp" if stage == 2 else path
    print(f"{path}: {said['goal']}")
    print(f"about {said['minutes'][size]} minutes (an estimate); look for 'not written yet'")
    print(f"\n  edit {where}\n  ladder lab hint {stage}{' --numpy' * numpy} --level 1")
    print(f"  ladder lab check {path}")
    return 0


def hint_command(
    stage: Stage,
    level: Annotated[int, option("1: a question, 2: the idea, 3: nearly the line",
                                 options.whole(1, 3))] = 1,
    numpy: Numpy = False,
) -> int:  # fmt: skip
    """Give a hint for each gap, from a question to nearly the line."""
    from course.lab import labs

    try:
        for text in labs.hints(known(stage), level, numpy):
            print(text)
    except labs.NoLab as error:
        raise UserError(str(error)) from None
    return 0


def check_command(
    file: Annotated[Path, typer.Argument(help="your file, for stage 2 your folder")],
    stage: Annotated[int | None, option("which stage it is; as it says by default")] = None,
    seed: Annotated[int | None, option("of the inputs; a new one by default")] = None,
) -> int:
    """Check your file, and tell what a failure comes from."""
    from course.lab import checks

    prepare_children("cpu")  # interpreted, so that it is the same on every machine
    number = None if stage is None else known(stage)

    def tell(mark: checks.Mark) -> None:
        print(f"{'ok  ' if mark.passed else 'FAIL'}  {mark.check.name}", flush=True)

    try:
        found = checks.check(file, number, seed, tell)
    except (checks.BadStage, checks.Unchecked) as error:
        raise UserError(str(error)) from None
    passed = sum(mark.passed for mark in found.marks)
    of = f", {passed} of {len(found.marks)} checks passed" if found.marks else ""
    print(f"\nstage {found.stage}: {found.verdict}{of}")
    if found.verdict == "passed":
        print(f"beside stage 3, with times: ladder run --stages 3 --stage {file}")
        return 0
    first = next((mark.check.name for mark in found.marks if not mark.passed), None)
    if first:
        print(f"\nthe first to fail, {first}:")
    for line in found.case:
        print(f"  {line}")
    print(f"\n{found.diagnosis}")
    return 1


def export_command(
    folder: Annotated[Path, typer.Argument(help="a new folder", metavar="DIR")],
    stages: Annotated[str, option("those that stay, such as 0-4; all above are taken out")],
) -> int:
    """Copy the checkout to hand it out, without the stages to be written."""
    from course.lab import labs

    checkout.need("ladder lab export")
    match = re.fullmatch(r"0-([0-8])|0", stages.strip())
    if not match:
        raise UserError(f"--stages: got {stages!r}, expected 0-N, with N from 1 to {LABS}")
    try:
        labs.export(folder, int(match[1] or 0))
    except labs.NoLab as error:
        raise UserError(str(error)) from None
    print(f"{folder}: stages {stages}, and the stub of the next for `ladder lab start` there")
    return 0


for carry_out in (start_command, hint_command, check_command, export_command):
    name = carry_out.__name__.removesuffix("_command")
    lab.command(name, cls=Command)(carry_out)
