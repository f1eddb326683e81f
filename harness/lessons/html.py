"""What a notebook shows, as HTML that needs no style sheet, and as plain text.

A code host shows a notebook's HTML without <style> and without most of CSS: what is said must be
read from tables, <pre> and <b> alone. The few inline styles are for Jupyter, whose own sheet would
set text to the right; nothing is lost where they are.
"""

from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

LEFT = 'align="left" style="text-align:left"'
RIGHT = 'align="right" style="text-align:right"'


@dataclass(frozen=True)
class Shown:
    """One output of a cell: Jupyter takes the `html`, a terminal the `text`."""

    html: str
    text: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Picture:
    """A picture as a cell's output, with `words` for who doesn't see it."""

    png: bytes
    words: str

    def _repr_mimebundle_(self, **_: object) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
        data = {"image/png": b64encode(self.png).decode("ascii"), "text/plain": self.words}
        return data, {"image/png": {"alt": self.words}}

    def __repr__(self) -> str:
        return self.words


def table(
    header: Sequence[str], rows: Iterable[Sequence[object]], title: str = "", note: str = "",
    left: int = 1,
) -> Shown:  # fmt: skip
    """A table, its first `left` columns to the left, the others to the right; words around it."""
    texts = [[str(cell) for cell in row] for row in rows]
    return Shown(
        as_html(header, texts, title, note, left), as_text(header, texts, title, note, left)
    )


def as_html(
    header: Sequence[str], rows: Sequence[Sequence[str]], title: str, note: str, left: int
) -> str:
    """The table as HTML; every text is escaped."""
    sides = [LEFT if index < left else RIGHT for index in range(len(header))]
    lines = [f"<p><b>{escape(title)}</b></p>"] * bool(title) + ["<table>"]
    for tag, texts in [("th", header), *(("td", row) for row in rows)]:
        cells = (
            f"<{tag} {side}>{escape(text)}</{tag}>" for side, text in zip(sides, texts, strict=True)
        )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    lines += ["</table>"] + [f"<p>{escape(note)}</p>"] * bool(note)
    return "\n".join(lines)


def as_text(
    header: Sequence[str], rows: Sequence[Sequence[str]], title: str, note: str, left: int
) -> str:
    """The table in letters of one width."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [title] * bool(title)
    for texts in (header, *rows):
        padded = (
            text.ljust(width) if index < left else text.rjust(width)
            for index, (text, width) in enumerate(zip(texts, widths, strict=True))
        )
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines + [note] * bool(note))


def together(parts: Sequence[Shown]) -> Shown:
    """Several outputs as one, one below the other."""
    return Shown("\n".join(part.html for part in parts), "\n\n".join(part.text for part in parts))
