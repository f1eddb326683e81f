"""One process of a comparison, from the parent's side: its stages are called, judged and timed.

Only a stage that is right, or wrong by design and alone, is timed. The times that the process
reports are checked against the parent's clock. What is said to the process, and what it answers, is
listed in harness/isolation/messages.py; `compete` (harness/isolation/contestant.py) answers.
"""

import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

from harness.isolation import messages
from harness.isolation.child import NO_MESSAGE, ChildFailed
from harness.isolation.contestant import compete
from harness.isolation.judge import Judge
from harness.isolation.measured_call import AGAIN, STRIDED
from harness.isolation.messages import Checked, Out, Timed, Verdict
from harness.isolation.processes import descendants, kept_waiting
from harness.isolation.roster import LEAST_LOAD, StageInfo
from harness.isolation.scratch import scratch
from harness.isolation.session import Session
from harness.problems.problem import Problem
from harness.runs.plan import Comparison

ALONE_SECONDS = 0.2  # of sampling a stage alone
TURN_SECONDS = 0.3  # of sampling each of several stages in turns, with no number of rounds given
LEAST_SECONDS = 0.01  # least rest of a budget, so that a message already sent is still read
INTERPRETED = "interpreted: no speed to compare"

# how a reported time is checked by the parent's clock
LEAST_SECONDS = 1e-8  # of a call from Python, on any machine
CHECK_SECONDS, MOST_CHECKS = 0.01, 3
MOST_CALLS = 20_000  # no call takes so little that these last no longer than the messages
MESSAGE_SECONDS = 0.02  # for messages in both directions
MOST_FACTOR = 4.0  # a factor between the two clocks that noise of a busy machine may explain
LAUNCH_SECONDS = 0.002  # that Python may take to launch a call, not part of a GPU's own time

Failure = tuple[str, str] | None  # status and reason
Say = Callable[[str], None]  # called with each step when it begins


@dataclass
class Outcome:
    """What came of a stage on a problem: its status, and what was measured and judged of it.

    `dropped`: it has failed and is not measured further. `refused`: it raised a ValueError.
    """

    stage: StageInfo
    problem: Problem
    status: str = "crashed"
    reason: str = ""
    dropped: bool = False
    refused: bool = False
    waited: float = 0.0  # seconds of its check, by the parent's clock
    checked: Checked | None = None
    verdict: Verdict | None = None  # on its first outputs
    timed: Timed | None = None
    skip_ratio: float | None = None
    printed: str = ""  # by its processes

    @property
    def mode(self) -> str:
        """'native', 'compiled' or 'interpreted'."""
        interpreted = self.checked is not None and self.checked.interpreted
        return "interpreted" if interpreted else self.stage.modes[self.problem.device]

    @property
    def call_ms(self) -> float:
        """The time of the last call of its check, ms."""
        return 0.0 if self.checked is None else self.checked.call_ms

    @property
    def time_ms(self) -> float | None:
        """Its median time, ms; None where it wasn't timed."""
        return None if self.timed is None else self.timed.time_ms

    def forget(self) -> None:
        """Reset all fields to their defaults, except what was printed."""
        for each in fields(self):
            if each.default is not MISSING and each.name != "printed":
                setattr(self, each.name, each.default)

    def drop(self, status: str, reason: str) -> None:
        """Note that the stage failed: its times are deleted, and it is not measured further."""
        self.status, self.reason, self.dropped = status, reason, True
        self.timed = self.skip_ratio = None

    def drop_out(self, message: Out) -> None:
        """Note that the stage failed, as its process reports."""
        self.drop(message.status, message.reason)
        self.refused = message.refused

    def note_verdict(self, verdict: Verdict) -> None:
        """Note the judge's verdict on the first outputs."""
        self.verdict = verdict
        declared = self.stage.inexact(self.problem)
        if declared and verdict.finite:
            self.status, self.reason = "wrong-by-design", declared
        elif verdict.exact:
            self.status = "ok"
        else:
            self.status, self.reason = "wrong", verdict.why


def remaining(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes of the stages that have not failed."""
    return [outcome for outcome in outcomes if not outcome.dropped]


class ComparisonProcess:
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
        self.sampled = 0.0  # when the sampling began
        # our own are called with any strides in the tests of the contract
        self.strided = not all(outcome.stage.ours for outcome in outcomes)
        # its own folder, so that processes share no files
        self.folder = tempfile.TemporaryDirectory(dir=scratch(), ignore_cleanup_errors=True)
        self.outs = [Path(self.folder.name) / f"out.{i}" for i in range(len(outcomes))]
        order = messages.Order(
            comparison.problem, [outcome.problem for outcome in outcomes],
            paths=[str(outcome.stage.path) for outcome in outcomes],
            sha256=[outcome.stage.sha256 for outcome in outcomes],
            outs=list(map(str, self.outs)), alone=comparison.alone, apart=apart,
            strided=self.strided, graph=self.limits.graph,
            warmup=0 if comparison.alone else self.limits.warmup,
            rounds=self.limits.rounds or messages.LEAST_ROUNDS,
            budget=self.limits.budget, memory=self.limits.memory,
        )  # fmt: skip
        load = max(LEAST_LOAD, self.limits.budget)
        self.session = Session(compete, order, memory=self.limits.memory, load=load)

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
        """Have each stage called for the first time, and its outputs judged; note who is timed.

        The time of the judge does not count towards the budget.
        """
        budget = self.limits.budget
        late = f"took more than its budget of {budget:g} s"
        begun = time.monotonic()
        self.session.send(messages.Start())
        for outcome in self.outcomes:
            self.tell(f"{outcome.stage.number} {outcome.stage.name} is called")
            called = time.monotonic()
            answer: Checked | Out = self.session.receive(Checked, Out, seconds=budget, late=late)
            outcome.waited = time.monotonic() - called
            if isinstance(answer, Out):
                outcome.drop_out(answer)
            else:
                outcome.checked = answer
                # since all began: the child doesn't wait between two stages until it is asked
                if why := why_too_long(answer.call_ms, 1, time.monotonic() - begun):
                    outcome.drop("wrong", why)
        self.seconds = max(LEAST_SECONDS, budget - (time.monotonic() - begun))
        for outcome, out in zip(self.outcomes, self.outs, strict=True):
            if not outcome.dropped:
                outcome.note_verdict(self.judge.verdict(out))
                excused = self.comparison.alone and outcome.status == "wrong-by-design"
                if outcome.status != "ok" and not excused:
                    outcome.drop(outcome.status, outcome.reason)
                elif why := self.why_strides_matter(outcome, out):
                    outcome.drop("wrong", why)
        self.keep_single_calls()
        self.going = [
            index
            for index, outcome in enumerate(self.outcomes)
            if not outcome.dropped and outcome.timed is None and outcome.mode != "interpreted"
        ]

    def why_strides_matter(self, outcome: Outcome, out: Path) -> str | None:
        """Why the outputs for strided inputs are wrong, or None."""
        if not self.strided or not outcome.stage.exact(outcome.problem):
            return None
        again = len(AGAIN[outcome.problem.direction]) - 1
        found = self.judge.verdict(out.with_name(f"{out.name}.strided"), again)
        return None if found.exact else f"with {STRIDED}: {found.why}"

    def keep_single_calls(self) -> None:
        """Note the time of the one call of a stage alone that is interpreted, or very slow."""
        for outcome in remaining(self.outcomes):
            interpreted = outcome.mode == "interpreted"
            if self.comparison.alone and (interpreted or 4e-3 * outcome.call_ms >= self.seconds):
                outcome.timed = Timed(outcome.call_ms, None, 1, None, None, None, change=[])
            elif interpreted:
                outcome.reason = INTERPRETED

    def start_sampling(self) -> None:
        """Tell the process which stages to time and for how long; one of several then warms up."""
        if not self.going:
            return
        seconds = TURN_SECONDS * len(self.going) if self.limits.rounds is None else 0.0
        if self.comparison.alone:
            [only] = self.going
            wanted = max(ALONE_SECONDS, 5e-3 * self.outcomes[only].call_ms)
            seconds = min(wanted, self.seconds / 2)
        self.sampled = time.monotonic()
        self.session.send(messages.Sample(self.going, seconds))
        if self.apart:
            budget, late = self.limits.budget, f"took more than {self.limits.budget:g} s to warm up"
            answer: messages.Done | Out = self.session.receive(
                messages.Done, Out, seconds=budget, late=late
            )
            if isinstance(answer, Out):
                [only] = self.going
                self.outcomes[only].drop_out(answer)
                self.going = []

    def turn(self) -> None:
        """Have the process take one sample."""
        self.session.send(messages.Turn())
        late = "took too long for its turn"
        self.session.receive(messages.Done, seconds=self.limits.budget, late=late)

    def end_turns(self) -> None:
        """Tell the process that there are no more turns."""
        self.session.send(messages.Turn(over=True))

    def finish(self) -> None:
        """Receive the timings, judge the outputs of calls with changed inputs, check the times."""
        if not self.going:
            return
        seconds, late = self.seconds, f"took more than its budget of {self.limits.budget:g} s"
        if not self.comparison.alone:
            seconds = self.limits.budget * len(self.going)
            late = f"took more than {seconds:g} s for the rounds of all"
        going = [self.outcomes[index] for index in self.going]
        answers: list[Timed | Out] = [
            self.session.receive(Timed, Out, seconds=seconds, late=late) for _ in going
        ]
        waited = time.monotonic() - self.sampled
        for index, outcome, answer in zip(self.going, going, answers, strict=True):
            if isinstance(answer, Out):
                outcome.drop_out(answer)
            elif why := (
                why_too_long(answer.time_ms, answer.samples, waited)
                or why_cached(outcome, self.outs[index], self.judge, answer.change)
            ):
                outcome.drop("wrong", why)
            else:
                outcome.timed = answer
        for place, outcome in enumerate(going):
            if not outcome.dropped and (why := self.why_too_short(place, outcome)):
                outcome.drop("wrong", why)
        if self.limits.rounds is not None:  # a cell has no field for the skip ratio
            for outcome, ratio in zip(going, self.count(seconds)):
                if not outcome.dropped:
                    outcome.skip_ratio = ratio

    def count(self, seconds: float) -> list[float | None]:
        """The share of tiles that each stage skips, where it counts them.

        A failure here does not affect the times, which were taken before.
        """
        self.session.send(messages.CountTiles())
        late = "took too long to count its tiles"
        try:
            answer = self.session.receive(messages.Counted, seconds=seconds, late=late)
        except ChildFailed:
            return []
        return answer.skip_ratios

    def now(self) -> float:
        """The parent's clock in seconds, less the time that both waited for a processor."""
        pid = self.session.start().process.pid  # a descendant of this one: counted once
        return time.monotonic() - kept_waiting({os.getpid(), pid, *descendants(pid)})

    def why_too_short(self, place: int, outcome: Outcome) -> str | None:
        """Why the time that a stage's process reports is too short to be true; None if it isn't.

        The parent times some calls by its own clock, which includes delays of a busy machine. So a
        reported time is rejected only where it is far below the parent's in each of several checks.
        """
        reported = 1e-3 * (outcome.time_ms or 0.0)
        if reported < LEAST_SECONDS:
            return f"its clock is wrong: {1e3 * reported:.3g} ms per call is less than a call takes"
        if MOST_FACTOR * reported >= outcome.waited:  # the wait for the stage's first calls
            return None
        calls = min(MOST_CALLS, math.ceil(CHECK_SECONDS / reported))
        allowed = MESSAGE_SECONDS + MOST_FACTOR * calls * reported
        if outcome.problem.device == "cuda":
            allowed += calls * LAUNCH_SECONDS
        for _ in range(MOST_CHECKS):
            begun = self.now()
            self.session.send(messages.Repeat(place, calls))
            late = f"took more than {self.limits.budget:g} s for {calls} calls"
            self.session.receive(messages.Done, seconds=self.limits.budget, late=late)
            waited = self.now() - begun
            if waited <= allowed:
                return None
        return (
            f"its clock is wrong: {1e3 * reported:.3g} ms per call, but {1e3 * waited:.3g} ms for "
            f"{calls} of them"
        )

    def __enter__(self) -> "ComparisonProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.session.end()
        self.folder.cleanup()


def why_too_long(ms: float, samples: int, waited: float) -> str | None:
    """Why a median that a stage's process reports is too long to be true; None if it isn't.

    Half of the samples take as long as the median, or longer: more than the `waited` seconds are
    impossible.
    """
    if 1e-3 * ms * samples / 2 <= waited:
        return None
    all_ms = 1e3 * waited
    return f"its clock is wrong: {ms:.3g} ms is the median of {samples}, which took {all_ms:.3g} ms"


def why_cached(outcome: Outcome, out: Path, judge: Judge, change: list[int] | None) -> str | None:
    """Why the outputs for changed inputs are wrong, as those of a stage that caches are, or None.

    The outputs of one of the timed calls are checked last.
    """
    if not outcome.stage.exact(outcome.problem):
        return None
    for index, (changed, _) in enumerate(AGAIN[outcome.problem.direction]):
        found = judge.verdict(out.with_name(f"{out.name}.again{index}"), index)
        if not found.exact:
            return f"its output after {changed} changed is not the new {changed}'s: {found.why}"
    found = judge.verdict(out.with_name(f"{out.name}.timed"), change=change)
    if not found.exact:
        return f"its output of a call that was timed is not that call's own: {found.why}"
    return None
