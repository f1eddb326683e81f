"""`ladder lab`: write a stage yourself, with hints and checks; export and grade for a class."""

import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer

from harness.isolation.scratch import scratch
from harness.records import checkout, files
from ladder import options
from ladder.arguments import end_children, prepare_children, stages_and_device
from ladder.help import Command, Groups, as_typed, examples, quoted
from ladder.options import UserError, option

LABS = 8  # the last stage that has a lab
WIDTH = 80  # columns of what is printed

Stage = Annotated[int, typer.Argument(help="the stage's number", metavar="STAGE")]
Twin = Annotated[
    bool, option("stage 5 in torch, for a CPU; so it is where there is no Triton", None, "--cpu")
]

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
    twin: Twin = False,
) -> int:  # fmt: skip
    """Write a stub: a stage's file without the parts that you write."""
    from course.lab import labs

    said = labs.about()[known(stage)]
    path = to or Path(f"mine_{stage}" if labs.handed_in(stage) else f"mine_{stage}.py")
    try:
        twin = twin or labs.in_torch(stage)
        labs.start(stage, path, size, twin)
    except labs.NoLab as error:
        raise UserError(str(error)) from None
    where = path / labs.handed_in(stage)[0] if labs.handed_in(stage) else path
    print(f"{path}: {said['goal']}")
    parts = {"predict": 0, "write": said["minutes"][size], **said["around"]}
    of = ", ".join(f"{part} {minutes}" for part, minutes in parts.items())
    print(f"about {sum(parts.values())} minutes, an estimate: {of}")
    print("look for 'not written yet'")
    hint = as_typed("lab", "hint", str(stage), *["--cpu"] * twin, "--level", "1")
    print(f"\n  edit {quoted(str(where))}\n  {hint}")
    print(f"  {as_typed('lab', 'check', str(path))}")
    return 0


def hint_command(
    stage: Stage,
    level: Annotated[int, option("1: a question, 2: the idea, 3: nearly the line",
                                 options.whole(1, 3))] = 1,
    twin: Twin = False,
) -> int:  # fmt: skip
    """Give a hint for each gap, from a question to nearly the line."""
    from course.lab import labs

    try:
        for text in labs.hints(known(stage), level, twin or labs.in_torch(stage)):
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
        if file.is_file():  # stage 2's is a folder, which `ladder run` does not take
            sizes = "--n", "64,65", "--d", "16"
            run = as_typed("run", "--stages", "3", "--stage", str(file), *sizes)
            print(f"beside stage 3, with times: {run}")
        return 0
    first = next((mark.check.name for mark in found.marks if not mark.passed), None)
    if first and found.case:
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
    from course.lab import handout, labs

    checkout.need("ladder lab export")
    match = re.fullmatch(r"0-([0-8])|0", stages.strip())
    if not match:
        raise UserError(f"--stages: got {stages!r}, expected 0-N, with N from 0 to {LABS}")
    try:
        handout.export(folder, int(match[1] or 0))
    except labs.NoLab as error:
        raise UserError(str(error)) from None
    stub = "the stub of the next for `ladder lab start` there"
    more = stub if (folder / "stubs").is_dir() else "no lab: none is left to be written"
    print(f"{folder}: stages {stages}, and {more}")
    return 0


@contextmanager
def alone(named: Mapping[str, Path | None]) -> Iterator[None]:
    """Keep other commands from writing the files that options name meanwhile.

    Raises UserError where one writes them now. A file that is made for that and stays empty goes.
    """
    with ExitStack() as stack:
        for name, path in named.items():
            if path is None:
                continue
            new = not path.exists()
            try:
                owned = files.Owned(path)
            except BlockingIOError:
                raise UserError(
                    f"{name}: {path}: another command is writing it: wait until that ends, or name "
                    "another file"
                ) from None
            stack.callback(owned.close)
            if new:
                stack.callback(remove_empty, path)
        yield


def remove_empty(path: Path) -> None:
    """Remove a file in which nothing was written."""
    if path.is_file() and not path.stat().st_size:
        path.unlink()


def grade_command(
    folder: Annotated[Path, typer.Argument(
        help="submissions, as Moodle or Canvas exports them, or one .py file each (stage 2: one "
        "folder each); or one of them",
        metavar="DIR")],
    stage: Annotated[int, option("the stage that they were to write", options.whole(0, LABS))],
    out: Annotated[Path, option("the table, CSV")] = Path("grades.csv"),
    points: Annotated[Path | None, option("a TOML file: check = points, default = points")] = None,
    gradebook: Annotated[Path | None, option(
        "fill the grades into a copy of this CSV file, which Moodle or Canvas exported")] = None,
    column: Annotated[str | None, option(
        "of the gradebook, where it has several of grades")] = None,
    junit: Annotated[Path | None, option("as JUnit's XML, too")] = None,
    gradescope: Annotated[Path | None, option(
        "one submission as Gradescope's results.json, too")] = None,
    only: Annotated[str | None, option("one submission, again: its name")] = None,
    seed: Annotated[int | None, option("of all inputs; the stage's number by default")] = None,
    budget: Annotated[float, option("seconds for a check", options.seconds)] = 30.0,
    memory: Annotated[str, option("of a submission", options.size)] = "2G",
    jobs: Annotated[int, option("submissions at a time", options.whole(1))] = 1,
    twin: Twin = False,
) -> int:  # fmt: skip
    """Grade a folder of submissions: a table, and a report for each student.

    Exit codes: 0 when all files found are graded, whatever the verdicts; 2 when nothing can be
    graded, which costs nobody points; 130 after a Ctrl-C. Rows are written one by one; run again to
    go on.
    """
    from course.lab import checks, labs
    from course.lab.grading import grade, gradebooks, reports, submissions
    from course.lab.grading.calls import Limits
    from ladder.measuring import check_writable

    try:
        worth, fast = grade.read_points(stage, points)
        table = grade.Table(out, worth, stage)
        copies = Path(tempfile.mkdtemp(dir=scratch()))
        found = submissions.submissions(folder, stage, copies)
        chosen = submissions.chosen(found, only)
        anew = only is not None or [each.path for each in chosen] == [folder]
        if gradescope is not None and len(chosen) > 1:
            raise grade.NotGraded(
                f"--gradescope: got {len(chosen)} submissions, expected one, since Gradescope "
                "grades each by itself (`ladder lab autograder`); name a file, or --only one"
            )
        book = None if gradebook is None else gradebooks.read(gradebook, column, found)
        filled = None if gradebook is None else out.with_name(f"{out.stem}-{gradebook.name}")
        seen = dict(os.environ)
        if fast is not None:
            on_a_gpu(seen)
            end_children()
        backward = any(each.problem.direction != "fwd" for each in checks.checks(stage, 0))
        prepare_children("cpu", backward)  # interpreted, so that it is the same on every machine
        grade.refuse(stage, twin)
        others = {"--junit": junit, "--gradescope": gradescope, "--gradebook": filled}
        for name, file in others.items():
            check_writable(file, name)  # now, not when all are graded
        seed = stage if seed is None else seed  # the same for submissions that are graded alone
        limits = Limits(budget, options.size(memory))
        told = out.with_name(f"{out.stem}-reports")
        told.mkdir(parents=True, exist_ok=True)

        def tell(row: grade.Row, result: checks.Result | None) -> None:
            if result is not None:
                text = reports.report(row, result, worth)
                files.write(told / f"{row.submission}.md", text)
            kept = " (kept)" if result is None else ""
            why = f": {row.diagnosis}" if row.diagnosis and not row.checks else ""
            got = f"{row.points:g} of {row.max_points:g}"
            print(f"{row.submission}: {row.verdict}, {got}{kept}{why}", flush=True)

        with alone(others):
            with table.alone():
                grade.grade_all(chosen, table, stage, seed, twin, limits, tell, anew, jobs)
                if fast is not None:
                    on_a_gpu(seen)
                    for row in table.time(chosen, fast, seed, anew):
                        print(f"{row.submission}: speed: {row.checks['speed']}", flush=True)
                table.compare(found.submissions, twin)
            for line in found.left if only is None else ():
                print(f"not graded: {line}", file=sys.stderr)
            for (
                row
            ) in table.rows.values():  # also of rows that were kept: their points may be others
                path = told / f"{row.submission}.md"
                if path.is_file():
                    text = reports.renewed(path.read_text(encoding="utf-8"), row, worth)
                    files.write(path, text)
            named = [table.rows[each.name] for each in chosen]
            if junit is not None:
                files.write(junit, reports.junit(named, worth))
            if gradescope is not None:
                files.write(gradescope, reports.gradescope(named[0], worth, told))
            if len(named) > 1:
                summary = reports.of_class(named, worth)
                files.write(out.with_name(f"{out.stem}-class.md"), summary)
                print(f"\n{summary}")
            if book is not None and filled is not None:
                grades = reports.grades(table.rows.values())
                data, lines = gradebooks.fill(book, found.submissions, grades)
                files.write(filled, data)
                for line in lines:
                    print(f"--gradebook: {line}", file=sys.stderr)
                print(f"{filled}: to be uploaded to {found.origin}")
    except (grade.NotGraded, checks.Unchecked, labs.NoLab, OSError) as error:
        raise UserError(str(error)) from None
    read = f", read as {found.origin} exports them" if found.origin else ""
    print(f"{out}: {len(named)} graded{read}; reports in {told}")
    return 0


def autograder_command(
    stage: Annotated[int, option("the stage that they write", options.whole(0, LABS))],
    to: Annotated[Path, option("Gradescope's zip; classroom.yml comes beside it")] = Path(
        "autograder.zip"
    ),
    points: Annotated[Path | None, option("a TOML file: check = points, default = points")] = None,
    seed: Annotated[int | None, option("of all inputs; the stage's number by default")] = None,
    budget: Annotated[float, option("seconds for a check", options.seconds)] = 30.0,
    memory: Annotated[str, option("of a submission", options.size)] = "2G",
    twin: Twin = False,
) -> int:
    """Write an autograder for Gradescope, and the workflow that runs it in GitHub Classroom."""
    from course.lab import labs
    from course.lab.grading import autograder, grade

    checkout.need("ladder lab autograder")
    try:
        if grade.read_points(stage, points)[1] is not None:
            raise grade.NotGraded(f"{points}: [speed]: an autograder has no GPU; leave it away")
        labs.source(stage, twin)  # or it has no twin
        fixed = stage if seed is None else seed
        settings = autograder.Settings(stage, fixed, budget, memory, twin)
        with files.whole(to) as draft:
            autograder.write(draft, settings, points)
        classroom = to.with_name("classroom.yml")
        files.write(classroom, autograder.workflow(settings, to.name))
    except (grade.NotGraded, labs.NoLab, OSError) as error:
        raise UserError(str(error)) from None
    print(f"{to}: upload it to Gradescope; 1 CPU and 2 GB of memory at least")
    print(f"{classroom}: for GitHub Classroom; where both files go is said in its first lines")
    return 0


def on_a_gpu(environ: Mapping[str, str]) -> None:
    """Let children see the GPU that `environ` has. Raises UserError where there is none."""
    for name in ("CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET"):
        os.environ.pop(name, None)
        if name in environ:
            os.environ[name] = environ[name]
    end_children()
    stages_and_device("cuda", [], 60.0, None)


for carry_out in (
    start_command, hint_command, check_command, grade_command, autograder_command, export_command,
):  # fmt: skip
    name = carry_out.__name__.removesuffix("_command")
    lab.command(name, cls=Command)(carry_out)
