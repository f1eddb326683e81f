"""Autograders of one lab for Gradescope (a zip) and GitHub Classroom (a workflow)."""

import json
import shlex
import subprocess
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from course.lab import labs
from course.lab.grading.submissions import NotGraded
from course.lab.labs import ROOT

TEMPLATES = Path(__file__).with_name("templates")
# of the checkout: what grading runs, and what it is installed from
PACKAGES = ("stages", "harness", "attention_ladder", "course", "ladder", "csrc")
FILES = (
    "pyproject.toml", "constraints.txt", "CMakeLists.txt", "Makefile", "README.md", "LICENSE",
)  # fmt: skip
UNUSED = ("harness/data/",)  # what no check reads
SETTINGS = "settings.json"


@dataclass(frozen=True)
class Settings:
    """What an assignment's autograder asks for; the seed is the same for all its submissions."""

    stage: int
    seed: int
    budget: float
    memory: str
    twin: bool

    @property
    def files(self) -> list[str]:
        """The names of what a student hands in; those of a Python file are up to the student."""
        return [*labs.handed_in(self.stage)] or [f"mine_{self.stage}.py"]

    def told(self) -> dict[str, list[str]]:
        """Return what a run is told besides: its options, and the files of a folder, if any."""
        return {"options": self.options(), "folder": [*labs.handed_in(self.stage)]}

    def options(self) -> list[str]:
        """Return the options of `ladder lab grade`."""
        given = [f"--stage={self.stage}", f"--seed={self.seed}", f"--budget={self.budget:g}"]
        return [*given, f"--memory={self.memory}", *(["--cpu"] if self.twin else [])]


def write(to: Path, settings: Settings, points: Path | None) -> None:
    """Write Gradescope's zip: setup.sh, run_autograder, the settings, and what they need of here.

    Raises NotGraded where git can't say which files are tracked.
    """
    with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as made:
        for name in ("setup.sh", "run_autograder.py"):
            data = (TEMPLATES / name).read_bytes()
            add(made, name.removesuffix(".py"), data, executable=True)
        add(made, SETTINGS, json.dumps(asdict(settings) | settings.told()).encode())
        if points is not None:
            add(made, "points.toml", points.read_bytes())
        for name in needed():
            add(made, f"ladder/{name}", (ROOT / name).read_bytes())


def needed() -> Iterator[str]:
    """Yield the checkout's tracked files that grading needs."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", *PACKAGES, *FILES], capture_output=True
    )
    if done.returncode:
        raise NotGraded("autograder: git does not know this checkout's files: clone the repository")
    for name in filter(None, done.stdout.decode().split("\0")):
        if not name.startswith(UNUSED):
            yield name


def add(made: zipfile.ZipFile, name: str, data: bytes, executable: bool = False) -> None:
    """Add a file to a zip: the same bytes whenever it is made."""
    info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    info.compress_type = zipfile.ZIP_DEFLATED
    info.external_attr = (0o100755 if executable else 0o100644) << 16
    made.writestr(info, data)


def workflow(settings: Settings, zip_name: str) -> str:
    """Return GitHub Classroom's workflow, which runs the same zip in a student's repository."""
    text = (TEMPLATES / "classroom.yml").read_text(encoding="utf-8")
    files = shlex.join(settings.files)
    return text.replace("AUTOGRADER_ZIP", zip_name).replace("STUDENTS_FILES", files)
