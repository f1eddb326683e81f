"""Plans a run and carries it out: a process a cell, a judge a problem, a record a cell.

Data flows one way: problem, cell, measurement, record. Nothing here touches a tensor.
"""

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from harness.problems.problem import PEERS_FROM
from harness.records.units import show_bytes
from harness.problems import cost
from harness.records import environment
from harness.problems.directions import AGAIN
from harness.problems.problem import REAL_D, Problem
from harness.isolation.child import NO_MESSAGE, START_LIMIT, Child, ChildFailed
from harness.records.results import BadRecord, Writer, check_record, key
from harness.isolation.roster import StageInfo
from harness.isolation.worker import contest, duel, judge

JUDGE_LIMIT = 600.0  # seconds for an oracle
# FLOP/s in float64 that none exceeds: a CPU's core (two 512-bit FMAs a cycle, 6 GHz), and a GPU
CORE_RATE, GPU_RATE = 2e11, 1e14
GPU_SIZES = (1024, 2048, 4096, 8192, 16384)
SMALL_N, SMALL_D = 64, 16  # the tour's small part goes up to so many keys
SAMPLE_SECONDS = 0.2  # of sampling a cell
TURN_SECONDS = 0.3  # of sampling a contestant, in turns

Record = dict[str, Any]
Report = Callable[[Record, str], None]  # told of each cell's record and of what the stage printed


@dataclass(frozen=True)
class Limits:
    """What one cell may take: `budget` seconds from the first call on, `memory` bytes."""

    budget: float = 60.0
    memory: int = 4 << 30


@dataclass(frozen=True)
class Cell:
    """One stage on one problem; `paired`: timed in turns with the other stages, in one process."""

    stage: StageInfo
    problem: Problem
    paired: bool = False

    def to_json(self) -> Record:
        """The cell as the env line's plan has it."""
        identity = {"stage": self.stage.number, "name": self.stage.name, "paired": self.paired}
        return identity | self.problem.to_json()


def plan_grid(
    stages: Sequence[StageInfo], problems: Iterable[Problem], paired: bool = False
) -> list[Cell]:
    """Every stage on every problem, problem by problem; with `paired`, once more in turns."""
    turns = (False, True) if paired else (False,)
    return [Cell(stage, problem, turn) for problem in problems for turn in turns for stage in stages]


def plan_tour(stages: Sequence[StageInfo], base: Problem) -> list[Cell]:
    """What a newcomer sees: small problems for all, larger ones and real input for the faster.

    A GPU gets a part of its own, up to N = 16384, with the peers. Stages come in up to the N that
    they call worth running; `base` gives seed, dtype and device.
    """
    sizes = [("normal", n, SMALL_D) for n in (8, 16, 32, SMALL_N)]
    sizes += [("normal", n, 64) for n in (64, 128, 256, 512, 1024)]
    sizes += [("real", n, REAL_D) for n in (128, 256, 512)]
    if base.device == "cuda":
        sizes += [("normal", n, d) for d in (64, 128) for n in GPU_SIZES if (n, d) != (1024, 64)]
    cells = []
    for inputs, n, d in sizes:
        problem = replace(base, inputs=inputs, nq=n, nk=n, d=d)
        # a stage that isn't worth more than the small part is spared the rest
        least = n if d == SMALL_D else max(n, SMALL_N + 1)
        cells += [
            Cell(stage, problem)
            for stage in stages
            if least <= stage.worth_up_to.get(problem.device, least)
            and (stage.number < PEERS_FROM or peer_joins(stage, problem))
        ]
    return cells


def peer_joins(peer: StageInfo, problem: Problem) -> bool:
    """Whether a peer has a row: on a GPU, on the larger problems that it takes."""
    large = problem.device == "cuda" and problem.nk >= GPU_SIZES[0]
    return large and peer.why_skip(problem) is None


def run(
    cells: Sequence[Cell], done: Iterable[Record], writer: Writer, limits: Limits, report: Report
) -> list[Record]:
    """Measure the cells that aren't in `done`, append each to `writer`, tell `report` of each.

    Returns the new records. A cell that fails costs itself only.
    """
    measured = {key(record): record for record in done}
    left = [cell for cell in cells if key(cell.to_json()) not in measured]
    records: list[Record] = []
    with tempfile.TemporaryDirectory(prefix="ladder-") as folder:
        for problem, group in groupby(left, key=lambda cell: cell.problem):
            with Judge(problem, Path(folder)) as court:
                for batch, printed in run_problem(list(group), measured, court, limits):
                    writer.append(*batch)
                    for record in batch:
                        records.append(record)
                        measured[key(record)] = record
                        report(record, printed)
                        printed = ""
    return records


def run_problem(
    cells: Sequence[Cell], measured: Mapping[str, Record], court: "Judge", limits: Limits
) -> Iterator[tuple[list[Record], str]]:
    """The records of the cells of one problem, with what the stages printed.

    First a cell at a time; then those to be paired together, in one process, if each of them was
    found right by itself.
    """
    log = court.folder / "log"
    for cell in cells:
        if cell.paired:
            continue
        record = blank_record(cell)
        log.write_bytes(b"")
        if reason := cell.stage.why_skip(cell.problem):
            record |= {"status": "skipped", "reason": reason}
        elif hopeless := why_hopeless(cell.problem):
            record["status"], record["reason"] = hopeless
        else:
            try:
                measure(cell, court, limits, record)
            except ChildFailed as error:
                record |= {"status": error.status, "reason": error.reason}
            except (KeyError, TypeError):  # a message without its figures, or none at all
                record = forged(cell)
            try:
                check_record(record)
            except BadRecord:  # figures that are none
                record = forged(cell)
        yield [record], log.read_bytes().decode(errors="replace")
    if in_turns := [cell for cell in cells if cell.paired]:
        log.write_bytes(b"")
        records = measure_in_turns(in_turns, measured, court, limits)
        yield records, log.read_bytes().decode(errors="replace")


def blank_record(cell: Cell) -> Record:
    """The record of a cell before anything is measured."""
    problem = cell.problem
    measured = ("time_ms", "time_iqr_ms", "first_call_ms", "sm_clock_mhz", "peak_bytes")
    errors = ("err_stage3_max", "err_stage3_rel", "err_f64_max", "err_f64_rel")
    return {
        "kind": "cell",
        **cell.to_json(),
        "seqlens_k": list(problem.seqlens_k) if problem.seqlens_k is not None else None,
        "mode": cell.stage.modes[problem.device],
        "status": "crashed",
        "reason": "",
        "samples": 0,
        **dict.fromkeys((*measured, "memory_meter")),
        **dict.fromkeys(errors),
        "flops": cost.flops(problem),
        "hbm_bytes": cost.hbm_bytes(problem, cell.stage.traffic),
    }


def why_hopeless(problem: Problem) -> tuple[str, str] | None:
    """Status and reason where no answer to `problem` can be checked here; None where one may be.

    Said before anything is made: inputs that outgrow the machine would have its kernel end whatever
    process it likes, and an oracle that can't be in time would be waited for in silence.
    """
    machine, held = environment.memory_bytes(), cost.held_bytes(problem)
    if machine is not None and held > machine // 2:
        return "out-of-memory", (
            f"can't be checked: that takes at least {show_bytes(held)}, more than half of this "
            f"machine's {show_bytes(machine)}"
        )
    rate = GPU_RATE if problem.device == "cuda" else CORE_RATE * environment.cores()
    seconds = cost.flops(problem) / rate
    if seconds > JUDGE_LIMIT:
        return "timeout", (
            f"can't be checked: the oracle would take at least {seconds:.0f} s, more than its "
            f"limit of {JUDGE_LIMIT:g} s"
        )
    return None


def forged(cell: Cell) -> Record:
    """The record of a cell whose process reported what no process of ours would."""
    return blank_record(cell) | {"status": "crashed", "reason": NO_MESSAGE}


def measure(cell: Cell, court: "Judge", limits: Limits, record: Record) -> None:
    """Fill `record` with what the cell's own process measures and its judge finds.

    Raises ChildFailed where the cell comes to nothing.
    """
    out = court.folder / "out"
    order = cell.to_json() | {"memory": limits.memory, "seconds": SAMPLE_SECONDS}
    court.open()  # the oracle first: what can't be checked isn't run
    try:
        with Child(
            contest, str(cell.stage.path), order, str(out), log=court.folder / "log"
        ) as child:
            late = f"did not load in {START_LIMIT:g} s"
            expect(child.receive(START_LIMIT, late), "ready")
            child.limit_memory(limits.memory)
            child.send({"event": "start"})
            budget = Stopwatch(limits.budget)
            late = f"took more than its budget of {limits.budget:g} s"
            message = expect(child.receive(budget.left(), late), "output")
            budget.stop()
            for field in ("mode", "first_call_ms", "peak_bytes", "memory_meter"):
                record[field] = message[field]
            hold(record, court.verdict(out.with_suffix(".first")), cell)
            go = record["status"] in ("ok", "wrong-by-design")
            budget.start()
            child.send({"event": "order", "go": go, "seconds_left": budget.left()})
            if not go:
                return
            message = expect(child.receive(budget.left(), late), "done")
            if message["again"]:
                for index, (changed, _) in enumerate(AGAIN[cell.problem.direction]):
                    again = court.verdict(out.with_suffix(f".again{index}"), index)
                    if not again["exact"] and cell.stage.exact(cell.problem):
                        why = f"its output after {changed} changed is not the new {changed}'s: "
                        record |= {"status": "wrong", "reason": why + again["why"]}
                        return
            for field in ("time_ms", "time_iqr_ms", "samples", "sm_clock_mhz"):
                record[field] = message[field]
    finally:
        court.sweep()


def measure_in_turns(
    cells: Sequence[Cell], measured: Mapping[str, Record], court: "Judge", limits: Limits
) -> list[Record]:
    """The paired records of the cells of one problem: all contestants in one process, in turns.

    Only stages that were right by themselves, and not interpreted, compete; the others are skipped.
    """
    records = [blank_record(cell) for cell in cells]
    competing = []
    for cell, record in zip(cells, records, strict=True):
        single = measured.get(key(replace(cell, paired=False).to_json()))
        if single is None or single["status"] != "ok":
            record |= {"status": "skipped", "reason": "not ok by itself: not compared"}
        elif single["mode"] == "interpreted":
            record |= {"status": "skipped", "reason": "interpreted: no speed to compare"}
        else:
            competing.append((cell, record))
    if not competing:
        return records
    order = cells[0].problem.to_json() | {"seconds": TURN_SECONDS * len(competing)}
    paths = [str(cell.stage.path) for cell, _ in competing]
    outs = [court.folder / f"out.{index}" for index in range(len(competing))]
    try:
        court.open()
        child = Child(duel, paths, order, [str(out) for out in outs], log=court.folder / "log")
        with child:
            late = f"did not load in {START_LIMIT:g} s"
            expect(child.receive(START_LIMIT, late), "ready")
            child.limit_memory(limits.memory)
            child.send({"event": "start"})
            seconds = limits.budget * len(competing)
            late = f"took more than their budgets of {limits.budget:g} s together"
            message = expect(child.receive(seconds, late), "done")
        for (cell, record), out, timing in zip(competing, outs, message["timings"], strict=True):
            hold(record, court.verdict(out), cell)
            if record["status"] == "ok":
                record |= timing
        for _, record in competing:
            check_record(record)
    except ChildFailed as error:
        for _, record in competing:
            record |= {"status": error.status, "reason": error.reason}
    except (KeyError, TypeError, ValueError):  # BadRecord is one
        for cell, record in competing:
            record |= forged(cell)
    finally:
        court.sweep()
    return records


def expect(message: Record, event: str) -> Record:
    """`message`, where it is the `event` that is due; ChildFailed otherwise."""
    if message["event"] == "failed":
        raise ChildFailed(message["status"], message["reason"])
    if message["event"] != event:
        raise ChildFailed("crashed", f"its process said {message['event']!r} out of turn")
    return message


def hold(record: Record, verdict: Record, cell: Cell) -> None:
    """Set the record's status and errors by the judge's verdict."""
    for field in ("err_f64_max", "err_f64_rel", "err_stage3_max", "err_stage3_rel"):
        record[field] = verdict.get(field)
    if verdict["exact"]:
        record["status"] = "ok"
    else:
        record |= {"status": "wrong", "reason": verdict["why"]}
    if not cell.stage.exact(cell.problem) and verdict["finite"]:
        reason = f"declared exact up to Nk = {cell.stage.exact_up_to} only"
        record |= {"status": "wrong-by-design", "reason": reason}


class Judge:
    """The process that holds one problem's oracles; started when the first output is due."""

    def __init__(self, problem: Problem, folder: Path) -> None:
        self.problem = problem
        self.folder = folder
        self.log = folder / "judge.log"
        self.child: Child | None = None
        self.ready = False

    def start(self) -> Child:
        """Start it, once; it makes the oracle while others load."""
        if self.child is None:
            self.child = Child(judge, self.problem.to_json(), log=self.log)
            self.ready = False
        return self.child

    def open(self) -> Child:
        """Start it, once, and wait until the oracle is made."""
        child = self.start()
        if not self.ready:
            try:
                late = f"the oracle took more than {JUDGE_LIMIT:g} s"
                expect(child.receive(START_LIMIT + JUDGE_LIMIT, late), "ready")
                self.ready = True
            except ChildFailed as error:
                self.close()
                raise ChildFailed(error.status, f"can't be checked: {error.reason}") from None
        return child

    def verdict(self, path: Path, again: int | None = None) -> Record:
        """What the judge finds of the outputs in the file `path`.

        `again`: which of the changes in directions.AGAIN they were computed after.
        """
        child = self.open()
        child.send({"event": "check", "path": str(path), "again": again})
        late = f"comparing its output took more than {JUDGE_LIMIT:g} s"
        return expect(child.receive(JUDGE_LIMIT, late), "verdict")

    def sweep(self) -> None:
        """Remove outputs that were written for it: no later stage may find them."""
        for path in self.folder.glob("out.*"):
            path.unlink()

    def close(self) -> None:
        """End its process."""
        if self.child is not None:
            self.child.end()
            self.child = None

    def __enter__(self) -> "Judge":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stopwatch:
    """What is left of a number of seconds; it can be stopped while somebody else works."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.since: float | None = time.monotonic()

    def left(self) -> float:
        """The seconds left, at least a hundredth, so that an answer already there is heard."""
        running = time.monotonic() - self.since if self.since is not None else 0.0
        return max(0.01, self.seconds - running)

    def stop(self) -> None:
        """Stand still."""
        self.seconds, self.since = self.left(), None

    def start(self) -> None:
        """Go on."""
        self.since = time.monotonic()


def default_memory(machine_bytes: int | None) -> int:
    """The memory that a cell may take unless told: the smaller of 4 GiB and half the machine's."""
    return min(4 << 30, machine_bytes // 2) if machine_bytes else 4 << 30
