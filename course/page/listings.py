"""Make of the stages' files what the page shows side by side: coloured lines, and how they match.

Which files a stage has, and which lines of them are its kernel, is decided where `ladder diff`
takes it from; lines are matched as in the notebooks.
"""

import difflib
from collections.abc import Sequence
from html import escape
from itertools import combinations
from pathlib import Path
from typing import Any

from pygments.lexers import get_lexer_for_filename
from pygments.token import Comment, Keyword, Literal, Name, Number

from course.lessons import diff
from harness.records.code import built_in_files, files_of, label, number_of, read_declared

# what is told apart in the page, by the class of its style sheet
KINDS = {"c": Comment, "n": Number, "s": Literal, "k": Keyword, "d": Name.Decorator}


def collect() -> dict[str, Any]:
    """The listings of all stages, and what each two share, under the key 'listings'.

    stages   number, title, idea, the names of its `files`; `whole`: [file, line, HTML] of all its
             lines, `kernel`: of its kernels' lines
    opcodes  'whole' and 'kernel' -> 'a b', a < b -> [equal, from, to in a, from, to in b]
    """
    numbers = [*map(number_of, built_in_files())]
    parts = {
        "whole": {n: whole(n) for n in numbers},
        "kernel": {n: diff.kernel(n) for n in numbers},
    }
    return {"listings": {
        "stages": [about(number, {name: of[number] for name, of in parts.items()})
                   for number in numbers],
        "opcodes": {name: {f"{a} {b}": opcodes(of[a], of[b]) for a, b in combinations(numbers, 2)}
                    for name, of in parts.items()},
    }}  # fmt: skip


def whole(stage: int) -> list[diff.Placed]:
    """All lines of a stage's files, in reading order, but for the comments that mark exercises."""
    return [line for line in diff.whole(stage) if not diff.MARKER.match(line[2])]


def about(number: int, parts: dict[str, list[diff.Placed]]) -> dict[str, Any]:
    """What the page says of a stage, and its lines in colour."""
    files = files_of(number)
    names, declared = [path.name for path in files], read_declared(files[0])
    lines = {path.name: coloured(path) for path in files}
    return {
        "number": number, "title": declared["title"], "idea": declared["idea"],
        "place": label(files[0]), "files": names,
        **{part: [[names.index(name), line, lines[name][line - 1] if text else ""]
                  for name, line, text in shown]
           for part, shown in parts.items()},
    }  # fmt: skip


def coloured(path: Path) -> list[str]:
    """The lines of a file as HTML: <i class=c>a comment</i>, and so on by KINDS."""
    lexer = get_lexer_for_filename(path.name, stripnl=False, ensurenl=False)
    lines = [""]
    for kind, text in lexer.get_tokens(path.read_text(encoding="utf-8")):
        mark = next((mark for mark, each in KINDS.items() if kind in each), "")
        for index, piece in enumerate(text.split("\n")):
            lines += [""] if index else []
            html = escape(piece, quote=False)
            lines[-1] += f"<i class={mark}>{html}</i>" if mark and piece else html
    return lines


def opcodes(old: Sequence[diff.Placed], new: Sequence[diff.Placed]) -> list[list[int]]:
    """What is equal in both, and what lies between, in order; 1 for equal, else 0."""
    a, b = ([text for *_, text in lines] for lines in (old, new))
    found = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    return [[int(tag == "equal"), *places] for tag, *places in found]
