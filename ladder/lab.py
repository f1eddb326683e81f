"""`ladder lab`: write a stage yourself, with hints and checks; export and grade for a class."""

import os
import re
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from harness.records import checkout
from harness.records.units import clean
from ladder import options
from ladder.arguments import end_children, prepare_children, stages_and_device
from ladder.help import Command, Groups, examples
from ladder.options import UserError, option

LABS = 8  # the last stage that has a lab
WIDTH = 80  # columns of what is printed

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


def wrapped(text: str, indent: str = "") -> str:
    """Return a line in lines of 80 columns, those after the first indented."""
    return textwrap.fill(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


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
    parts = {"predict": 0, "write": said["minutes"][size], **said["around"]}
    of = ", ".join(f"{part} {minutes}" for part, minutes in parts.items())
    print(f"about {sum(parts.values())} minutes, an estimate: {of}")
    print("look for 'not written yet'")
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
            for at, line in enumerate(text.splitlines()):
                code = at > 0 and level == 3
                print(line if code else wrapped(line, "    "))
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
        print(wrapped(f"  {line}", "    "))
    print(f"\n{wrapped(found.diagnosis)}")
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


def grade_command(
    folder: Annotated[Path, typer.Argument(
        help="submissions, one .py file each (stage 2: one folder each); or one of them",
        metavar="DIR")],
    stage: Annotated[int, option("the stage that they were to write", options.whole(0, LABS))],
    out: Annotated[Path, option("the table, CSV")] = Path("grades.csv"),
    points: Annotated[Path | None, option("a TOML file: check = points, default = points")] = None,
    junit: Annotated[Path | None, option("as JUnit's XML, too")] = None,
    gradescope: Annotated[Path | None, option("as Gradescope's results.json, too")] = None,
    only: Annotated[str | None, option("one submission, again: its name")] = None,
    seed: Annotated[int | None, option("of all inputs; the stage's number by default")] = None,
    budget: Annotated[float, option("seconds for a check", options.seconds)] = 30.0,
    memory: Annotated[str, option("of a submission", options.size)] = "2G",
    numpy: Numpy = False,
) -> int:  # fmt: skip
    """Grade a folder of submissions: a table, and a report for each student.

    Exit codes: 0 when all are graded, whatever the verdicts; 2 when nothing can be graded, which
    costs nobody points; 130 after a Ctrl-C. Rows are written one by one; run again to go on.
    """
    from course.lab import checks, labs
    from course.lab.grading import grade, reports, speed
    from course.lab.grading.calls import Limits
    from ladder.measuring import writing

    try:
        worth, fast = grade.read_points(stage, points)
        table = grade.Table(out, worth, stage)
        paths, others = grade.submissions(folder, stage)
        anew = only is not None or paths == [folder]
        if only is not None:
            asked = (only, grade.name_of(Path(only)))
            paths = [path for path in paths if grade.name_of(path) in asked]
        if not paths:
            raise grade.NotGraded(f"--only: no submission {only!r} in {folder}")
        seen = dict(os.environ)
        if fast is not None:
            on_a_gpu(seen)
            end_children()
        backward = any(each.problem.direction != "fwd" for each in checks.checks(stage, 0))
        prepare_children("cpu", backward)  # interpreted, so that it is the same on every machine
        grade.refuse(stage, numpy)
        for name, file in (("--junit", junit), ("--gradescope", gradescope)):
            if file is not None:
                with writing(file, name):  # now, not when all are graded
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.open("a").close()
        seed = stage if seed is None else seed  # the same for submissions that are graded alone
        limits = Limits(budget, options.size(memory))
        folder = out.with_name(f"{out.stem}-reports")
        folder.mkdir(parents=True, exist_ok=True)

        def tell(row: grade.Row, result: checks.Result | None) -> None:
            if result is not None:
                text = reports.report(row, result, worth)
                (folder / f"{row.submission}.md").write_text(text, encoding="utf-8")
            kept = " (kept)" if result is None else ""
            print(
                f"{row.submission}: {row.verdict}, {row.points:g} of {row.max_points:g}{kept}",
                flush=True,
            )

        grade.grade_all(paths, table, stage, seed, numpy, limits, tell, anew)
        if fast is not None:
            on_a_gpu(seen)
            for path in paths:
                row = table.rows[grade.name_of(path)]
                if row.verdict == "passed" and (anew or speed.NAME not in row.checks):
                    row = table.put(row.with_speed(speed.judged(path, stage, fast, seed)))
                    print(f"{row.submission}: speed: {row.checks[speed.NAME]}", flush=True)
        if others and only is None:
            expected = f"expected {grade.FORM[stage == 2]} for each submission"
            listed = ", ".join(clean(path.name) for path in others)
            print(f"not graded: {listed}: {expected}", file=sys.stderr)
        for row in table.rows.values():  # also of rows that were kept: their points may be others
            path = folder / f"{row.submission}.md"
            if path.is_file():
                text = reports.renewed(path.read_text(encoding="utf-8"), row, worth)
                path.write_text(text, encoding="utf-8")
        named = [table.rows[grade.name_of(path)] for path in paths]
        if junit is not None:
            junit.write_text(reports.junit(named, worth), encoding="utf-8")
        if gradescope is not None:
            gradescope.write_text(reports.gradescope(named, worth, folder), encoding="utf-8")
    except (grade.NotGraded, labs.NoLab, OSError) as error:
        raise UserError(str(error)) from None
    print(f"{out}: {len(named)} graded; reports in {folder}")
    return 0


def on_a_gpu(environ: Mapping[str, str]) -> None:
    """Let children see the GPU that `environ` has. Raises UserError where there is none."""
    for name in ("CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET"):
        os.environ.pop(name, None)
        if name in environ:
            os.environ[name] = environ[name]
    end_children()
    stages_and_device("cuda", [], 60.0, None)


for carry_out in (start_command, hint_command, check_command, grade_command, export_command):
    name = carry_out.__name__.removesuffix("_command")
    lab.command(name, cls=Command)(carry_out)
