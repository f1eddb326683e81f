"""The lesson between two stages: what changed from one file to the other."""

import difflib
from collections.abc import Iterator
from pathlib import Path

from rich.text import Text

STYLES = {"+": "green", "-": "red", "@": "cyan"}


def changes(old: Path, new: Path) -> Iterator[Text]:
    """A unified diff of two stages' files, line by line, coloured."""
    before, after = (path.read_text().splitlines() for path in (old, new))
    for line in difflib.unified_diff(before, after, old.name, new.name, n=3, lineterm=""):
        header = line.startswith(("---", "+++"))
        yield Text(line, style="bold" if header else STYLES.get(line[:1], ""))
