"""The gaps of a stage: comments in its own file mark what a student writes, so no stub can drift.

    # exercise NAME: goal; shapes in -> out     a part with all that it holds, to `# end of NAME`
    # step NAME: goal; shapes in -> out         within it, the one statement below

A large stub lacks the exercises, a small one the steps. In C++ the comments begin with //. The
formulas of a Python file's docstring are taken out, too, where they give a gap away.
"""

import ast
import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from course.lessons.marks import BLANK, MARKER

KINDS = {"small": "step", "large": "exercise"}  # size of the gaps -> how they are marked
NOT_WRITTEN = "not written yet"
UNTOLD = "the formulas: yours to write"  # a stub's docstring has this in their place
FORMULA = re.compile(r"\s+([A-Za-z_]+)(?:\[\w+\])? \+?= ")
UNPARSED = (SyntaxError, ValueError, RecursionError, MemoryError)  # text that is no Python
COMMENT = re.compile(r"\s*(#(?!error)|//|$)")
STUBS_OWN = re.compile(rf"\s*(?:raise NotImplementedError\(.|#error ){NOT_WRITTEN}: (\w+)")
PLACEHOLDER = re.compile(r"\s*(pass|\.\.\.|raise NotImplementedError.*|#error.*)\s*$")
# in a statement that is nearly given away these words stay, and a name goes
KEPT = "for|in|if|is|not|and|or|return|new|None|True|False|const|raise"
NAME = re.compile(rf"(?<![\w.\"-])(?!(?:{KEPT})\b)[A-Za-z_][\w.]*(?![\w.\"]|\s*[({{]|=[^=])")


@dataclass(frozen=True)
class Gap:
    """One gap: its name, what it says of itself, and its lines [first, last), counted from 0."""

    name: str
    says: str
    first: int
    last: int
    lines: Sequence[str]

    def nearly(self) -> str:
        """Return its lines with the names on the right-hand sides blanked."""
        text = []
        for line in self.lines:
            *target, value = re.split(r"(?<= = |\+= )", line.split("  #")[0], maxsplit=1)
            text.append("".join(target) + NAME.sub(BLANK, value))
        return "\n".join(text)


def find(text: str, size: str) -> list[Gap]:
    """Return the gaps of a file for a `size`, 'small' or 'large', in order."""
    lines = text.splitlines()
    found = []
    for at, line in enumerate(lines):
        mark = MARKER.match(line)
        if mark and mark[2] == KINDS[size]:
            end = statement_end(lines, at + 1) if size == "small" else exercise_end(lines, at)
            found.append(Gap(mark[3], mark[4] or "", at + 1, end, lines[at + 1 : end]))
    return found


def statement_end(lines: Sequence[str], first: int) -> int:
    """Find the end of the statement that begins in line `first`, by indentation and brackets."""
    indent = depth(lines[first])
    end = first + 1
    while end < len(lines) and (
        depth(lines[end]) > indent
        or (depth(lines[end]) == indent and lines[end].lstrip()[:1] in (")", "]"))
    ):
        end += 1
    return end


def depth(line: str) -> int:
    """Return the number of spaces before a line's text; 0 for an empty line."""
    return len(line) - len(line.lstrip())


def exercise_end(lines: Sequence[str], at: int) -> int:
    """Find the end of the exercise marked in line `at`; the file's end where no end is marked.

    Two exercises of a file may have the same name: the next end mark counts.
    """
    name = MARKER.match(lines[at])[3]  # type: ignore[index]
    for end in range(at + 1, len(lines)):
        mark = MARKER.match(lines[end])
        if mark and (mark[2], mark[3]) == ("end of", name):
            return end
    return len(lines)


def replaced(text: str, size: str, bodies: Sequence[Sequence[str]]) -> str:
    """Return a file's text with other lines in its gaps, in order."""
    lines = text.splitlines()
    for gap, body in reversed(list(zip(find(text, size), bodies, strict=True))):
        lines[gap.first : gap.last] = body
    return "\n".join(lines) + "\n"


def told(text: str, size: str) -> str:
    """Return the docstring's lines of formulas, first to last, if one gives a gap away; or ''.

    It does if its left side is a small gap's name, or is assigned in a large gap; S is also s.
    """
    lines = text.partition('"""')[2].partition('"""')[0].splitlines()
    formulas = {at: mark[1].lower() for at, x in enumerate(lines) if (mark := FORMULA.match(x))}
    found = find(text, size)
    assigned = filter(None, (FORMULA.match(line) for gap in found for line in gap.lines))
    names = {x.name for x in found} if size == "small" else {mark[1] for mark in assigned}
    if names.isdisjoint(formulas.values()):
        return ""
    return "\n".join(lines[min(formulas) : max(formulas) + 1])


def stub(text: str, size: str) -> str:
    """Return a stage's file with its gaps taken out; each gap raises that it is not written yet."""
    bodies = []
    for gap in find(text, size):
        says = f"{NOT_WRITTEN}: {gap.name}"
        cpp = "//" in text.splitlines()[gap.first - 1]
        line = f"#error {says}" if cpp else f'raise NotImplementedError("{says}")'
        bodies.append([" " * depth(gap.lines[0]) + line])
    formulas = told(text, size)
    without = text.replace(formulas, " " * depth(formulas) + UNTOLD, 1) if formulas else text
    return replaced(without, size, bodies)


def missing(text: str) -> Iterator[tuple[str, int]]:
    """Yield the gaps that a file can't run without, or all of `attend`: each name, and line from 1.

    What the stub raises still stands in such a gap. One that is empty may be done in another line.
    """
    lines = enumerate(text.splitlines(), start=1)
    found = [(mark[1], at) for at, line in lines if (mark := STUBS_OWN.match(line))]
    with contextlib.suppress(*UNPARSED):  # C++, and what Python itself will refuse
        body = ast.parse(text).body
        attends = [x for x in body if isinstance(x, ast.FunctionDef) and x.name == "attend"]
        if not found and any(all(map(hollow, attend.body)) for attend in attends):
            found.append(("attend", attends[0].lineno))
        if all(map(says, body)):
            found.append(("attend", 1))
    yield from found


def hollow(statement: ast.stmt) -> bool:
    """Whether a statement is a placeholder for code that is not written yet."""
    return says(statement) or bool(PLACEHOLDER.match(ast.unparse(statement).splitlines()[0]))


def says(statement: ast.stmt) -> bool:
    """Whether a statement is a bare text, such as a docstring."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def unwritten(text: str) -> Iterator[tuple[str, int]]:
    """Yield the gaps of a student's file that hold no code yet: each name, and line from 1.

    A gap is empty, or begins with what a stub has there, or with `pass` or `...`.
    """
    lines = text.splitlines()
    marks = [(at, mark) for at, line in enumerate(lines) if (mark := MARKER.match(line))]
    ends = [at for at, _ in marks[1:]] + [len(lines)]
    for (at, mark), end in zip(marks, ends):
        steps_follow = end < len(lines) and MARKER.match(lines[end])[2] == "step"  # type: ignore[index]
        if mark[2] == "end of" or (mark[2] == "exercise" and steps_follow):
            continue
        code = [line for line in lines[at + 1 : end] if not COMMENT.match(line)]
        if not code or PLACEHOLDER.match(code[0]):
            yield mark[3], at + 1
