"""Where modules are looked for: never in the current folder before Python's own library.

There a user's copy.py would be imported in place of Python's copy, by the judge as well. Nothing is
imported here that a file in that folder could replace.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
LIBRARY = os.path.dirname(os.__file__)  # noqa: PTH120


def without_here(path: Sequence[str]) -> list[str]:
    """Return `path` without the current folder, where that comes before Python's library.

    It does by `python -m`, and by an empty entry of PYTHONPATH (as in PYTHONPATH=$PYTHONPATH:x).
    Other folders of PYTHONPATH stay.
    """
    end = path.index(LIBRARY) if LIBRARY in path else len(path)
    return [entry for entry in path[:end] if not is_here(entry)] + list(path[end:])


def is_here(entry: str) -> bool:
    """Whether an entry of sys.path is the current folder."""
    try:
        return entry == "" or os.path.samefile(entry, os.getcwd())  # noqa: PTH109, PTH121
    except OSError:
        return False


def leave_here() -> None:
    """Take the current folder out of this process's sys.path, as `without_here` does.

    A checkout of the ladder that is not installed goes to the end instead, or before another one.
    """
    before = list(sys.path)
    sys.path[:] = without_here(before)
    if sys.path == before or not is_here(ROOT):
        return
    found = importlib.util.find_spec("ladder")
    if found is None:
        sys.path.append(ROOT)
    elif found.origin is None or not found.origin.startswith(ROOT):
        sys.path.insert(sys.path.index(LIBRARY) + 1, ROOT)
