"""The engine: measures one comparison of stages on one problem, from first calls to outcomes.

For `ladder run` a comparison has a single stage, alone in its process; with --paired the stages
that were right then take turns in one process. `ladder bench` always times several stages in turns.
harness/runs/heat.py handles one process: the check, the turns, and the calls after them. Nothing
here uses tensors.
"""

import contextlib
import time
from collections.abc import Sequence

from harness.isolation.judge import Judge, NoVerdict
from harness.runs.heat import TURN_SECONDS, Failure, Heat, Say, remaining
from harness.runs.outcome import Outcome
from harness.runs.plan import Comparison, why_hopeless

APART = "timed in a process of its own, in turns with the others' processes"
LEAST_ROUNDS = 5  # as in harness/measures/timing.py, which imports torch


def silent(step: str) -> None:
    """Ignore a step."""


def measure(
    comparison: Comparison, judge: Judge, log: list[str], tell: Say = silent
) -> list[Outcome]:
    """Measure `comparison`; returns the outcome of each stage. One that fails affects no other.

    The output of the stages, process by process, is added to `log`; `tell` is called with each
    step.
    """
    problem = comparison.problem
    outcomes = [Outcome(*contestant) for contestant in comparison.contestants()]
    for outcome in outcomes:
        if outcome.stage.failed is not None:
            outcome.drop(*outcome.stage.failed)
        elif reason := outcome.stage.why_skip(outcome.problem):
            outcome.drop("skipped", reason)
        elif hopeless := why_hopeless(problem):
            outcome.drop(*hopeless)
    try:
        fill_outcomes(comparison, remaining(outcomes), judge, log, tell)
    except NoVerdict as error:
        for outcome in remaining(outcomes):
            outcome.drop(error.status, error.reason)
    return outcomes


def fill_outcomes(
    comparison: Comparison, together: Sequence[Outcome], judge: Judge, log: list[str], tell: Say
) -> None:
    """Measure all stages together; where their process ends early, first each one alone.

    A stage that ends the process also does so alone; the others are then measured without it. Where
    one of the stages is a user's own file, each stage has its own process, and these take turns: it
    can neither slow nor damage the others.
    """
    apart = not all(outcome.stage.ours for outcome in together)

    def run(outcomes: Sequence[Outcome]) -> list[Failure]:
        groups = [[outcome] for outcome in outcomes] if apart else [outcomes]
        return in_processes(comparison, groups, judge, log, tell)

    failures = run(together)
    if any(failures) and len(together) > 1:
        for outcome in together:
            outcome.forget()
            for failure in run([outcome]):
                if failure is not None:
                    outcome.drop(*failure)
        together = remaining(together)
        where = "beside the others" if apart else "of all in one process"
        failures = [
            failure and (failure[0], f"sound alone, but {where}: {failure[1]}")
            for failure in run(together)
        ]
    for index, outcome in enumerate(together):
        failure = failures[index if apart else 0]
        if failure is not None and not outcome.dropped:
            outcome.drop(*failure)
        elif apart and outcome.time_ms is not None and not comparison.alone:
            outcome.reason = APART if not outcome.stage.ours else ""


def in_processes(
    comparison: Comparison, groups: Sequence[Sequence[Outcome]], judge: Judge, log: list[str],
    tell: Say,
) -> list[Failure]:  # fmt: skip
    """Check each group of stages in its own process, time them in turns, check them again.

    Returns the failure of each group's process, None where it did not fail. Raises NoVerdict where
    nothing can be checked.
    """
    with contextlib.ExitStack() as stack:
        apart = len(groups) > 1
        heats = [
            stack.enter_context(Heat(comparison, outcomes, judge, apart, tell))
            for outcomes in groups
        ]
        tell("the contestants load, stage 3 in float64 is computed")
        for heat in heats:
            heat.attempt(heat.load)
        for heat in heats:
            heat.attempt(heat.check)
        limits = comparison.limits
        if limits.rounds is not None and (going := [e for h in heats for e in h.to_be_timed()]):
            names = ", ".join(outcome.stage.name for outcome in going)
            tell(f"{names}: {limits.warmup} + {limits.rounds} calls each, in turns")
        for heat in heats:
            heat.attempt(heat.send_turns)
        if apart:
            take_turns(heats, limits.rounds)
        for heat in heats:
            heat.attempt(heat.finish)
    log.extend(heat.session.printed() for heat in heats)
    return [heat.failure for heat in heats]


def take_turns(heats: Sequence["Heat"], rounds: int | None) -> None:
    """Let processes take turns: one sample each per round, starting one process later."""
    able = [heat for heat in heats if heat.going]
    deadline = time.monotonic() + (TURN_SECONDS * len(able) if rounds is None else 0.0)
    first = 0
    while first < (rounds or LEAST_ROUNDS) or time.monotonic() < deadline:
        for offset in range(len(able)):
            heat = able[(first + offset) % len(able)]
            heat.attempt(heat.turn)
        first += 1
    for heat in able:
        heat.attempt(heat.end_turns)
