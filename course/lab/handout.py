"""`ladder lab export`: a copy of the checkout to hand out, whose pages promise what it holds.

`belongs` decides which files are in a copy; what its pages say follows from these files.
"""

import ast
import functools
import re
import shutil
from collections.abc import Collection
from pathlib import Path
from string import Template

from course.lab import gaps
from course.lab.cpp import STAGE_2
from course.lab.labs import HERE, ROOT, STUBS, TWIN, NoLab, about, handed_in, place, stubs
from harness.problems.problem import PEERS_FROM, YARDSTICK
from harness.records.code import files_of
from harness.records.environment import tracked

PACKAGES = ("stages/", "harness/", "attention_ladder/", "course/", "ladder/")
TOP = (
    "Makefile", "pyproject.toml", "constraints.txt", "CMakeLists.txt", "LICENSE", "CITATION.cff",
    "README.md", ".gitignore", ".editorconfig", ".devcontainer/", "csrc/",
)  # fmt: skip
# pages of docs/, each with the stage that it is about, if it is about one
PAGES = dict.fromkeys(
    ("installing", "primer", "glossary", "lab", "measuring", "memory", "profiling", "commands",
     "walkthrough/index"), 0,
) | {"flash2": 6, "training": 7}  # fmt: skip
TESTS = ("conftest", "stages/conftest", "stages/stage_checks", "stages/test_handout")
RECORDS = "results/"  # notebooks show them
ANSWERS = "results/cpu/pitfalls"  # this record holds lines of stages
FIRST_ON_A_GPU = 5
CODE = ("stages/", "csrc/")  # where the stages' own code is
TRAIN_TEXT = "harness/data/train_text.txt"  # this project's own sources, as a text to learn
# a link's words, file and heading
LINK = re.compile(r"\[([^][]*)\]\(([^)#:\s]+\.(?:md|py|ipynb|html)|(?=#))(?:#([^)\s]*))?\)")
TO_WRITE = re.compile(r"<!-- to write -->\n(.*?)<!-- end -->\n+", re.S)  # of TEMPLATE
WHOLE = re.compile(r"<!-- not in a handout -->\n.*?<!-- end -->\n+", re.S)
TEMPLATE = HERE / "handout.md"  # of the first page
PICTURE = re.compile(r"figures/([\w.-]+)")
# a command in a sentence, with the brackets that it may stand in
INLINE = re.compile(r"( \(`|`)((?:\.venv/bin/)?ladder [^`]*)(`\)?)")
# in a call: the stages to run or compare, and the stage of a lab
NAMED = re.compile(r"(--stages?) (\d[\w,]*)|(?<=ladder )diff (\d) (\d)")
LAB = re.compile(r"(?<=lab start )\d|(?<=lab hint )\d|(?<=mine_)\d(?=\.py)")
NEEDS_ALL = re.compile(r"ladder (lab export|readme|figures|report|ring)\b")  # a copy can't


def belongs(name: str, last: int) -> bool:
    """Whether a file of the checkout is in a copy with the stages up to `last`.

    Stage 3 is in each: all others are judged by it. Of docs/figures, what its pages show.
    """
    upper = re.match(r"(?:stages/(?:cpu/)?s|notebooks/\d\d_to_|docs/walkthrough/)(\d+)", name)
    if upper:
        lower = re.match(r"notebooks/(\d\d)_to", name)
        number = int(upper[1])
        page = name.startswith("docs/") and number in about()  # of the next stage: its questions
        return number <= last + page or (number == YARDSTICK and not lower)
    if name.startswith("notebooks/"):  # the overview shows every stage
        return name.startswith("notebooks/primer")
    if name.startswith("docs/"):
        return PAGES.get(name.removeprefix("docs/").removesuffix(".md"), last + 1) <= last
    if name.startswith("tests/"):
        return name.removeprefix("tests/").removesuffix(".py") in TESTS
    if name.startswith("csrc/"):
        return last >= 2
    if name.startswith("harness/peers/ranks/"):  # they import stage 10
        return last >= 10
    if name.startswith("course/emulator/"):  # of what stage 9 is written for
        return last >= 8
    if name == TEMPLATE.relative_to(ROOT).as_posix():
        return False
    return name.startswith((*PACKAGES, *TOP, RECORDS)) and not name.startswith(ANSWERS)


def export(to: Path, last: int) -> None:
    """Copy the checkout to the new folder `to`, without what gives away stages above `last`.

    Raises NoLab where `to` is there already, or git can't say which files are tracked.
    """
    if to.exists():
        raise NoLab(f"{to}: is there already; name a new folder")
    own = tracked()
    if own is None:
        raise NoLab("export: git does not know this checkout's files: clone the repository")
    names = sorted(path.relative_to(ROOT).as_posix() for path in own if path.is_file())
    kept = [name for name in names if belongs(name, last)]
    following = last + 1 if last + 1 in about() else None
    stub_of = [x.relative_to(ROOT).as_posix() for x in files_of(following)] if following else []
    peers = [name for name in kept if name.startswith("harness/peers/")]
    while unused := parts(kept) - {
        x for name in {*kept, *stub_of} - {*peers} for x in imported(name)
    }:
        kept = [name for name in kept if name not in unused]  # nothing that is kept imports them
    gone = {*names} - {*kept}
    kept = [name for name in kept if name not in peers or not imported(name) & gone]
    for name in kept:
        copy(ROOT / name, to / name)
    if following and handed_in(following):  # the lab's way into Python; the stage can't run yet
        copy(STAGE_2, to / STUBS.name / STAGE_2.name)
    if last < 2:  # nothing to compile
        rules = lines_of(ROOT / "CMakeLists.txt")[:2]
        (to / "CMakeLists.txt").write_text("\n".join(rules) + "\n", encoding="utf-8")
    for size in gaps.KINDS if following else ():  # a later stub would give this one away
        for twin in (False, True)[: 1 + (following == TWIN)]:
            for name, stub in stubs(last + 1, size, twin).items():
                write(to / STUBS.name / place(last + 1, size, twin) / name, stub)
    shown = {name for name in kept if name.startswith(CODE)}
    above = {x for name in {*names} - {*kept} if name.startswith(CODE)
             for x in lines_of(ROOT / name)}  # fmt: skip
    here = {line for name in shown for line in lines_of(ROOT / name)}
    text = [line for line in lines_of(ROOT / TRAIN_TEXT) if line in here or line not in above]
    write(to / TRAIN_TEXT, "\n".join(text) + "\n")
    write_pages(to, last, following)


def write_pages(to: Path, last: int, following: int | None) -> None:
    """Make the pages and notebooks of the copy in `to` say what it holds, and nothing else."""
    there = stages_in(to)
    write(to / "README.md", readme(to, there, following))
    for page in (to / "docs" / "walkthrough").glob("[0-9]*-*.md"):
        if following == int(page.name.split("-")[0]):  # questions stay, answers go
            asked = page.read_text(encoding="utf-8").split("\n## Read\n")[0]
            asked = re.sub(r"<details>.*?</details>\n*", "", asked, flags=re.S)
            page.write_text(asked.rstrip() + "\n", encoding="utf-8")
    pictures = set()
    for page in sorted(to.rglob("*.md")):
        text = true_here(page.read_text(encoding="utf-8"), page.parent, there, following)
        write(page, without_dead_links(text, page.parent))
        pictures |= {*PICTURE.findall(text)}
    for page in (to / "notebooks").glob("*.*"):
        text = page.read_text(encoding="utf-8")
        write(page, without_dead_links(text, page.parent))
        pictures |= {*PICTURE.findall(text)}
    for name in sorted(pictures):
        copy(ROOT / "docs" / "figures" / name, to / "docs" / "figures" / name)
    rules = (ROOT / "Makefile").read_text(encoding="utf-8")
    write(to / "Makefile", re.sub(r"# not in a handout\n.*?# end\n+", "", rules, flags=re.S))


def stages_in(copy: Path) -> set[int]:
    """Return the numbers of the stages that a copy holds."""
    return {int(path.name[1:3]) for path in (copy / "stages").glob("s[0-9][0-9]_*")}


def readme(to: Path, there: Collection[int], following: int | None) -> str:
    """The copy's first page, with the table of all stages."""
    whole = (ROOT / "README.md").read_text(encoding="utf-8")
    stages = whole.partition("<!-- begin ladder -->\n")[2].partition("<!-- end ladder -->")[0]
    stages = re.sub(r"\[Sizes\]\([^)]*\); \[h", "[H", stages)  # on a page that is not there
    top = max(there) if following is None else following - 1
    if top < FIRST_ON_A_GPU:  # whose gain is the first that a GPU's record shows
        stages = re.sub(r"Measured on: NVIDIA .*\n+", "", stages)
    kept = f"stages 0 to {top}" if top else "stage 0"
    if top < YARDSTICK:
        kept += f" are here, and stage {YARDSTICK}, by which all others are judged"
        kept = kept if top else kept.replace("stage 0 are", "stage 0 is", 1)
    else:
        kept += " are here"
    books = ", ".join(
        f"[{path.stem.replace('_', ' ')}](notebooks/{path.name})"
        for path in sorted((to / "notebooks").glob("*.ipynb"))
    )
    text = TEMPLATE.read_text(encoding="utf-8")
    if following is None:
        return TO_WRITE.sub("", Template(text).safe_substitute(
            kept=kept, stages=stages, notebooks=books))  # fmt: skip
    page = next((to / "docs" / "walkthrough").glob(f"{following}-*.md")).name
    return TO_WRITE.sub(r"\1", Template(text).substitute(
        kept=kept, stages=stages, notebooks=books, stage=following, page=page,
        goal=about()[following]["goal"], file=f"mine_{following}" + ".py" * (following != 2),
    ))  # fmt: skip


def true_here(text: str, folder: Path, there: Collection[int], following: int | None) -> str:
    """Return a page's text without the rows, items and commands that the copy has nothing for.

    folder: the page's; there: the stages of the copy; following: the one to be written.
    """

    def inline(found: re.Match[str]) -> str:
        now = command_here(found[2], there, following)
        aside = (found[1], found[3]) == (" (`", "`)")
        return "" if aside and now is None else f"{found[1]}{now or found[2]}{found[3]}"

    lines, in_code, of_stages = [], False, False
    for line in WHOLE.sub("", text).splitlines():
        if line.lstrip().startswith("```"):
            in_code = not in_code and line.strip() == "```sh"
        elif in_code:
            command, gap, comment = line.partition("  ")
            now = command_here(command, there, following)
            if now is None:
                continue
            line = line if now == command else now + (gap + comment) * ("mine" not in now)
        else:
            of_stages = line.startswith("| stage |") or (of_stages and line.startswith("|"))
            number = re.match(r"\| (\d+) ", line) if of_stages else None
            if number and int(number[1]) not in {*there, following}:
                continue
            first = re.match(r"(?:\||[-*]|\d+\.) \[[^]]*\]\(([^)#:\s]+)[^)]*\)", line)
            if first and not (folder / first[1]).exists():
                continue
            line = INLINE.sub(inline, line)
        lines.append(line)
    return "\n".join(lines).replace("```sh\n```\n", "") + "\n"


def command_here(command: str, there: Collection[int], following: int | None) -> str | None:
    """Return a command as it works in the copy: without absent stages; None where it doesn't."""
    if NEEDS_ALL.search(command):
        return None
    labs = {*there, following}
    for number in map(int, LAB.findall(command)):
        if number not in labs:
            if following is None or "--cpu" in command:
                return None
            command = LAB.sub(str(following), command).replace(".py", ".py" * (following != 2))
    dead = False

    def named(found: re.Match[str]) -> str:
        nonlocal dead
        asked = (found[2] or f"{found[3]},{found[4]}").split(",")
        kept = [x for x in asked if not x.isdigit() or int(x) in there or int(x) >= PEERS_FROM]
        dead = dead or not kept or (found[1] is None and kept != asked)
        return found[0] if kept == asked else f"{found[1]} {','.join(kept)}"

    command = NAMED.sub(named, command)
    return None if dead else command


def without_dead_links(text: str, folder: Path) -> str:
    """Return a page's text; of each link to a file that is not there only the words are left."""

    def link(found: re.Match[str]) -> str:
        path = folder / found[2] if found[2] else None
        if not found[3]:
            return found[0 if path is None or path.exists() else 1]
        there = text if path is None else path.read_text(encoding="utf-8") if path.exists() else ""
        return found[0 if found[3] in headings(there) else 1]

    return LINK.sub(link, text)


def headings(text: str) -> set[str]:
    """Return the headings of a page's text, as a link names them."""
    found = re.findall(r"^#+ +(.+)$", text, re.M)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in found)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def copy(path: Path, to: Path) -> None:
    """Copy a file; folders are made as needed."""
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, to)


def write(path: Path, text: str) -> None:
    """Write a text file; folders are made as needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def lines_of(path: Path) -> list[str]:
    """Return the lines of a text file."""
    return path.read_text(encoding="utf-8").splitlines()


def parts(names: list[str]) -> set[str]:
    """Return those of `names` that are modules of stages/, but no stages."""
    return {x for x in names if re.fullmatch(r"stages/common/(?!__)\w+\.py", x)}


@functools.cache
def imported(name: str) -> frozenset[str]:
    """Return the modules of stages/ that a file of the checkout imports from: their files."""
    text = (ROOT / name).read_text(encoding="utf-8") if name.endswith(".py") else ""
    if "from stages" not in text:
        return frozenset()
    froms = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.ImportFrom)]
    named = {f"{x.module}{name}" for x in froms for name in ("", *(f".{y.name}" for y in x.names))}
    return frozenset(f"{name.replace('.', '/')}.py" for name in named)
