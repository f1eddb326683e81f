"""The console that tables are printed to, as wide as a page."""

from typing import Any

from rich.console import Console

WIDTH, LEAST = 100, 40  # columns of a page; a narrower terminal breaks the lines itself


class Page(Console):
    """A console that cuts nothing: rows wider than the terminal continue on the next line."""

    def print(self, *objects: Any, **how: Any) -> None:
        """Console.print without cropping."""
        super().print(*objects, **{"crop": False, **how})


def make_page() -> Console:
    """A console on standard output, 40 to 100 columns wide, 100 where it is no terminal."""
    console = Page()
    console.width = max(LEAST, min(WIDTH, console.width)) if console.is_terminal else WIDTH
    return console
