"""An exercise made from two neighbouring stages: the lines that the upper one adds are blanked.

The template is the upper stage's own file, so it can't fall behind it. Its docstring, which gives
the answer, is left out, and it declares itself under a number and a name of its own, so that
`ladder run --stage` takes it as one more row.
"""

import ast
import re
from collections.abc import Sequence

from harness.lessons.side_by_side import changed, code

BLANK = "____"


class Exercise:
    """Stage `upper` without the lines that its function `name` has and stage `lower`'s has not.

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
        """A stage's file with `lines`, a line a blank, where the answer would be.

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
