"""What a lab checks of one submission, each check a mark; judged as `ladder run` judges a stage."""

import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.isolation.declared import read_declared
from harness.isolation.judge import Judge
from harness.isolation.roster import BadStage, StageInfo, describe_files
from harness.lab import cpp, explain, gaps
from harness.problems.problem import Problem
from harness.runs.contest import measure
from harness.runs.plan import Comparison, Limits

STAGES = range(9)  # that have a lab
SCALAR, LITE = (0, 1, 2), 4  # stages of loops on numbers; the stage that is right for one tile
TRITON, MASKS, GRADIENTS = 4, (3, 6, 7, 8), (0, 2, 3, 7)
BUDGET = 20.0  # seconds for a check
FAILED = {"wrong": "failed", "wrong-by-design": "failed", "skipped": "failed"}
REMEMBERED = "its output after"  # how the reason begins where a stage remembers its answers


@dataclass(frozen=True)
class Check:
    """One check: a problem, its tensors in a layout, and where to look if this is the first to fail."""

    name: str
    problem: Problem
    look: str
    layout: str = ""


@dataclass(frozen=True)
class Mark:
    """What came of a check: a record's status, 'ok' where it passed, and the reason where not."""

    check: Check
    status: str
    reason: str

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
    base = Problem("normal", seed, 1, 1, 1, 3, 5, 4, "float32", "ieee", False, None, "cpu")
    if stage in SCALAR:
        shapes = {"square": (3, 4, 4), "d": (3, 5, 3), "keys": (3, 21, 4)}
    else:
        shapes = {"square": (5, 64, 64), "d": (5, 33, 40), "keys": (5, 192, 16)}
        base = replace(base, nq=5, nk=16, d=16)
    if stage == LITE:
        shapes["keys"] = (5, 50, 16)

    def sized(name: str, **more: object) -> Problem:
        nq, nk, d = shapes[name]
        return replace(base, nq=nq, nk=nk, d=d, **more)

    def at(**more: object) -> Problem:
        return replace(base, **more)

    yield Check("a few keys", base, "the products, the scale, the softmax")
    yield Check("as many keys as columns", sized("square"), "which of k's axes are keys")
    yield Check("d is no power of two", sized("d", h=2, hk=2), "masks of columns, and the scale")
    if stage == LITE:
        yield Check("a ragged tile", sized("keys"), "the mask of the tile's last keys")
    else:
        yield Check("many keys", sized("keys"), "what is carried from tile to tile")
    if stage >= TRITON and stage != LITE:
        yield Check("one key in the last tile", at(nk=65), "the mask of the last tile's keys")
    peaky = sized("keys", inputs="peaky")
    if stage >= TRITON and stage != LITE:
        peaky = replace(peaky, nk=150)
    yield Check("large scores", peaky, "what keeps exp in range, and the rescale")
    if stage == 1:
        yield Check("scores of 1000", base, "what keeps exp in range", "high")
    several = at(b=2, h=3, hk=3, nq=2 if stage in SCALAR else 35)
    yield Check("batch, heads and strides", several, "how an address is computed", "strided")
    half = at(dtype="float16", precision="float16")
    yield Check("float16", half, "the dtype of the output, and of what is summed up")
    if stage in MASKS:
        look = "which keys a row may see: the mask, and the bounds"
        long = 10 if stage == 3 else 70
        yield Check("causal", at(nq=long, nk=long, causal=True), look)
        yield Check("causal, fewer queries", at(nq=long // 2, nk=long, causal=True), look)
        few = at(b=2, h=4, hk=2, nq=long // 2, nk=10, causal=True, seqlens_k=(0, 7))
        yield Check("lengths and grouped heads", few, f"{look}; rows that see nothing")
    if stage == 8:
        yield Check("many parts", at(nq=2, nk=400), "the merge of the parts")
    if stage in GRADIENTS:
        look = "the backward pass; the forward pass of this problem is right"
        yield Check("gradients", at(direction="train"), look)
        peaky = sized("keys", inputs="peaky", direction="train", h=2, hk=2)
        yield Check("gradients of large scores", peaky, look)
    if stage == 7:
        masked = at(direction="train", nq=40, nk=70, h=2, hk=1, causal=True)
        yield Check("gradients under a mask", masked, "which rows see a key, and which keys a row")


def check(
    path: Path, stage: int | None = None, seed: int | None = None,
    tell: Callable[[Mark], None] = lambda mark: None,
) -> Result:  # fmt: skip
    """Check the submission in `path`, a stage's file (for stage 2 a folder), as stage `stage`.

    None: the stage that it says it is. `seed`: of all inputs, a secret one where None. `tell` is
    told of each mark. Whatever the file does costs itself only. Raises BadStage where there is no
    such file, Unchecked where nothing can be said here.
    """
    files = cpp.FILES if path.is_dir() else ("",)
    for name in files:
        if not (path / name).is_file():
            raise BadStage(f"{path / name}: no such file")
    number = 2 if path.is_dir() else declared(path) if stage is None else stage
    missing = [
        f"{name}, line {line} of {(path / each).name}"
        for each in files
        for name, line in gaps.unwritten((path / each).read_text(encoding="utf-8", errors="replace"))
    ]
    if missing:
        found = f"{gaps.NOT_WRITTEN}: {'; '.join(missing)}"
        return Result(number, "not-written", (), found)
    with tempfile.TemporaryDirectory(prefix="ladder-lab-") as name:
        folder = Path(name)
        try:
            [info] = describe_files([cpp.build(path, folder) if path.is_dir() else path])
        except (BadStage, cpp.NotBuilt) as error:
            return Result(number, "crashed", (), str(error))
        asked = list(checks(number, secrets.randbits(40) if seed is None else seed))
        return judged(info, number, asked, folder, tell)


def declared(path: Path) -> int:
    """The stage that a submission says it is. Raises BadStage where it says none that has a lab."""
    try:
        number = read_declared(path).get("number")
    except (ValueError, SyntaxError) as error:
        raise BadStage(f"{path.name}: {error}; --stage says which stage it is") from None
    if number not in STAGES:
        known = ", ".join(map(str, STAGES))
        raise BadStage(f"{path.name}: got stage {number}, expected one of {known}, or --stage")
    return int(number)


class Unchecked(Exception):
    """A stage can't be checked on this machine; the message says why."""


def judged(
    info: StageInfo, number: int, asked: Sequence[Check], folder: Path,
    tell: Callable[[Mark], None],
) -> Result:  # fmt: skip
    """The marks of a stage that could be loaded, and what its first failure comes from."""
    if reason := info.unavailable["cpu"]:
        raise Unchecked(f"stage {number} can't be checked here: {reason}")
    # what excuses a file's own mistakes is not believed; stage 4 is asked for no more than a tile
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
    asked_of = wrap(info.path, failed.check.layout, folder)
    said = explain.explain(asked_of, failed.check.problem, failed.check.layout, failed.reason, folder)
    look = f"no known mistake gives just this; look at: {failed.check.look}"
    return Result(number, verdict, marks, said.diagnosis or look, said.case)


def one(info: StageInfo, each: Check, folder: Path) -> Mark:
    """The mark of one check: its stage alone in a process, its output judged in another."""
    asked = replace(info, path=wrap(info.path, each.layout, folder))
    comparison = Comparison(each.problem, [asked], Limits(budget=BUDGET), alone=True)
    with tempfile.TemporaryDirectory(dir=folder) as place, Judge(each.problem, Path(place)) as judge:
        [outcome] = measure(comparison, judge, [])
    return Mark(each, outcome.status, outcome.reason)


def wrap(path: Path, layout: str, folder: Path) -> Path:
    """The file of a stage that asks the one in `path` in a `layout`, in `folder`."""
    if not layout:
        return path
    wrapper = folder / f"{layout}.py"
    wrapper.write_text(
        "import stages\nfrom harness.lab.layouts import laid\n\n"
        f"mine = stages.load({str(path.resolve())!r})\n"
        f"STAGE, attend = mine.STAGE, laid(mine.attend, {layout!r})\n",
        encoding="utf-8",
    )
    return wrapper
