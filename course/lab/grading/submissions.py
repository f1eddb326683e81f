"""Which files are submissions, and whose: as they lie in a folder, or as Moodle or Canvas exports.

Moodle: a folder `Jane Doe_123_assignsubmission_file_` for each student (older and newer ones lack
the last _), or, downloaded without folders, a file `Jane Doe_123_assignsubmission_file_mine.py`;
123 is the number in the grading worksheet's "Participant 123". Canvas: a file
`doejane_LATE_123_456_mine-1.py`: the student's ID in the gradebook, the file's number, its name.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from course.lab import cpp, labs
from harness.records.units import clean

LONGEST_NAME = 220  # bytes of a submission's name: no file's may have more than 255
FORMULA = ("=", "+", "-", "@")  # a spreadsheet computes a text that begins so
SUFFIXES = (".py", *{Path(name).suffix for name in cpp.FILES})
SKIPPED = (".", "__")  # begin the names of what systems and Python leave in folders

MOODLE, CANVAS = "Moodle", "Canvas"
OF_MOODLE = re.compile(
    r"(?P<who>.+?)(?:_(?P<student>\d+))?_assignsubmission_(?:file|onlinetext)(?:_(?P<file>.*))?"
)
# a student's name has no _ followed by digits and a _; an anonymous one has no number
OF_CANVAS = re.compile(
    r"(?:(?:LATE_)?(?P<anonymous>anon_[^_]+)|(?P<who>.+?)(?:_LATE)?_(?P<student>\d+))"
    r"_\d+_(?P<file>.+)"
)
UPLOADED_AGAIN = re.compile(r"-\d+(?=\.\w+$)")  # what Canvas appends to a file's name


class NotGraded(Exception):
    """Raised where grading is impossible; the message says why, and what to do."""


@dataclass(frozen=True)
class Submission:
    """A submission's name in the table, and its file, for stage 2 its folder.

    who, student: the name and the number of its student in Moodle or Canvas, '' where not known.
    """

    name: str
    path: Path
    who: str = ""
    student: str = ""


@dataclass(frozen=True)
class Found:
    """What lies in a folder: the submissions, why the rest is not graded, and who exported it."""

    folder: Path
    submissions: list[Submission]
    left: list[str]
    origin: str = ""


def chosen(found: Found, only: str | None) -> list[Submission]:
    """Return all submissions, or the one named `only`. Raises NotGraded where there is none."""
    asked = (only, None if only is None else name_of(only))
    kept = [each for each in found.submissions if only is None or each.name in asked]
    if not kept:
        raise NotGraded(f"--only: no submission {only!r} in {found.folder}")
    return kept


@dataclass
class Files:
    """A student's files in an export, by the names that the student gave them."""

    who: str
    student: str
    files: dict[str, list[Path]] = field(default_factory=dict)

    def add(self, name: str, path: Path) -> None:
        self.files.setdefault(name, []).append(path)

    @property
    def name(self) -> str:
        return f"{self.who}_{self.student}" if self.student else self.who


def submissions(folder: Path, stage: int, copies: Path) -> Found:
    """Return the submissions in a folder, or the one named; stage 2's of an export go to `copies`.

    Raises NotGraded where there is none, or two have the same name.
    """
    if folder.suffix == ".zip" and folder.is_file():
        raise NotGraded(f"{folder}: a zip: unpack it, and name the folder")
    wanted = labs.handed_in(stage)
    single = (folder / wanted[0]).is_file() if wanted else folder.is_file()
    if single:
        return Found(folder, [Submission(name_of(folder.name), folder)], [])
    if not folder.is_dir():
        raise NotGraded(f"{folder}: no such file or folder of submissions")
    found = sorted(path for path in folder.iterdir() if not path.name.startswith(SKIPPED))
    taken = [path for path in found if OF_MOODLE.fullmatch(path.name)]
    if taken:
        result = of_students(folder, files_of_moodle(taken), stage, copies, MOODLE)
    else:
        taken = [path for path in found if OF_CANVAS.fullmatch(path.name) and path.is_file()]
        code = {path for path in found if path.suffix in SUFFIXES or path.is_dir()}
        if taken and code <= {*taken}:  # else a name looks like that by chance
            result = of_students(folder, files_of_canvas(taken), stage, copies, CANVAS)
        else:
            taken = [x for x in found if (x.is_dir() if wanted else x.suffix == ".py")]
            result = Found(folder, [Submission(name_of(path.name), path) for path in taken], [])
    if rest := ", ".join(clean(path.name) for path in found if path not in taken):
        result.left.append(f"{rest}: expected {form(stage)} for each submission")
    if not result.submissions:
        why = "".join(f"; {line}" for line in result.left[:3])
        raise NotGraded(f"{folder}: no submission in it; expected {form(stage)} for each{why}")
    for name, other in pairwise(sorted(each.name for each in result.submissions)):
        if name == other:
            raise NotGraded(f"{folder}: two submissions have the name {name!r}: rename one")
    return result


def form(stage: int) -> str:
    """Return what a submission is, in words."""
    wanted = labs.handed_in(stage)
    return f"one folder with {' and '.join(wanted)}" if wanted else "one *.py file"


def files_of_moodle(found: Sequence[Path]) -> list[Files]:
    """Return each student's files, which lie in a folder, at any depth, or have its name."""
    students: dict[str, Files] = {}
    for path in found:
        match = OF_MOODLE.fullmatch(path.name)
        assert match is not None
        who, student = match["who"], match["student"] or ""
        files = students.setdefault(f"{who}_{student}", Files(who, student))
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            inside = file.relative_to(path).parts
            if file.is_file() and not any(part.startswith(SKIPPED) for part in inside):
                files.add(file.name if inside else match["file"] or path.name, file)
    return list(students.values())


def files_of_canvas(found: Sequence[Path]) -> list[Files]:
    """Return each student's files."""
    students: dict[str, Files] = {}
    for path in found:
        match = OF_CANVAS.fullmatch(path.name)
        assert match is not None
        who, student = match["who"] or match["anonymous"], match["student"] or ""
        files = students.setdefault(f"{who}_{student}", Files(who, student))
        files.add(UPLOADED_AGAIN.sub("", match["file"]), path)
    return list(students.values())


def of_students(
    folder: Path, students: Sequence[Files], stage: int, copies: Path, origin: str
) -> Found:
    """Return each student's submission; of one who handed in none, or several, it says so."""
    kept: list[Submission] = []
    left: list[str] = []
    wanted = labs.handed_in(stage)
    for each in students:
        names = wanted or [x for x in each.files if x.endswith(".py")]
        files = [path for name in names for path in each.files.get(name, [])]
        if len(files) != max(1, len(wanted)) or not all(
            len(each.files.get(name, [])) == 1 for name in names
        ):
            listed = ", ".join(path.name for path in files) or ", ".join(each.files) or "no file"
            expected = " and ".join(wanted) or "one .py file"
            left.append(clean(f"{each.name}: {listed}: expected {expected}"))
            continue
        name, [path, *_] = name_of(each.name), files
        if wanted:
            path = copies / str(len(kept)) / name
            path.mkdir(parents=True)
            for file, to in zip(files, cpp.files(path), strict=True):
                shutil.copyfile(file, to)
        kept.append(Submission(name, path, each.who, each.student))
    return Found(folder, kept, left, origin)


def name_of(name: str) -> str:
    """Return a submission's name for its file's: without .py, safe to print and in a spreadsheet.

    Characters that aren't printable, and a first one that begins a formula, become %XX. The end of
    one too long for a report's file becomes a digest of it.
    """
    name = name.removesuffix(".py")
    safe = "".join(
        x if x.isprintable() and not (at == 0 and x in FORMULA)
        else "".join(f"%{byte:02X}" for byte in os.fsencode(x))
        for at, x in enumerate(name)
    )  # fmt: skip
    if len(os.fsencode(safe)) <= LONGEST_NAME:
        return safe
    return f"{safe[:50]}~{hashlib.sha256(os.fsencode(name)).hexdigest()[:12]}"
