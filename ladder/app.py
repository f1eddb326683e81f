"""The `ladder` command. Exit codes: 0 success, 1 a cell failed, 2 bad arguments.

Cells that are ok, skipped or wrong by design are a success; wrong, crashed, timed out and out of
memory are failures.
"""

import io
import locale
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from harness import ending
from harness.isolation.roster import BadStage
from harness.records import checkout, environment
from harness.records.jsonl import WriteFailed
from harness.records.schema import BadRecord
from harness.records.units import clean
from ladder.arguments import end_children
from ladder.bench import bench_command
from ladder.ceilings import ceilings_command
from ladder.doctor import doctor_command, list_command
from ladder.generate import generate_command
from ladder.help import LAB, LOOK, MEASURE, PAGES, SHOW, Command, Groups, as_typed, examples
from ladder.hidden import HIDDEN
from ladder.io import io_command
from ladder.lab import lab
from ladder.model import model_command
from ladder.options import UserError
from ladder.pages import diff_command, figures_command, readme_command
from ladder.report import report_command
from ladder.ring import ring_command
from ladder.run import run_command
from ladder.show import show_command
from ladder.trace import trace_command
from ladder.train import train_command

LEAST_FILES = 64  # open files that a run with its processes needs
# errors of the user, whose messages say all
USERS = (UserError, checkout.NoCheckout, BadStage, BadRecord, WriteFailed)

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
    """Print the versions and exit, if `wanted`."""
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
    """Run the command line and exit. An error of the user gives one line, never a traceback."""
    try:
        prepare()
        result = app(args=arguments, standalone_mode=False, prog_name="ladder")
        code = result if isinstance(result, int) else 0
    except BaseException as error:
        code = exit_code(error)
    if code > 128:  # by a signal; INTERRUPTED is also typer's code after a Ctrl-C
        ending.ignore()
        end_children()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            if stream is sys.stdout and code in (0, 1):  # any other has said so already
                code = exit_code(error)
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # or Python fails again
    sys.exit(code)


def prepare() -> None:
    """Make text printable in any encoding of the terminal, and allow enough open files.

    Files are read and written in UTF-8, here and in child processes.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # or a file of records would get its handle
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "w"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    os.environ |= {"PYTHONUTF8": "1", "PYTHONIOENCODING": "utf-8:replace"}
    with suppress(locale.Error):
        if locale.getpreferredencoding(False).lower() != "utf-8":
            locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
    try:
        Path.cwd()
    except OSError:  # libraries would end silently, or with a traceback
        raise UserError("the folder that you are in is gone: cd to another") from None
    if other := checkout.warning():
        print(f"ladder: {other}", file=sys.stderr)
    if most_files() < LEAST_FILES:
        raise UserError(
            f"this shell allows {most_files()} open files at a time, expected {LEAST_FILES} or "
            "more: `ulimit -n 1024` allows them"
        )


def most_files() -> int:
    """How many files may be open at a time, after raising the limit if needed and possible."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return LEAST_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < LEAST_FILES <= hard or hard == resource.RLIM_INFINITY:
        soft = max(soft, LEAST_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft if soft >= 0 else LEAST_FILES


def exit_code(error: BaseException) -> int:
    """Print one line about the `error` that ended a command; returns the exit code.

    An error of the program itself is raised again.
    """
    signal = None if isinstance(error, USERS) else ending.signal_behind(error)
    if isinstance(signal, ending.Stopped):
        complain(str(signal))
        return signal.code
    if signal is not None:
        return ending.INTERRUPTED
    if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
        return 0  # `ladder show FILE | head`
    if isinstance(error, USERS):
        return complain(str(error))
    if isinstance(error, OSError):
        return complain(f"{error.filename or 'output'}: {error.strerror or error}")
    if not hasattr(error, "format_message"):  # typer's own usage errors have it
        raise error
    message = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":  # `ladder` alone: the message is the help
        print(message, file=sys.stderr)
        return 2
    return complain(bad_value(error, message))


def complain(message: str) -> int:
    """Print an error in one line on stderr; returns the exit code for it."""
    with suppress(OSError):
        print(f"ladder: {clean(' '.join(message.split()))}", file=sys.stderr, flush=True)
    return 2


def bad_value(error: BaseException, message: str) -> str:
    """The text for typer's usage `error`: its `message`, or the value given and what was expected.

    For a value that it can't convert, typer's message doesn't say what was given. Its message of
    another kind (an argument is missing, no option has that name) is followed by where to read on.
    """
    found: list[dict[str, str]] = getattr(error.__cause__, "errors", list)()
    if not found or not (param := getattr(error, "param", None)):
        if (context := getattr(error, "ctx", None)) is None:
            return message
        there = as_typed(*context.command_path.split()[1:], "--help")
        return f"{message.rstrip('.')}; see `{there}`"
    expected = found[0]["msg"].removeprefix("Input should be ").partition(",")[0]
    return f"{param.opts[0]}: got {found[0]['input']!r}, expected: {expected}"


# in the order of the help: heading, function, examples
COMMANDS = (
    (LOOK, list_command, "ladder list"),
    (LOOK, doctor_command, "ladder doctor"),
    (LOOK, diff_command, "ladder diff 4 5", "ladder diff 4 5 --whole"),
    (
        LOOK,
        trace_command,
        "ladder trace --n 8 --tile 2 --row 3",
        "ladder trace --n 8 --tile 2 --row 3 --splits 2",
        "ladder trace --format json --n 64",
    ),
    (
        MEASURE,
        run_command,
        "ladder run",
        "ladder run --stages 3,5 --n 64,65,128 --inputs peaky",
        "ladder run --stages 3,5 --stage mine.py --n 64,128",
        "ladder run --stages 3,6 --n 64,128 --b 2 --seqlens 10,64 --h 4 --hk 2",
        "ladder run --resume runs/FILE.jsonl",
    ),
    (
        MEASURE,
        bench_command,
        "ladder bench",
        "ladder bench --stages 3,6,sdpa_math --n 64,128",
        "ladder bench --suite 004               # needs a GPU",
        "ladder bench --resume runs/FILE.jsonl",
    ),
    (
        MEASURE,
        ring_command,
        "ladder ring --world 2                  # needs two GPUs",
        "ladder ring --world 3 --device cpu     # checks, and shows no speed",
        "ladder ring --predict --h 128",
    ),
    (MEASURE, train_command, "ladder train --stage 3", "ladder train --stage mine.py"),
    (MEASURE, generate_command, "ladder generate --stage 3", "ladder generate --prompt 'def '"),
    (MEASURE, model_command, "ladder model --stage 5", "ladder model --stage 5 --text FILE"),
    (MEASURE, ceilings_command, "ladder ceilings"),
    (MEASURE, io_command, "ladder io", "ladder io --stages 3,6 --n 4096"),
    (
        SHOW,
        show_command,
        "ladder show runs/FILE.jsonl --format markdown",
        "ladder show runs/FILE.jsonl --plot plots",
        "ladder show runs/FILE.jsonl --roofline plots --ceilings runs/CEILINGS.jsonl",
    ),
    (PAGES, readme_command, "ladder readme", "ladder readme --check"),
    (PAGES, figures_command, "ladder figures --out docs/figures", "ladder figures --check"),
    (
        PAGES,
        report_command,
        "ladder report --out report.html",
        "ladder report runs/FILE.jsonl --out report.html",
    ),
)
for heading, carry_out, *lines in COMMANDS:
    name = carry_out.__name__.removesuffix("_command")
    app.command(name, cls=Command, rich_help_panel=heading, epilog=examples(*lines))(carry_out)
for name, old_command in HIDDEN.items():
    app.command(name, cls=Command, hidden=True)(old_command)
app.add_typer(lab, name="lab", rich_help_panel=LAB)
