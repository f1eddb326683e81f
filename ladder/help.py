"""The layout of `ladder --help`, with commands in groups; the check of all commands' options."""

import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from typer.core import TyperCommand, TyperGroup

from harness.ending import listen
from harness.records import checkout
from ladder.arguments import check_together
from ladder.old import as_now

LOOK = "Look around"
LAB = "Learn by writing"
MEASURE = "Measure"
SHOW = "Show records again"
PAGES = "Make the project's own pages"


def as_typed(*words: str) -> str:
    """`ladder` and `words` as they can be typed here, where `ladder` may not be on the PATH.

    `.venv/bin/ladder diff 4 5` from the folder of a checkout whose .venv is not activated.
    """
    script = Path(sysconfig.get_path("scripts")) / "ladder"
    found = shutil.which("ladder")
    if found is not None and Path(found).with_suffix("") == script:
        return " ".join(["ladder", *map(quoted, words)])
    there = shutil.which(script) is not None
    program = script if there else Path(sys.executable)
    if program.parent != Path.cwd() and program.is_relative_to(Path.cwd()):
        program = program.relative_to(Path.cwd())
    return " ".join(map(quoted, [str(program), *([] if there else ["-m", "harness"]), *words]))


def quoted(word: str) -> str:
    """A word of a command as this system's shells take it."""
    if os.name == "nt":  # its shells know no other quotes, and \\ is no escape there
        return f'"{word}"' if " " in word else word
    return shlex.quote(word)


class Command(TyperCommand):
    """A command whose options may exclude each other."""

    def invoke(self, ctx: Any) -> Any:
        """Carry out the command after checking that its options go together.

        From here on a signal raises an exception. Before, it ends the process at once
        (harness/__main__.py): pydantic, with which typer parses options, may swallow an exception.
        """
        check_together(ctx)
        listen()
        return super().invoke(ctx)


class Groups(TyperGroup):
    """Commands in groups, each under its heading (`rich_help_panel`), in plain text.

    Typer itself shows headings only in boxes, for which it loads rich's Markdown.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that `args` name, by its old name too."""
        return super().resolve_command(ctx, as_now(args))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group, in the order of their first commands."""
        groups: dict[str, list[tuple[str, str]]] = {}
        shown = {name: each for name, each in self.commands.items() if not each.hidden}
        width = max(map(len, shown))
        for name, command in shown.items():
            heading = getattr(command, "rich_help_panel", None) or "Commands"
            summary = command.get_short_help_str(formatter.width)
            groups.setdefault(heading, []).append((name.ljust(width), summary))
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


def examples(*lines: str) -> str:
    """The examples below a command's options, with their line breaks kept.

    In a course's copy, those for which it has the stages.
    """
    if (yours := checkout.to_be_written()) is not None:
        from course.lab.handout import command_here, stages_in

        there = stages_in(checkout.ROOT)
        lines = tuple(filter(None, (command_here(line, there, yours) for line in lines)))
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])
