"""The engine: one comparison of stages on one problem, from their first calls to their outcomes.

`ladder run` compares a stage with nothing, alone in its process, and those found right once more in
turns where it is asked for; `ladder bench` compares several in turns. Every stage is called first,
its outputs go to the judge (another process), and only what is right, or wrong by design where it
is alone, is timed. Nothing here touches a tensor.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.isolation.child import NO_MESSAGE, ChildFailed
from harness.isolation.contestant import compete
from harness.isolation.judge import Judge, NoVerdict
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
from harness.runs.plan import Comparison, why_hopeless

SAMPLE_SECONDS = 0.2  # of sampling a stage alone
TURN_SECONDS = 0.3  # of sampling each of several in turns, where no rounds are asked for
LEAST_SECONDS = 0.01  # left of a budget, so that an answer already given is still heard
INTERPRETED = "interpreted: no speed to compare"

# what a comparison's process may say (harness/isolation/contestant.py)
OUT = {**FAULT, "refused": is_bool}
TIMED = {
    "time_ms": is_time, "time_iqr_ms": optional(is_number), "samples": is_count,
    "sm_clock_mhz": optional(is_count), "rounds_ms": optional(list_of(is_time)),
}  # fmt: skip
FIRST = {
    "checked": {
        "first_call_ms": is_time,
        "call_ms": is_time,
        "peak_bytes": optional(is_count),
        "memory_meter": lambda value: value in (None, *METERS),
        "launch_configs": lambda value: value is None or isinstance(value, dict),
    },
    "out": OUT,
}
DONE = {"done": {"timings": list_of(lambda value: has(OUT)(value) or has(TIMED)(value))}}
COUNTED = {"counted": {"skip_ratios": list_of(optional(is_number))}}


Say = Callable[[str], None]  # told of each step when it begins


def silent(step: str) -> None:
    """Say nothing of a step."""


def measure(
    comparison: Comparison, judge: Judge, log: list[str], tell: Say = silent
) -> list[Outcome]:
    """The outcome of each stage of `comparison`. A stage that fails costs itself only.

    What the stages print, process by process, is added to `log`; `tell` is told of each step.
    """
    problem = comparison.problem
    outcomes = [Outcome(*contestant) for contestant in comparison.contestants()]
    for outcome in outcomes:
        if reason := outcome.stage.why_skip(outcome.problem):
            outcome.drop("skipped", reason)
        elif hopeless := why_hopeless(problem):
            outcome.drop(*hopeless)
    try:
        find_out(comparison, left(outcomes), judge, log, tell)
    except NoVerdict as error:
        for outcome in left(outcomes):
            outcome.drop(error.status, error.reason)
    return outcomes


def left(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those that take part still."""
    return [outcome for outcome in outcomes if not outcome.dropped]


def find_out(
    comparison: Comparison, together: Sequence[Outcome], judge: Judge, log: list[str], tell: Say
) -> None:
    """Fill the outcomes: all together, and where that process ends early, first one at a time.

    One that takes the process with it shows it by itself, too; the others then go on without it.
    """
    failure = in_one_process(comparison, together, judge, log, tell)
    if failure is not None and len(together) > 1:
        for outcome in together:
            outcome.forget()
            if by_itself := in_one_process(comparison, [outcome], judge, log, tell):
                outcome.drop(*by_itself)
        together = left(together)
        failure = in_one_process(comparison, together, judge, log, tell)
        if failure is not None:
            failure = (failure[0], f"sound alone, but of all in one process: {failure[1]}")
    if failure is not None:
        for outcome in left(together):
            outcome.drop(*failure)


def in_one_process(
    comparison: Comparison, outcomes: Sequence[Outcome], judge: Judge, log: list[str], tell: Say
) -> tuple[str, str] | None:
    """Check the stages of `outcomes`, time them, check them again, all in one new process.

    Returns None, or status and reason of that process's early end. Raises NoVerdict where nothing
    can be checked.
    """
    if not outcomes:
        return None
    limits = comparison.limits
    order = comparison.problem.to_json() | {
        "page_sizes": [outcome.problem.page_size for outcome in outcomes],
        "alone": comparison.alone, "warmup": 0 if comparison.alone else limits.warmup,
        "rounds": limits.rounds, "budget": limits.budget, "memory": limits.memory,
    }  # fmt: skip
    paths = [str(outcome.stage.path) for outcome in outcomes]
    outs = [judge.folder / f"out.{index}" for index in range(len(outcomes))]
    session = Session(
        compete, paths, order, list(map(str, outs)), log=judge.folder / "log", memory=limits.memory
    )
    try:
        with session:
            tell("the contestants load, stage 3 in float64 is computed")
            judge.start()  # it makes the oracles while the stages load
            session.ready()
            judge.open()  # before the first call: a stage that tunes itself wants the GPU alone
            seconds = check(comparison, outcomes, outs, session, judge, tell)
            time_them(comparison, outcomes, outs, session, judge, seconds, tell)
    except ChildFailed as error:
        if error.reason == NO_MESSAGE:  # nor is what it said before to be believed
            for outcome in outcomes:
                outcome.forget()
        return error.status, error.reason
    finally:
        judge.remove_outputs()
        log.append(session.printed())
    return None


def check(
    comparison: Comparison, outcomes: Sequence[Outcome], outs: Sequence[Path], session: Session,
    judge: Judge, tell: Say,
) -> float:  # fmt: skip
    """Have each stage called and its outputs judged; returns what is left of one budget, seconds.

    The clock stands still while the judge works.
    """
    budget = comparison.limits.budget
    late = f"took more than its budget of {budget:g} s"
    begun = time.monotonic()
    session.send({"event": "start"})
    for outcome in outcomes:
        tell(f"{outcome.stage.number} {outcome.stage.name} is called")
        message = session.receive(FIRST, budget, late)
        if message["event"] == "checked":
            outcome.note(message, (*CHECKED, "call_ms", "launch_configs"))
        else:
            note_fault(outcome, message)
    seconds = max(LEAST_SECONDS, budget - (time.monotonic() - begun))
    for outcome, out in zip(outcomes, outs, strict=True):
        if not outcome.dropped:
            outcome.note_verdict(judge.verdict(out))
            excused = comparison.alone and outcome.status == "wrong-by-design"
            if outcome.status != "ok" and not excused:
                outcome.drop(outcome.status, outcome.reason)
    return seconds


def note_fault(outcome: Outcome, message: dict[str, str]) -> None:
    """Drop a stage that has failed, as its process says."""
    outcome.drop(message["status"], message["reason"])
    outcome.refused = bool(message["refused"])


def time_them(
    comparison: Comparison, outcomes: Sequence[Outcome], outs: Sequence[Path], session: Session,
    judge: Judge, seconds: float, tell: Say,
) -> None:  # fmt: skip
    """Have the stages that are left timed, alone within `seconds`, and their answers checked again.

    Interpreted stages are no match for others: alone, their one call is their time.
    """
    limits = comparison.limits
    going = []
    for index, outcome in enumerate(outcomes):
        if outcome.dropped:
            continue
        interpreted = outcome.mode == "interpreted"
        if comparison.alone and (interpreted or 1e-3 * outcome.call_ms >= seconds / 4):
            outcome.time_ms, outcome.samples = outcome.call_ms, 1
        elif interpreted:
            outcome.reason = INTERPRETED
        else:
            going.append(index)
    if not going:
        return
    if comparison.alone:
        sampled = min(max(SAMPLE_SECONDS, 5e-3 * outcomes[0].call_ms), seconds / 2)
        late = f"took more than its budget of {limits.budget:g} s"
    else:
        sampled = TURN_SECONDS * len(going) if limits.rounds is None else 0.0
        seconds = limits.budget * len(going)
        late = f"took more than {seconds:g} s for the rounds of all"
    if limits.rounds is not None:
        names = ", ".join(outcomes[index].stage.name for index in going)
        tell(f"{names}: {limits.warmup} + {limits.rounds} calls each, in turns")
    session.send({"event": "turns", "going": going, "seconds": sampled})
    timings = session.receive(DONE, seconds, late)["timings"]
    if len(timings) != len(going):
        raise ChildFailed("crashed", NO_MESSAGE)
    for index, timing in zip(going, timings, strict=True):
        outcome = outcomes[index]
        if "status" in timing:
            note_fault(outcome, timing)
        elif why := why_not_again(outcome, outs[index], judge):
            outcome.drop("wrong", why)
        else:
            outcome.note(timing, TIMING)
    if limits.rounds is not None:  # a cell has no field for it
        note_skip_ratios([outcomes[index] for index in going], session, seconds)


def note_skip_ratios(going: Sequence[Outcome], session: Session, seconds: float) -> None:
    """Note the share of its tiles that each stage skips, where it counts them.

    Where the process fails at it, the times were taken before, and stand.
    """
    try:
        late = "took too long to count its tiles"
        ratios = session.receive(COUNTED, seconds, late)["skip_ratios"]
    except ChildFailed:
        return
    for outcome, ratio in zip(going, ratios):
        if not outcome.dropped:
            outcome.skip_ratio = ratio


def why_not_again(outcome: Outcome, out: Path, judge: Judge) -> str | None:
    """Why the answers to changed inputs are not those inputs' own, or None where they are."""
    if not outcome.stage.exact(outcome.problem):
        return None
    for index, (changed, _) in enumerate(AGAIN[outcome.problem.direction]):
        found = judge.verdict(out.with_name(f"{out.name}.again{index}"), index)
        if not found["exact"]:
            why = found["why"]
            return f"its output after {changed} changed is not the new {changed}'s: {why}"
    return None
