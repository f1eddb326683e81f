"""Make the calls of one check: fresh, secret inputs for each, the answers judged afterwards.

The submission answers in its own process, watched by guard.py. The judge computes the expected
answers of a check only after that process, and all that it has started, have ended: before, there
is nothing of it to find. Nothing that the process says counts in its favour.
"""

import contextlib
import importlib
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from course.lab.grading.endings import FORBIDDEN
from harness.isolation.call import Call, WrongOutput, bind, blame, prepare_for, write_outputs
from harness.isolation.changes import Given
from harness.isolation.child import NO_MESSAGE, START_LIMIT, ChildFailed, hear
from harness.isolation.fork_server import OF_GRADIENTS
from harness.isolation.judge import Judge
from harness.isolation.messages import Failed, Ready, tell
from harness.isolation.scratch import scratch
from harness.isolation.session import Session
from harness.problems.directions import OUTPUTS
from harness.problems.problem import ITEMSIZE, Problem

# of a check's row in checks.toml: what the submission's own kernels may do at most in one call
LIMITS = {
    "reads": "it reads {got:.3g} elements for each of q, k and v, as in more than one pass",
    "tile": "it loads {got:.0%} of the keys at once, as in one tile",
    "scores": "it makes a tensor of {got:.0%} of all scores, as if S were whole",
    "kept": "it holds tensors of {got:.0%} of all scores at once, as if S were whole",
    "masked": "it masks {got:.0%} of all scores, as if no tile were seen whole",
    "writes": "it fills {got:.3g} elements for each of o, as if S were whole",
    "alone": "one program reads {got:.0%} of all that is read, as if no keys were split",
    "visits": "a row's program reads {got:.0%} of all keys, as without a mask",
}


@dataclass(frozen=True)
class Answered:
    """The stage is loaded, or was called. `suspect`: why a right answer is not its own, or ''."""

    suspect: str


@dataclass(frozen=True)
class Cheated:
    """The submission did something forbidden: the child ends."""

    reason: str


@dataclass(frozen=True)
class Limits:
    """The limits of one check's calls: seconds, and bytes of memory."""

    seconds: float = 30.0
    memory: int = 2 << 30


USUAL = Limits()


@dataclass(frozen=True)
class Answer:
    """The result of the calls: 'ok', or a record's status or 'cheated', with the reason.

    seed: of the first call that is wrong. printed: what the submission printed.
    """

    status: str
    reason: str = ""
    seed: int | None = None
    printed: str = ""


def ask(
    path: Path, problem: Problem, layout: str, rules: Mapping[str, Any], seeds: Sequence[int],
    limits: Limits, judge: Judge,
) -> Answer:  # fmt: skip
    """Call the stage in `path` with inputs from each of `seeds`, the last one twice.

    `judge`: of this submission's checks. Raises NoVerdict where it can't say what is right.
    """
    # a new folder, so that no submission finds files of another
    with tempfile.TemporaryDirectory(dir=scratch(), ignore_cleanup_errors=True) as name:
        asked = [*seeds, seeds[-1]]
        outs = [Path(name) / f"out.{index}" for index in range(len(asked))]
        order = problem.to_json()
        session = Session(
            answer,
            str(path.resolve()),
            order,
            layout,
            {**rules, "memory": limits.memory},
            memory=limits.memory,
        )
        failed, suspect = None, ""
        with session:
            try:
                suspect = question(session, seeds, outs, limits)
            except ChildFailed as error:
                failed = fault(error.status, error.reason)
        printed = session.printed()
        if failed is not None:
            return replace(failed, printed=printed)
        found = judged(judge, asked, outs, problem)
        if found.status == "ok" and suspect:  # a wrong answer is not cheating
            found = Answer("cheated", suspect)
        return replace(found, printed=printed)


def question(session: Session, seeds: Sequence[int], outs: Sequence[Path], limits: Limits) -> str:
    """Load and call the stage. Returns why right answers are not its own, '' if they are.

    Raises ChildFailed where it fails or cheats.
    """
    session.ready(START_LIMIT)
    suspect = ""
    late = f"took more than {limits.seconds:g} s"
    end = time.monotonic() + limits.seconds
    orders: list[dict[str, Any]] = [
        {
            "event": "call", "seed": seed, "out": str(out),
            "in_place": index % 2 == 1 and index < len(seeds), "compared": index >= len(seeds) - 1,
        }
        for index, (seed, out) in enumerate(zip([*seeds, seeds[-1]], outs, strict=True))
    ]  # fmt: skip
    for order in [{"event": "load"}, *orders]:
        left = max(0.0, end - time.monotonic())
        said = session.ask(order, Answered, Cheated, seconds=left, late=late)
        if isinstance(said, Cheated):
            raise ChildFailed("cheated", said.reason.removeprefix(FORBIDDEN))
        suspect = suspect or said.suspect
    return suspect


def fault(status: str, reason: str) -> Answer:
    """Classify a failed process: it cheats if it speaks for the harness, or guard.py says so."""
    if NO_MESSAGE in reason or "out of turn" in reason:
        return Answer("cheated", f"it speaks for the harness: {reason}")
    if FORBIDDEN in reason:
        return Answer("cheated", reason.partition(FORBIDDEN)[2])
    return Answer(status, reason)


def judged(judge: Judge, asked: Sequence[int], outs: Sequence[Path], problem: Problem) -> Answer:
    """Judge each call's outputs."""
    seen: dict[bytes, int] = {}
    for index, (seed, out) in enumerate(zip(asked, outs, strict=True)):
        data = read(out, problem)
        if index == 0 or seed != asked[index - 1]:
            judge.turn_to(replace(problem, seed=seed))
        try:
            found = judge.verdict(out)
        except ChildFailed as error:
            return fault(error.status, error.reason)
        if not found.exact:
            if seen.get(data, seed) != seed:
                why = "it is the answer to an earlier call, whose inputs were others"
                return Answer("cheated", f"its output after {index} calls: {why}", seed)
            where = f"call {index + 1} of {len(asked)}: " if index else ""
            return Answer("wrong", f"{where}{found.why}", seed)
        seen.setdefault(data, seed)
    return Answer("ok")


def read(path: Path, problem: Problem) -> bytes:
    """Read an output's file; b'' where it can't be an output."""
    most = 4 * problem.b * problem.h * max(problem.nq, problem.nk) * problem.d
    try:
        if path.is_file() and path.stat().st_size <= most * ITEMSIZE[problem.dtype]:
            return path.read_bytes()
    except OSError:
        pass
    return b""


# ---- in the submission's process


@contextlib.contextmanager
def loading(rules: Mapping[str, Any], connection: Connection, path: str) -> Iterator[None]:
    """Watch a submission while its STAGE is read, as `describe_files` takes it."""
    from course.lab.grading.guard import Guard

    with Guard(connection, path, rules, event="bad").watching(loading=True):
        yield


def answer(
    connection: Connection, path: str, order: dict[str, Any], layout: str, rules: dict[str, Any]
) -> None:
    """Load the stage in `path`, and answer each call; sends Ready, then Answered each time."""
    import torch

    import stages
    from course.lab.grading.guard import Guard
    from course.lab.layouts import laid, make_given
    from harness.isolation.processes import set_data_limit

    torch.set_num_threads(1)
    problem = Problem.from_json(order)
    if problem.direction != "fwd":  # imported by the first call, it would count as that call's work
        with contextlib.suppress(ImportError):
            for name in OF_GRADIENTS:
                importlib.import_module(name)
    try:
        guard = Guard(connection, path, rules)
        work = guard.work
        set_data_limit(rules["memory"])
        tell(connection, Ready())
        hear(connection)
        with guard.watching(loading=True):
            module = stages.load(path, alone=True)
        torch.set_num_threads(1)
        tell(connection, Answered(""))
        given: Given | None = None
        call: Call | None = None
        works: list[dict[str, int]] = []
        watched = guard.around(module.attend)

        def expected(*tensors: torch.Tensor, **options: Any) -> Any:
            work.expect(problem, tensors)
            return watched(*tensors, **options)

        # layouts are the harness's own work
        attend = laid(expected, layout) if layout else module.attend
        whole = contextlib.nullcontext if layout else guard.watching
        while True:
            asked = hear(connection)
            fresh = make_given(replace(problem, seed=asked["seed"]))
            if asked["in_place"] and given is not None and not problem.page_size:
                for x, y in zip(given.tensors, fresh.tensors, strict=True):
                    if x is not None:
                        x.data.copy_(y)  # no version counter tells
                given.copies = fresh.copies
            else:
                given, bound = fresh, bind(attend, problem)
                with whole():  # a paged cache is the submission's, too
                    call = prepare_for(problem, module, bound, given.tensors)
            assert call is not None
            work.record()  # what was before is the harness's own
            if not layout:
                work.expect(problem, given.tensors)
            with whole(), work.counted(works if asked["compared"] else None):
                outputs = call()
            suspect = work.suspect(dict(zip(OUTPUTS[problem.direction], outputs)))
            did = work.measured(problem)
            for name, most in rules["work"].items():
                if did[name] > most:
                    raise WrongOutput(LIMITS[name].format(got=did[name]))
            with guard.watching():  # the answer must be computed by now
                write_outputs(outputs, problem, given.tensors, asked["out"])
                given.check_unwritten()
            work.compare(works)
            tell(connection, Answered(suspect))
    except BaseException as error:
        blamed = blame(error)
        blamed["reason"] = f"{line_of(error, Path(path))}{blamed['reason']}"
        tell(connection, Failed(**blamed))


def line_of(error: BaseException, path: Path) -> str:
    """'mine.py:96: `its code`: ' of the innermost line of `path` that `error` passed; or ''."""
    told: BaseException | None = error
    found, seen = "", set[int]()
    while told is not None and id(told) not in seen:  # an error may be its own cause
        seen.add(id(told))  # Triton's interpreter wraps the kernel's error
        for frame in traceback.extract_tb(told.__traceback__):
            if frame.filename == str(path):
                code = (frame.line or "").split("  #")[0]
                found = f"{path.name}:{frame.lineno}: `{code}`: "
        told = told.__cause__ or told.__context__
    return found
