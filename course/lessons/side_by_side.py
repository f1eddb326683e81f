"""Show two stages' code in a notebook: in two columns with marked changes, or as an exercise.

Code hosts show a notebook's HTML without <style> and without most of CSS: it must be readable with
tables, <pre> and <b> alone. So a changed line is bold, with '-' (removed) or '+' (added) before it.
Below the columns are the files and the start of their sha256: tests/course/test_notebooks.py finds
a notebook that shows an older stage by it.
"""

import ast
import difflib
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import zip_longest
from pathlib import Path

from course.lessons import diff
from course.lessons.marks import BLANK
from harness.records.code import files_of
from harness.views.look import COMES, GOES, INK
from harness.views.table import Column, Table

ROOT = Path(__file__).parents[2]
WIDTH = 62  # characters of code before a line is wrapped: two columns fit into a usual window
DIGITS = 12  # of a sha256, enough to identify a version
GROUNDS = {"-": GOES, "+": COMES}  # of a changed line, where there is CSS
CELL = 'align="left" valign="top" style="text-align:left;vertical-align:top"'
# a viewer may show <pre> in a table in its text font, or cut what is wider than the window
FONT = "font-family:ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;font-size:12px"
PRE = f'style="text-align:left;white-space:pre;margin:0;{FONT};line-height:1.35"'
SCROLLS = 'style="overflow-x:auto;max-width:100%"'
WIDEST = 400  # columns of a table's text, which nothing cuts


@dataclass(frozen=True)
class Shown:
    """The output of a notebook cell: Jupyter shows the `html`, a terminal the `text`."""

    html: str
    text: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


def table(
    header: Sequence[str], rows: Iterable[Sequence[object]], title: str = "", note: str = "",
    left: int = 1,
) -> Shown:  # fmt: skip
    """A table with title and note; the first `left` columns left-aligned, the others right."""
    columns = [Column(name, left=index < left) for index, name in enumerate(header)]
    made = Table(columns, [[*map(str, row)] for row in rows], title, [note] if note else [], gap=2)
    return Shown(made.html(), made.text(WIDEST))


@dataclass(frozen=True)
class Code:
    """Lines of a file with their numbers, from 1, without comments that mark exercises."""

    path: Path
    title: str
    numbers: Sequence[int]
    lines: Sequence[str]


def code(where: int | str, name: str = "") -> Code:
    """The code of a stage by number, or of a file by its path in the project, or a function of it.

    In Python `name` may be a function, a class, or 'Class.method'; in C++ it is the start of a
    function up to its parenthesis. Raises KeyError where there is no such stage or function,
    OSError where there is no such file.
    """
    if isinstance(where, int):
        title, files = f"stage {where}", files_of(where)
    else:
        title, files = where, [ROOT / where]
    path, *others = files
    if name and others and path.suffix == ".py":  # the file of a folder that has it
        found = (x for x in files if x.suffix == ".py" and defines(x, name.split(".")[0]))
        path = next(found, path)
    text, lines = path.read_text(encoding="utf-8"), diff.numbered(path)
    if name:
        title = f"{title}: {name}"
        first, last = (extent if path.suffix == ".py" else braces)(text, name)
        lines = lines[first - 1 : last]
    numbers, kept = zip(*diff.unmarked(lines), strict=True)
    return Code(path, title, numbers, kept)


def defines(path: Path, name: str) -> bool:
    """Whether a Python file defines the function or class `name`."""
    return any(getattr(node, "name", None) == name for node in ast.parse(path.read_bytes()).body)


def extent(text: str, name: str) -> tuple[int, int]:
    """The first and the last line of the function or class `name`, its decorators included."""
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        named = (x for x in getattr(node, "body", []) if getattr(x, "name", None) == part)
        if (found := next(named, None)) is None:
            raise KeyError(f"no {name} in the file")
        node = found
    return diff.extent(node)


def braces(text: str, name: str) -> tuple[int, int]:
    """The first and the last line of the C++ function that begins with `name`."""
    lines = text.splitlines()
    for first, line in enumerate(lines):
        if f"{name}(" in line and line.endswith("{"):
            return first + 1, lines.index(indent_of(line) + "}", first) + 1
    raise KeyError(f"no {name} in the file")


def indent_of(line: str) -> str:
    """The blanks that a line begins with."""
    return line[: len(line) - len(line.lstrip())]


def fingerprint(path: Path) -> str:
    """A file's path in the project and the start of its digest, for an output to cite."""
    data = path.read_bytes().replace(b"\r\n", b"\n")  # without the CRs of a checkout on Windows
    place = path.relative_to(ROOT).as_posix()
    return f"{place}, sha256 {hashlib.sha256(data).hexdigest()[:DIGITS]}"


def side_by_side(left: Code | int, right: Code | int, context: int | None = 3) -> Shown:
    """Show both in two columns: changes with `context` lines around them; None: all lines."""
    old, new = (code(x) if isinstance(x, int) else x for x in (left, right))
    around = max(len(old.lines), len(new.lines)) if context is None else context
    stretches = [(f"<th {CELL}>{escape(old.title)}</th>", f"<th {CELL}>{escape(new.title)}</th>")]
    for opcodes in matcher(old, new).get_grouped_opcodes(around):
        one, two = (f"<td {CELL}><pre {PRE}>{x}</pre></td>" for x in columns(old, new, opcodes))
        stretches.append((one, two))
    rows = "".join(f"<tr>{one}{two}</tr>" for one, two in stretches)
    files = dict.fromkeys(fingerprint(x.path) for x in (old, new))
    note = f"- goes, + comes. {'; '.join(files)}."
    unified = difflib.unified_diff(
        old.lines, new.lines, old.title, new.title, n=around, lineterm=""
    )  # for a viewer that shows no HTML
    return Shown(
        f"<div {SCROLLS}><table>{rows}</table></div>\n<p><small>{escape(note)}</small></p>",
        "\n".join([*unified, note]),
    )


def matcher(old: Code, new: Code) -> difflib.SequenceMatcher[str]:
    """A SequenceMatcher of the lines."""
    return difflib.SequenceMatcher(None, old.lines, new.lines, autojunk=False)


def columns(
    old: Code, new: Code, opcodes: Iterable[tuple[str, int, int, int, int]]
) -> tuple[str, str]:
    """The two columns of a group of changes as HTML, corresponding lines side by side."""
    rows: list[tuple[str, str]] = []
    for tag, i1, i2, j1, j2 in opcodes:
        goes, comes = "  " if tag == "equal" else "-+"
        for i, j in zip_longest(range(i1, i2), range(j1, j2)):
            pair = marked(old, i, goes), marked(new, j, comes)
            rows += zip_longest(*pair, fillvalue="")
    left, right = zip(*rows, strict=True)
    return "\n".join(left), "\n".join(right)


def marked(of: Code, index: int | None, mark: str) -> list[str]:
    """One line of code, wrapped, with its number and its mark; [] where `index` is None."""
    if index is None:
        return []
    numbers = [str(of.numbers[index])]
    lines = []
    for number, piece in zip_longest(numbers, folded(of.lines[index]), fillvalue=""):
        line = escape(f"{number:>4} {mark} {piece}", quote=False).rstrip()
        style = f"background:{GROUNDS.get(mark)};color:{INK}"
        lines.append(line if mark == " " else f'<b style="{style}">{line}</b>')
    return lines


def folded(line: str) -> list[str]:
    """Wrap a line into pieces of at most WIDTH characters, before a comment or else at a space."""
    indent = indent_of(line) + " " * 8
    pieces = []
    while len(line) > WIDTH:
        comment, blank = (line.rfind(x, len(indent) + 1, WIDTH + 1) for x in ("  # ", " "))
        at = next((x for x in (comment, blank) if x > 0), WIDTH)
        pieces.append(line[:at])
        line = indent + line[at:].lstrip()
    return [*pieces, line]


def changed(old: Code, new: Code) -> tuple[list[str], list[str]]:
    """The removed lines and the added lines."""
    found = [opcode for opcode in matcher(old, new).get_opcodes() if opcode[0] != "equal"]
    return (
        [line for _, first, last, _, _ in found for line in old.lines[first:last]],
        [line for _, _, _, first, last in found for line in new.lines[first:last]],
    )


class Exercise:
    """Stage `upper` without the lines of its function `name` that stage `lower` doesn't have.

    The template is the upper stage's own file, so it can't be out of date. Its docstring, which
    gives the answer, is left out, and it declares its own number and name, so that `ladder run
    --stage` takes it as one more row. Raises KeyError where a stage has no such function.
    """

    def __init__(self, lower: int, upper: int, name: str) -> None:
        new = code(upper, name)
        gone, come = changed(code(lower, name), new)
        self.answer = [line.strip() for line in come]
        self.gone = len(gone)
        self.whole = "\n".join(code(upper).lines) + "\n"
        self.kernel = list(new.lines)
        self.places: list[int] = []  # indices of the answer's lines in the kernel
        stripped = [line.strip() for line in self.kernel]
        for line in self.answer:
            self.places.append(stripped.index(line, self.places[-1] + 1 if self.places else 0))

    def replaced(self, lines: Sequence[str]) -> str:
        """The kernel with `lines` in place of the answer, indented as the original lines."""
        result = list(self.kernel)
        for place, line in zip(self.places, lines, strict=True):
            result[place] = indent_of(result[place]) + line
        return "\n".join(result)

    def filled(
        self, lines: str | Sequence[str], number: int = 90, name: str = "mine", title: str = ""
    ) -> str:
        """The stage's file with `lines`, one line per blank, in place of the answer.

        Empty lines and indentation are ignored. Raises ValueError for a wrong number of lines.
        """
        given = lines.splitlines() if isinstance(lines, str) else lines
        given = [line.strip() for line in given if line.strip()]
        if len(given) != len(self.places):
            raise ValueError(f"lines: got {len(given)}, expected {len(self.places)}, one per blank")
        text = self.whole.replace("\n".join(self.kernel), self.replaced(given))
        return declared(text, number, name, title or name)

    def blanked(self) -> list[str]:
        """The answer with blanks for its right-hand sides, from which a student starts."""
        return [re.sub(r" (\+?=) .*", rf" \1 {BLANK}", line) for line in self.answer]

    def __repr__(self) -> str:
        return self.replaced(self.blanked())


def declared(text: str, number: int, name: str, title: str) -> str:
    """A stage's file without its docstring, and with another STAGE."""
    docstring, *nodes = ast.parse(text).body
    stage = next(filter(diff.is_declaration, nodes))
    declaration = (
        f"STAGE = Stage(\n    number={number}, name={name!r}, title={title!r},\n"
        '    idea="my nine lines", needs=("triton",), dtypes=("float16", "bfloat16", "float32"),\n)'
    )
    lines = text.splitlines()
    kept = lines[docstring.end_lineno : stage.lineno - 1]
    return "\n".join([*kept, declaration, *lines[stage.end_lineno :]]).lstrip("\n") + "\n"
