"""`ladder diff`, `ladder readme`, `ladder figures`: made of the files of a checkout."""

import sys
from typing import Annotated

import typer
from rich.text import Text

from course.lessons import diff as diff_view
from course.page import drift
from course.report import pages
from harness.records import checkout, files
from harness.records.code import built_in_files, number_of
from harness.records.schema import BadRecord
from harness.views.table import Page, make_page
from ladder import options
from ladder.measuring import writing
from ladder.options import UserError
from ladder.report import report_command


def diff_command(
    old: Annotated[int, typer.Argument(help="a stage's number")],
    new: Annotated[int, typer.Argument(help="another stage's number")],
    whole: options.Whole = False,
) -> int:
    """Show what changed in the kernel from one stage to another."""
    numbers = [*map(number_of, built_in_files())]
    for number in (old, new):
        if number not in numbers:
            known = ", ".join(map(str, numbers))
            raise UserError(f"diff: got {number}, expected some of {known}")
    if old == new:
        raise UserError(f"diff: got {old} twice, the same stage; expected two different ones")
    console = make_page()
    lines = list(diff_view.changes(old, new, diff_view.whole if whole else diff_view.kernel))
    width = Page().width if console.is_terminal else max(len(line) for line in lines)
    for line in lines:
        shown = line.copy()
        shown.truncate(width, overflow="ellipsis")
        console.print(shown, soft_wrap=True)
    if not whole:
        console.print(Text(diff_view.summary((old, new), lines), style="dim"), soft_wrap=True)
    if any(len(line) > width for line in lines):
        said = f"…: a line longer than {width} columns; a wider window, or > FILE, has all of it."
        console.print(Text(said, style="dim"), soft_wrap=True)
    return 0


def readme_command(check: options.CheckPages = False) -> int:
    """Make README's and the docs' tables again from results/."""
    checkout.need("ladder readme")
    made = {}
    for page in pages.PAGES:
        try:
            made[page] = pages.generate(page.read_text(), page)
        except BadRecord:
            raise
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise UserError(f"readme: results/ is not what {page.name} shows: {error}") from error
    stale = [page for page, text in made.items() if text != page.read_text()]
    old_report = drift.is_stale()
    if check:
        for page in (*stale, *([drift.PAGE] if old_report else [])):
            name = page.relative_to(pages.ROOT)
            print(f"{name} differs from results/: run `ladder readme`", file=sys.stderr)
        return int(bool(stale) or old_report)
    for page in stale:
        files.write(page, made[page])
    for path in pages.draw(pages.ROOT / "docs" / "figures"):
        print(path.relative_to(pages.ROOT))
    if old_report:
        report_command(out=drift.PAGE)
    return 0


def figures_command(
    out: options.Figures = None,
    ceilings: options.FigureCeilings = None,
    check: options.CheckFigures = False,
) -> int:
    """Draw the picture of the memory hierarchy, for docs."""
    from course.lessons import figures  # imports NumPy, for this command only

    if out is None or ceilings is None:
        checkout.need("ladder figures", ", or name both --out and --ceilings")
    folder, record = out or figures.FOLDER, ceilings or figures.CEILINGS
    if not record.is_file():  # before the pictures are drawn, which takes seconds
        raise UserError(f"--ceilings: {record}: no such file")
    try:
        with writing(folder):
            if not check:
                for path in figures.draw(folder, record):
                    print(path.relative_to(figures.ROOT) if out is None else path, flush=True)
                return 0
            stale = figures.stale(folder, record)
    except BadRecord:  # its message says what is wrong and where
        raise
    except ValueError as error:
        raise UserError(f"--ceilings: {record}: {error}") from None
    for name in stale:
        print(
            f"{folder / name}: missing, or not drawn from what is here now: run `ladder figures`",
            file=sys.stderr,
        )
    return int(bool(stale))
