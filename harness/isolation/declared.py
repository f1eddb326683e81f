"""Read the declaration of a built-in stage or peer from its file without running it.

A file declares its stage once, by `STAGE = Stage(...)` (stages/contract.py). Importing the file
imports torch, which takes seconds; names and titles can be read from the text of that call.
"""

import ast
from pathlib import Path
from typing import Any


def read_declared(path: Path) -> dict[str, Any]:
    """The keyword arguments of `STAGE = Stage(...)` in the file `path`, without defaults.

    Raises ValueError where there is no such call, or its values are not literals.
    """
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if ast.unparse(node).startswith("STAGE = Stage(") and isinstance(node, ast.Assign):
            call = node.value
            if isinstance(call, ast.Call) and not call.args:
                return {
                    each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg
                }
    raise ValueError(f"{path.name}: no STAGE = Stage(...) with keywords in it")
