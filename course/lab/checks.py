"""What a lab checks of one submission, each check a mark; judged as `ladder run` judges a stage."""

import secrets
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from course.lab import cpp, explain, gaps
from harness.isolation.judge import Judge
from harness.isolation.roster import BadStage, StageInfo, describe_files, read_declared
from harness.problems.problem import Problem
from harness.records.units import clean
from harness.runs.comparison import compare
from harness.runs.plan import Comparison, Limits

STAGES = range(9)  # that have a lab
TABLE = tomllib.loads(Path(__file__).with_name("checks.toml").read_text(encoding="utf-8"))
BASE = Problem("normal", 0, 1, 1, 1, 1, 1, 1, "float32", "ieee", False, None, "cpu")
BUDGET = 10.0  # seconds for a check
SHOWN = 5  # lines of what a submission printed, the last ones
FAILED = {"wrong": "failed", "wrong-by-design": "failed", "skipped": "failed"}
REMEMBERED = "its output after"  # how the reason begins where a stage remembers its answers


class Unchecked(Exception):
    """A stage can't be checked on this machine; the message says why."""


@dataclass(frozen=True)
class Check:
    """A problem, its tensors in a layout, and where to look if this is the first to fail."""

    name: str
    problem: Problem
    layout: str
    look: str


@dataclass(frozen=True)
class Mark:
    """What came of a check: a record's status, 'ok' where it passed, and the reason where not.

    printed: what the submission printed meanwhile.
    """

    check: Check
    status: str
    reason: str
    printed: str = ""

    @property
    def passed(self) -> bool:
        return self.status == "ok"


@dataclass(frozen=True)
class Result:
    """What is to be said of one submission.

    verdict    passed, failed, cheated, not-written, crashed, timeout or out-of-memory
    marks      a mark for each check, in order; none where it is not written, or can't be loaded
    diagnosis  what the first failure comes from, '' where there is none
    case       lines that show that failure
    """

    stage: int
    verdict: str
    marks: Sequence[Mark]
    diagnosis: str = ""
    case: Sequence[str] = ()


def checks(stage: int, seed: int) -> Iterator[Check]:
    """The checks of a stage's lab, the smallest first; all inputs come from `seed`."""
    for row in TABLE["checks"]:
        if stage in row["on"]:
            row = {"layout": "", "hk": row.get("h", 1), "dtype": "float32", **row, "seed": seed}
            row["precision"] = "ieee" if row["dtype"] == "float32" else row["dtype"]
            problem = Problem.from_json({**BASE.to_json(), **row})
            yield Check(row["name"], problem, row["layout"], row["look"])


def check(
    path: Path, stage: int | None = None, seed: int | None = None,
    tell: Callable[[Mark], None] = lambda mark: None,
) -> Result:  # fmt: skip
    """Check the submission in `path`, a stage's file (for stage 2 a folder), as stage `stage`.

    None: the stage that it says it is. `seed`: of all inputs, a secret one where None. `tell` is
    told of each mark. Whatever the file does costs itself only. Raises BadStage where there is no
    such file, or it says no stage that has a lab; Unchecked where this machine can't run it.
    """
    files = [path / name for name in cpp.FILES] if path.is_dir() else [path]
    for file in files:
        if not file.is_file():
            raise BadStage(f"{file}: no such file")
    number = 2 if path.is_dir() else declared(path) if stage is None else stage
    missing = [
        f"  {name}, line {line} of {file.name}"
        for file in files
        for name, line in gaps.unwritten(file.read_text(encoding="utf-8", errors="replace"))
    ]
    if missing:
        return Result(number, "not-written", (), gaps.NOT_WRITTEN, missing)
    with tempfile.TemporaryDirectory(prefix="ladder-lab-") as name:
        folder = Path(name)
        try:
            file = cpp.build(path, folder) if path.is_dir() else path
            [info] = describe_files([file], load=BUDGET)
        except (BadStage, cpp.NotBuilt) as error:
            return Result(number, "crashed", (), str(error))
        if info.failed:
            return Result(number, info.failed[0], (), info.failed[1])
        asked = list(checks(number, secrets.randbits(40) if seed is None else seed))
        return judged(info, number, asked, folder, tell)


def declared(path: Path) -> int:
    """The stage that a submission says it is. Raises BadStage where it says none that has a lab."""
    try:
        number = read_declared(path).get("number", "none")
    except (ValueError, SyntaxError) as error:
        raise BadStage(f"{path.name}: {error}; --stage says which stage it is") from None
    if number not in STAGES:
        known = ", ".join(map(str, STAGES))
        raise BadStage(f"{path.name}: got stage {number}, expected one of {known}, or --stage")
    return int(number)


def judged(
    info: StageInfo, number: int, asked: Sequence[Check], folder: Path,
    tell: Callable[[Mark], None],
) -> Result:  # fmt: skip
    """The marks of a stage that could be loaded, and what its first failure comes from."""
    reason = info.unavailable["cpu"]
    if reason and "cpu" in info.devices and "cuda" not in info.needs:  # not the file's own fault
        raise Unchecked(f"stage {number} can't be checked here: {reason}")
    # what would excuse a file's mistakes is not believed; stage 4 is asked for one tile alone
    info = replace(info, exact_up_to=None, rounds_scores=False)
    marks: list[Mark] = []
    for each in asked:
        if marks and marks[-1].status == "timeout":
            mark = Mark(each, "timeout", "not tried after a check that did not end")
        else:
            mark = one(info, each, folder)
        marks.append(mark)
        tell(mark)
    failed = next((mark for mark in marks if not mark.passed), None)
    if failed is None:
        return Result(number, "passed", marks)
    verdict = FAILED.get(failed.status, failed.status)
    if failed.reason.startswith(REMEMBERED):
        verdict = "cheated"
    known = explain.from_words(TABLE["reasons"], failed.reason)
    said = explain.Said(known, [failed.reason])
    if not known and failed.status == "wrong":
        path = wrap(info.path, failed.check.layout, folder)
        said = explain.from_numbers(path, failed.check.problem, failed.check.layout, folder)
    look = f"no known mistake gives just this; look at: {failed.check.look}"
    printed = [f"it printed: {clean(x)}" for x in failed.printed.splitlines()[-SHOWN:]]
    return Result(number, verdict, marks, said.diagnosis or look, [*said.case, *printed])


def one(info: StageInfo, each: Check, folder: Path) -> Mark:
    """The mark of one check: its stage alone in a process, its output judged in another."""
    asked = replace(info, path=wrap(info.path, each.layout, folder))
    comparison = Comparison(each.problem, [asked], Limits(budget=BUDGET), alone=True)
    with Judge(each.problem) as judge:
        log: list[str] = []
        [outcome] = compare(comparison, judge, log)
    return Mark(each, outcome.status, outcome.reason, "".join(log))


def wrap(path: Path, layout: str, folder: Path) -> Path:
    """The file of a stage that asks the one in `path` in a `layout`, in `folder`."""
    if not layout:
        return path
    wrapper = folder / f"{layout}.py"
    wrapper.write_text(
        "import stages\nfrom course.lab.layouts import laid\n\n"
        f"mine = stages.load({str(path.resolve())!r})\n"
        f"STAGE, attend = mine.STAGE, laid(mine.attend, {layout!r})\n",
        encoding="utf-8",
    )
    return wrapper
