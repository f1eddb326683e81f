"""How the samples of a call are planned and summed up; a clock and a device are elsewhere.

Whoever compares calls fixes, after their warm-up, how many calls each sample takes, and says so to
all processes that take part: nothing that one of them measures changes how often it calls. (Several
processes that compute one attention in step would wait for each other for ever otherwise.) Nothing
here uses torch, so that a parent process can do it.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from harness.records.values import Time

LEAST_ROUNDS: Final = 5  # where no number of rounds is given
SAMPLE_MS: Final = 2.0  # the shortest sample of calls on a CPU
WARM_MS: Final = 10.0  # of untimed calls before it, where others ran in between
HEAD_START: Final = 2_000_000  # cycles of the GPU's clock, about 1 ms: longer than most launches
LONGEST_HEAD_START: Final = 32_000_000  # about 16 ms


@dataclass(frozen=True)
class Plan:
    """How one sample is taken: `untimed` calls, then `calls` that are timed together.

    On a GPU each call is timed by itself, after so many cycles that Python has to launch it.
    """

    untimed: int = 0
    calls: int = 1
    head_start: int = HEAD_START


ONE_CALL: Final = Plan()


@dataclass(frozen=True)
class Sampled:
    """A sample, ms per call. `late`: the GPU had to wait for Python, and the time includes that."""

    time_ms: Time
    late: bool = False


class Series:
    """The samples of one call, which `take` takes one by one, in this process or another one."""

    def __init__(self, take: Callable[[Plan], Sampled], device: str) -> None:
        self.take, self.device = take, device
        self.plan, self.cost = ONE_CALL, 0.0  # of a sample, seconds
        self.samples_ms: list[float] = []

    def fix(self, alone: bool) -> None:
        """Fix how each sample is taken. The call is warmed up already.

        On a CPU a sample of several calls makes the clock's own cost small. Where the call is not
        `alone`, the caches hold what other calls left there: stage 2 at N = 64 takes twice as long
        after a call of stage 0, and as long as alone after some calls of its own. These are not
        timed. What takes longer than WARM_MS has no use for the caches' old content.
        """
        probe, begun = ONE_CALL, time.monotonic()
        each = self.take(probe).time_ms
        if self.device == "cpu" and each < WARM_MS:
            probe, begun = Plan(calls=math.ceil(WARM_MS / each)), time.monotonic()
            each = self.take(probe).time_ms
        took = time.monotonic() - begun
        if self.device == "cpu":
            untimed = 0 if alone else int(WARM_MS / each)
            self.plan = Plan(untimed, calls=max(1, round(SAMPLE_MS / each)))
        self.cost = took * (self.plan.untimed + self.plan.calls) / probe.calls

    def sample(self) -> None:
        """Take a sample. Where the GPU was done before Python, again with twice the head start.

        A call that waits for the GPU itself gets the longest one, and its waiting counts as its
        time.
        """
        sampled = self.take(self.plan)
        while sampled.late and self.plan.head_start < LONGEST_HEAD_START:
            self.plan = replace(self.plan, head_start=2 * self.plan.head_start)
            sampled = self.take(self.plan)
        self.samples_ms.append(sampled.time_ms)

    @property
    def median_ms(self) -> float:
        """The median of the samples, ms."""
        return statistics.median(self.samples_ms)

    @property
    def rounds_ms(self) -> list[float]:
        """The samples for a record, to six digits, more than any clock resolves."""
        return [float(f"{sample:.6g}") for sample in self.samples_ms]

    @property
    def iqr_ms(self) -> float | None:
        """The third quartile less the first, ms; None where there is one sample."""
        if len(self.samples_ms) < 2:
            return None
        first, _, third = statistics.quantiles(self.samples_ms, n=4, method="inclusive")
        return third - first


def rounds_in(seconds: float, cost: float) -> int:
    """How many rounds fit into `seconds`, where one costs `cost` seconds; LEAST_ROUNDS at least."""
    return max(LEAST_ROUNDS, math.ceil(seconds / max(cost, 1e-6)))


def turns(count: int, rounds: int) -> Iterator[int]:
    """Whose sample is next, of `count` series: one of each in a round.

    Each round starts one later than the last, so that no call always follows the same other.
    """
    for first in range(rounds):
        for offset in range(count):
            yield (first + offset) % count
