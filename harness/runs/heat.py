"""One process of a comparison: its stages are called, judged, timed, and asked again.

Only what is right, or wrong by design where it is alone, is timed. What the process says of its
times is held to our own clock.
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
from harness.isolation.measured_call import AGAIN
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
from harness.records.schema import METERS
from harness.runs.outcome import CHECKED, TIMING, Outcome
from harness.runs.plan import Comparison

SAMPLE_SECONDS = 0.2  # of sampling a stage alone
TURN_SECONDS = 0.3  # of sampling each of several in turns, where no rounds are asked for
LEAST_SECONDS = 0.01  # left of a budget, so that an answer already given is still heard
INTERPRETED = "interpreted: no speed to compare"

# how we look at a claimed time by our own clock
WATCH_SECONDS, MOST_CALLS, LOOKS = 0.01, 1000, 3
WAITING = 0.02  # seconds for messages to come and go
FAR = 4.0  # a time so many times as long is no noise of a busy machine
LAUNCH = 0.002  # seconds that Python may take for a call, of which a GPU's own time knows nothing

# what a comparison's process may say (harness/isolation/contestant.py)
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
Say = Callable[[str], None]  # told of each step when it begins


def left(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those that take part still."""
    return [outcome for outcome in outcomes if not outcome.dropped]


class Heat:
    """One process of a comparison, and the stages in it; `failure` is how it ended early."""

    def __init__(
        self, comparison: Comparison, outcomes: Sequence[Outcome], judge: Judge, apart: bool,
        tell: Say,
    ) -> None:  # fmt: skip
        self.comparison, self.outcomes, self.judge, self.apart = comparison, outcomes, judge, apart
        self.tell, self.limits = tell, comparison.limits
        self.failure: Failure = None
        self.going: list[int] = []
        self.seconds = self.limits.budget  # left of it
        # its own, so that it finds nothing there that another has made, and leaves nothing
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
        """Take a step, unless one before has failed."""
        if self.failure is None and self.outcomes:
            try:
                step()
            except ChildFailed as error:
                if error.reason == NO_MESSAGE:  # nor is what it said before to be believed
                    for outcome in self.outcomes:
                        outcome.forget()
                self.failure, self.going = (error.status, error.reason), []
                self.session.end()

    def load(self) -> None:
        """Load the stages while the judge makes its oracles."""
        self.judge.start()
        self.session.ready()
        self.judge.open()  # before the first call: a stage that tunes itself wants the GPU alone

    def check(self) -> None:
        """Have each stage called and its outputs judged.

        The clock of the budget stands still while the judge works.
        """
        budget = self.limits.budget
        late = f"took more than its budget of {budget:g} s"
        begun = time.monotonic()
        self.session.send({"event": "start"})
        for outcome in self.outcomes:
            self.tell(f"{outcome.stage.number} {outcome.stage.name} is called")
            asked = time.monotonic()
            message = self.session.receive(FIRST, budget, late)
            outcome.waited = time.monotonic() - asked
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
        """The stages that are left, and not interpreted: those are no match for others.

        Alone, the one call of a stage that is interpreted, or that slow, is its time.
        """
        found = []
        for outcome in left(self.outcomes) if self.failure is None else []:
            interpreted = outcome.mode == "interpreted"
            if self.comparison.alone and (interpreted or 4e-3 * outcome.call_ms >= self.seconds):
                outcome.time_ms, outcome.samples = outcome.call_ms, 1
            elif interpreted:
                outcome.reason = INTERPRETED
            else:
                found.append(outcome)
        return found

    def send_turns(self) -> None:
        """Say who is timed, and for how long; a process among others then warms up."""
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
        """Its turn: a sample."""
        self.session.send({"turn": True})
        self.session.receive({"turn": {}}, self.limits.budget, "took too long for its turn")

    def end_turns(self) -> None:
        """Tell it that no turn comes any more."""
        self.session.send({"turn": False})

    def finish(self) -> None:
        """Take its timings, and judge what it answered to calls with inputs of their own."""
        if not self.going:
            return
        seconds, late = self.seconds, f"took more than its budget of {self.limits.budget:g} s"
        if not self.comparison.alone:
            seconds = self.limits.budget * len(self.going)
            late = f"took more than {seconds:g} s for the rounds of all"
        self.note_timings(self.session.receive(DONE, seconds, late)["timings"])
        going = [self.outcomes[index] for index in self.going]
        for place, outcome in enumerate(going):
            if not outcome.dropped and (why := self.why_too_fast(place, outcome)):
                outcome.drop("wrong", why)
        if self.limits.rounds is not None:  # a cell has no field for it
            for outcome, ratio in zip(going, self.count(seconds)):
                if not outcome.dropped:
                    outcome.skip_ratio = ratio

    def note_timings(self, timings: Sequence[dict[str, Any]]) -> None:
        """Take the timings over, of what answers rightly to changed inputs, too."""
        if len(timings) != len(self.going):
            raise ChildFailed("crashed", NO_MESSAGE)
        for index, timing in zip(self.going, timings, strict=True):
            outcome = self.outcomes[index]
            if "status" in timing:
                note_fault(outcome, timing)
            elif why := why_not_again(outcome, self.outs[index], self.judge, timing["change"]):
                outcome.drop("wrong", why)
            else:
                outcome.note(timing, TIMING)

    def count(self, seconds: float) -> list[float | None]:
        """The share of its tiles that each stage skips, where it counts them.

        Where the process fails at it, the times were taken before, and stand.
        """
        self.session.send({"calls": 0})
        try:
            late = "took too long to count its tiles"
            return list(self.session.receive(COUNTED, seconds, late)["skip_ratios"])
        except ChildFailed:
            return []

    def now(self) -> float:
        """Our clock, seconds, less what other processes have taken of the machine from us both."""
        pids = (os.getpid(), self.session.start().process.pid)
        return time.monotonic() - sum(map(kept_waiting, pids))

    def why_too_fast(self, place: int, outcome: Outcome) -> str | None:
        """Why the time that a stage's process claims can't be true, by our own clock; or None.

        A call takes no longer than we wait for it. What a busy machine adds is forgiven: only a
        time that is far below, each time that we look, is a false one.
        """
        claimed = 1e-3 * (outcome.time_ms or 0.0)
        if FAR * claimed >= outcome.waited:  # for its first call, and more
            return None
        calls = min(MOST_CALLS, math.ceil(WATCH_SECONDS / claimed))
        allowed = WAITING + FAR * calls * claimed
        if outcome.problem.device == "cuda":
            allowed += calls * LAUNCH  # a GPU's own time is not that of its launches
        for _ in range(LOOKS):
            begun = self.now()
            self.session.send({"index": place, "calls": calls})
            late = f"took more than {self.limits.budget:g} s for {calls} calls"
            self.session.receive({"called": {}}, self.limits.budget, late)
            waited = self.now() - begun
            if waited <= allowed:
                return None
        return (
            f"its clock is wrong: {1e3 * claimed:.3g} ms a call, but {1e3 * waited:.3g} ms for "
            f"{calls} of them"
        )

    def __enter__(self) -> "Heat":
        return self

    def __exit__(self, *_: object) -> None:
        self.session.end()
        self.folder.cleanup()


def note_fault(outcome: Outcome, message: dict[str, str]) -> None:
    """Drop a stage that has failed, as its process says."""
    outcome.drop(message["status"], message["reason"])
    outcome.refused = bool(message["refused"])


def why_not_again(
    outcome: Outcome, out: Path, judge: Judge, change: list[int] | None
) -> str | None:
    """Why the answers to changed inputs are not those inputs' own, or None where they are.

    Last comes the answer to one of the calls that were timed.
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
