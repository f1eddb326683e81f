"""A stage in a folder as one file: what a student writes is one file, of whatever stage.

The first file's docstring comes first, then the imports of all files, the declaration, what the
other files hold, in reading order, and the rest of the first file.
"""

import ast
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.records.code import files_of

Lines = list[str]


def one_file(stage: int | Path) -> str:
    """Return a stage's code as the text of one file; of a stage in one file, that file's text.

    Raises KeyError where there is no such stage, ValueError where a file takes a name of another
    of the folder under a new one.
    """
    first, *others = (x for x in files_of(stage) if x.suffix == ".py")
    text = first.read_text(encoding="utf-8")
    if not others:
        return text
    imports: dict[str, dict[str, None]] = {}
    header, (declaration, rest) = docstring(text), halves(parted(text, imports))
    bodies = [parted(x.read_text(encoding="utf-8"), imports) for x in reversed(others)]
    declaration = [line for line in declaration if not line.startswith("    files=")]
    sections = [declaration, *bodies, rest]
    head = "\n\n".join("\n".join(lines).strip("\n") for lines in (header, written(imports)))
    return "\n\n\n".join([head, *("\n".join(x).strip("\n") for x in sections)]) + "\n"


def docstring(text: str) -> Lines:
    """Return the lines of a file's docstring."""
    node = ast.parse(text).body[0]
    return text.splitlines()[: node.end_lineno]


def parted(text: str, imports: dict[str, dict[str, None]]) -> Lines:
    """Return a file's lines after its imports, and add these to `imports`: module -> names.

    What it imports from its own folder is left out, since that stands in the same file.
    """
    nodes = ast.parse(text).body
    last = 1
    for node in nodes:
        if isinstance(node, ast.Import):
            for name in node.names:
                imports.setdefault(f"import {name.name}", {})
        elif isinstance(node, ast.ImportFrom):
            named = {ast.unparse(name): None for name in node.names}
            if not node.level:
                known = {name for names in imports.values() for name in names}
                new = {name: None for name in named if name not in known}
                imports.setdefault(f"from {node.module} import ", {}).update(new)
            elif any(x.asname not in (None, x.name) for x in node.names):
                raise ValueError(f"from .{node.module}: a name of the folder under a new one")
        else:
            continue
        last = node.end_lineno or last
    return text.splitlines()[max(last, len(docstring(text))) :]


def halves(lines: Lines) -> tuple[Lines, Lines]:
    """Split the lines of a first file after its declaration, `STAGE = Stage(...)`."""
    end = lines.index(")", lines.index("STAGE = Stage(")) + 1
    return lines[:end], lines[end:]


def written(imports: dict[str, dict[str, None]]) -> Lines:
    """Return the imports as lines: Python's own, others', then ours."""
    groups: dict[int, Lines] = {0: [], 1: [], 2: []}
    for start in sorted(imports, key=lambda x: (x.startswith("from"), x)):
        names = sorted(imports[start], key=lambda x: (not x.isupper(), x.islower(), x))
        module = start.split()[1].split(".")[0]
        group = 2 if module == "stages" else int(module not in sys.stdlib_module_names)
        if names or start.startswith("import"):
            groups[group] += wrapped(start, names)
    return "\n\n".join("\n".join(lines) for lines in groups.values() if lines).splitlines()


def wrapped(start: str, names: Sequence[str]) -> Lines:
    """Return an import in one line, or with a line for each name where it is too long."""
    line = start + ", ".join(names)
    if len(line) <= 100:
        return [line]
    return [f"{start}(", *(f"    {name}," for name in names), ")"]
