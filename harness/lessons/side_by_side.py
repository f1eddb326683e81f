"""Two stages' code for a notebook: in two columns, changed lines marked; and as an exercise.

A code host shows a notebook's HTML without <style> and without most of CSS: what is said must be
read from tables, <pre> and <b> alone.

A changed line is bold, and has '-' (it goes) or '+' (it comes) before it, so that it is seen
without CSS and without colour. Below the columns stand the files and the start of their sha256: a
notebook that shows an older stage is found by that (tests/test_notebooks.py).
"""

import ast
import difflib
import hashlib
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import zip_longest
from pathlib import Path

from harness.views.look import COMES, GOES, INK

ROOT = Path(__file__).parents[2]
WIDTH = 62  # columns of code before a line goes on below: two columns fit into a usual window
DIGITS = 12  # of a sha256, enough to tell versions apart
GROUNDS = {"-": GOES, "+": COMES}  # of a changed line, where there is CSS
CELL = 'align="left" valign="top" style="text-align:left;vertical-align:top"'
# a viewer may give <pre> in a table the letters of its prose, or cut what is wider than the window
FONT = "font-family:ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;font-size:12px"
PRE = f'style="text-align:left;white-space:pre;margin:0;{FONT};line-height:1.35"'
SCROLLS = 'style="overflow-x:auto;max-width:100%"'

# the lines of both columns that belong together, None where one column has none; and whether they
# are the same
Pair = tuple[int | None, int | None, bool]

# for Jupyter, whose own sheet would set text to the right; nothing is lost where they are
LEFT = 'align="left" style="text-align:left"'
RIGHT = 'align="right" style="text-align:right"'
BLANK = "____"  # what a student fills in


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


@dataclass(frozen=True)
class Code:
    """Lines of a file: `first` is the number of the first of them, counted from 1."""

    path: Path
    title: str
    first: int
    lines: Sequence[str]


def code(where: int | str, name: str = "") -> Code:
    """A stage by number, or a file by its path in the project; whole, or its function `name`.

    In Python `name` may be a class, or a method as 'Class.method'; in C++ it is how a function
    begins, up to its parenthesis. Raises KeyError where there is no such stage or function, OSError
    where there is no such file.
    """
    path = stage_file(where) if isinstance(where, int) else ROOT / where
    text = path.read_text(encoding="utf-8")
    title = f"stage {where}" if isinstance(where, int) else where
    if not name:
        return Code(path, title, 1, text.splitlines())
    first, last = (extent if path.suffix == ".py" else braces)(text, name)
    return Code(path, f"{title}: {name}", first, text.splitlines()[first - 1 : last])


def stage_file(number: int) -> Path:
    """The file of the built-in stage `number`; KeyError where there is none."""
    for path in (ROOT / "stages").glob(f"s{number:02d}_*.py"):
        return path
    raise KeyError(f"no stage {number} in stages/")


def extent(text: str, name: str) -> tuple[int, int]:
    """The first and the last line of the function or class `name`, decorators counted."""
    body: Sequence[ast.stmt] = ast.parse(text).body
    for part in name.split("."):
        found = [node for node in body if getattr(node, "name", None) == part]
        if not found:
            raise KeyError(f"no {name} in the file")
        node = found[0]
        body = getattr(node, "body", [])
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
    return first, node.end_lineno or node.lineno


def braces(text: str, name: str) -> tuple[int, int]:
    """The first and the last line of the C++ function that begins with `name`."""
    lines = text.splitlines()
    for first, line in enumerate(lines):
        if f"{name}(" in line and line.endswith("{"):
            closing = line[: len(line) - len(line.lstrip())] + "}"
            return first + 1, lines.index(closing, first) + 1
    raise KeyError(f"no {name} in the file")


def fingerprint(path: Path) -> str:
    """The file's place in the project and its digest, as an output cites it."""
    data = path.read_bytes().replace(b"\r\n", b"\n")  # as a checkout on Windows may have it
    place = path.relative_to(ROOT).as_posix()
    return f"{place}, sha256 {hashlib.sha256(data).hexdigest()[:DIGITS]}"


def side_by_side(left: Code | int, right: Code | int, context: int | None = 3) -> Shown:
    """Both in two columns, each changed line with `context` lines around it; None: all lines."""
    old, new = (code(x) if isinstance(x, int) else x for x in (left, right))
    heads = "".join(f"<th {CELL}>{escape(x.title)}</th>" for x in (old, new))
    rows = [f"<tr>{heads}</tr>"]
    for group in groups(old, new, context):
        cells = (f"<td {CELL}><pre {PRE}>{x}</pre></td>" for x in columns(old, new, group))
        rows.append(f"<tr>{''.join(cells)}</tr>")
    files = dict.fromkeys(fingerprint(x.path) for x in (old, new))
    note = f"- goes, + comes. {'; '.join(files)}."
    html = (
        f"<div {SCROLLS}><table>{''.join(rows)}</table></div>\n<p><small>{escape(note)}</small></p>"
    )
    return Shown(html, f"{unified(old, new, context)}\n{note}")


def groups(old: Code, new: Code, context: int | None) -> Iterator[list[Pair]]:
    """The stretches worth showing, each as pairs of indices into both files' lines."""
    matcher = difflib.SequenceMatcher(None, old.lines, new.lines, autojunk=False)
    around = max(len(old.lines), len(new.lines)) if context is None else context
    for opcodes in matcher.get_grouped_opcodes(around):
        yield [
            (i, j, tag == "equal")
            for tag, i1, i2, j1, j2 in opcodes
            for i, j in zip_longest(range(i1, i2), range(j1, j2))
        ]


def changed(old: Code, new: Code) -> tuple[list[str], list[str]]:
    """The lines that go and the lines that come."""
    pairs = [pair for group in groups(old, new, 0) for pair in group if not pair[2]]
    return (
        [old.lines[i] for i, _, _ in pairs if i is not None],
        [new.lines[j] for _, j, _ in pairs if j is not None],
    )


def columns(old: Code, new: Code, group: Sequence[Pair]) -> tuple[str, str]:
    """Both columns of a stretch as HTML, padded so that what belongs together is at one height."""
    left: list[str] = []
    right: list[str] = []
    for i, j, same in group:
        one = [] if i is None else marked(old, i, " " if same else "-")
        two = [] if j is None else marked(new, j, " " if same else "+")
        height = max(len(one), len(two))
        left += one + [""] * (height - len(one))
        right += two + [""] * (height - len(two))
    return "\n".join(left), "\n".join(right)


def marked(of: Code, index: int, mark: str) -> list[str]:
    """One line of code, on as many lines as it takes, with its number and its mark."""
    first, *others = folded(of.lines[index])
    lines = [f"{of.first + index:>4} {mark} {first}"]
    lines += [f"{'':>4} {mark} {other}" for other in others]
    if mark == " ":
        return [escape(line, quote=False).rstrip() for line in lines]
    style = f'style="background:{GROUNDS[mark]};color:{INK}"'
    return [f"<b {style}>{escape(line, quote=False).rstrip()}</b>" for line in lines]


def folded(line: str) -> list[str]:
    """A line as pieces of WIDTH columns at most, broken before a comment, or else at a blank."""
    indent = " " * (len(line) - len(line.lstrip()) + 8)
    pieces = []
    while len(line) > WIDTH:
        comment, blank = (line.rfind(x, len(indent) + 1, WIDTH + 1) for x in ("  # ", " "))
        at = next((x for x in (comment, blank) if x > 0), WIDTH)
        pieces.append(line[:at])
        line = indent + line[at:].lstrip()
    return [*pieces, line]


def unified(old: Code, new: Code, context: int | None) -> str:
    """The same as a unified diff, for a viewer that shows no HTML."""
    around = max(len(old.lines), len(new.lines)) if context is None else context
    return "\n".join(
        difflib.unified_diff(old.lines, new.lines, old.title, new.title, n=around, lineterm="")
    )


class Exercise:
    """Stage `upper` without the lines that its function `name` has and stage `lower`'s has not.

    The template is the upper stage's own file, so it can't be out of date. Its docstring, which
    gives the answer, is left out, and it declares itself under a number and a name of its own, so
    that `ladder run --stage` takes it as one more row.

    Raises KeyError where a stage has no such function.
    """

    def __init__(self, lower: int, upper: int, name: str) -> None:
        old, new = code(lower, name), code(upper, name)
        gone, come = changed(old, new)
        self.answer = [line.strip() for line in come]
        self.gone = len(gone)
        self.whole = "\n".join(code(upper).lines) + "\n"
        self.kernel = list(new.lines)
        self.places = blanks(self.kernel, self.answer)

    def filled(
        self, lines: str | Sequence[str], number: int = 90, name: str = "mine", title: str = ""
    ) -> str:
        """A stage's file with `lines`, one line per blank, where the answer would be.

        Empty lines and indentation don't count. Raises ValueError where there are too many or too
        few of them.
        """
        given = lines.splitlines() if isinstance(lines, str) else lines
        given = [line.strip() for line in given if line.strip()]
        if len(given) != len(self.places):
            raise ValueError(f"lines: got {len(given)}, expected {len(self.places)}, one a blank")
        before = "\n".join(self.kernel)
        after = "\n".join(replaced(self.kernel, self.places, given))
        return declared(self.whole.replace(before, after), number, name, title or name)

    def blanked(self) -> list[str]:
        """The answer with its right-hand sides blanked: what a student starts from."""
        return [re.sub(r" (\+?=) .*", rf" \1 {BLANK}", line) for line in self.answer]

    def __repr__(self) -> str:
        return "\n".join(replaced(self.kernel, self.places, self.blanked()))


def blanks(kernel: Sequence[str], answer: Sequence[str]) -> list[int]:
    """Where in `kernel` the lines of the answer are, one after the other."""
    places: list[int] = []
    for line in answer:
        start = places[-1] + 1 if places else 0
        places.append(next(i for i in range(start, len(kernel)) if kernel[i].strip() == line))
    return places


def replaced(kernel: Sequence[str], places: Sequence[int], lines: Sequence[str]) -> list[str]:
    """`kernel` with `lines` in those places, each as far to the right as what it replaces."""
    result = list(kernel)
    for place, line in zip(places, lines, strict=True):
        indent = kernel[place][: len(kernel[place]) - len(kernel[place].lstrip())]
        result[place] = indent + line
    return result


def declared(text: str, number: int, name: str, title: str) -> str:
    """A stage's file without its docstring, and with a STAGE of its own."""
    tree = ast.parse(text)
    lines = text.splitlines()
    docstring, stage = tree.body[0], None
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "STAGE":
            stage = node
    if stage is None or ast.get_docstring(tree) is None:
        raise ValueError("the stage's file has no docstring or no STAGE")
    declaration = (
        f"STAGE = Stage(\n    number={number}, name={name!r}, title={title!r},\n"
        '    idea="my ten lines", needs=("triton",), dtypes=("float16", "bfloat16", "float32"),\n)'
    )
    kept = [
        *lines[docstring.end_lineno : stage.lineno - 1],
        declaration,
        *lines[stage.end_lineno :],
    ]
    return "\n".join(kept).lstrip("\n") + "\n"
