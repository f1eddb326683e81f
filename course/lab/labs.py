"""The labs: their stubs, and what labs.toml says of them."""

import importlib.util
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from course.lab import gaps
from course.lab.one_file import one_file
from harness.records.code import files_of, first_file, label, twin_file

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
STUBS = ROOT / "stubs"  # in an exported copy
TWIN = 5  # the stage whose lab may be written in torch, for a CPU: stages/cpu/


def in_torch(stage: int) -> bool:
    """Whether a stage's lab is written in torch here: its kernel needs Triton, which isn't here."""
    return stage == TWIN and importlib.util.find_spec("triton") is None


class NoLab(Exception):
    """Raised where there is no such lab or a file is in the way; the message says what to do."""


def about() -> dict[int, dict[str, Any]]:
    """Return for each stage its goal, its minutes by size, and each step's question and idea."""
    return {
        int(stage): said
        for stage, said in tomllib.loads((HERE / "labs.toml").read_text(encoding="utf-8")).items()
    }


def handed_in(stage: int) -> tuple[str, ...]:
    """Return the names of the files that a student hands in, in a folder; () for one .py file."""
    return tuple(about()[stage].get("files", ()))


def source(stage: int, twin: bool = False) -> Path:
    """Return the first file of a lab's solution; an exported copy may lack it."""
    if twin and stage != TWIN:
        raise NoLab(
            f"--cpu: stage {stage} has no lab in torch for a CPU, only stage {TWIN} has one"
        )
    try:
        return twin_file(stage) if twin else first_file(stage)
    except KeyError:
        return ROOT / "stages" / f"s{stage:02d}"


def solution(stage: int, twin: bool = False) -> dict[str, str]:
    """Return what a student would hand in, by file name; {} in an exported copy that lacks it."""
    first = source(stage, twin)
    if not first.is_file():
        return {}
    if named := handed_in(stage):
        files = {path.name: path for path in files_of(stage)}
        return {name: files[name].read_text(encoding="utf-8") for name in named}
    text = first.read_text(encoding="utf-8") if twin else one_file(stage)
    return {f"{label(first).removesuffix('.py')}.py": text}


def stubs(stage: int, size: str, twin: bool = False) -> dict[str, str]:
    """Return a stub's files by name: one .py file, or those handed in. Raises NoLab without any."""
    files = {name: gaps.stub(x, size) for name, x in solution(stage, twin).items()}
    if not files:
        kept = sorted((STUBS / place(stage, size, twin)).glob("*"))
        files = {each.name: each.read_text(encoding="utf-8") for each in kept}
    if not files:
        raise NoLab(f"stage {stage}: neither its file nor a stub is here; get a whole checkout")
    return files


def place(stage: int, size: str, twin: bool) -> str:
    """Return the folder of a stub in an exported copy."""
    return f"{stage}-{size}{'-cpu' if twin else ''}"


def start(stage: int, to: Path, size: str, twin: bool) -> None:
    """Write a stub to the file `to`, or to the folder. Never overwrites: raises NoLab."""
    files, folder = stubs(stage, size, twin), handed_in(stage)
    try:
        if folder:
            to.mkdir(parents=True)
        else:
            to.parent.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with (to / name if folder else to).open("x", encoding="utf-8") as file:
                file.write(text)
    except FileExistsError:
        raise NoLab(f"{to}: is there already, and is not overwritten: --to names another") from None


def hints(stage: int, level: int, twin: bool = False) -> Iterator[str]:
    """Yield a hint for each step, from a question (level 1) to nearly the line (3).

    Raises NoLab where an exported copy has no stub of the stage, or lacks its lines for level 3.
    """
    whole = solution(stage, twin)
    if level == 3 and not whole:
        raise NoLab("--level: this copy lacks the lines that level 3 is made from: take 1 or 2")
    files = whole or stubs(stage, "small", twin)
    for gap in gaps.find("".join(files.values()), "small"):
        hint = gap.nearly() if level == 3 else f"    {about()[stage][gap.name][level - 1]}"
        yield f"{gap.name}: {gap.says}\n{hint}"
