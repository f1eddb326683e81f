"""The `ladder` command. Exit codes: 0 all well, 1 a cell failed, 2 bad arguments.

All cells ok, skipped or wrong by design is well; wrong, crashed, timed out or out of memory is not.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from harness.commands import doctor as doctor_view
from harness.commands.bench import bench_command
from harness.commands.figures import figures_command
from harness.commands.help import LOOK, MEASURE, PAGES, SHOW, Groups, examples
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
from harness.isolation.declared import read_declared
from harness.isolation.roster import (
    BadStage,
    built_in_files,
    describe_files,
    peer_files,
    read_stages,
)
from harness.lessons import diff as diff_view
from harness.problems.problem import (
    PEERS_FROM,
)
from harness.records import checkout, environment, units
from harness.records.jsonl import WriteFailed
from harness.records.schema import BadRecord
from harness.report import pages
from harness.runs import ceilings
from harness.views import cell_tables, lines, machine, roofline, table
from harness.views.look import DARK, LIGHT
from harness.views.table import Column, Table

app = typer.Typer(
    cls=Groups,
    help="Exact attention, each stage faster than the last, all measured by one harness.",
    epilog=examples(
        "ladder run                 # the tour", "ladder diff 4 5", "ladder run --help"
    ),
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def show_version(wanted: bool) -> None:
    """Print the versions and leave, where they are `wanted`."""
    if wanted:
        named = ((name, environment.version(name)) for name in ("torch", "triton"))
        found = [f"{name} {version}" for name, version in named if version]
        python = f"Python {environment.platform.python_version()}"
        print(f"ladder {environment.own_version()} ({', '.join([python, *found])})")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=show_version, is_eager=True, help="Show the versions and exit."
        ),
    ] = False,
) -> None:
    """The options of `ladder` itself."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit. Whatever the user got wrong is one line, never a traceback."""
    if other := checkout.warning():
        print(f"ladder: {other}", file=sys.stderr)
    try:
        result = app(args=arguments, standalone_mode=False, prog_name="ladder")
        code = result if isinstance(result, int) else 0
    except (UserError, checkout.NoCheckout, BadStage, BadRecord, WriteFailed) as error:
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


def table_command(
    file: Annotated[Path, typer.Argument(help="a results file, JSONL")],
    form: Annotated[str, typer.Option("--format", help="rich, markdown, csv or json")] = "rich",
) -> int:
    """Show the tables of a run again, from its records alone."""
    one_of(form, "--format", cell_tables.FORMATS)
    env, cells = open_results(file)
    cell_tables.show(env, cells, form, table.page())
    return 0


def plot_command(
    file: Annotated[Path, typer.Argument(help="a results file, JSONL")],
    out: Annotated[Path, typer.Option(help="the folder for time.png, memory.png, error.png")],
) -> int:
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


def ceilings_command(
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; cuda by default where there is a GPU")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="where the records go; a new file under runs/ by default")
    ] = None,
) -> int:
    """Measure this machine's best: matrix products and copies."""
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
                said = units.show_rate(found["value"], found["unit"])
            title = machine.ceiling_title(asdict(ceiling))
            print(f"[{index}/{len(wanted)}] {title}: {said}", file=sys.stderr, flush=True)
    console = table.page()
    machine.show_ceilings(env, records, console)
    console.print(Text(f"records: {out}"), soft_wrap=True)
    return int(len(records) < len(wanted))


def roofline_command(
    file: Annotated[Path, typer.Argument(help="a results file, JSONL")],
    ceilings_file: Annotated[
        Path, typer.Option("--ceilings", help="what `ladder ceilings` wrote on the same machine")
    ],
    out: Annotated[Path, typer.Option(help="the folder for roofline.png, or roofline-dark.png")],
    dark: Annotated[
        bool, typer.Option("--dark", help="for a dark page: light ink on near-black")
    ] = False,
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


def list_command() -> int:
    """List the stages: number, name and idea."""
    rows = []
    for path in [*built_in_files(), *peer_files()]:
        try:
            stage = read_declared(path)
        except (SyntaxError, ValueError):  # somebody's own, not in literals: by its import then
            stage = vars(describe_files([path])[0])
        texts = (stage["title"], stage["idea"], stage.get("still_hurts", ""))
        rows.append([str(stage["number"]), *texts])
    headers = ("stage", "the one idea", "still hurts")
    columns = [Column("#"), *(Column(header, left=True, wraps=True) for header in headers)]
    page = table.page()
    page.print(Table(columns, rows, gap=2))
    said = f"From {PEERS_FROM} on: peers, others' kernels to compare with. "
    page.print(Text(f"{said}`ladder doctor` says what runs here.", style="dim"))
    return 0


def doctor_command() -> int:
    """Say what runs on this machine and what doesn't, and why."""
    try:
        stages = read_stages()
    except BadStage as error:
        doctor_view.show([], table.page())
        print(f"no stage runs here: {error}", file=sys.stderr)
        return 1
    doctor_view.show(stages, table.page())
    return 0 if doctor_view.healthy(stages) else 1


def diff_command(
    old: Annotated[int, typer.Argument(help="a stage's number")],
    new: Annotated[int, typer.Argument(help="another's")],
    whole: Annotated[
        bool, typer.Option("--whole", help="the whole files, not the kernels alone")
    ] = False,
) -> int:
    """Show what changed in the kernel from one stage to another."""
    files = {int(path.stem[1:3]): path for path in built_in_files()}
    for number in (old, new):
        if number not in files:
            there = ", ".join(str(number) for number in files)
            raise UserError(f"diff: got {number}, expected some of {there}")
    console = table.page()
    paths = (files[old], files[new])
    lines = list(diff_view.changes(*paths, diff_view.whole if whole else diff_view.kernel))
    for line in lines:
        console.print(line, soft_wrap=True)
    if not whole and old != new:
        console.print(Text(diff_view.summary(paths, lines), style="dim"), soft_wrap=True)
    return 0


def readme_command(
    check: Annotated[
        bool, typer.Option("--check", help="write nothing; exit code 1 where README is stale")
    ] = False,
) -> int:
    """Make README's and the docs' tables again from results/."""
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


app.command("list", rich_help_panel=LOOK, epilog=examples("ladder list"))(list_command)
app.command("doctor", rich_help_panel=LOOK, epilog=examples("ladder doctor"))(doctor_command)
app.command(
    "diff",
    rich_help_panel=LOOK,
    epilog=examples("ladder diff 4 5", "ladder diff 4 5 --whole"),
)(diff_command)
app.command(
    "trace",
    rich_help_panel=LOOK,
    epilog=examples("ladder trace --n 8 --tile 2 --row 3", "ladder trace --format json --n 64"),
)(trace_command)
app.command(
    "run",
    rich_help_panel=MEASURE,
    epilog=examples(
        "ladder run",
        "ladder run --stages 3,5 --n 64,65,128 --inputs peaky",
        "ladder run --stages 3,5 --stage mine.py --n 64,128",
        "ladder run --stages 3,6 --n 64,128 --b 2 --seqlens 10,64 --h 4 --hk 2",
        "ladder run --resume runs/FILE.jsonl",
    ),
)(run_command)
app.command(
    "bench",
    rich_help_panel=MEASURE,
    epilog=examples(
        "ladder bench",
        "ladder bench --stages 3,6,sdpa_math --n 64,128",
        "ladder bench --suite 004               # needs a GPU",
        "ladder bench --show runs/FILE.jsonl --plots plots",
    ),
)(bench_command)
app.command(
    "train",
    rich_help_panel=MEASURE,
    epilog=examples("ladder train --stage 3", "ladder train --stage mine.py"),
)(train_command)
app.command(
    "model",
    rich_help_panel=MEASURE,
    epilog=examples("ladder model --stage 5", "ladder model --stage 5 --text FILE"),
)(model_command)
app.command("ceilings", rich_help_panel=MEASURE, epilog=examples("ladder ceilings"))(
    ceilings_command
)
app.command(
    "io",
    rich_help_panel=MEASURE,
    epilog=examples("ladder io", "ladder io --stages 3,6 --n 4096"),
)(io_command)
app.command(
    "table",
    rich_help_panel=SHOW,
    epilog=examples("ladder table runs/FILE.jsonl --format markdown"),
)(table_command)
app.command(
    "plot", rich_help_panel=SHOW, epilog=examples("ladder plot runs/FILE.jsonl --out plots")
)(plot_command)
app.command(
    "roofline",
    rich_help_panel=SHOW,
    epilog=examples("ladder roofline runs/FILE.jsonl --ceilings runs/CEILINGS.jsonl --out plots"),
)(roofline_command)
app.command(
    "readme", rich_help_panel=PAGES, epilog=examples("ladder readme", "ladder readme --check")
)(readme_command)
app.command(
    "figures",
    rich_help_panel=PAGES,
    epilog=examples("ladder figures --out docs/figures", "ladder figures --check"),
)(figures_command)
