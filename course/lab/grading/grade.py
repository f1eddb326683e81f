"""Grade a folder of submissions one after another, each by itself; points for each check."""

import csv
import hashlib
import io
import json
import os
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from course.lab import checks, cpp, labs
from course.lab.grading.calls import Limits
from course.lab.grading.speed import NAME, Speed, read_speed
from harness.isolation.roster import BadStage, describe_files
from harness.records import environment, files
from harness.records.units import clean

LONGEST = 500  # characters of a diagnosis in the table
LONGEST_NAME = 220  # bytes of a submission's name: no file's may have more than 255
FORM = ("one *.py file", f"one folder with {' and '.join(cpp.FILES)}")  # of a submission
FORMULA = ("=", "+", "-", "@")  # a spreadsheet computes a text that begins so


class NotGraded(Exception):
    """Raised where grading is impossible; the message says why, and what to do."""


@dataclass(frozen=True)
class Row:
    """A submission's row of the table.

    checks: each check and what came of it, 'ok' or a mark's status. seed: what all inputs are drawn
    from. version, sha256: of the ladder, and of the submission. options: of the command, that can
    change the result.
    """

    submission: str
    stage: int
    points: float
    max_points: float
    verdict: str
    diagnosis: str
    seed: int
    version: str
    sha256: str
    seconds: float
    checks: Mapping[str, str]
    options: str = ""

    def worth(self, points: Mapping[str, float]) -> "Row":
        """Return the row with other points for each check."""
        return replace(
            self, points=sum(points.get(x, 0) for x in self.passed), max_points=sum(points.values())
        )

    @property
    def passed(self) -> list[str]:
        """The checks that give points: none if it cheated, until a person has reviewed it."""
        if self.verdict == "cheated":
            return []
        return [name for name, status in self.checks.items() if status == "ok"]

    def with_speed(self, status: str) -> "Row":
        """Return the row with the result of the speed check."""
        verdict = "cheated" if status == "cheated" else self.verdict
        said = self.diagnosis if status == "ok" else f"speed: {status}"
        return replace(self, verdict=verdict, diagnosis=said, checks={**self.checks, NAME: status})


def submissions(folder: Path, stage: int) -> tuple[list[Path], list[Path]]:
    """Return the submissions in a folder, or the one named; and what else lies there.

    A submission is a Python file, for stage 2 a folder.
    """
    single = folder.is_file() if stage != 2 else (folder / cpp.FILES[0]).is_file()
    if single:
        return [folder], []
    if not folder.is_dir():
        raise NotGraded(f"{folder}: no such file or folder of submissions")
    found = sorted(path for path in folder.iterdir() if not path.name.startswith((".", "__")))
    kept = [path for path in found if (path.is_dir() if stage == 2 else path.suffix == ".py")]
    if not kept:
        raise NotGraded(f"{folder}: no submission in it; expected {FORM[stage == 2]} for each")
    names = sorted(map(name_of, kept))
    for name, other in pairwise(names):
        if name == other:
            raise NotGraded(f"{folder}: two submissions have the name {name!r}: rename one")
    return kept, [path for path in found if path not in kept]


def name_of(path: Path) -> str:
    """Return a submission's name: its file's, without .py, safe to print and in a spreadsheet.

    Characters that aren't printable, and a first one that begins a formula, become %XX. The end of
    one too long for a report's file becomes a digest of it.
    """
    name = path.name.removesuffix(".py")
    safe = "".join(
        x if x.isprintable() and not (at == 0 and x in FORMULA)
        else "".join(f"%{byte:02X}" for byte in os.fsencode(x))
        for at, x in enumerate(name)
    )  # fmt: skip
    if len(os.fsencode(safe)) <= LONGEST_NAME:
        return safe
    return f"{safe[:50]}~{hashlib.sha256(os.fsencode(name)).hexdigest()[:12]}"


def read_points(stage: int, path: Path | None) -> tuple[dict[str, float], Speed | None]:
    """Read each check's points, and what speed is asked, from checks.toml or a TOML file `path`.

    `default` is for checks that the file does not name. Raises NotGraded where it is no such file,
    or names a check that the stage's lab does not have.
    """
    names = [check.name for check in checks.checks(stage, 0)]
    try:
        table = {} if path is None else tomllib.loads(path.read_text(encoding="utf-8"))
        speed = read_speed(table.pop("speed")) if "speed" in table else None
    except (OSError, ValueError) as error:
        raise NotGraded(f"{path}: {error}") from None
    if speed is not None and not checks.rules(stage, False)["kernels"]:
        raise NotGraded(f"{path}: [speed] is for stages with a GPU's kernels, from 4 on")
    default = table.pop("default", checks.TABLE["points"])
    points = {name: table.pop(name, default) for name in names}
    if table:
        known = ", ".join(map(repr, names))
        raise NotGraded(f"{path}: no check {min(table)!r} in stage {stage}; there are {known}")
    if speed is not None:
        points[NAME] = speed.points
    for name, value in points.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e6:
            raise NotGraded(f"{path}: {name}: got {value!r}, expected a number from 0 on")
    return points, speed


def refuse(stage: int, numpy: bool) -> None:
    """Raise NotGraded where this machine can't run a stage's lab: that is no student's fault."""
    source = labs.source(stage, numpy)
    if stage == 2 and cpp.compiler() is None:
        raise NotGraded("stage 2 can't be graded here: there is no C++ compiler; install one")
    if stage == 2 or not source.is_file():
        return
    [info] = describe_files([source])
    if reason := info.unavailable["cpu"]:
        raise NotGraded(f"stage {stage} can't be graded here: {reason}")


def grade(
    path: Path, stage: int, seed: int, numpy: bool, limits: Limits
) -> tuple[Row, checks.Result]:
    """Grade one submission: its row, and what its report says. It can harm no other's row."""
    begun = time.monotonic()
    try:
        result = checks.check(path, stage, seed, limits=limits, numpy=numpy)
    except BadStage as error:
        result = checks.Result(stage, "crashed", (), str(error))
    except checks.Unchecked as error:
        raise NotGraded(str(error)) from None
    row = Row(
        name_of(path), stage, 0, 0, result.verdict, clean(result.diagnosis)[:LONGEST], seed,
        environment.own_version(), result.sha256, round(time.monotonic() - begun, 1),
        {mark.check.name: mark.status for mark in result.marks}, options_of(numpy, limits),
    )  # fmt: skip
    return row, result


def options_of(numpy: bool, limits: Limits) -> str:
    """Return the options that can change a result, as the command takes them."""
    return f"--budget {limits.seconds:g} --memory {limits.memory}{' --numpy' * numpy}"


def grade_all(
    paths: Sequence[Path], table: "Table", stage: int, seed: int, numpy: bool, limits: Limits,
    tell: Callable[[Row, checks.Result | None], None], anew: bool,
) -> None:  # fmt: skip
    """Grade `paths`, and write each row when it is there. Rows of equal files and options are kept.

    `anew`: existing rows are made again. `tell` is called with each row, without a result where the
    row is kept.
    """
    table.write()
    for path in paths:
        old = table.rows.get(name_of(path))
        if old and not anew and (old.sha256, old.version, old.seed, old.options) == (
            checks.digest(path), environment.own_version(), seed, options_of(numpy, limits),
        ):  # fmt: skip
            tell(old, None)
            continue
        row, result = grade(path, stage, seed, numpy, limits)
        row = table.put(row)
        tell(row, result)


class Table:
    """The rows of a CSV file: existing ones are read, each new one is written at once.

    Raises NotGraded where the file is not such a table, or is one of another stage.
    """

    def __init__(self, path: Path, points: Mapping[str, float], stage: int) -> None:
        self.path, self.points, self.stage = path, points, stage
        self.rows: dict[str, Row] = {}
        self.owned: files.Owned | None = None
        self.read()

    def read(self) -> None:
        """Read the rows that are in the file, if it is there."""
        if self.path.exists():
            try:
                with self.path.open(newline="", encoding="utf-8") as file:
                    for each in csv.DictReader(file):
                        row = read_row(each)
                        self.rows[row.submission] = row.worth(self.points)
            except (OSError, ValueError, KeyError, TypeError):
                raise NotGraded(
                    f"{self.path}: is there already, and is no table of `ladder lab grade`: name "
                    "another --out"
                ) from None
        if others := {row.stage for row in self.rows.values()} - {self.stage}:
            raise NotGraded(f"{self.path}: the table is of stage {min(others)}: name another --out")

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from writing the file meanwhile; NotGraded where one does now."""
        try:
            self.owned = files.Owned(self.path, new=not self.path.exists())
        except (BlockingIOError, FileExistsError):
            raise NotGraded(
                f"{self.path}: another `ladder lab grade` is writing it: wait until that ends, or "
                "name another --out"
            ) from None
        except OSError as error:
            raise NotGraded(f"{self.path}: can't be written: {error.strerror}") from None
        try:
            self.read()  # again: another may have ended just now
            yield
        finally:
            self.owned.close()
            self.owned = None

    def put(self, row: Row) -> Row:
        """Add a row, or replace that of the same name; the row with its points."""
        row = self.rows[row.submission] = row.worth(self.points)
        self.write()
        return row

    def write(self) -> None:
        """Write all rows; the file is complete at every moment, even if this process is killed."""
        text = io.StringIO()
        writer = csv.DictWriter(text, [each.name for each in fields(Row)])
        writer.writeheader()
        for row in sorted(self.rows.values(), key=lambda row: row.submission):
            writer.writerow({**asdict(row), **plain(row)})
        data = text.getvalue().encode()
        try:
            if self.owned is None:
                files.write(self.path, data)
            else:
                self.owned.replace(data)
        except OSError as error:
            raise NotGraded(f"{self.path}: can't be written: {error.strerror}") from None


def plain(row: Row) -> dict[str, Any]:
    """Return the fields of a row that the table writes in another form."""
    return {
        "points": f"{row.points:g}",
        "max_points": f"{row.max_points:g}",
        "diagnosis": f"'{row.diagnosis}" if row.diagnosis.startswith(FORMULA) else row.diagnosis,
        "checks": json.dumps(row.checks),
    }


def read_row(each: Mapping[str, str]) -> Row:
    """Read a row of the table."""
    each = {"options": "", **each}  # older tables have none
    known: dict[str, Any] = {field.name: each[field.name] for field in fields(Row)}
    numbers = {name: float(known[name]) for name in ("points", "max_points", "seconds")}
    whole = {name: int(known[name]) for name in ("stage", "seed")}
    return Row(**{**known, **numbers, **whole, "checks": dict(json.loads(known["checks"]))})
