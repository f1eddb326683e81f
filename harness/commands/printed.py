"""What a stage prints, shown to people with the stage's name before it."""

from rich.console import Console
from rich.text import Text

PRINTED_LINES = 20  # of what a stage prints, shown a cell


def show_printed(console: Console, name: str, printed: str) -> None:
    """The last lines of what a stage printed, its name before each."""
    lines = printed.splitlines()
    if len(lines) > PRINTED_LINES:
        lines = [f"... {len(lines) - PRINTED_LINES} lines before", *lines[-PRINTED_LINES:]]
    for line in lines:
        clean = "".join(c for c in line if c.isprintable())
        console.print(Text(f"{name} | {clean}", style="dim"), soft_wrap=True)
