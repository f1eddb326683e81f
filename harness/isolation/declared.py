"""What a built-in stage or peer declares of itself, read from its file without running it.

A file declares itself once, by `STAGE = Stage(...)` (stages/contract.py); importing it imports
torch, which takes seconds. Whoever wants names and titles alone reads the call's own text.
"""

import ast
from pathlib import Path
from typing import Any


def read_declared(path: Path) -> dict[str, Any]:
    """The keywords of the `STAGE = Stage(...)` in the file `path`; defaults are left out.

    Raises ValueError where there is none, or its values are not literals.
    """
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if ast.unparse(node).startswith("STAGE = Stage(") and isinstance(node, ast.Assign):
            call = node.value
            if isinstance(call, ast.Call) and not call.args:
                return {
                    each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg
                }
    raise ValueError(f"{path.name}: no STAGE = Stage(...) with keywords in it")
