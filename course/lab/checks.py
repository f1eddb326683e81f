"""Check one submission of a lab; each check gives a mark, which is worth points in grading."""

import functools
import hashlib
import os
import random
import re
import secrets
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import decode_source
from pathlib import Path
from typing import Any

from course.lab import cpp, explain, gaps
from course.lab.grading import calls
from course.lab.grading.calls import LIMITS
from course.lab.labs import ROOT, TWIN
from harness.isolation.judge import Judge
from harness.isolation.roster import BadStage, StageInfo, describe_files
from harness.isolation.scratch import scratch
from harness.problems.problem import Problem
from harness.records.code import read_declared
from harness.records.units import clean

STAGES = range(9)  # those that have a lab
SIZES = ("b", "h", "nq", "nk", "d")
TABLE = tomllib.loads(Path(__file__).with_name("checks.toml").read_text(encoding="utf-8"))
BASE = Problem("normal", 0, 1, 1, 1, 1, 1, 1, "float32", "ieee", False, None, "cpu")
LOAD = 20.0  # seconds for a file to be imported
CALLS = (2, 5)  # the least and the most calls of a check, where checks.toml doesn't say
SHOWN = 5  # how many of the last lines that a submission printed are shown
# a warning in what a submission printed: the file's folder and its line of code say nothing
WARNED = re.compile(r"^.*[/\\](\S+:\d+: \w*Warning: .*)\n  .*$", re.M)
FAILED = {"wrong": "failed", "wrong-by-design": "failed", "skipped": "failed"}

NO_KERNEL = "no Triton kernel in it; stage 5 in torch is graded with --cpu"


class Unchecked(Exception):
    """Raised where a stage can't be checked on this machine; the message says why."""


@dataclass(frozen=True)
class Check:
    """A problem, its tensors in a layout, and where to look if this is the first to fail.

    calls: how often a submission is called at least and at most, each time with other inputs.
    work: what its kernels may do at most (LIMITS).
    """

    name: str
    problem: Problem
    layout: str
    look: str
    calls: tuple[int, int] = CALLS
    work: Mapping[str, float] = field(default_factory=dict)


NOT_TRIED = "not-tried"


@dataclass(frozen=True)
class Mark:
    """The result of a check, and the reason.

    status: a record's, 'ok' where it passed; 'cheated'; or NOT_TRIED, after a timeout.

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
    """The result for one submission.

    verdict    passed, failed, cheated, not-written, crashed, timeout or out-of-memory
    marks      a mark for each check, in order; none where it is not written, or can't be loaded
    diagnosis  the cause of the first failure, '' where there is none
    case       lines that show that failure
    sha256     of the submission's files, as they were read for all that was checked; '' where they
               could not be read
    """

    stage: int
    verdict: str
    marks: Sequence[Mark]
    diagnosis: str = ""
    case: Sequence[str] = ()
    sha256: str = ""


def checks(stage: int, seed: int) -> Iterator[Check]:
    """Yield the checks of a stage's lab, the smallest first; sizes [least, most] are drawn."""
    for row in TABLE["checks"]:
        if stage in row["on"]:
            draw = random.Random(f"{seed} {row['name']}")
            row = {
                key: draw.randint(*value) if key in SIZES and isinstance(value, list) else value
                for key, value in row.items()
            }
            row = {"layout": "", "hk": row.get("h", 1), "dtype": "float32", **row, "seed": seed}
            row["precision"] = "ieee" if row["dtype"] == "float32" else row["dtype"]
            problem = Problem.from_json({**BASE.to_json(), **row})
            calls = tuple(row.get("calls", CALLS))
            work = {name: row[name] for name in LIMITS if name in row}
            yield Check(row["name"], problem, row["layout"], row["look"], calls, work)


def seeds(each: Check) -> list[int]:
    """Return a secret seed for each call of a check: none follows from those before it."""
    known = f"{each.problem.seed} {each.name}"
    count = random.Random(known).randint(*each.calls)
    digests = [hashlib.sha256(f"{known} {index}".encode()).digest() for index in range(count)]
    return [int.from_bytes(digest[:5], "big") for digest in digests]


def rules(stage: int, twin: bool, home: Path | None = None) -> dict[str, Any]:
    """Return what a submission may do (grading/guard.py); `twin`: in torch, for a CPU.

    `home`: what it was copied from; in that folder it may not look for an answer.
    """
    none: dict[str, Any] = {"least": 2, "launches": False}
    none |= {"kernels": [], "imports": [], "stages": []}
    of_stage = none | TABLE["rules"]["cpu" if twin else str(stage)]
    of_stage["home"] = home and str(home)
    of_stage |= {kind: TABLE["torch"][kind] for kind in ("carry", "scale")}
    of_stage["torch"] = [name for kind in of_stage["torch"] for name in TABLE["torch"][kind]]
    return of_stage


def check(
    path: Path, stage: int | None = None, seed: int | None = None,
    tell: Callable[[Mark], None] = lambda mark: None, limits: calls.Limits = calls.USUAL,
    twin: bool | None = None, only: Collection[str] | None = None,
) -> Result:  # fmt: skip
    """Check the submission in `path`, a stage's file (for stage 2 a folder), as stage `stage`.

    None: the stage that its STAGE names. `seed` is the seed of all inputs; None: a secret one.
    `tell` is called with each mark. `twin`: whether stage 5 must be in torch, for a CPU; None: if
    the file has no kernels. A file that crashes or hangs fails alone. Raises BadStage where there
    is no such file, or it names no stage that has a lab; Unchecked where this machine can't run it.

    The files are read once, and a copy is checked: they may be changed, or uploaded, meanwhile.
    `only`: the names of the checks to make, by default all.
    """
    if path.is_dir() and stage not in (2, None):
        raise BadStage(f"{path.name}: a folder; expected one .py file for stage {stage}")
    with tempfile.TemporaryDirectory(dir=scratch()) as name:
        copy, sha256 = copied(path, Path(name))
        result = checked(copy, stage, seed, tell, limits, twin, path.resolve(), only)
    return replace(result, sha256=sha256)


def copied(path: Path, folder: Path) -> tuple[Path, str]:
    """Copy a submission into a folder; the copy, and the SHA-256 of its files. Raises BadStage."""
    to = folder / path.resolve().name
    if path.is_dir():
        if not any(file.exists() for file in cpp.files(path)):
            raise BadStage(
                f"{path.name}: a folder without {' and '.join(cpp.FILES)}, which are stage 2's; "
                "of another stage name the .py file"
            )
        to.mkdir()
    files = list(zip(cpp.files(path), cpp.files(to), strict=True))
    data = [bytes_of(file) for file, _ in files]
    for (_, copy), each in zip(files, data, strict=True):
        copy.write_bytes(each)
    return to, hashlib.sha256(b"\0".join(data)).hexdigest()


def digest(path: Path) -> str:
    """The SHA-256 of a submission's files; '' where they can't be read."""
    try:
        return hashlib.sha256(b"\0".join(map(cpp.read, cpp.files(path)))).hexdigest()
    except OSError:
        return ""


def checked(
    path: Path, stage: int | None, seed: int | None, tell: Callable[[Mark], None],
    limits: calls.Limits, twin: bool | None, home: Path, only: Collection[str] | None,
) -> Result:  # fmt: skip
    """Check the copy `path` of the submission `home`."""
    files = cpp.files(path)
    texts = [text_of(file) for file in files]
    number = 2 if path.is_dir() else declared(path) if stage is None else stage
    missing = [
        f"  {name}, line {line} of {file.name}"
        for file, text in zip(files, texts, strict=True)
        for name, line in gaps.missing(text)
    ]
    if missing:
        return Result(number, "not-written", (), gaps.NOT_WRITTEN, missing)
    found = attempted(path, number, seed, tell, limits, twin, home, only)
    lines = [*found.case]
    if found.verdict not in ("passed", "cheated"):
        lines += [
            f"no code in the gap {name}, line {line} of {file.name}: does another line do its work?"
            for file, text in zip(files, texts, strict=True)
            for name, line in gaps.unwritten(text)
        ]
    diagnosis, *lines = placeless([found.diagnosis, *lines], path, home)
    return replace(found, diagnosis=diagnosis, case=lines)


def placeless(texts: Sequence[str], path: Path, home: Path) -> list[str]:
    """Return texts for a student without the folders of the machine that graded them.

    path  the copy that was graded
    home  what it was copied from
    """
    homes = [
        path.parent,
        path.resolve().parent,
        home.parent,
        ROOT,
        Path(tempfile.gettempdir()),
        Path.home(),
    ]
    homes += [Path(sys.prefix), Path(sys.base_prefix), Path(sysconfig.get_path("stdlib")).parent]
    homes += [path, path.resolve(), home] if path.is_dir() else []
    names = sorted({f"{home}{os.sep}" for home in homes if home.is_absolute()}, key=len)
    for name in reversed(names):
        texts = [text.replace(name, "") for text in texts]
    return list(texts)


def attempted(
    path: Path, number: int, seed: int | None, tell: Callable[[Mark], None], limits: calls.Limits,
    twin: bool | None, home: Path, only: Collection[str] | None,
) -> Result:  # fmt: skip
    """Load a submission and return the result of its checks; as `checked`."""
    with tempfile.TemporaryDirectory(dir=scratch()) as name:
        folder = Path(name)
        try:
            file = cpp.build(path, folder, home) if path.is_dir() else path
            may = {**rules(number, False, home), "kernels": []}  # none runs yet
            watch = functools.partial(calls.loading, may)
            [info] = describe_files([file], LOAD, limits.memory, watch)
            failed = info.failed
        except (BadStage, cpp.NotBuilt) as error:
            failed = "crashed", str(error)
        if failed:
            found = calls.fault(*failed)
            known = explain.from_words(TABLE["reasons"], found.reason)
            known = "" if found.status == "cheated" else known
            case = [found.reason] if known else []
            return Result(number, found.status, (), known or found.reason, case)
        asked = list(checks(number, secrets.randbits(40) if seed is None else seed))
        asked = [each for each in asked if only is None or each.name in only]
        return judged(info, number, asked, folder, tell, limits, twin, home)


def bytes_of(file: Path) -> bytes:
    """Return the bytes of a submission's file. Raises BadStage where it can't be read."""
    try:
        return cpp.read(file)
    except OSError as error:
        raise BadStage(f"{file.name}: {error.strerror}") from None


def text_of(file: Path) -> str:
    """Return the text of a submission's file, decoded as Python does; for C++ that is UTF-8."""
    data = bytes_of(file)
    try:
        return decode_source(data)
    except (SyntaxError, LookupError, ValueError):  # Python or the compiler says what is wrong
        return data.decode("utf-8", "replace")


def declared(path: Path) -> int:
    """Return the stage that a submission's STAGE names. Raises BadStage where that has no lab."""
    try:
        number = read_declared(path).get("number", "none")
    except SyntaxError as error:
        line = f":{error.lineno}" if error.lineno else ""  # a NUL has none
        raise BadStage(f"{path.name}{line}: not Python: {error.msg}") from None
    except (*gaps.UNPARSED, LookupError) as error:
        said = str(error).removeprefix(f"{path.name}: ").partition(": <ast.")[0]
        raise BadStage(f"{path.name}: {said}; --stage says which stage it is") from None
    if number not in STAGES:
        known = ", ".join(map(str, STAGES))
        raise BadStage(f"{path.name}: got stage {number}, expected one of {known}, or --stage")
    return int(number)


def judged(
    info: StageInfo, number: int, asked: Sequence[Check], folder: Path,
    tell: Callable[[Mark], None], limits: calls.Limits = calls.USUAL, twin: bool | None = None,
    home: Path | None = None,
) -> Result:  # fmt: skip
    """Return the marks of a stage that could be loaded, and the cause of its first failure."""
    reason = info.unavailable["cpu"]
    needs = (
        {"triton"} if number >= 4 and not twin else set()
    )  # what the lab needs, whatever the file says
    if reason and "cpu" in info.devices and needs >= {*info.needs}:
        raise Unchecked(f"stage {number} can't be checked here: {reason}")
    plain = number == TWIN and "triton" not in info.needs
    if plain and twin is False:
        return Result(number, "failed", (), NO_KERNEL)
    may = rules(number, plain, home)
    marks: list[Mark] = []
    with Judge(BASE) as judge:  # it turns to a problem when a submission has answered
        for each in asked:
            if marks and marks[-1].status in ("timeout", NOT_TRIED):
                mark = Mark(each, NOT_TRIED, "not tried after a check that did not end")
            elif why := info.why_skip(each.problem):
                mark = Mark(each, "skipped", why)
            else:
                mark = one(info, each, may, limits, judge)
            marks.append(mark)
            tell(mark)
    # cheating is reported first, whatever else is wrong
    failed = next((mark for mark in marks if mark.status == "cheated"), None)
    failed = failed or next((mark for mark in marks if not mark.passed), None)
    if failed is None:
        return Result(number, "passed", marks)
    verdict = FAILED.get(failed.status, failed.status)
    known = explain.from_words(TABLE["reasons"], failed.reason)
    if failed.status == "skipped":
        known = f"the file's STAGE declares less than the stage must do: {failed.reason}"
    if verdict == "cheated":
        known = f"not allowed: {failed.reason}"
        if info.number != number:  # it may have been handed in by mistake
            known += f"; its STAGE says that it is stage {info.number}'s file"
    elif known == gaps.NOT_WRITTEN:
        verdict = "not-written"
    said = explain.Said(known, [] if verdict == "cheated" else [failed.reason])
    if not known and failed.status == "wrong":
        path = wrap(info.path, failed.check.layout, folder)
        said = explain.from_numbers(
            path, failed.check.problem, failed.check.layout, folder, (str(info.path.resolve()), may)
        )
        surely = explain.python_max(
            info.path, of=" tl.max("
        )  # the max of tiles, not of two numbers
        known = surely or said.diagnosis or explain.python_max(info.path)
    case, look = list(said.case), f"look at: {failed.check.look}"
    if not known and failed.status not in ("wrong", "skipped"):
        known = case.pop()  # it stopped with a message and a line, which say more
    if not known and case[-1].startswith(explain.FIRST_TILE):
        look = case.pop()  # this place is nearer to the mistake
    known = known or f"no known mistake gives just this; {look}"
    lines = WARNED.sub(r"\1", failed.printed).splitlines()
    printed = [f"it printed: {clean(x)}" for x in lines[-SHOWN:]]
    return Result(number, verdict, marks, known, [*case, *printed])


def one(
    info: StageInfo, each: Check, may: dict[str, Any], limits: calls.Limits, judge: Judge
) -> Mark:
    """Return the mark of one check; its problem is that of the first call that was wrong.

    A file's own excuses (the exact_up_to of its STAGE) are ignored.
    """
    may = may | {"work": dict(each.work)}
    found = calls.ask(info.path, each.problem, each.layout, may, seeds(each), limits, judge)
    if found.seed is not None:
        each = replace(each, problem=replace(each.problem, seed=found.seed))
    return Mark(each, found.status, found.reason, found.printed)


def wrap(path: Path, layout: str, folder: Path) -> Path:
    """Write to `folder` a stage that calls the one in `path` with tensors in a `layout`."""
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
