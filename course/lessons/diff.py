"""Show in the terminal what changed from one stage's file, or its kernels, to another's."""

import ast
import difflib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.text import Text

from course.lessons.marks import MARKER
from harness.records.code import FIRST, files_of, first_file, label

CONTEXT = 3  # unchanged lines around each change

Numbered = tuple[int, str]  # a line and its number in its file, from 1
Placed = tuple[str, int, str]  # its file's name, its number and the line


def numbered(path: Path) -> list[Numbered]:
    """The lines of a file."""
    return list(enumerate(path.read_text(encoding="utf-8").splitlines(), start=1))


def whole(stage: int) -> list[Placed]:
    """All the lines of a stage's files, in reading order."""
    return [(path.name, *line) for path in files_of(stage) for line in numbered(path)]


def kernel(stage: int) -> list[Placed]:
    """The lines of a stage's Triton kernels, or of all its code where it has none.

    All code is everything after the docstring, the imports and the declaration, and what is not
    in Python.
    """
    files = files_of(stage)
    only_kernels = any(map(has_kernel, files))
    found: list[Placed] = []
    for path in files:
        lines = numbered(path)
        if path.suffix == ".py":
            nodes = ast.parse(path.read_text(encoding="utf-8")).body
            after = [i + 1 for i, node in enumerate(nodes) if is_declaration(node)] or [0]
            shown = list(filter(is_kernel, nodes)) if only_kernels else nodes[after[-1] :]
            parts = [extent(node) for node in shown]
            lines = [
                line for first, last in parts for line in (*lines[first - 1 : last], (last, ""))
            ]
        found += [(path.name, *line) for line in unmarked(lines)]
    return found


def has_kernel(path: Path) -> bool:
    """Whether a file has kernels in Triton or Gluon."""
    return path.suffix == ".py" and any(map(is_kernel, ast.parse(path.read_bytes()).body))


def unmarked(lines: Sequence[Numbered]) -> list[Numbered]:
    """The lines without the comments that mark exercises."""
    return [line for line in lines if not MARKER.match(line[1])]


def extent(node: ast.AST) -> tuple[int, int]:
    """The first and the last line of a statement, its decorators included."""
    starts = [node, *getattr(node, "decorator_list", [])]
    return min(each.lineno for each in starts), getattr(node, "end_lineno", 0)


def is_kernel(node: ast.stmt) -> bool:
    """Whether a statement is a function for Triton or Gluon to compile."""
    decorators = getattr(node, "decorator_list", [])
    return any(ast.unparse(each).split("(")[0].endswith(".jit") for each in decorators)


def is_declaration(node: ast.stmt) -> bool:
    """Whether a statement declares the stage: STAGE = ..."""
    return ast.unparse(node).startswith("STAGE =")


def changes(old: int, new: int, part: Callable[[int], Sequence[Placed]] = whole) -> Iterator[Text]:
    """What changed in `part` of two stages' files, line by line, coloured.

    First two lines that say what - and + mean; then each place with a heading that says which lines
    of the files these are.
    """
    before, after = part(old), part(new)
    a, b = ([text for *_, text in lines] for lines in (before, after))
    groups = list(difflib.SequenceMatcher(None, a, b).get_grouped_opcodes(CONTEXT))
    if groups:
        yield Text(f"- only in {label(first_file(old))}", style="red")
        yield Text(f"+ only in {label(first_file(new))}", style="green")
    for group in groups:
        (_, first, _, new_first, _), (_, _, last, _, new_last) = group[0], group[-1]
        there = f"{place(new, after, new_first, new_last)}"
        yield Text(f"{there} ({place(old, before, first, last)}):", style="bold")
        for tag, first, last, new_first, new_last in group:
            if tag == "equal":
                yield from (Text(f" {text}") for text in a[first:last])
            else:
                yield from (Text(f"-{text}", style="red") for text in a[first:last])
                yield from (Text(f"+{text}", style="green") for text in b[new_first:new_last])


def place(stage: int, lines: Sequence[Placed], first: int, last: int) -> str:
    """'s05_triton_online.py, lines 3 to 9': where the lines from index `first` up to `last` are."""
    name = label(first_file(stage))
    start, end = (lines[max(i, 0)] for i in (first if last > first else first - 1, last - 1))
    if start[0] != FIRST and not name.endswith(".py"):
        name = f"{name}/{start[0]}"
    elif name.endswith(".py") and start[0] != name:
        name = start[0]  # such as a file in C++
    if first == last:
        return f"{name}, after line {start[1] if first else 0}"
    return (
        f"{name}, lines {start[1]} to " + (f"{end[0]} " if end[0] != start[0] else "") + f"{end[1]}"
    )


def summary(stages: Sequence[int], lines: Sequence[Text]) -> str:
    """A line that says what was compared, and how many lines of the diff `lines` changed."""
    added, removed = (sum(line.plain[:1] == sign for line in lines[2:]) for sign in "+-")
    without = [label(first_file(x)) for x in stages if not any(map(has_kernel, files_of(x)))]
    note = f" ({' and '.join(without)}: no Triton kernel, all the code)" if without else ""
    return f"The kernels{note}: {added} lines come, {removed} go. --whole compares the whole files."
