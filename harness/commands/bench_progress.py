"""What `ladder bench` says before it sets out, where that is hopeless, and on its way."""

import sys
import time
from collections.abc import Sequence

from rich.console import Console

from harness.commands.arguments import show_printed
from harness.problems import cost
from harness.problems.problem import Problem
from harness.records import units
from harness.records.schema import Record
from harness.runs.plan import Comparison, why_hopeless

REASON = 100  # characters of a reason, on stderr
# FLOP/s that are fast for attention on one thread of a CPU (contestants have no more), and in
# Triton's interpreter, where a contestant is called once and not timed
THREAD_RATE, INTERPRETED_RATE = 2e11, 2e9
PATIENCE = 600.0  # seconds: what takes longer even at those rates is not begun


def why_too_long(comparisons: Sequence[Comparison]) -> str | None:
    """Why the comparisons can't be over in a time worth waiting for; None where they may be.

    Only of a CPU: what a GPU is too slow for, its memory refuses first.
    """
    seconds = 0.0
    for comparison in comparisons:
        problem, limits = comparison.problem, comparison.limits
        calls = limits.warmup + (limits.rounds or 0)
        if problem.device != "cpu" or why_hopeless(problem):  # those end at once, and say so
            continue
        for stage, asked in comparison.contestants():
            if stage.why_skip(asked):
                continue
            if stage.modes[problem.device] == "interpreted":
                seconds += cost.flops(problem) / INTERPRETED_RATE
            else:
                seconds += cost.flops(problem) * calls / THREAD_RATE
    if seconds <= PATIENCE:
        return None
    rates = [f"{rate / 1e9:.0f} GFLOP/s" for rate in (THREAD_RATE, INTERPRETED_RATE)]
    return (
        f"hopeless on a CPU: the calls alone would take {show_long(seconds)} at {rates[0]}, which "
        f"is fast for its one thread, and {rates[1]} interpreted; take a GPU, smaller sizes "
        "without --suite, or fewer --stages and a smaller --repeat"
    )


def show_long(seconds: float) -> str:
    """'25 minutes' or '3.2 hours'."""
    if seconds < 5400:
        return f"{seconds / 60:.0f} minutes"
    return f"{units.significant(seconds / 3600, 2)} hours"


class Progress:
    """What is under way and what came of each comparison, on stderr; and what stages print.

    On a terminal, what is under way is one line that changes.
    """

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self.console = Console(stderr=True)
        self.status = self.console.status("") if self.console.is_terminal else None
        self.start = time.monotonic()

    def __enter__(self) -> "Progress":
        if self.status is not None:
            self.status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.status is not None:
            self.status.stop()

    def watch(self, comparison: Comparison, what: str) -> None:
        """`what` begins, in a comparison that is under way."""
        line = f"{self.where(self.done + 1, comparison.problem)}: {what} ..."
        if self.status is not None:
            self.status.update(line.replace("[", r"\["))
        else:
            print(line, file=sys.stderr, flush=True)

    def tell(self, comparison: Comparison, records: Sequence[Record], printed: str) -> None:
        """One comparison is over."""
        self.done += 1
        results = ", ".join(f"{record['name']} {outcome(record)}" for record in records)
        line = f"{self.where(self.done, comparison.problem)}: {results}"
        self.console.print(line, soft_wrap=True, markup=False, highlight=False)
        show_printed(self.console, "bench", printed)

    def where(self, count: int, problem: Problem) -> str:
        """Which comparison, after how many seconds, on what."""
        masked = " causal" if problem.causal else ""
        what = f"{problem.direction}{masked} d = {problem.d}, N = {problem.nk}"
        what += f", Nq = {problem.nq}" * (problem.nq != problem.nk)
        return f"[{count}/{self.total}] {time.monotonic() - self.start:.0f} s: {what}"


def outcome(record: Record) -> str:
    """A record in a few words: what is said here is all there is of a run that is cut off."""
    if record["status"] != "ok":
        return f"{record['status']} ({record['reason'][:REASON]})"
    return units.show_time(record["time_ms"]) if record["time_ms"] else "interpreted"
