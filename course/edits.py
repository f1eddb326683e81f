"""Replace text that is found exactly once: how mutants, variants and known mistakes are made.

A wrong stage is the shipped one with some text replaced. Since each text must be there once, the
mistake can't fall behind the stage unnoticed, and what is replaced is all that differs.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from harness.records.code import FIRST, files_of, label

Changes = Iterable[Sequence[str]]  # (old, new) each


def replace_once(text: str, old: str, new: str, where: str) -> str:
    """Return `text` with `new` in the place of `old`.

    Raises ValueError where `old` isn't found exactly once; the message begins with `where`.
    """
    return replace_in({"": text}, old, new, where)[""]


def replace_each(text: str, changes: Changes, where: str) -> str:
    """Return `text` after each of `changes`, one after another, as `replace_once`."""
    for old, new in changes:
        text = replace_once(text, old, new, where)
    return text


def replace_in(texts: Mapping[str, str], old: str, new: str, where: str) -> dict[str, str]:
    """Return name -> text with `new` in the place of `old`, which is found once in all `texts`.

    Raises ValueError, as `replace_once`.
    """
    if (found := sum(text.count(old) for text in texts.values())) != 1:
        files = f" in {', '.join(texts)}" if len(texts) > 1 else ""
        raise ValueError(f"{where}: found {found} times{files}, expected once: {old!r}")
    return {name: text.replace(old, new) for name, text in texts.items()}


def texts_of(stage: int | Path) -> dict[str, str]:
    """Return the name and text of each file of a stage; of a stage in one file, of that file."""
    first, *others = files_of(stage)
    files = [first, *others] if first.name == FIRST else [first]
    return {path.name: path.read_text(encoding="utf-8") for path in files}


def changed(stage: int | Path, changes: Changes, name: str = "") -> dict[str, str]:
    """Return file name -> text of a stage with `changes`, each old text found once in all files.

    Raises ValueError, which begins with the stage's file or folder, and `name`, where one isn't.
    """
    texts, where = texts_of(stage), label(files_of(stage)[0])
    for old, new in changes:
        texts = replace_in(texts, old, new, f"{where}: {name}" if name else where)
    return texts


def write_changed(stage: int | Path, changes: Changes, folder: Path, name: str) -> Path:
    """Write a stage with `changes` as `name` in `folder`; return the path, for `stages.load`.

    Raises what `changed` does.
    """
    return write_texts(stage, changed(stage, changes, name), folder, name)


def write_texts(stage: int | Path, texts: Mapping[str, str], folder: Path, name: str) -> Path:
    """Write `texts`, made from those of a stage, as `name` in `folder`; return the path.

    A stage in one file becomes a file, one in a folder a folder whose files import each other.
    """
    if FIRST not in texts:
        [text] = texts.values()
        path = folder / f"{name}.py"
        path.write_text(text, encoding="utf-8")
        return path
    (folder / name).mkdir(exist_ok=True)
    own = rf"^from stages\.{label(files_of(stage)[0])}(?:(\.)| (?=import ))"
    for file, text in texts.items():
        text = re.sub(own, lambda found: "from ." if found[1] else "from . ", text, flags=re.M)
        (folder / name / file).write_text(text, encoding="utf-8")
    return folder / name
