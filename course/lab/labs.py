"""The labs: their stubs, what labs.toml says of them, and a copy of the checkout to hand out."""

import ast
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from course.lab import gaps
from course.lab.cpp import FILES
from harness.isolation.roster import built_in_files
from harness.problems.problem import YARDSTICK

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
STUBS = ROOT / "stubs"  # in an exported copy
NUMPY = HERE / "numpy_online.py"  # stage 5 for machines without Triton
# these hold lines of stages, or answers
TELLING = ("tests/", "tools/", "docs/lecturer.md", "results/cpu/pitfalls")
LINK = re.compile(r"\[([^][]*)\]\(([^)#:\s]+\.(?:md|py|ipynb))(?:#[^)\s]*)?\)")  # its words, file
TRAIN_TEXT = "harness/data/train_text.txt"  # this project's own sources, as a text to learn


class NoLab(Exception):
    """Raised where there is no such lab or a file is in the way; the message says what to do."""


def about() -> dict[int, dict[str, Any]]:
    """Return for each stage its goal, its minutes by size, and each step's question and idea."""
    return {
        int(stage): said
        for stage, said in tomllib.loads((HERE / "labs.toml").read_text(encoding="utf-8")).items()
    }


def source(stage: int, numpy: bool = False) -> Path:
    """Return the path of the file with a stage's gaps; an exported copy may lack it."""
    if numpy and stage != 5:
        raise NoLab(f"--numpy: stage {stage} has no NumPy twin, only stage 5 has one")
    if stage == 2:
        return ROOT / "csrc" / FILES[0]
    found = (path for path in built_in_files() if int(path.stem[1:3]) == stage)
    return NUMPY if numpy else next(found, ROOT / "stages" / f"s{stage:02d}")


def stubs(stage: int, size: str, numpy: bool = False) -> dict[str, str]:
    """Return a stub's files by name: one, but two for stage 2. Raises NoLab where there is none."""
    path = source(stage, numpy)
    if path.is_file():
        files = {path.name: gaps.stub(path.read_text(encoding="utf-8"), size)}
    else:
        kept = sorted((STUBS / place(stage, size, numpy)).glob("*"))
        files = {each.name: each.read_text(encoding="utf-8") for each in kept}
    if not files:
        raise NoLab(f"stage {stage}: neither its file nor a stub is here; get a whole checkout")
    if stage == 2:
        files[FILES[1]] = (ROOT / "csrc" / FILES[1]).read_text(encoding="utf-8")
    return files


def place(stage: int, size: str, numpy: bool) -> str:
    """Return the folder of a stub in an exported copy."""
    return f"{stage}-{size}{'-numpy' if numpy else ''}"


def start(stage: int, to: Path, size: str, numpy: bool) -> None:
    """Write a stub to the file `to`, for stage 2 to the folder. Never overwrites: raises NoLab."""
    files = stubs(stage, size, numpy)
    try:
        if stage == 2:
            to.mkdir(parents=True)
        else:
            to.parent.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with (to / name if stage == 2 else to).open("x", encoding="utf-8") as file:
                file.write(text)
    except FileExistsError:
        raise NoLab(f"{to}: is there already, and is not overwritten: --to names another") from None


def hints(stage: int, level: int, numpy: bool = False) -> Iterator[str]:
    """Yield a hint for each step, from a question (level 1) to nearly the line (3).

    Raises NoLab where an exported copy has no stub of the stage, or lacks its lines for level 3.
    """
    path = source(stage, numpy)
    whole = path.is_file()
    if level == 3 and not whole:
        raise NoLab("--level: this copy lacks the lines that level 3 is made from: take 1 or 2")
    files = {path.name: path.read_text("utf-8")} if whole else stubs(stage, "small", numpy)
    for gap in gaps.find("".join(files.values()), "small"):
        hint = gap.nearly() if level == 3 else f"    {about()[stage][gap.name][level - 1]}"
        yield f"{gap.name}: {gap.says}\n{hint}"


def export(to: Path, last: int) -> None:
    """Copy the tracked files to the new folder `to`, without what gives away stages above `last`.

    Raises NoLab where `to` is there already, or git can't say which files are tracked.
    """
    if to.exists():
        raise NoLab(f"{to}: is there already; name a new folder")
    done = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True)
    if done.returncode:
        raise NoLab("export: git does not know this checkout's files: clone the repository")
    kept: list[str] = []
    dropped: list[str] = []
    for name in filter(None, done.stdout.decode().split("\0")):
        (dropped if tells(name, last) else kept).append(name)
    stub_of = [source(last + 1).relative_to(ROOT).as_posix()] if last + 1 in about() else []
    while unused := parts(kept) - {x for name in (*kept, *stub_of) for x in imported(name)}:
        kept = [name for name in kept if name not in unused]  # only stages above import them
        dropped += sorted(unused)
    for name in kept:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, to / name)
    lines = [
        {line for name in names if name.startswith("stages/") for line in lines_of(ROOT / name)}
        for names in (kept, dropped)
    ]
    text = lines_of(ROOT / TRAIN_TEXT)
    shown = [line for line in text if line in lines[0] or line not in lines[1]]
    (to / TRAIN_TEXT).write_text("\n".join(shown) + "\n", encoding="utf-8")
    for page in (to / "docs" / "walkthrough").glob("[0-9]*-*.md"):
        if int(page.name.split("-")[0]) > last:  # questions stay, answers go
            asked = page.read_text(encoding="utf-8").split("\n## Read\n")[0]
            asked = re.sub(r"<details>.*?</details>\n*", "", asked, flags=re.S)
            page.write_text(asked.rstrip() + "\n", encoding="utf-8")
    for page in (*to.rglob("*.md"), *(to / "notebooks").glob("*.*")):
        page.write_text(without_dead_links(page), encoding="utf-8")
    if last < 2:  # nothing to compile
        rules = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8").splitlines()[:2]
        (to / "CMakeLists.txt").write_text("\n".join(rules) + "\n", encoding="utf-8")
    for size in gaps.KINDS if last + 1 in about() else ():  # a later stub would give this one away
        for numpy in (False, True)[: 1 + (last + 1 == 5)]:
            for name, stub in stubs(last + 1, size, numpy).items():
                path = to / STUBS.name / place(last + 1, size, numpy) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(stub, encoding="utf-8")


def without_dead_links(page: Path) -> str:
    """Return a page's text; of each link to a file that is not there only the words are left."""

    def link(found: re.Match[str]) -> str:
        return found[0 if (page.parent / found[2]).exists() else 1]

    return LINK.sub(link, page.read_text(encoding="utf-8"))


def lines_of(path: Path) -> list[str]:
    """Return the lines of a text file."""
    return path.read_text(encoding="utf-8").splitlines()


def parts(names: list[str]) -> set[str]:
    """Return those of `names` that are modules of stages/, but no stages."""
    return {x for x in names if re.fullmatch(r"stages/(?!s\d\d_|__)\w+\.py", x)}


def imported(name: str) -> set[str]:
    """Return the files that a file of the checkout may import from."""
    if not name.endswith(".py"):
        return set()
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
    froms = [x for x in ast.walk(tree) if isinstance(x, ast.ImportFrom)]
    named = {f"{x.module}{name}" for x in froms for name in ("", *(f".{y.name}" for y in x.names))}
    return {f"{name.replace('.', '/')}.py" for name in named}


def tells(name: str, last: int) -> bool:
    """Whether a file of the checkout gives a stage above `last` away.

    Stage 3 stays: all others are judged by it.
    """
    if name.startswith(("stages/s02", f"stages/s{YARDSTICK:02d}")):  # of 2: the way into Python
        return False
    upper = re.match(r"(?:stages/s|notebooks/\d\d_to_)(\d\d)", name)
    return (
        name.startswith(TELLING)
        or bool(upper and int(upper[1]) > last)
        or (name == f"csrc/{FILES[0]}" and last < 2)
        or (name == NUMPY.relative_to(ROOT).as_posix() and last < 5)
    )
