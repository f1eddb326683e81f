"""Carry out a run: comparison after comparison, each record written when it is measured.

For `ladder run` a comparison has a single stage, alone in its process; with --paired the stages
that were right then take turns in one process. `ladder bench` always times several stages in turns.
harness/runs/process.py handles one process: the check, the turns, and the calls after them. Nothing
here uses tensors.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from types import MappingProxyType
from typing import Final

from harness.isolation.judge import ERRORS, Judge, NoVerdict
from harness.measures.samples import rounds_in, turns
from harness.problems import cost
from harness.problems.problem import ONE_GPU, PEERS_FROM
from harness.records.jsonl import Writer
from harness.records.schema import Record, key
from harness.runs.plan import Cell, Comparison, Limits, group, why_beyond, why_hopeless
from harness.runs.process import (
    INTERPRETED,
    NOT_TIMED,
    ComparisonProcess,
    Failure,
    Outcome,
    Say,
    remaining,
)

# fields of a record and of a message (harness/isolation/messages.py)
CHECKED: Final = ("first_call_ms", "peak_bytes", "memory_meter", "products")

ALONE_SECONDS: Final = 0.2  # of sampling a stage alone
TURN_SECONDS: Final = 0.3  # of sampling each of several, where no rounds are given
APART: Final = "timed in a process of its own, in turns with the others' processes"

# called with a comparison, its records, and what each of its stages has printed
Report = Callable[[Comparison, list[Record], list[str]], None]
Watch = Callable[[Comparison, str], None]


# ---- from cells to records


def run_cells(
    cells: Sequence[Cell], done: Iterable[Record], writer: Writer, limits: Limits, report: Report,
    watch: Watch = lambda *_: None,
) -> None:  # fmt: skip
    """Measure the cells that aren't in `done`; write and `report` each comparison's records.

    `watch` is called with each step of a comparison when it begins. An interrupted run keeps the
    comparisons that were finished.
    """
    measured = {key(record): record for record in done}
    left = [cell for cell in cells if cell.key not in measured]
    comparisons = group(left, limits)
    for problem, alike in groupby(comparisons, key=lambda comparison: comparison.problem):
        with Judge(problem) as judge:
            for comparison in alike:
                tell = functools.partial(watch, comparison)
                outcomes = compare(comparison, judge, tell, measured)
                records = [make_record(outcome, not comparison.alone) for outcome in outcomes]
                note_one_gpu(records)
                writer.append(*records)
                measured |= {key(record): record for record in records}
                report(comparison, records, [outcome.printed for outcome in outcomes])


def copied(message: object, names: Sequence[str]) -> Record:
    """The fields `names` of a message; None each where there was no message."""
    return {name: getattr(message, name, None) for name in names}


def make_record(outcome: Outcome, paired: bool) -> Record:
    """The record of one stage on one problem; `paired`: it took turns with others."""
    stage, problem, checked = outcome.stage, outcome.problem, outcome.checked
    # a peer refuses a problem by a ValueError; so does a stage that can't cut a length for a world
    refused = outcome.refused and (stage.number >= PEERS_FROM or problem.world > 1)
    lengths = problem.seqlens_k
    return {
        "kind": "cell",
        "stage": stage.number,
        "name": stage.name,
        "paired": paired,
        **problem.to_json(),
        "seqlens_k": None if lengths is None else list(lengths),
        "mode": outcome.mode,
        "status": "skipped" if refused else outcome.status,
        "reason": outcome.reason,
        "launch_configs": checked.launch_configs if checked and not outcome.dropped else None,
        **copied(checked, CHECKED),
        **vars(outcome.timed),
        **copied(outcome.verdict, ERRORS),
        "flops": cost.flops(problem),
        "hbm_bytes": cost.hbm_bytes(problem, stage.traffic),
    }


def note_one_gpu(records: Sequence[Record]) -> None:
    """Note in each record of a world how many times as fast it is as one GPU with all of it."""
    one = [record["time_ms"] for record in records if record["name"] == ONE_GPU]
    for record in records:
        both = one and one[0] and record["time_ms"] and record["world"] > 1
        record["x_one_gpu"] = one[0] / record["time_ms"] if both else None


# ---- one comparison


def compare(
    comparison: Comparison, judge: Judge, tell: Say = lambda _: None,
    measured: Mapping[str, Record] = MappingProxyType({}),
) -> list[Outcome]:  # fmt: skip
    """Measure `comparison`; returns the outcome of each stage. One that fails affects no other.

    `tell` is called with each step. A stage takes no turns where it was `measured` alone and either
    wasn't right or was interpreted.
    """
    outcomes = [Outcome(cell.stage, cell.problem) for cell in comparison.cells]
    for cell, outcome in zip(comparison.cells, outcomes, strict=True):
        alone = measured.get(replace(cell, paired=False).key, {"status": "ok"})
        if alone["status"] != "ok":
            outcome.drop("skipped", "not ok by itself: not compared")
        elif alone.get("mode") == "interpreted":
            outcome.drop("skipped", INTERPRETED)
        elif cell.stage.failed is not None:
            outcome.drop(*cell.stage.failed)
        elif reason := cell.stage.why_skip(cell.problem):
            outcome.drop("skipped", reason)
        elif hopeless := (
            why_hopeless(comparison.problem)
            or why_beyond(cell.stage, comparison.problem, comparison.limits)
        ):
            outcome.drop(*hopeless)
    try:
        fill_outcomes(comparison, remaining(outcomes), judge, tell)
    except NoVerdict as error:
        for outcome in remaining(outcomes):
            outcome.drop(error.status, error.reason)
    return outcomes


def compare_alone(cell: Cell, limits: Limits) -> Outcome:
    """Measure one stage alone; returns its outcome."""
    comparison = Comparison([cell], limits)
    with Judge(comparison.problem) as judge:
        [outcome] = compare(comparison, judge)
    return outcome


def fill_outcomes(
    comparison: Comparison, together: Sequence[Outcome], judge: Judge, tell: Say
) -> None:
    """Measure all stages together; where their process ends early, first each one alone.

    A stage that ends the process also does so alone; the others are then measured without it. Where
    one of the stages is a user's own file, each stage has its own process, and these take turns: it
    can neither slow nor damage the others. The ranks of a world have all stages, and call the same
    one at a time: the one at which they end is known, and the others are measured anew without it.
    """
    world = comparison.problem.world > 1
    apart = not world and not all(outcome.stage.ours for outcome in together)

    def run(outcomes: Sequence[Outcome], at_once: bool = True) -> list[Failure]:
        groups = [[outcome] for outcome in outcomes] if apart else [outcomes]
        return in_processes(comparison, groups, judge, tell, at_once)

    def run_without_failed(
        outcomes: Sequence[Outcome], at_once: bool = True
    ) -> tuple[Sequence[Outcome], list[Failure]]:
        failures = run(outcomes, at_once)
        while world and any(failures) and len(left := remaining(outcomes)) < len(outcomes):
            for outcome in left:
                outcome.forget()
            outcomes, failures = left, run(left)
        return outcomes, failures

    together, failures = run_without_failed(together)
    # mostly GPUs: each alone would have as few
    too_few = world and failures[0] is not None and failures[0][0] == "skipped"
    if any(failures) and len(together) > 1 and not too_few:
        for outcome in together:
            outcome.forget()
            for failure in run([outcome]):
                if failure is not None:
                    outcome.drop(*failure)
        # loading one after another: one may have been late only because of the others
        together, failures = run_without_failed(remaining(together), at_once=False)
        where = "beside the others" if apart or world else "of all in one process"
        failures = [
            failure and (failure[0], f"sound alone, but {where}: {failure[1]}")
            for failure in failures
        ]
    for index, outcome in enumerate(together):
        failure = failures[index if apart else 0]
        if failure is not None and not outcome.dropped:
            outcome.drop(*failure)
        elif apart and outcome.timed is not NOT_TIMED and not comparison.alone:
            outcome.reason = APART if not outcome.stage.ours else ""


def in_processes(
    comparison: Comparison, groups: Sequence[Sequence[Outcome]], judge: Judge, tell: Say,
    at_once: bool = True,
) -> list[Failure]:  # fmt: skip
    """Check each group of stages in its own process, time them in turns, check them again.

    They load at the same time if `at_once`, else one after another.
    Returns the failure of each group's process, None where it did not fail. Raises NoVerdict where
    nothing can be checked.
    """
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(ComparisonProcess(comparison, outcomes, judge, tell))
            for outcomes in groups
        ]
        tell("the stages load, stage 3 in float64 is computed")
        for loading in [started] if at_once else [[each] for each in started]:
            for each in loading:
                each.attempt(each.start)
            while loading := [each for each in loading if each.still_loads()]:
                pass  # each is watched
        if any(each.loaded for each in started):
            judge.open()  # before the first call: a stage that tunes itself needs the GPU alone
        for each in started:
            each.attempt(each.check)
        for each in started:
            each.attempt(each.warm_up)
        timed = [(each, index) for each in started for index in each.going]
        if timed:
            rounds = rounds_of(comparison, timed)
            names = ", ".join(each.outcomes[index].stage.name for each, index in timed)
            if comparison.limits.rounds is not None:
                tell(f"{names}: {comparison.limits.warmup} + {rounds} calls each, in turns")
            for turn in turns(len(timed), rounds):
                each, index = timed[turn]
                each.attempt(each.sample, index)
        for each in started:
            each.attempt(each.finish)
    for each in started:
        for outcome in each.outcomes[:1]:  # what several print in one process can't be told apart
            outcome.printed += each.session.printed()
    return [each.failure for each in started]


def rounds_of(comparison: Comparison, timed: Sequence[tuple[ComparisonProcess, int]]) -> int:
    """The number of samples of each of the stages that are `timed`: the same for all."""
    if comparison.limits.rounds is not None:
        return comparison.limits.rounds
    cost = sum(each.series[index].cost for each, index in timed)
    if not comparison.alone:
        return rounds_in(TURN_SECONDS * len(timed), cost)
    [(process, index)] = timed  # its samples take half of its budget at most
    return min(rounds_in(ALONE_SECONDS, cost), max(1, int(process.left[index] / 2 / cost)))
