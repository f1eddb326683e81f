"""The lesson between two stages: what changed from one file, or its kernels, to the other."""

import ast
import difflib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.text import Text

STYLES = {"+": "green", "-": "red", "@": "cyan"}
CONTEXT = 3  # lines that are the same, around each change

Numbered = tuple[int, str]  # a line and its number in the file, from 1


def whole(path: Path) -> list[Numbered]:
    """All the lines of a stage's file."""
    return list(enumerate(path.read_text(encoding="utf-8").splitlines(), start=1))


def kernel(path: Path) -> list[Numbered]:
    """The lines of a stage's file that compute: its Triton kernels, or where it has none, all code.

    All code is what comes after the docstring, the imports and the declaration.
    """
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    chosen: Sequence[ast.stmt] = [node for node in nodes if is_kernel(node)]
    if not chosen:
        start = 1 + max(
            (i for i, node in enumerate(nodes) if ast.unparse(node).startswith("STAGE =")),
            default=-1,
        )
        chosen = nodes[start:]
    lines = whole(path)
    found: list[Numbered] = []
    for node in chosen:
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(each.lineno for each in decorators)])
        found += [*lines[first - 1 : node.end_lineno], (node.end_lineno or first, "")]
    return found[:-1]


def has_kernels(path: Path) -> bool:
    """Whether there are kernels in a stage's file."""
    return any(map(is_kernel, ast.parse(path.read_text(encoding="utf-8")).body))


def is_kernel(node: ast.stmt) -> bool:
    """Whether a statement is a function for Triton or Gluon to compile."""
    decorators = getattr(node, "decorator_list", [])
    return any(ast.unparse(each).split("(")[0].endswith(".jit") for each in decorators)


def changes(
    old: Path, new: Path, part: Callable[[Path], Sequence[Numbered]] = whole
) -> Iterator[Text]:
    """A unified diff of `part` of two stages' files, line by line, coloured.

    Its lines are numbered as in the files.
    """
    before, after = part(old), part(new)
    a, b = ([text for _, text in lines] for lines in (before, after))
    matcher = difflib.SequenceMatcher(None, a, b)
    for count, group in enumerate(matcher.get_grouped_opcodes(CONTEXT)):
        if not count:
            yield Text(f"--- {old.name}", style="bold")
            yield Text(f"+++ {new.name}", style="bold")
        _, first, _, new_first, _ = group[0]
        _, _, last, _, new_last = group[-1]
        sizes = (last - first, new_last - new_first)
        where = f"-{start(before, first)},{sizes[0]} +{start(after, new_first)},{sizes[1]}"
        yield Text(f"@@ {where} @@", style=STYLES["@"])
        for tag, first, last, new_first, new_last in group:
            if tag == "equal":
                yield from (Text(f" {text}") for text in a[first:last])
                continue
            yield from (Text(f"-{text}", style=STYLES["-"]) for text in a[first:last])
            yield from (Text(f"+{text}", style=STYLES["+"]) for text in b[new_first:new_last])


def summary(paths: Sequence[Path], lines: Sequence[Text]) -> str:
    """What was compared of the files in `paths`, and how much `lines`, the changes, come to."""
    come, go = (sum(line.plain[:1] == sign for line in lines[2:]) for sign in "+-")
    without = [path.name for path in paths if not has_kernels(path)]
    said = f" ({' and '.join(without)}: no Triton kernel, all the code)" if without else ""
    return f"The kernels{said}: {come} lines come, {go} go. --whole compares the whole files."


def start(lines: Sequence[Numbered], index: int) -> int:
    """The number of the line at `index` in its file."""
    return lines[index][0] if index < len(lines) else (lines[-1][0] if lines else 0)
