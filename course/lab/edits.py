"""Replace text that is found exactly once: how mutants, variants and known mistakes are made.

A wrong stage is the shipped one with some text replaced. Since each text must be there once, the
mistake can't fall behind the stage unnoticed, and what is replaced is all that differs.
"""

from collections.abc import Iterable, Sequence


def replace_once(text: str, old: str, new: str, where: str) -> str:
    """Return `text` with `new` in the place of `old`.

    Raises ValueError where `old` isn't found exactly once; the message begins with `where`, the
    name of the file or of what is made from it.
    """
    if (found := text.count(old)) != 1:
        raise ValueError(f"{where}: found {found} times, expected once: {old!r}")
    return text.replace(old, new)


def replace_each(text: str, changes: Iterable[Sequence[str]], where: str) -> str:
    """Return `text` after each of `changes`, (old, new), one after another, as replace_once."""
    for old, new in changes:
        text = replace_once(text, old, new, where)
    return text
