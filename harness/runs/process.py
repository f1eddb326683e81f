"""One process of a comparison, from the parent's side: its stages are called, judged and timed.

Only a stage that is right, or wrong by design and alone, is timed. What is said to the process, and
what it answers, is listed in harness/isolation/messages.py; `serve` (measured_stage.py) answers.
"""

import contextlib
import functools
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from harness.isolation import messages
from harness.isolation.changes import AGAIN, STRIDED
from harness.isolation.child import NO_MESSAGE, ChildFailed
from harness.isolation.judge import Judge, NoVerdict
from harness.isolation.measured_stage import serve
from harness.isolation.messages import Checked, Link, Out, Verdict
from harness.isolation.ranks import Ranks
from harness.isolation.roster import LEAST_LOAD, StageInfo
from harness.isolation.scratch import scratch
from harness.isolation.session import Session
from harness.measures.samples import LEAST_ROUNDS, ONE_CALL, Plan, Sampled, Series
from harness.problems import cost
from harness.problems.problem import Problem
from harness.records import environment
from harness.runs.plan import Comparison

LEAST_REST: Final = 0.01  # seconds of a budget, at least: a message already sent is still read
CLOCK_MS: Final = 20.0  # of calls before the GPU's clock is read
LAUNCHES: Final = 20  # in a row
LAUNCHES_MS: Final = 40.0  # of the GPU's time for a row, at most, but for two calls
LAUNCH_ROWS: Final = 5  # fewer where they take longer than five such rows
INTERPRETED: Final = "interpreted: no speed to compare"
SHARED_CORES: Final = "no speed: these processes share the cores of one CPU"
LINK_LIMIT: Final = 60.0  # seconds to measure what the ranks of a world send each other

# how a reported time is checked by the parent's clock
LEAST_MS: Final = 1e-5  # of a call from Python, on any machine
MESSAGE_SECONDS: Final = 0.02  # for messages in both directions
WARM_UP_CALLS: Final = 2  # of torch's Timer, before a sample of several calls
GPU_SECONDS: Final = 0.05  # for the head start, flushing L2 and launching
MOST_FACTOR: Final = 4.0  # between the two clocks, in one sample at least
MORE_SAMPLES: Final = 20  # that may show it, where a busy machine has delayed all others

Failure = tuple[str, str] | None  # status and reason
Say = Callable[[str], None]  # called with each step when it begins


@dataclass(frozen=True)
class Timed:
    """The timing of a stage, as its record has it: with `rounds_ms` where it took turns."""

    time_ms: float | None = None
    time_iqr_ms: float | None = None
    samples: int = 0
    sm_clock_mhz: int | None = None
    rounds_ms: list[float] | None = None
    launch_ms: float | None = None
    skip_ratio: float | None = None
    link_gb_s: float | None = None
    link_us: float | None = None


NOT_TIMED: Final = Timed()


class Dropped(Exception):
    """A stage has failed in a step; its outcome says why."""


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
    checked: Checked | None = None
    verdict: Verdict | None = None  # on its first outputs
    timed: Timed = NOT_TIMED
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
        return self.timed.time_ms

    def forget(self) -> None:
        """Reset all fields to their defaults, except what was printed."""
        for each in fields(self):
            if each.default is not MISSING and each.name != "printed":
                setattr(self, each.name, each.default)

    def drop(self, status: str, reason: str) -> None:
        """Note that the stage failed: its times are deleted, and it is not measured further."""
        self.status, self.reason, self.dropped = status, reason, True
        self.timed = NOT_TIMED

    def believe(self, message: object) -> Any:
        """Note that the stage failed, where its process reports that; else return the message."""
        if isinstance(message, Out):
            self.drop(message.status, message.reason)
            self.refused = message.refused
            raise Dropped
        return message

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
        self, comparison: Comparison, outcomes: Sequence[Outcome], judge: Judge, tell: Say
    ) -> None:
        self.comparison, self.outcomes, self.judge = comparison, outcomes, judge
        self.tell, self.limits = tell, comparison.limits
        self.failure: Failure = None
        self.series: dict[int, Series] = {}  # of the stages that are timed, by index
        self.left: dict[int, float] = {}  # the rest of each one's budget, seconds
        self.credible: set[int] = set()  # by the parent's clock
        self.world = comparison.problem.world
        self.at_work: Outcome | None = None  # the stage that is called now, if any
        self.loaded = False
        self.link: Link | None = None  # between the ranks of a world
        # our own are called with any strides in the tests of the contract
        self.strided = self.world == 1 and not all(outcome.stage.ours for outcome in outcomes)
        # its own folder, so that processes share no files
        self.folder = tempfile.TemporaryDirectory(dir=scratch(), ignore_cleanup_errors=True)
        self.outs = [Path(self.folder.name) / f"out.{i}" for i in range(len(outcomes))]
        asked = [
            messages.Asked(str(each.stage.path), each.stage.sha256, each.problem, str(out))
            for each, out in zip(outcomes, self.outs, strict=True)
        ]
        order = messages.Order(
            comparison.problem, asked, alone=comparison.alone, strided=self.strided,
            graph=self.limits.graph, memory=self.limits.memory,
        )  # fmt: skip
        load = max(LEAST_LOAD, self.limits.budget)
        memory = self.limits.memory
        self.session: Session | Ranks = Session(serve, order, memory=memory, load=load)
        if self.world > 1:
            meeting = str(Path(self.folder.name) / "meeting")
            all_of_them = replace(order, meeting=meeting, patience=self.limits.budget)
            each = [replace(all_of_them, rank=rank) for rank in range(self.world)]
            self.session = Ranks(serve, each, memory, load)

    def attempt(self, step: Callable[..., None], *arguments: object) -> None:
        """Carry out a step, unless an earlier one has failed; note a failure."""
        if self.failure is None and self.outcomes:
            try:
                step(*arguments)
            except Dropped:
                pass
            except NoVerdict:
                raise
            except ChildFailed as error:
                if error.reason == NO_MESSAGE:  # then its earlier messages can't be trusted either
                    for outcome in self.outcomes:
                        outcome.forget()
                self.failure, self.series = (error.status, error.reason), {}
                if self.world > 1 and self.at_work is not None:
                    self.at_work.drop(*self.failure)  # all ranks call the same one at a time
                self.session.end()

    def start(self) -> None:
        """Have the stages loaded, while the judge makes its oracles."""
        self.judge.start()
        self.session.start()

    def still_loads(self) -> bool:
        """Watch the process for a moment; whether its stages are still being loaded."""
        self.attempt(self.look)
        return self.failure is None and bool(self.outcomes) and not self.loaded

    def look(self) -> None:
        """Note whether the stages are loaded."""
        self.loaded = self.session.is_ready()

    def check(self) -> None:
        """Have each stage called for the first time, and its outputs judged; note who is timed.

        The time of the judge does not count towards the budget.
        """
        budget = self.limits.budget
        begun = time.monotonic()
        self.session.send(messages.Start())
        for outcome in self.outcomes:
            self.tell(f"{outcome.stage.number} {outcome.stage.name} is called")
            self.at_work = outcome
            answer = self.session.receive(Checked, Out, seconds=budget, late=self.late)
            with contextlib.suppress(Dropped):
                outcome.checked = outcome.believe(answer)
                # since all began: the child doesn't wait between two stages until it is asked
                check_clock(outcome, answer.call_ms, time.monotonic() - begun)
        self.at_work = None
        rest = max(LEAST_REST, budget - (time.monotonic() - begun))
        for outcome, out in zip(self.outcomes, self.outs, strict=True):
            if not outcome.dropped:
                outcome.note_verdict(self.judge.verdict(out))
                excused = self.comparison.alone and outcome.status == "wrong-by-design"
                if outcome.status != "ok" and not excused:
                    outcome.drop(outcome.status, outcome.reason)
                elif why := self.why_strides_matter(outcome, out):
                    outcome.drop("wrong", why)
        for index, outcome in enumerate(self.outcomes):
            if not outcome.dropped:
                self.plan_timing(index, outcome, rest)

    def plan_timing(self, index: int, outcome: Outcome, rest: float) -> None:
        """Have a stage timed, unless it is interpreted, or alone and so slow that one call is all.

        `rest`: seconds of the budget that its check has left.
        """
        interpreted, alone = outcome.mode == "interpreted", self.comparison.alone
        if alone and (interpreted or 4e-3 * outcome.call_ms >= rest):
            outcome.timed = Timed(outcome.call_ms, None, 1)
        elif interpreted:
            outcome.reason = INTERPRETED
        else:
            device, devices = outcome.problem.device, outcome.stage.devices
            device = device if device in devices else devices[0]  # where it computes
            self.series[index] = Series(functools.partial(self.take, index), device)
            self.left[index] = rest if alone else self.limits.budget

    @property
    def late(self) -> str:
        """The reason of a stage that exceeds its budget."""
        return f"took more than its budget of {self.limits.budget:g} s"

    def why_strides_matter(self, outcome: Outcome, out: Path) -> str | None:
        """Why the outputs for strided inputs are wrong, or None."""
        if not self.strided or not outcome.stage.exact(outcome.problem):
            return None
        last = len(AGAIN[outcome.problem.direction]) - 1
        found = self.judge.verdict(out.with_name(f"{out.name}.strided"), last)
        return None if found.exact else f"with {STRIDED}: {found.why}"

    def warm_up(self) -> None:
        """Warm each stage up that is timed, and fix how its samples are taken."""
        if not self.series:
            return
        self.session.send(messages.Keep([*self.series]))
        if self.world > 1:
            late = f"sending to each other took more than {LINK_LIMIT:g} s"
            self.link = self.session.receive(Link, seconds=LINK_LIMIT, late=late)
        for index in self.series:
            self.attempt(self.warm_up_one, index)

    def warm_up_one(self, index: int) -> None:
        """Warm a stage up. It is dropped where the rounds would exceed its budget."""
        limits, outcome, series = self.limits, self.outcomes[index], self.series[index]
        for _ in range(0 if self.comparison.alone else limits.warmup):
            seconds = 1e-3 * self.take(index, ONE_CALL).time_ms
            calls = limits.warmup + (limits.rounds or LEAST_ROUNDS)
            if seconds * calls > limits.budget:
                outcome.drop(
                    "timeout", f"{seconds:.3g} s per call: {calls} calls do not fit in its budget "
                    f"of {limits.budget:g} s",
                )  # fmt: skip
                raise Dropped
        series.fix(self.comparison.alone)
        self.credible.discard(index)  # the samples are to show it

    @property
    def going(self) -> list[int]:
        """The indices of the stages that are timed and haven't failed."""
        return [index for index in self.series if not self.outcomes[index].dropped]

    def sample(self, index: int) -> None:
        """Have a sample of a stage taken, unless it has failed."""
        if not self.outcomes[index].dropped:
            self.series[index].sample()

    def take(self, index: int, plan: Plan) -> Sampled:
        """Have the process take a sample; the stage is dropped where its clock is wrong."""
        outcome, begun = self.outcomes[index], time.monotonic()
        self.at_work = outcome
        asked, left = messages.Turn(**vars(plan), stage=index), self.left[index]
        answer = self.session.ask(asked, Sampled, Out, seconds=left, late=self.late)
        waited = time.monotonic() - begun
        self.left[index] = max(LEAST_REST, self.left[index] - waited)
        sampled: Sampled = outcome.believe(answer)
        check_clock(outcome, sampled.time_ms * plan.calls, waited)
        calls = plan.untimed + plan.calls + (WARM_UP_CALLS if plan.calls > 1 else 0)
        most = MOST_FACTOR * 1e-3 * sampled.time_ms * calls
        most += MESSAGE_SECONDS + (GPU_SECONDS if self.series[index].device == "cuda" else 0.0)
        if waited <= most:
            self.credible.add(index)
        return sampled

    def finish(self) -> None:
        """Have the calls after the samples made, and their outputs judged."""
        for index in self.going:
            self.attempt(self.finish_one, index)

    def finish_one(self, index: int) -> None:
        """Note the timing of a stage, once its outputs for changed inputs are judged."""
        outcome, series = self.outcomes[index], self.series[index]
        self.at_work, ms = outcome, series.median_ms
        for _ in range(MORE_SAMPLES):
            if index not in self.credible:
                self.take(index, series.plan)
        launches = max(2, min(LAUNCHES, int(LAUNCHES_MS / ms)))
        rows = max(1, min(LAUNCH_ROWS, int(LAUNCH_ROWS * LAUNCHES_MS / (launches * ms))))
        asked = messages.Finish(index, 1 + int(CLOCK_MS / ms), launches, rows)
        seconds = self.left[index] if self.comparison.alone else self.limits.budget
        answer = self.session.ask(asked, messages.Finished, Out, seconds=seconds, late=self.late)
        finished: messages.Finished = outcome.believe(answer)
        if why := why_cached(outcome, self.outs[index], self.judge, finished.change or None):
            outcome.drop("wrong", why)
        elif self.world > 1 and outcome.problem.device == "cpu":
            outcome.reason = SHARED_CORES
        elif why := faster_than_possible(outcome.problem, ms):
            outcome.drop("wrong", why)
        elif index not in self.credible:
            outcome.drop("wrong", f"its clock is wrong: {ms:.3g} ms per call is too short")
        else:
            outcome.timed = Timed(
                ms, series.iqr_ms, len(series.samples_ms), finished.sm_clock_mhz,
                None if self.comparison.alone else series.rounds_ms, finished.launch_ms,
                finished.skip_ratio, *self.link_figures(),
            )  # fmt: skip

    def link_figures(self) -> tuple[float, float] | tuple[()]:
        """The rate at which a rank sends to the next, 10^9 bytes/s; the smallest message's us."""
        link = self.link
        return () if link is None else (link.size / link.time_ms / 1e6, 1e3 * link.small_ms)

    def __enter__(self) -> "ComparisonProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.session.end()
        self.folder.cleanup()


def check_clock(outcome: Outcome, ms: float, waited: float) -> None:
    """Drop a stage whose process reports a time that no call takes, or a longer one than `waited`.

    `waited`: seconds by the parent's clock.
    """
    why = ""
    if ms < LEAST_MS:
        why = "is less than a call takes"
    elif 1e-3 * ms > waited:
        why = f"of {1e3 * waited:.3g} ms by the parent's clock"
    if why:
        outcome.drop("wrong", f"its clock is wrong: {ms:.3g} ms {why}")
        raise Dropped


@functools.cache
def card() -> str:
    """The name of this machine's GPU, '' where it has none."""
    return (environment.gpu() or ("",))[0]


def faster_than_possible(problem: Problem, ms: float) -> str:
    """Why a call can't have taken so few ms, by its GPU's data sheet; '' where it can.

    A stage that computes a part of the problem, such as the keys of one rank alone, looks fast.
    """
    peak = cost.peak_tflops(card(), problem) if problem.device == "cuda" else None
    rate = cost.flops(problem) / ms / 1e9
    if peak is None or rate <= peak:
        return ""
    return (
        f"faster than possible: {rate:.0f} TFLOP/s, and {problem.world} x {card()} does "
        f"{peak:.0f} at most"
    )


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
