"""Show in the terminal what changed from one stage's file, or its kernels, to another's."""

import ast
import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.text import Text

CONTEXT = 3  # unchanged lines around each change

Numbered = tuple[int, str]  # a line and its number in the file, from 1
# a comment that marks an exercise of `ladder lab` (course/lab/gaps.py), left out of differences
MARKER = re.compile(r"(\s*)(?:#|//) (exercise|step|end of) (\w+)(?:: (.*))?$")


def whole(path: Path) -> list[Numbered]:
    """All the lines of a stage's file."""
    return list(enumerate(path.read_text(encoding="utf-8").splitlines(), start=1))


def kernel(path: Path) -> list[Numbered]:
    """The lines of a stage's Triton kernels, or of all its code where it has none.

    All code is everything after the docstring, the imports and the declaration.
    """
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    after = [i + 1 for i, node in enumerate(nodes) if is_declaration(node)] or [0]
    lines = whole(path)
    found: list[Numbered] = []
    for node in list(filter(is_kernel, nodes)) or nodes[after[-1] :]:
        first, last = extent(node)
        found += [*lines[first - 1 : last], (last, "")]
    return unmarked(found[:-1])


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


def changes(
    old: Path, new: Path, part: Callable[[Path], Sequence[Numbered]] = whole
) -> Iterator[Text]:
    """What changed in `part` of two stages' files, line by line, coloured.

    First two lines that say what - and + mean; then each place with a heading that says which lines
    of the files these are.
    """
    before, after = part(old), part(new)
    a, b = ([text for _, text in lines] for lines in (before, after))
    groups = list(difflib.SequenceMatcher(None, a, b).get_grouped_opcodes(CONTEXT))
    if groups:
        yield Text(f"- only in {old.name}", style="red")
        yield Text(f"+ only in {new.name}", style="green")
    for group in groups:
        (_, first, _, new_first, _), (_, _, last, _, new_last) = group[0], group[-1]
        there = f"{new.name}, {place(after, new_first, new_last)}"
        yield Text(f"{there} ({old.name}, {place(before, first, last)}):", style="bold")
        for tag, first, last, new_first, new_last in group:
            if tag == "equal":
                yield from (Text(f" {text}") for text in a[first:last])
            else:
                yield from (Text(f"-{text}", style="red") for text in a[first:last])
                yield from (Text(f"+{text}", style="green") for text in b[new_first:new_last])


def place(lines: Sequence[Numbered], first: int, last: int) -> str:
    """'lines 3 to 9': where the lines from index `first` up to `last` stand in their file."""
    if first == last:
        return f"after line {lines[first - 1][0] if first else 0}"
    return f"lines {lines[first][0]} to {lines[last - 1][0]}"


def summary(paths: Sequence[Path], lines: Sequence[Text]) -> str:
    """A line that says what was compared, and how many lines of the diff `lines` changed."""
    added, removed = (sum(line.plain[:1] == sign for line in lines[2:]) for sign in "+-")
    trees = {path.name: ast.parse(path.read_text(encoding="utf-8")).body for path in paths}
    without = [name for name, nodes in trees.items() if not any(map(is_kernel, nodes))]
    note = f" ({' and '.join(without)}: no Triton kernel, all the code)" if without else ""
    return f"The kernels{note}: {added} lines come, {removed} go. --whole compares the whole files."
