"""The `ladder` command. Exit codes: 0 all well, 1 a cell failed, 2 bad arguments.

All cells ok, skipped or wrong by design is well; wrong, crashed, timed out or out of memory is not.
"""

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from harness.commands.arguments import INTERRUPTED, bad_value, complain
from harness.commands.bench import bench_command
from harness.commands.ceilings import ceilings_command
from harness.commands.doctor import doctor_command, list_command
from harness.commands.figures import figures_command
from harness.commands.generate import generate_command
from harness.commands.help import LOOK, MEASURE, PAGES, SHOW, Groups, examples
from harness.commands.io import io_command
from harness.commands.model import model_command
from harness.commands.options import UserError
from harness.commands.run import run_command
from harness.commands.show import (
    diff_command,
    plot_command,
    readme_command,
    roofline_command,
    table_command,
)
from harness.commands.trace import trace_command
from harness.commands.train import train_command
from harness.isolation.roster import BadStage
from harness.records import checkout, environment
from harness.records.jsonl import WriteFailed
from harness.records.schema import BadRecord

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
            code = complain(bad_value(error, message))
    sys.exit(code)


# in the order of the help: its heading, what carries it out, examples
COMMANDS = (
    (LOOK, list_command, "ladder list"),
    (LOOK, doctor_command, "ladder doctor"),
    (LOOK, diff_command, "ladder diff 4 5", "ladder diff 4 5 --whole"),
    (
        LOOK,
        trace_command,
        "ladder trace --n 8 --tile 2 --row 3",
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
        "ladder bench --show runs/FILE.jsonl --plots plots",
    ),
    (MEASURE, train_command, "ladder train --stage 3", "ladder train --stage mine.py"),
    (MEASURE, generate_command, "ladder generate --stage 3", "ladder generate --prompt 'def '"),
    (MEASURE, model_command, "ladder model --stage 5", "ladder model --stage 5 --text FILE"),
    (MEASURE, ceilings_command, "ladder ceilings"),
    (MEASURE, io_command, "ladder io", "ladder io --stages 3,6 --n 4096"),
    (SHOW, table_command, "ladder table runs/FILE.jsonl --format markdown"),
    (SHOW, plot_command, "ladder plot runs/FILE.jsonl --out plots"),
    (
        SHOW,
        roofline_command,
        "ladder roofline runs/FILE.jsonl --ceilings runs/CEILINGS.jsonl --out plots",
    ),
    (PAGES, readme_command, "ladder readme", "ladder readme --check"),
    (PAGES, figures_command, "ladder figures --out docs/figures", "ladder figures --check"),
)
for heading, carry_out, *lines in COMMANDS:
    name = carry_out.__name__.removesuffix("_command")
    app.command(name, rich_help_panel=heading, epilog=examples(*lines))(carry_out)
