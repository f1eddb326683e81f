"""Grade a folder of submissions one after another, each by itself; points for each check."""

import csv
import io
import json
import queue
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from course.lab import checks, cpp, labs
from course.lab.grading import speed
from course.lab.grading.calls import Limits
from course.lab.grading.machine import Machine, may_be_the_machines, remedy
from course.lab.grading.similarity import likenesses
from course.lab.grading.speed import NAME, Speed, read_speed
from course.lab.grading.submissions import FORMULA, NotGraded, Submission, name_of
from harness.isolation.judge import NoVerdict
from harness.isolation.roster import BadStage, describe_files
from harness.records import environment, files
from harness.records.units import clean

LONGEST = 500  # characters of a diagnosis in the table


@dataclass(frozen=True)
class Row:
    """A submission's row of the table.

    checks: each check and what came of it, 'ok' or a mark's status. seed: what all inputs are drawn
    from. version, sha256: of the ladder, and of the submission. options: of the command, that can
    change the result. like_ours, like_another, another: how alike it is (similarity.py).
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
    like_ours: str = ""
    like_another: str = ""
    another: str = ""

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


def read_points(stage: int, path: Path | None) -> tuple[dict[str, float], Speed | None]:
    """Read each check's points, and what speed is asked, from checks.toml or a TOML file `path`.

    `default` is for checks that the file does not name. Raises NotGraded where it is no such file,
    or names a check that the stage's lab does not have.
    """
    names = [check.name for check in checks.checks(stage, 0)]
    try:
        table = {} if path is None else tomllib.loads(path.read_text(encoding="utf-8"))
        speed = read_speed(table.pop("speed")) if "speed" in table else None
    except OSError as error:
        raise NotGraded(f"{path}: {error.strerror}") from None
    except ValueError as error:
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


def refuse(stage: int, twin: bool) -> None:
    """Raise NotGraded where this machine can't run a stage's lab: that is no student's fault."""
    source = labs.source(stage, twin)
    if labs.handed_in(stage):  # compiled for each submission
        if cpp.compiler() is None:
            raise NotGraded(
                f"stage {stage} can't be graded here: there is no C++ compiler; install one"
            )
        return
    if not source.is_file():
        return
    [info] = describe_files([source])
    if reason := info.unavailable["cpu"]:
        other = "; in torch it is graded with --cpu" if stage == labs.TWIN else ""
        raise NotGraded(f"stage {stage} can't be graded here: {reason}{other}")


def grade(
    path: Path, stage: int, seed: int, twin: bool, limits: Limits, name: str = "",
    tell: Callable[[checks.Mark], None] = lambda mark: None,
) -> tuple[Row, checks.Result]:  # fmt: skip
    """Grade one submission: its row, and what its report says. It can harm no other's row.

    name: in the table, by default that of its file. `tell` is called with each mark.
    """
    begun = time.monotonic()
    try:
        result = checks.check(path, stage, seed, tell, limits=limits, twin=twin)
    except BadStage as error:
        result = checks.Result(stage, "crashed", (), str(error))
    except (checks.Unchecked, NoVerdict) as error:
        raise NotGraded(f"stage {stage} can't be graded here: {error}") from None
    except OSError as error:  # this process failed, so it is the machine's fault
        raise NotGraded(unable(stage, error)) from None
    row = Row(
        name or name_of(path.name), stage, 0, 0, result.verdict,
        clean(result.diagnosis)[:LONGEST], seed, environment.own_version(), result.sha256,
        round(time.monotonic() - begun, 1), {mark.check.name: mark.status for mark in result.marks},
        options_of(twin, limits),
    )  # fmt: skip
    return row, result


def unable(stage: int, error: OSError) -> str:
    """Say that this process can't grade: its disk is full, say."""
    why = f"{error.strerror or error}{remedy(str(error))}"
    return f"stage {stage} can't be graded on this machine: {why}"


def options_of(twin: bool, limits: Limits) -> str:
    """Return the options that can change a result, as the command takes them."""
    return f"--budget {limits.seconds:g} --memory {limits.memory}{' --cpu' * twin}"


def grade_all(
    submissions: Sequence[Submission], table: "Table", stage: int, seed: int, twin: bool,
    limits: Limits, tell: Callable[[Row, checks.Result | None], None], anew: bool, jobs: int = 1,
) -> None:  # fmt: skip
    """Grade all, and write each row when it is there. Rows of equal files and options are kept.

    `anew`: existing rows are made again. `tell` is called with each row, without a result where the
    row is kept. jobs: how many at a time. No row is written that may be this machine's fault:
    raises NotGraded (machine.py).
    """
    table.write()
    left = []
    for each in submissions:
        old = table.rows.get(each.name)
        if old and not anew and (old.sha256, old.version, old.seed, old.options) == (
            checks.digest(each.path), environment.own_version(), seed, options_of(twin, limits),
        ):  # fmt: skip
            tell(old, None)
        else:
            left.append(each)
    machine = Machine(stage, seed, twin, limits)
    if jobs > 1 and len(left) > 1:
        machine.prove()
        alone = []
        for each, made in side_by_side(left, stage, seed, twin, limits, jobs):
            if made is None or may_be_the_machines(made[1]):
                alone.append(each)  # the others may have taken its time or memory
            else:
                tell(table.put(made[0]), made[1])
        left = sorted(alone, key=left.index)
    for each in left:
        row, result = grade(each.path, stage, seed, twin, limits, each.name)
        try:
            machine.believe(result)
        except OSError as error:
            raise NotGraded(unable(stage, error)) from None
        tell(table.put(row), result)


def side_by_side(
    submissions: Sequence[Submission], stage: int, seed: int, twin: bool, limits: Limits, jobs: int
) -> Iterator[tuple[Submission, tuple[Row, checks.Result] | None]]:
    """Yield each submission with its row and result, in the order of their ends; None if it failed.

    `jobs` threads wait for the processes that do the work.
    """
    todo: queue.SimpleQueue[Submission] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[Submission, Any]] = queue.SimpleQueue()
    stopped = threading.Event()

    def go_on(mark: checks.Mark) -> None:
        if stopped.is_set():
            raise SystemExit

    def work() -> None:
        while not stopped.is_set():
            try:
                each = todo.get_nowait()
            except queue.Empty:
                return
            made = None
            with suppress(Exception):  # grading it alone, later, says what is wrong
                made = grade(each.path, stage, seed, twin, limits, each.name, go_on)
            done.put((each, made))

    for each in submissions:
        todo.put(each)
    for _ in range(min(jobs, len(submissions))):
        threading.Thread(target=work, daemon=True).start()
    try:
        for _ in submissions:
            yield done.get()
    finally:
        stopped.set()  # after a Ctrl-C the fork server ends, and their processes with it


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
        except NotGraded:
            if not self.rows:  # a table without a row says nothing
                self.path.unlink(missing_ok=True)
            raise
        finally:
            self.owned.close()
            self.owned = None

    def put(self, row: Row) -> Row:
        """Add a row, or replace that of the same name; the row with its points."""
        row = self.rows[row.submission] = row.worth(self.points)
        self.write()
        return row

    def time(
        self, submissions: Sequence[Submission], asked: Speed, seed: int, anew: bool
    ) -> Iterator[Row]:
        """Take the speed of those that passed, one after the other; yields each one's row.

        Raises Unchecked where this machine can't time them.
        """
        for each in submissions:
            row = self.rows[each.name]
            if row.verdict == "passed" and (anew or NAME not in row.checks):
                status = speed.judged(each.path, self.stage, asked, seed, sha256=row.sha256)
                yield self.put(row.with_speed(status))

    def compare(self, submissions: Sequence[Submission], twin: bool) -> None:
        """Fill in how alike the submissions are, and write the rows."""
        paths = {each.name: each.path for each in submissions}
        for name, like in likenesses(paths, self.stage, twin).items():
            if row := self.rows.get(name):
                self.rows[name] = replace(
                    row, like_ours=like.ours, like_another=like.another, another=like.name
                )
        self.write()

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
    known: dict[str, Any] = {
        field.name: each[field.name] if field.default is MISSING else each.get(field.name, "")
        for field in fields(Row)
    }  # an older table lacks the last ones
    numbers = {name: float(known[name]) for name in ("points", "max_points", "seconds")}
    whole = {name: int(known[name]) for name in ("stage", "seed")}
    return Row(**{**known, **numbers, **whole, "checks": dict(json.loads(known["checks"]))})
