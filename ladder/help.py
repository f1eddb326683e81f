"""The layout of `ladder --help`, with commands in groups; the check of all commands' options."""

from typing import Any

from typer.core import TyperCommand, TyperGroup

from ladder.arguments import check_together
from ladder.ending import listen

LOOK = "Look around"
LAB = "Learn by writing"
MEASURE = "Measure"
SHOW = "Show records again"
PAGES = "Make the project's own pages"


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

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group, in the order of their first commands."""
        groups: dict[str, list[tuple[str, str]]] = {}
        width = max(map(len, self.commands))
        for name, command in self.commands.items():
            if not command.hidden:
                heading = getattr(command, "rich_help_panel", None) or "Commands"
                summary = command.get_short_help_str(formatter.width)
                groups.setdefault(heading, []).append((name.ljust(width), summary))
        for heading, rows in groups.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


def examples(*lines: str) -> str:
    """The examples below a command's options, with their line breaks kept."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])
