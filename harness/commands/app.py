"""The `ladder` command. Exit codes: 0 all well, 1 a cell failed, 2 bad arguments.

All cells ok, skipped or wrong by design is well; wrong, crashed, timed out or out of memory is not.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from harness.commands import doctor as doctor_view
from harness.commands.bench import bench_command
from harness.commands.figures import figures_command
from harness.commands.io import io_command
from harness.commands.model import model_command
from harness.commands.options import (
    INTERRUPTED,
    UserError,
    check_out,
    complain,
    create,
    default_out,
    one_of,
    open_results,
    settle_device,
)
from harness.commands.run import run_command
from harness.commands.trace import trace_command
from harness.commands.train import train_command
from harness.isolation.child import ChildFailed
from harness.isolation.roster import BadStage, read_stages
from harness.lessons import diff as diff_view
from harness.records import checkout, environment
from harness.records.jsonl import WriteFailed
from harness.records.schema import BadRecord
from harness.report import pages
from harness.runs import ceilings
from harness.views import cell_tables, lines, roofline

app = typer.Typer(
    help="Exact attention, each stage faster than the last, all measured by one harness.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit. Whatever the user got wrong is one line, never a traceback."""
    if other := checkout.warning():
        print(f"ladder: {other}", file=sys.stderr)
    try:
        result = app(args=arguments, standalone_mode=False, prog_name="ladder")
        code = result if isinstance(result, int) else 0
    except (UserError, BadStage, BadRecord, WriteFailed) as error:
        code = complain(str(error))
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:  # `ladder table FILE | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer's own usage errors have it
            raise
        message = error.format_message()
        if type(error).__name__ == "NoArgsIsHelpError":  # `ladder` alone: the message is the help
            print(message, file=sys.stderr)
            code = 2
        else:
            code = complain(message)
    sys.exit(code)


@app.command("table")
def table_command(
    file: Annotated[Path, typer.Argument(help="a results file, JSONL")],
    form: Annotated[str, typer.Option("--format", help="rich, markdown, csv or json")] = "rich",
) -> int:
    """Show the tables of a run again, from its records alone."""
    one_of(form, "--format", cell_tables.FORMATS)
    env, cells = open_results(file)
    cell_tables.show(env, cells, form, cell_tables.page())
    return 0


@app.command("plot")
def plot_command(
    file: Annotated[Path, typer.Argument(help="a results file, JSONL")],
    out: Annotated[Path, typer.Option(help="the folder for time.png, memory.png, error.png")],
) -> int:
    """Plot time, memory and error against N, from records alone."""
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


@app.command("ceilings")
def ceilings_command(
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; cuda by default where there is a GPU")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="where the records go; a new file under runs/ by default")
    ] = None,
) -> int:
    """Measure what this machine can do at the best: matrix products and copies."""
    check_out(out)
    device = settle_device(device)
    try:
        reason = ceilings.why_no_gpu() if device != "cpu" else None
    except ChildFailed as error:
        reason = f"the GPU can't be asked: {error.reason}"
    if device == "cuda" and reason:
        raise UserError(f"--device: got cuda, but {reason}")
    device = device or ("cpu" if reason else "cuda")
    env = environment.make_env(device, [], [], {"command": "ceilings", "device": device})
    out = out or default_out("ceilings")
    writer = create(out, env)
    wanted = ceilings.plan(device)
    records = []
    with writer:
        for index, (ceiling, found) in enumerate(zip(wanted, ceilings.measure(wanted)), start=1):
            if isinstance(found, str):
                said = f"failed: {found}"
            else:
                writer.append(found)
                records.append(found)
                said = ceilings.show_rate(found["value"], found["unit"])
            print(f"[{index}/{len(wanted)}] {ceiling.title}: {said}", file=sys.stderr, flush=True)
    console = cell_tables.page()
    ceilings.show(env, records, console)
    console.print(Text(f"records: {out}"), soft_wrap=True)
    return int(len(records) < len(wanted))


@app.command("roofline")
def roofline_command(
    file: Annotated[Path, typer.Argument(help="a results file, JSONL")],
    ceilings_file: Annotated[
        Path, typer.Option("--ceilings", help="what `ladder ceilings` wrote on the same machine")
    ],
    out: Annotated[Path, typer.Option(help="the folder for roofline.png, or roofline-dark.png")],
    dark: Annotated[
        bool, typer.Option("--dark", help="for a dark page: light ink, no background")
    ] = False,
) -> int:
    """Put every stage of a run under the roofs of its machine, from records alone."""
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
        written = roofline.draw(env, panels, out, dark)
    except ImportError as error:
        raise UserError(f"plots need matplotlib: {error}; pip install matplotlib") from None
    except OSError as error:
        raise UserError(f"--out: {out}: {error.strerror}") from None
    console = cell_tables.page()
    roofline.show(env, panels, console)
    console.print(Text(f"plot: {written}"), soft_wrap=True)
    return 0


@app.command("list")
def list_command() -> int:
    """List the stages: number, name and idea."""
    shown = Table(box=None, padding=(0, 1), pad_edge=False, header_style="underline")
    for header in ("#", "stage", "the one idea", "still hurts"):
        shown.add_column(header, justify="right" if header == "#" else "left")
    for stage in read_stages():
        shown.add_row(
            str(stage.number), Text(stage.title), Text(stage.idea), Text(stage.still_hurts)
        )
    cell_tables.page().print(shown)
    return 0


@app.command("doctor")
def doctor_command() -> int:
    """Say what runs on this machine and what doesn't, and why."""
    try:
        stages = read_stages()
    except BadStage as error:
        doctor_view.show([], cell_tables.page())
        print(f"no stage runs here: {error}", file=sys.stderr)
        return 1
    doctor_view.show(stages, cell_tables.page())
    return 0 if doctor_view.healthy(stages) else 1


@app.command("diff")
def diff_command(
    old: Annotated[int, typer.Argument(help="a stage's number")],
    new: Annotated[int, typer.Argument(help="another's")],
) -> int:
    """Show what changed from one stage to another: the lesson."""
    files = {int(path.stem[1:3]): path for path in built_in()}
    for number in (old, new):
        if number not in files:
            there = ", ".join(str(number) for number in files)
            raise UserError(f"diff: got {number}, expected some of {there}")
    console = cell_tables.page()
    for line in diff_view.changes(files[old], files[new]):
        console.print(line, soft_wrap=True)
    return 0


@app.command("readme")
def readme_command(
    check: Annotated[
        bool, typer.Option("--check", help="write nothing; exit code 1 where README is stale")
    ] = False,
) -> int:
    """Make the tables and pictures of README and docs again from the records under results/."""
    checkout.need("ladder readme")
    stale = []
    for page in pages.PAGES:
        before = page.read_text()
        after = pages.generate(before, page)
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


app.command("run")(run_command)
app.command("model")(model_command)
app.command("io")(io_command)
app.command("trace")(trace_command)
app.command("figures")(figures_command)
app.command("bench")(bench_command)
app.command("train")(train_command)


def built_in() -> list[Path]:
    """The built-in stages' files, without loading one."""
    from harness.isolation.roster import built_in_files

    return built_in_files()
