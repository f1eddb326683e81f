"""`ladder bench`: contestants against each other, a problem at a time, all of them in one process.

Data flows one way: problems, a contest each, records. In a contest every contestant is called once,
its output goes to the judge (another process), and those that are right take turns; only from such
times are ratios made. Whoever is wrong, crashes or refuses is out, with its status and its reason,
and is never timed. Nothing here touches a tensor.
"""

import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from harness.problems.problem import PEERS_FROM, YARDSTICK
from harness.problems import cost
from harness.isolation.bench_worker import compete
from harness.problems.directions import AGAIN
from harness.problems.problem import Problem
from harness.isolation.child import NO_MESSAGE, START_LIMIT, Child, ChildFailed
from harness.records.results import Writer, check_record
from harness.isolation.roster import StageInfo
from harness.runs.runner import Judge, expect, why_hopeless

INTERPRETED = "interpreted: no speed to compare"
TIMING = ("time_ms", "time_iqr_ms", "samples", "sm_clock_mhz")

Record = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Terms:
    """How a contest is held: `warmup` calls each, then `repeat` rounds of one sample each.

    `budget`: seconds that a contestant may take for its check, and once more for its rounds;
    `memory`: bytes of the machine's own memory that a contest may take.
    """

    warmup: int
    repeat: int
    budget: float
    memory: int


@dataclass(frozen=True)
class Contest:
    """Stages that answer one problem, against each other."""

    problem: Problem
    stages: Sequence[StageInfo]

    def to_json(self) -> list[Record]:
        """The contest as the env line's plan has it: a dict a contestant."""
        problem = self.problem.to_json()
        return [{"stage": stage.number, "name": stage.name, **problem} for stage in self.stages]


@dataclass(frozen=True)
class Sizes:
    """How many batch entries and heads a problem of N queries has.

    B = tokens // N and H = hidden // d, so that the work a token stays the same, as source 004 has
    it; or `b`, `h` where they are given.
    """

    tokens: int
    hidden: int
    b: int | None = None
    h: int | None = None

    def of(self, n: int, d: int) -> tuple[int, int]:
        """b and h of a problem. Raises ValueError where `tokens` or `hidden` is too small."""
        b = self.tokens // n if self.b is None else self.b
        h = self.hidden // d if self.h is None else self.h
        if b < 1:
            raise ValueError(f"N = {n} is more than the {self.tokens} tokens of a batch")
        if h < 1 or (self.h is None and self.hidden % d):
            raise ValueError(f"d = {d} does not divide {self.hidden}, the size of all heads")
        return b, h


def make_problems(
    base: Problem, directions: Sequence[str], causal: Sequence[bool], ds: Sequence[int],
    ns: Sequence[int], sizes: Sizes,
) -> list[Problem]:  # fmt: skip
    """A problem for each combination, N last; `base` gives inputs, seed, dtype and device.

    Raises ValueError where `sizes` leaves a problem no batch entry or no head.
    """
    problems = []
    for direction, masked, d, n in product(directions, causal, ds, ns):
        b, h = sizes.of(n, d)
        problems.append(
            replace(base, direction=direction, causal=masked, b=b, h=h, hk=h, nq=n, nk=n, d=d)
        )
    return problems


# suite -> directions, d, N, and how large: the sources' shapes, both with and without the mask
SOURCE_001 = Sizes(tokens=0, hidden=0, b=2, h=4)
SOURCE_004 = Sizes(tokens=16384, hidden=2048)
SHORT, LONG = (512, 1024, 2048, 4096, 8192), (512, 1024, 2048, 4096, 8192, 16384)
SUITES: dict[str, tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...], Sizes]] = {
    "001-forward": (("fwd",), (64,), SHORT, SOURCE_001),
    "001-train": (("fwd", "bwd", "train"), (64,), SHORT, SOURCE_001),
    "001-memory": (("fwd", "train"), (64,), SHORT, SOURCE_001),
    "004": (("fwd",), (64, 128), LONG, SOURCE_004),
}


def suite_problems(name: str, base: Problem) -> list[Problem]:
    """The problems of one of SUITES, in float16, as the sources have it."""
    directions, ds, ns, sizes = SUITES[name]
    half = replace(base, dtype="float16", precision="float16")
    return make_problems(half, directions, (False, True), ds, ns, sizes)


def fits(stage: StageInfo, problem: Problem) -> bool:
    """Whether a stage takes the problem and declares itself right on it."""
    return stage.why_skip(problem) is None and stage.exact(problem)


def usual_stages(stages: Sequence[StageInfo], problems: Sequence[Problem]) -> list[StageInfo]:
    """Who competes unless told: stage 3, the newest stage that fits, and all the peers.

    For forward passes that is the newest of the forward-only stages, for the others the newest that
    carries gradients.
    """
    ours = [stage for stage in stages if stage.number < PEERS_FROM]
    chosen = {stage.path for stage in stages if stage.number == YARDSTICK}
    for trains in {problem.direction != "fwd" for problem in problems}:
        able = [
            stage
            for stage in ours
            if stage.gradients == trains
            and any(fits(stage, p) for p in problems if (p.direction != "fwd") == trains)
        ]
        chosen |= {max(able, key=lambda stage: stage.number).path} if able else set()
    return [stage for stage in stages if stage.path in chosen or stage.number >= PEERS_FROM]


def plan(
    stages: Sequence[StageInfo], problems: Sequence[Problem], asked: Collection[Path]
) -> list[Contest]:
    """A contest a problem, of those of `stages` that fit.

    Stages whose files are `asked` for are contestants of every problem: where they don't take one,
    their record says why.
    """
    contests = []
    for problem in problems:
        able = [stage for stage in stages if stage.path in asked or fits(stage, problem)]
        if able:
            contests.append(Contest(problem, able))
    return contests


class NoOracle(Exception):
    """The judge can't say what is right; `status` is a record's, the text its reason."""

    def __init__(self, error: ChildFailed) -> None:
        super().__init__(error.reason)
        self.status = error.status


class Entry:
    """A contestant in a contest: its stage, its record, and the file that its output goes to."""

    def __init__(self, stage: StageInfo, problem: Problem, terms: Terms, out: Path) -> None:
        self.stage, self.problem, self.terms, self.out = stage, problem, terms, out
        self.record = blank_record(stage, problem, terms)
        self.standing = True

    def fall(self, status: str, reason: str) -> None:
        """It is out: nothing that was measured of it is kept, but its errors."""
        errors = {name: self.record[name] for name in ("err_f64_max", "err_f64_rel")}
        self.record = blank_record(self.stage, self.problem, self.terms) | errors
        self.record |= {"status": status, "reason": reason}
        self.standing = False

    def settle(self, verdict: Record) -> None:
        """Take the judge's verdict on its first output."""
        for name in ("err_f64_max", "err_f64_rel"):
            self.record[name] = verdict.get(name)
        if not self.stage.exact(self.problem) and verdict["finite"]:
            self.fall("wrong-by-design", f"declared exact up to Nk = {self.stage.exact_up_to} only")
        elif not verdict["exact"]:
            self.fall("wrong", verdict["why"])
        else:
            self.record["status"] = "ok"


def blank_record(stage: StageInfo, problem: Problem, terms: Terms) -> Record:
    """The record of a contestant before anything is measured."""
    problem_json = problem.to_json()
    if problem.seqlens_k is not None:
        problem_json["seqlens_k"] = list(problem.seqlens_k)
    measured = ("time_ms", "time_iqr_ms", "first_call_ms", "sm_clock_mhz", "peak_bytes")
    derived = ("tflops", "tokens_per_s", "skip_ratio", "err_f64_max", "err_f64_rel")
    return {
        "kind": "bench",
        "stage": stage.number,
        "name": stage.name,
        **problem_json,
        "mode": stage.modes[problem.device],
        "status": "crashed",
        "reason": "",
        "samples": 0,
        **dict.fromkeys((*measured, "memory_meter", *derived)),
        "flops": cost.flops(problem),
        "speedup": {},
        "warmup": terms.warmup,
        "repeat": terms.repeat,
    }


Report = Callable[[Contest, list[Record], str], None]  # told what the contestants printed, too


def run(contests: Sequence[Contest], terms: Terms, writer: Writer, report: Report) -> None:
    """Hold the contests, append the records of each to `writer`, tell `report` of them.

    A run broken off keeps the contests that were over.
    """
    with tempfile.TemporaryDirectory(prefix="ladder-") as name:
        folder = Path(name)
        for contest in contests:
            printed: list[str] = []
            records = hold(contest, terms, folder, printed)
            writer.append(*records)
            report(contest, records, "".join(printed))


def hold(contest: Contest, terms: Terms, folder: Path, printed: list[str]) -> list[Record]:
    """The records of one contest. A contestant that fails costs itself only.

    What the contestants print, process by process, is added to `printed`.
    """
    problem = contest.problem
    entries = [
        Entry(stage, problem, terms, folder / f"out.{index}")
        for index, stage in enumerate(contest.stages)
    ]
    for entry in entries:
        if reason := entry.stage.why_skip(problem):
            entry.fall("skipped", reason)
        elif hopeless := why_hopeless(problem):
            entry.fall(*hopeless)
    if any(entry.standing for entry in entries):
        with Judge(problem, folder) as court:
            try:
                find_out(entries, court, printed)
            except NoOracle as error:
                for entry in entries:
                    if entry.standing:
                        entry.fall(error.status, str(error))
    compare(entries)
    return [entry.record for entry in entries]


def find_out(entries: Sequence[Entry], court: Judge, printed: list[str]) -> None:
    """Fill the records: all together, and where that process ends early, first one at a time.

    One that takes the process with it shows it alone, too; the others then compete without it.
    """
    together = [entry for entry in entries if entry.standing]
    failure = compete_in_one_process(together, court, printed)
    if failure is not None and len(together) > 1:
        for entry in together:
            start_again(entry)
            if alone := compete_in_one_process([entry], court, printed):
                entry.fall(*alone)
        together = [entry for entry in together if entry.standing]
        failure = compete_in_one_process(together, court, printed) if together else None
        if failure is not None:
            failure = (failure[0], f"sound alone, but of all in one process: {failure[1]}")
    if failure is not None:
        for entry in together:
            if entry.standing:
                entry.fall(*failure)


def start_again(entry: Entry) -> None:
    """Forget what was found of a contestant."""
    entry.record = blank_record(entry.stage, entry.problem, entry.terms)
    entry.standing = True


def compete_in_one_process(
    entries: Sequence[Entry], court: Judge, printed: list[str]
) -> tuple[str, str] | None:
    """One contest: check, turns, second check. None, or how its process came to an early end.

    Raises NoOracle where nothing can be checked.
    """
    log = court.folder / "log"
    log.write_bytes(b"")
    try:
        with_a_child(entries, court, log)
        for entry in entries:
            check_record(entry.record)
    except ChildFailed as error:
        return error.status, error.reason
    except (KeyError, TypeError, ValueError):  # no message of ours, or figures that are none
        return "crashed", NO_MESSAGE
    finally:
        court.sweep()
        printed.append(log.read_bytes().decode(errors="replace"))
    return None


def with_a_child(entries: Sequence[Entry], court: Judge, log: Path) -> None:
    """Start the contest's process, and go through it step by step."""
    problem, terms = entries[0].problem, entries[0].terms
    court.start()  # it makes the oracle while the contestants load
    order = problem.to_json() | {
        "warmup": terms.warmup, "repeat": terms.repeat, "budget": terms.budget,
        "memory": terms.memory,
    }  # fmt: skip
    paths = [str(entry.stage.path) for entry in entries]
    outs = [str(entry.out) for entry in entries]
    with Child(compete, paths, order, outs, log=log) as child:
        late = f"did not load in {START_LIMIT:g} s"
        expect(child.receive(START_LIMIT, late), "ready")
        child.limit_memory(terms.memory)
        judged(court.open)  # before the first call: a stage that tunes itself wants the GPU alone
        child.send({"event": "start"})
        late = f"took more than its budget of {terms.budget:g} s"
        for entry in entries:
            note_first_call(entry, child.receive(terms.budget, late))
        for entry in entries:
            if entry.standing:
                entry.settle(verdict(court, entry.out))
            if entry.standing and entry.record["mode"] == "interpreted":
                entry.record["reason"] = INTERPRETED
        going = [
            index
            for index, entry in enumerate(entries)
            if entry.standing and entry.record["mode"] != "interpreted"
        ]
        child.send({"event": "turns", "going": going})
        if going:
            take_turns([entries[index] for index in going], child, court)


def note_first_call(entry: Entry, message: Record) -> None:
    """Note what a contestant's first call came to."""
    if message["event"] == "out":
        entry.fall(*refusal(entry.stage, message))
        return
    expect(message, "checked")
    for field in ("first_call_ms", "peak_bytes", "memory_meter"):
        entry.record[field] = message[field]


def refusal(stage: StageInfo, message: Record) -> tuple[str, str]:
    """Status and reason of one that is out: a ValueError of a peer says that it won't take this."""
    status, reason = str(message["status"]), str(message["reason"])
    if stage.number >= PEERS_FROM and message.get("refused"):
        return "skipped", reason
    return status, reason


def take_turns(going: Sequence[Entry], child: Child, court: Judge) -> None:
    """Have the contestants timed in turns, and their answers checked once more."""
    terms = going[0].terms
    seconds = terms.budget * len(going)
    late = f"took more than {seconds:g} s for the rounds of all"
    timings = expect(child.receive(seconds, late), "done")["timings"]
    for entry, timing in zip(going, timings, strict=True):
        if "status" in timing:
            entry.fall(*refusal(entry.stage, timing))
            continue
        if why := why_not_again(entry, court):
            entry.fall("wrong", why)
        else:
            note_timing(entry, timing)
    try:
        counted = expect(child.receive(seconds, "took too long to count its tiles"), "counted")
    except ChildFailed:
        return  # the times were taken before, and stand; nothing was counted
    for entry, ratio in zip(going, counted["skip_ratios"], strict=True):
        if entry.standing:
            entry.record["skip_ratio"] = ratio


def why_not_again(entry: Entry, court: Judge) -> str | None:
    """Why the answers to changed inputs are not those inputs' own, or None where they are."""
    for index, (changed, _) in enumerate(AGAIN[entry.problem.direction]):
        out = entry.out.with_name(f"{entry.out.name}.again{index}")
        found = verdict(court, out, index)
        if not found["exact"]:
            why = found["why"]
            return f"its output after {changed} changed is not the new {changed}'s: {why}"
    return None


def note_timing(entry: Entry, timing: Mapping[str, Any]) -> None:
    """Note a contestant's timing, and what follows from it."""
    record, problem = entry.record, entry.problem
    for field in TIMING:
        record[field] = timing[field]
    seconds = 1e-3 * record["time_ms"]
    if not 0 < seconds < float("inf"):
        raise TypeError(f"time_ms: got {record['time_ms']}")
    record["tflops"] = record["flops"] / seconds / 1e12
    record["tokens_per_s"] = problem.b * problem.nq / seconds


def verdict(court: Judge, out: Path, again: int | None = None) -> Record:
    """The judge's verdict on the outputs in a file, which is then removed: they are large."""
    if not out.is_file():  # announced, and never written
        raise ChildFailed("crashed", NO_MESSAGE)
    try:
        return judged(lambda: court.verdict(out, again))
    finally:
        out.unlink(missing_ok=True)


def judged(ask: Callable[[], T]) -> T:
    """What the judge answers. Its own failure is nobody's in the contest: it raises NoOracle."""
    try:
        return ask()
    except ChildFailed as error:
        raise NoOracle(error) from None


def compare(entries: Sequence[Entry]) -> None:
    """Fill in the speed-ups: a peer's median over one's own, from the same rounds."""
    timed = [entry for entry in entries if entry.record["time_ms"] is not None]
    peers = [entry for entry in timed if entry.stage.number >= PEERS_FROM]
    for entry in timed:
        entry.record["speedup"] = {
            peer.stage.name: peer.record["time_ms"] / entry.record["time_ms"]
            for peer in peers
            if peer is not entry
        }
