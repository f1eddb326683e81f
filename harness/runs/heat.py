"""One process of a comparison: its stages are called, judged, timed, and called again.

Only a stage that is right, or wrong by design and alone, is timed. The times that the process
reports are checked against the parent's clock.
"""

import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.isolation.child import NO_MESSAGE, ChildFailed
from harness.isolation.contestant import compete
from harness.isolation.judge import Judge
from harness.isolation.processes import kept_waiting
from harness.isolation.roster import LEAST_LOAD
from harness.isolation.session import (
    FAULT,
    Session,
    has,
    is_bool,
    is_count,
    is_number,
    is_time,
    list_of,
    optional,
)  # fmt: skip
from harness.problems.directions import AGAIN
from harness.records.schema import METERS
from harness.runs.outcome import CHECKED, TIMING, Outcome
from harness.runs.plan import Comparison

SAMPLE_SECONDS = 0.2  # of sampling a stage alone
TURN_SECONDS = 0.3  # of sampling each of several stages in turns, with no number of rounds given
LEAST_SECONDS = 0.01  # least rest of a budget, so that a message already sent is still read
INTERPRETED = "interpreted: no speed to compare"

# how a reported time is checked by the parent's clock
CHECK_SECONDS, MOST_CALLS, MOST_CHECKS = 0.01, 1000, 3
MESSAGE_SECONDS = 0.02  # for messages in both directions
MOST_FACTOR = 4.0  # a factor between the two clocks that noise of a busy machine may explain
LAUNCH_SECONDS = 0.002  # that Python may take to launch a call, not part of a GPU's own time

# the messages that the process of a comparison may send (harness/isolation/contestant.py)
OUT = {**FAULT, "refused": is_bool}
TIMED = {
    "time_ms": is_time, "time_iqr_ms": optional(is_number), "samples": is_count,
    "sm_clock_mhz": optional(is_count), "rounds_ms": optional(list_of(is_time)),
    "change": list_of(is_count),
}  # fmt: skip
FIRST = {
    "checked": {
        "first_call_ms": is_time,
        "call_ms": is_time,
        "peak_bytes": optional(is_count),
        "memory_meter": lambda value: value in (None, *METERS),
        "launch_configs": lambda value: value is None or isinstance(value, dict),
        "interpreted": is_bool,
    },
    "out": OUT,
}
DONE = {"done": {"timings": list_of(lambda value: has(OUT)(value) or has(TIMED)(value))}}
COUNTED = {"counted": {"skip_ratios": list_of(optional(is_number))}}


Failure = tuple[str, str] | None  # status and reason
Say = Callable[[str], None]  # called with each step when it begins


def remaining(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes of the stages that have not failed."""
    return [outcome for outcome in outcomes if not outcome.dropped]


class Heat:
    """One process of a comparison and its stages; `failure`: why it ended early, or None."""

    def __init__(
        self, comparison: Comparison, outcomes: Sequence[Outcome], judge: Judge, apart: bool,
        tell: Say,
    ) -> None:  # fmt: skip
        self.comparison, self.outcomes, self.judge, self.apart = comparison, outcomes, judge, apart
        self.tell, self.limits = tell, comparison.limits
        self.failure: Failure = None
        self.going: list[int] = []
        self.seconds = self.limits.budget  # the rest of the budget
        # its own folder, so that processes share no files
        self.folder = tempfile.TemporaryDirectory(prefix="ladder-", ignore_cleanup_errors=True)
        self.outs = [Path(self.folder.name) / f"out.{i}" for i in range(len(outcomes))]
        order = comparison.problem.to_json() | {
            "page_sizes": [outcome.problem.page_size for outcome in outcomes],
            "alone": comparison.alone, "apart": apart, "rounds": self.limits.rounds,
            "warmup": 0 if comparison.alone else self.limits.warmup,
            "budget": self.limits.budget, "memory": self.limits.memory,
        }  # fmt: skip
        paths = [str(outcome.stage.path) for outcome in outcomes]
        self.session = Session(
            compete, paths, order, list(map(str, self.outs)), memory=self.limits.memory,
            load=max(LEAST_LOAD, self.limits.budget),
        )  # fmt: skip

    def attempt(self, step: Callable[[], None]) -> None:
        """Carry out a step, unless an earlier one has failed; note a failure."""
        if self.failure is None and self.outcomes:
            try:
                step()
            except ChildFailed as error:
                if error.reason == NO_MESSAGE:  # then its earlier messages can't be trusted either
                    for outcome in self.outcomes:
                        outcome.forget()
                self.failure, self.going = (error.status, error.reason), []
                self.session.end()

    def load(self) -> None:
        """Load the stages while the judge makes its oracles."""
        self.judge.start()
        self.session.ready()
        self.judge.open()  # before the first call: a stage that tunes itself needs the GPU alone

    def check(self) -> None:
        """Have each stage called for the first time, and its outputs judged.

        The time of the judge does not count towards the budget.
        """
        budget = self.limits.budget
        late = f"took more than its budget of {budget:g} s"
        begun = time.monotonic()
        self.session.send({"event": "start"})
        for outcome in self.outcomes:
            self.tell(f"{outcome.stage.number} {outcome.stage.name} is called")
            called = time.monotonic()
            message = self.session.receive(FIRST, budget, late)
            outcome.waited = time.monotonic() - called
            if message["event"] == "checked":
                outcome.note(message, (*CHECKED, "call_ms", "launch_configs", "interpreted"))
            else:
                note_fault(outcome, message)
        self.seconds = max(LEAST_SECONDS, budget - (time.monotonic() - begun))
        for outcome, out in zip(self.outcomes, self.outs, strict=True):
            if not outcome.dropped:
                outcome.note_verdict(self.judge.verdict(out))
                excused = self.comparison.alone and outcome.status == "wrong-by-design"
                if outcome.status != "ok" and not excused:
                    outcome.drop(outcome.status, outcome.reason)

    def to_be_timed(self) -> list[Outcome]:
        """The stages to be timed: those that have not failed and are not interpreted.

        For a stage alone, where it is interpreted or very slow, its one call is its time.
        """
        found = []
        for outcome in remaining(self.outcomes) if self.failure is None else []:
            interpreted = outcome.mode == "interpreted"
            if self.comparison.alone and (interpreted or 4e-3 * outcome.call_ms >= self.seconds):
                outcome.time_ms, outcome.samples = outcome.call_ms, 1
            elif interpreted:
                outcome.reason = INTERPRETED
            else:
                found.append(outcome)
        return found

    def send_turns(self) -> None:
        """Tell the process which stages to time and for how long; one of several then warms up."""
        timed = self.to_be_timed()
        self.going = [i for i, each in enumerate(self.outcomes) if each in timed]
        if not timed:
            return
        sampled = TURN_SECONDS * len(timed) if self.limits.rounds is None else 0.0
        if self.comparison.alone:
            sampled = min(max(SAMPLE_SECONDS, 5e-3 * timed[0].call_ms), self.seconds / 2)
        self.session.send({"event": "turns", "going": self.going, "seconds": sampled})
        if self.apart:
            late = f"took more than {self.limits.budget:g} s to warm up"
            message = self.session.receive({"warm": {}, **DONE}, self.limits.budget, late)
            if message["event"] == "done":  # it has failed
                self.note_timings(message["timings"])
                self.going = []

    def turn(self) -> None:
        """Have the process take one sample."""
        self.session.send({"turn": True})
        self.session.receive({"turn": {}}, self.limits.budget, "took too long for its turn")

    def end_turns(self) -> None:
        """Tell the process that there are no more turns."""
        self.session.send({"turn": False})

    def finish(self) -> None:
        """Receive the timings, judge the outputs of calls with changed inputs, check the times."""
        if not self.going:
            return
        seconds, late = self.seconds, f"took more than its budget of {self.limits.budget:g} s"
        if not self.comparison.alone:
            seconds = self.limits.budget * len(self.going)
            late = f"took more than {seconds:g} s for the rounds of all"
        self.note_timings(self.session.receive(DONE, seconds, late)["timings"])
        going = [self.outcomes[index] for index in self.going]
        for place, outcome in enumerate(going):
            if not outcome.dropped and (why := self.why_too_short(place, outcome)):
                outcome.drop("wrong", why)
        if self.limits.rounds is not None:  # a cell has no field for the skip ratio
            for outcome, ratio in zip(going, self.count(seconds)):
                if not outcome.dropped:
                    outcome.skip_ratio = ratio

    def note_timings(self, timings: Sequence[dict[str, Any]]) -> None:
        """Note the timing of each stage whose outputs for changed inputs are right, too."""
        if len(timings) != len(self.going):
            raise ChildFailed("crashed", NO_MESSAGE)
        for index, timing in zip(self.going, timings, strict=True):
            outcome = self.outcomes[index]
            if "status" in timing:
                note_fault(outcome, timing)
            elif why := why_cached(outcome, self.outs[index], self.judge, timing["change"]):
                outcome.drop("wrong", why)
            else:
                outcome.note(timing, TIMING)

    def count(self, seconds: float) -> list[float | None]:
        """The share of tiles that each stage skips, where it counts them.

        A failure here does not affect the times, which were taken before.
        """
        self.session.send({"calls": 0})
        try:
            late = "took too long to count its tiles"
            return list(self.session.receive(COUNTED, seconds, late)["skip_ratios"])
        except ChildFailed:
            return []

    def now(self) -> float:
        """The parent's clock in seconds, less the time that both waited for a processor."""
        pids = (os.getpid(), self.session.start().process.pid)
        return time.monotonic() - sum(map(kept_waiting, pids))

    def why_too_short(self, place: int, outcome: Outcome) -> str | None:
        """Why the time that a stage's process reports is too short to be true; None if it isn't.

        The parent times some calls by its own clock, which includes delays of a busy machine. So a
        reported time is rejected only where it is far below the parent's in each of several checks.
        """
        reported = 1e-3 * (outcome.time_ms or 0.0)
        if MOST_FACTOR * reported >= outcome.waited:  # the wait for the stage's first calls
            return None
        calls = min(MOST_CALLS, math.ceil(CHECK_SECONDS / reported))
        allowed = MESSAGE_SECONDS + MOST_FACTOR * calls * reported
        if outcome.problem.device == "cuda":
            allowed += calls * LAUNCH_SECONDS
        for _ in range(MOST_CHECKS):
            begun = self.now()
            self.session.send({"index": place, "calls": calls})
            late = f"took more than {self.limits.budget:g} s for {calls} calls"
            self.session.receive({"called": {}}, self.limits.budget, late)
            waited = self.now() - begun
            if waited <= allowed:
                return None
        return (
            f"its clock is wrong: {1e3 * reported:.3g} ms per call, but {1e3 * waited:.3g} ms for "
            f"{calls} of them"
        )

    def __enter__(self) -> "Heat":
        return self

    def __exit__(self, *_: object) -> None:
        self.session.end()
        self.folder.cleanup()


def note_fault(outcome: Outcome, message: dict[str, str]) -> None:
    """Drop a stage that has failed, with the status and reason that its process reports."""
    outcome.drop(message["status"], message["reason"])
    outcome.refused = bool(message["refused"])


def why_cached(outcome: Outcome, out: Path, judge: Judge, change: list[int] | None) -> str | None:
    """Why the outputs for changed inputs are wrong, as those of a stage that caches are, or None.

    The outputs of one of the timed calls are checked last.
    """
    if not outcome.stage.exact(outcome.problem):
        return None
    for index, (changed, _) in enumerate(AGAIN[outcome.problem.direction]):
        found = judge.verdict(out.with_name(f"{out.name}.again{index}"), index)
        if not found["exact"]:
            why = found["why"]
            return f"its output after {changed} changed is not the new {changed}'s: {why}"
    found = judge.verdict(out.with_name(f"{out.name}.timed"), change=change)
    if not found["exact"]:
        return f"its output of a call that was timed is not that call's own: {found['why']}"
    return None
