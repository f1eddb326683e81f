"""What the tour has shown, in three lines from its records, and what to do next."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from harness.problems.problem import PEERS_FROM
from harness.records.schema import FAILURES
from harness.records.units import show_time
from harness.views.cell_tables import by_problem, comparable, problem_title, show_error, show_ratio

Record = Mapping[str, Any]

NEXT = "Next: `ladder diff 4 5` is what mends Lite; docs/walkthrough/index.md goes stage by stage."


def closing(env: Record, cells: Sequence[Record]) -> list[str]:
    """A line each: the fastest exact stage, where one broke, what was skipped; and what is next."""
    return [fastest(env, cells), broken(env, cells), skipped(env, cells), NEXT]


def fastest(env: Record, cells: Sequence[Record]) -> str:
    """Which stage was fastest at the largest problem on which two or more can be compared.

    Only rows that are ok and not interpreted, of stages that are exact at any N; no peers.
    """
    bounded = {identity(stage) for stage in env["rungs"] if stage["exact_up_to"] is not None}
    groups = []
    for group in by_problem(cells):
        able = [
            cell
            for cell in group
            if comparable(cell) and cell["stage"] < PEERS_FROM and identity(cell) not in bounded
        ]
        if able:
            groups.append((len(able) > 1, able[0]["flops"], able))
    if not groups:
        return "Fastest exact stage: none, no exact stage has a time to compare."
    able = max(groups, key=lambda group: group[:2])[2]
    first, *others = sorted(able, key=lambda cell: cell["time_ms"])
    said = f"Fastest exact stage: {name(env, first)}, {show_time(first['time_ms'])}"
    if others:
        ratio = show_ratio(others[0]["time_ms"] / first["time_ms"], paired=False)
        said += f", {ratio} as fast as {name(env, others[0])}"
    interpreted = {cell["stage"] for cell in cells if cell["mode"] == "interpreted"}
    apart = f" (interpreted, so not compared: {numbers(interpreted)})" if interpreted else ""
    return f"{said}; at {problem_title(first)}{apart}."


def broken(env: Record, cells: Sequence[Record]) -> str:
    """From which N on a stage that is declared inexact was wrong, and by how much."""
    parts = []
    for stage in env["rungs"]:
        rows = [cell for cell in cells if identity(cell) == identity(stage)]
        wrong = [cell for cell in rows if cell["status"] == "wrong-by-design"]
        if not wrong:
            continue
        least, most = (f(wrong, key=lambda cell: cell["nk"]) for f in (min, max))
        right = [c["nk"] for c in rows if c["status"] == "ok" and c["nk"] < least["nk"]]
        till = f"is exact up to N = {max(right)}, " if right else "is "
        said = f"{stage['stage']} {stage['title']} {till}wrong from N = {least['nk']} on: off by "
        said += f"{show_error(least['err_stage3_max'])} there"
        if most["nk"] > least["nk"]:
            said += f", by {show_error(most['err_stage3_max'])} at N = {most['nk']}"
        parts.append(said)
    failed = sorted({cell["stage"] for cell in cells if cell["status"] in FAILURES})
    if failed:
        parts.append(f"failed, and not on purpose: {numbers(failed)}")
    return f"Where it broke: {'; '.join(parts) or 'nowhere'}."


def skipped(env: Record, cells: Sequence[Record]) -> str:
    """Which stages were skipped for what reason, and which were spared the larger problems."""
    reasons: dict[str, set[int]] = {}
    for cell in cells:
        if cell["status"] == "skipped" and not cell["paired"]:
            reasons.setdefault(cell["reason"], set()).add(cell["stage"])
    parts = [f"{numbers(stages)} ({reason})" for reason, stages in reasons.items()]
    largest: dict[int, int] = {}
    for cell in env["plan"]:
        if cell["stage"] < PEERS_FROM:
            largest[cell["stage"]] = max(cell["nk"], largest.get(cell["stage"], 0))
    spared: dict[int, set[int]] = {}
    for stage, n in largest.items():
        if n < max(largest.values()):
            spared.setdefault(n, set()).add(stage)
    if spared:
        bounds = ", ".join(f"{numbers(stages)} above N = {n}" for n, stages in spared.items())
        top = max(largest.values())
        parts.append(f"{bounds} (the tour goes to N = {top}; they take too long here)")
    return f"Skipped: {'; '.join(parts) or 'nothing'}."


def identity(record: Record) -> tuple[int, str]:
    """What a record and a stage of the env line are the same by."""
    return record["stage"], record["name"]


def name(env: Record, cell: Record) -> str:
    """'3 torch, three GEMMs'."""
    title = next(stage["title"] for stage in env["rungs"] if identity(stage) == identity(cell))
    return f"{cell['stage']} {title}"


def numbers(stages: Collection[int]) -> str:
    """'stage 7' or 'stages 0, 1, 2'."""
    listed = ", ".join(map(str, sorted(stages)))
    return f"stage {listed}" if len(stages) == 1 else f"stages {listed}"
