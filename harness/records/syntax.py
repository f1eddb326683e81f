"""A digest of the code in a stage's file, without comments, docstrings, messages and layout.

A record is stale when the code of its stage was edited after it was measured. Edits of text for
people, such as a docstring or the stage's title, make no record stale.
"""

import ast
import functools
import hashlib
import subprocess
from pathlib import Path
from typing import Any

WORDS = ("title", "idea", "still_hurts")  # of STAGE = Stage(...): text for people


@functools.cache
def digest(text: str | bytes) -> str:
    """The SHA-256 of a Python file's syntax tree without docstrings and messages, in hexadecimal.

    Bytes are decoded as Python does. Written out by `plain`, since ast.dump differs between Python
    versions. Raises SyntaxError where `text` is not Python.
    """
    return hashlib.sha256(repr(plain(ast.parse(text))).encode("utf-8", "replace")).hexdigest()


def plain(node: Any) -> Any:
    """A syntax node as nested lists: its kind, and its fields that are not empty."""
    if isinstance(node, list):
        return [plain(item) for item in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        return ["Raise", plain(node.exc.func)]  # an error's message is no code
    found: list[Any] = [type(node).__name__]
    for name, value in ast.iter_fields(node):
        if name == "body" and holds_docstring(node):
            value = value[1:]
        if name == "keywords" and getattr(getattr(node, "func", None), "id", "") == "Stage":
            value = [
                x for x in value if x.arg not in WORDS or not isinstance(x.value, ast.Constant)
            ]
        if isinstance(node, ast.JoinedStr):  # some Pythons end an f-string with an empty text
            value = [part for part in value if getattr(part, "value", None) != ""]
        if value not in (None, []):
            found += [name, plain(value)]
    return found


def holds_docstring(node: ast.AST) -> bool:
    """Whether the first statement of a module, class or function is its docstring."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None


@functools.cache
def digest_of_version(path: Path, sha256: str) -> str | None:
    """The digest of the version of the file `path` whose bytes have this SHA-256.

    For old records, which have a hash of the file's bytes only. The version is the present file, or
    is looked up in its git history; None where it isn't found, or there is no git.
    """
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() == sha256:
        return digest(data)
    git = ["git", "-C", str(path.parent)]
    try:
        log = subprocess.run(
            [*git, "log", "--format=%H", "--", path.name], capture_output=True, check=True
        )
        for commit in log.stdout.decode().split():
            shown = subprocess.run([*git, "show", f"{commit}:./{path.name}"], capture_output=True)
            if hashlib.sha256(shown.stdout).hexdigest() == sha256:
                return digest(shown.stdout)
    except (OSError, subprocess.CalledProcessError):
        pass
    return None
