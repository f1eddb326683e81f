"""The commands that measure nothing: records shown again, two stages compared, pages made again."""

import sys
from typing import Annotated

import typer
from rich.text import Text

from harness.commands import options
from harness.commands.arguments import open_results
from harness.commands.options import UserError
from harness.isolation.roster import built_in_files
from harness.lessons import diff as diff_view
from harness.records import checkout
from harness.records.schema import BadRecord
from harness.report import pages
from harness.views import cell_tables, lines, roofline, table
from harness.views.look import DARK, LIGHT


def table_command(file: options.ResultsFile, form: options.TableFormat = "rich") -> int:
    """Show the tables of a run again, from its records alone."""
    env, cells = open_results(file)
    cell_tables.show(env, cells, form, table.page())
    return 0


def plot_command(file: options.ResultsFile, out: options.PlotFolder) -> int:
    """Plot time, memory and error of a run against N."""
    env, cells = open_results(file)
    try:
        written = lines.plot(env, cells, out)
    except ImportError as error:
        raise UserError(f"plots need matplotlib: {error}; pip install matplotlib") from None
    except OSError as error:
        raise UserError(f"--out: {out}: {error.strerror}") from None
    if not written:
        raise UserError(f"{file}: no cell in it has anything to plot")
    for path in written:
        print(path)
    return 0


def roofline_command(
    file: options.ResultsFile,
    ceilings_file: options.Ceilings,
    out: options.RooflineFolder,
    dark: options.Dark = False,
) -> int:
    """Put the stages of a run under the roofs of its machine."""
    env, cells = open_results(file)
    ceilings_env, roofs = open_results(ceilings_file, "ceiling")
    try:
        roofline.same_machine(env, ceilings_env)
    except roofline.NoRoof as error:
        raise UserError(f"--ceilings: {ceilings_file}: {error}") from None
    panels = roofline.panels(cells, roofs)
    if not panels:
        raise UserError(f"{file}: no cell in it has a place under a roof: ok, and not interpreted")
    try:
        written = roofline.draw(env, panels, out, DARK if dark else LIGHT)
    except ImportError as error:
        raise UserError(f"plots need matplotlib: {error}; pip install matplotlib") from None
    except OSError as error:
        raise UserError(f"--out: {out}: {error.strerror}") from None
    console = table.page()
    roofline.show(env, panels, console)
    console.print(Text(f"plot: {written}"), soft_wrap=True)
    return 0


def diff_command(
    old: Annotated[int, typer.Argument(help="a stage's number")],
    new: Annotated[int, typer.Argument(help="another's")],
    whole: options.Whole = False,
) -> int:
    """Show what changed in the kernel from one stage to another."""
    files = {int(path.stem[1:3]): path for path in built_in_files()}
    for number in (old, new):
        if number not in files:
            known = ", ".join(map(str, files))
            raise UserError(f"diff: got {number}, expected some of {known}")
    console = table.page()
    paths = (files[old], files[new])
    lines = list(diff_view.changes(*paths, diff_view.whole if whole else diff_view.kernel))
    for line in lines:
        console.print(line, soft_wrap=True)
    if not whole and old != new:
        console.print(Text(diff_view.summary(paths, lines), style="dim"), soft_wrap=True)
    return 0


def readme_command(check: options.CheckPages = False) -> int:
    """Make README's and the docs' tables again from results/."""
    checkout.need("ladder readme")
    stale = []
    for page in pages.PAGES:
        before = page.read_text()
        try:
            after = pages.generate(before, page)
        except BadRecord:
            raise
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise UserError(f"readme: results/ is not what {page.name} shows: {error}") from error
        if before != after:
            stale.append(page)
            if not check:
                page.write_text(after)
    if check:
        for page in stale:
            name = page.relative_to(pages.ROOT)
            print(f"{name} differs from results/: run `ladder readme`", file=sys.stderr)
        return int(bool(stale))
    for path in pages.draw(pages.ROOT / "docs" / "figures"):
        print(path.relative_to(pages.ROOT))
    return 0
