"""Carry out a run: comparison after comparison, each record written when it is measured."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from harness.isolation.judge import Judge
from harness.records.jsonl import Writer
from harness.records.schema import Record, key
from harness.runs.contest import measure
from harness.runs.heat import INTERPRETED
from harness.runs.outcome import Outcome, bench_records, cell_record
from harness.runs.plan import Cell, Comparison, Limits

# called with each cell's record, or all of a comparison's, and with the output of the stages
Report = Callable[[Record, str], None]
Watch = Callable[[Comparison, str], None]
ReportAll = Callable[[Comparison, list[Record], str], None]


def run(
    cells: Sequence[Cell], done: Iterable[Record], writer: Writer, limits: Limits, report: Report
) -> list[Record]:
    """Measure the cells that aren't in `done`; write and `report` each. Returns the new records.

    A cell that fails affects no other.
    """
    measured = {key(record): record for record in done}
    todo = [cell for cell in cells if key(cell.to_json()) not in measured]
    records: list[Record] = []
    for problem, group in groupby(todo, key=lambda cell: cell.problem):
        with Judge(problem) as judge:
            for batch, printed in run_problem(list(group), measured, judge, limits):
                writer.append(*batch)
                for record in batch:
                    records.append(record)
                    measured[key(record)] = record
                    report(record, printed)
                    printed = ""
    return records


def run_problem(
    cells: Sequence[Cell], measured: Mapping[str, Record], judge: Judge, limits: Limits
) -> Iterator[tuple[list[Record], str]]:
    """Measure the cells of one problem; yields their records with the output of the stages.

    First each stage alone; then, in turns, the paired cells whose stages were right alone.
    """
    for cell in cells:
        if not cell.paired:
            log: list[str] = []
            comparison = Comparison(cell.problem, [cell.stage], limits, alone=True)
            [outcome] = measure(comparison, judge, log)
            yield [cell_record(outcome, paired=False)], "".join(log)
    if paired := [cell for cell in cells if cell.paired]:
        log = []
        outcomes = in_turns(paired, measured, judge, limits, log)
        yield [cell_record(outcome, paired=True) for outcome in outcomes], "".join(log)


def in_turns(
    cells: Sequence[Cell], measured: Mapping[str, Record], judge: Judge, limits: Limits,
    log: list[str],
) -> list[Outcome]:  # fmt: skip
    """Measure the paired cells of one problem; returns their outcomes.

    Only stages that were right alone and not interpreted take turns; the others are skipped.
    """
    outcomes = [Outcome(cell.stage, cell.problem) for cell in cells]
    for cell, outcome in zip(cells, outcomes, strict=True):
        single = measured.get(key(replace(cell, paired=False).to_json()))
        if single is None or single["status"] != "ok":
            outcome.drop("skipped", "not ok by itself: not compared")
        elif single["mode"] == "interpreted":
            outcome.drop("skipped", INTERPRETED)
    going = [index for index, outcome in enumerate(outcomes) if not outcome.dropped]
    stages = [cells[index].stage for index in going]
    found = measure(Comparison(cells[0].problem, stages, limits), judge, log)
    for index, outcome in zip(going, found, strict=True):
        outcomes[index] = outcome
    return outcomes


def run_comparisons(
    comparisons: Sequence[Comparison], writer: Writer, report: ReportAll, watch: Watch
) -> None:
    """Measure the comparisons; write and `report` the records of each.

    `watch` is called with each step of a comparison when it begins. An interrupted run keeps the
    comparisons that were finished.
    """
    for comparison in comparisons:
        log: list[str] = []
        with Judge(comparison.problem) as judge:
            outcomes = measure(comparison, judge, log, functools.partial(watch, comparison))
        records = bench_records(outcomes, comparison.limits)
        writer.append(*records)
        report(comparison, records, "".join(log))
