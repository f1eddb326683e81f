"""Holds one comparison between stages in files, and checks what is true of every record of it."""

from dataclasses import replace
from pathlib import Path

from harness.isolation.judge import Judge
from harness.isolation.roster import describe_files
from harness.records import jsonl
from harness.runs.comparison import compare, make_record
from harness.runs.plan import group, plan_comparisons


def hold(*paths, problem, limits, page_sizes=(None,), printed=None, judge=Judge):
    """(name, page size) -> record of a comparison, as `ladder bench` plans it.

    Each stage is asked for by its file, so that it takes part in all. What the stages print is
    added to the list `printed`.
    """
    stages = describe_files([Path(path) for path in paths])
    problems = [replace(problem, page_size=size) for size in page_sizes]
    cells = plan_comparisons(stages, problems, [stage.path for stage in stages])
    [comparison] = group(cells, limits)
    with judge(comparison.problem) as judging:
        outcomes = compare(comparison, judging)
    if printed is not None:
        printed += [outcome.printed for outcome in outcomes]
    records = [make_record(outcome, paired=True) for outcome in outcomes]
    for record in records:
        jsonl.dump_line(record)  # which holds it to the schema
        timed = record["time_ms"] is not None
        assert timed == (record["status"] == "ok" and record["mode"] != "interpreted")
        assert record["samples"] == (limits.rounds if timed else 0)
        assert len(record["rounds_ms"] or ()) == record["samples"]
        assert record["reason"] or record["status"] == "ok"
    found = {(record["name"], record["page_size"]): record for record in records}
    assert [*found] == [(cell.stage.name, cell.problem.page_size) for cell in comparison.cells]
    return found
