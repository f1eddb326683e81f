"""How alike two submissions are, and each is to our stage: by their syntax, whatever the names.

It is a similarity and no verdict: where a gap leaves one natural line, all right answers are equal.
"""

import ast
import builtins
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from course.lab import cpp, labs
from course.lab.gaps import UNPARSED

RUN = 6  # syntax nodes in a row that are compared as one
# of C++: strings and comments, which say nothing; names, numbers, operators
TOKENS = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|([A-Za-z_]\w*)|(\d[\w.]*)|([^\s\w]+)', re.S
)
LEFT_OUT = ("annotation", "returns", "ctx", "type_comment", "type_ignores", "decorator_list")
BUILT_IN = {*dir(builtins)}
Run = tuple[str, ...]
Code = frozenset[tuple[Run, int]]  # runs of nodes, and the how-manieth each is


@dataclass(frozen=True)
class Likeness:
    """In percent: how like our stage, how like the most similar other, and that one's name."""

    ours: str = ""
    another: str = ""
    name: str = ""


def likenesses(files: Mapping[str, Path], stage: int, twin: bool) -> dict[str, Likeness]:
    """Return how alike the submissions `files` are, by their names.

    What the stub gives (the one with small gaps) is left out. A submission that adds nothing to it,
    or can't be read, is like none.
    """
    try:
        given = code_of(labs.stubs(stage, "small", twin).values(), stage)
    except labs.NoLab:
        given = frozenset()
    ours = own(code_of(labs.solution(stage, twin).values(), stage), given)
    codes = {name: own(read(path, stage), given) for name, path in files.items()}
    best: dict[str, tuple[int, str]] = {}
    for one, other in combinations(codes, 2):
        alike = percent(codes[one], codes[other])
        for name, another in ((one, other), (other, one)):
            best[name] = max(best.get(name, (0, "")), (alike, another), key=lambda x: x[0])
    found = {}
    for name, code in codes.items():
        share, of = best.get(name, (0, ""))
        found[name] = Likeness(
            str(percent(code, ours)) if code and ours else "",
            str(share) if code and of else "",
            of if code else "",
        )
    return found


def read(path: Path, stage: int) -> Code:
    """Return the code of a submission's files; none where they can't be read."""
    try:
        texts = [cpp.read(file).decode("utf-8", "replace") for file in cpp.files(path)]
        return code_of(texts, stage)
    except OSError:
        return frozenset()


def own(code: Code, given: Code) -> Code:
    """Return what of `code` is not in `given`, however often."""
    known = {run for run, _ in given}
    return frozenset((run, at) for run, at in code if run not in known)


def percent(one: Code, other: Code) -> int:
    """Return the share that two codes have in common: 100 where they are equal."""
    most = len(one) + len(other)
    return round(200 * len(one & other) / most) if most else 0


def code_of(texts: Iterable[str], stage: int) -> Code:
    """Return the runs of syntax nodes, for stage 2 of C++ tokens."""
    found: set[tuple[Run, int]] = set()
    seen: Counter[Run] = Counter()
    for text in texts:
        nodes = tokens(text) if labs.handed_in(stage) else walked(text)
        for run in zip(*(nodes[at:] for at in range(RUN))):
            found.add((run, seen[run]))
            seen[run] += 1
    return frozenset(found)


def walked(text: str) -> list[str]:
    """Return the syntax nodes of a Python text from top to bottom, without names and texts."""
    try:
        left: list[ast.AST] = [ast.parse(text)]
    except UNPARSED:
        return []
    found = []
    while left:  # as deep as it likes
        node = left.pop()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        said = [type(node).__name__]
        if isinstance(node, (ast.Attribute, ast.keyword)):  # those are no names of the student's
            said.append(str(node.attr if isinstance(node, ast.Attribute) else node.arg))
        if isinstance(node, ast.Constant) and not isinstance(node.value, str):
            said.append(repr(node.value))
        if isinstance(node, ast.Name) and node.id in BUILT_IN:
            said.append(node.id)
        found.append(" ".join(said))
        children: list[ast.AST] = []
        for name, value in ast.iter_fields(node):
            if name not in LEFT_OUT:
                items = value if isinstance(value, list) else [value]
                children += [x for x in items if isinstance(x, ast.AST)]
        left += reversed(children)
    return found


def tokens(text: str) -> list[str]:
    """Return the tokens of a C++ text, all names alike."""
    found = []
    for name, number, sign in TOKENS.findall(text):
        if name or number or sign:
            found.append("name" if name else number or sign)
    return found
