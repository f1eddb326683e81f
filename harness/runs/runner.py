"""Carries a run out: comparison after comparison, each record on the disk when it is measured."""

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

# told of each cell's record, or of all of a comparison's, and of what the stages printed
Report = Callable[[Record, str], None]
Watch = Callable[[Comparison, str], None]
ReportAll = Callable[[Comparison, list[Record], str], None]


def run(
    cells: Sequence[Cell], done: Iterable[Record], writer: Writer, limits: Limits, report: Report
) -> list[Record]:
    """Measure the cells that aren't in `done`, append each to `writer`, tell `report` of each.

    Returns the new records. A cell that fails costs itself only.
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
    """The records of the cells of one problem, with what the stages printed.

    First each stage alone; then, in turns, those of the paired cells that were found right alone.
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
    """The outcomes of the paired cells of one problem.

    Only stages that were right alone, and not interpreted, are compared; the others are skipped.
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
    """Measure the comparisons, append the records of each to `writer`, tell `report` of them.

    `watch` is told of each step of a comparison when it begins. A run broken off keeps the
    comparisons that were over.
    """
    for comparison in comparisons:
        log: list[str] = []
        with Judge(comparison.problem) as judge:
            outcomes = measure(comparison, judge, log, functools.partial(watch, comparison))
        records = bench_records(outcomes, comparison.limits)
        writer.append(*records)
        report(comparison, records, "".join(log))
