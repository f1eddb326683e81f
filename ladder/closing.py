"""The lines below a tour: the fastest stage, where one broke, what was skipped."""

from collections import Counter
from collections.abc import Collection, Sequence

from harness.problems.problem import PEERS_FROM
from harness.records.schema import FAILURES, Record
from harness.records.units import show_time
from harness.views.groups import THREE, Stage, by_problem, grouped, labels, numbers, stage_of, title
from harness.views.ratios import comparable, show_error, show_peak, show_ratio, times_faster


def closing(env: Record, cells: Sequence[Record]) -> list[str]:
    """The lines below a tour: the fastest stage, where one broke, what was skipped."""
    return [fastest(env, cells), broken(env, cells), skipped(env, cells)]


def fastest(env: Record, cells: Sequence[Record]) -> str:
    """Say which stage was fastest on the largest problem on which two or more can be compared.

    It is compared with stage 3, or where stage 3 is the fastest, with the next one. Only rows that
    are ok and not interpreted count, of stages that are exact at any N; no peers.
    """
    bounded = {stage_of(stage) for stage in env["rungs"] if stage.get("exact_up_to") is not None}
    able = [
        cell
        for cell in cells
        if comparable(cell) and cell["stage"] < PEERS_FROM and stage_of(cell) not in bounded
    ]
    if not able:
        return "Fastest exact stage: none, no exact stage has a time to compare."
    largest = max(by_problem(able), key=lambda group: (len(group) > 1, group[0]["flops"]))
    first, *others = sorted(largest, key=lambda cell: cell["time_ms"])
    names = labels(env)
    said = f"Fastest exact stage: {names[stage_of(first)]}, {show_time(first['time_ms'])}"
    said += f" and {show_peak(first)}"
    if others:
        # the next fused stage is often as fast: what fusing bought shows beside the yardstick
        other = next((cell for cell in others if stage_of(cell) == THREE), others[0])
        ratio = show_ratio(times_faster(other, first), paired=False)
        said += f", {ratio} as fast as {names[stage_of(other)]} ({show_peak(other)})"
    interpreted = {
        stage_of(cell)
        for cell in cells
        if cell["mode"] == "interpreted" and cell["status"] != "skipped"  # which ran in no mode
    }
    apart = f" (interpreted, so not compared: {called(env, interpreted)})" if interpreted else ""
    return f"{said}; at {title([first])}{apart}."


def broken(env: Record, cells: Sequence[Record]) -> str:
    """Say from which N on a stage that is declared inexact was wrong, and by how much."""
    parts = []
    for stage, label in labels(env).items():
        rows = [cell for cell in cells if stage_of(cell) == stage]
        wrong = [cell for cell in rows if cell["status"] == "wrong-by-design"]
        if not wrong:
            continue
        least, most = (end(wrong, key=lambda cell: cell["nk"]) for end in (min, max))
        right = [c["nk"] for c in rows if c["status"] == "ok" and c["nk"] < least["nk"]]
        till = f"is exact up to N = {max(right)}, " if right else "is "
        said = f"{label} {till}wrong at N = {least['nk']}, the next "
        said += f"measured: off by {show_error(least['err_f64_max'])} there"
        if most["nk"] > least["nk"]:
            said += f", by {show_error(most['err_f64_max'])} at N = {most['nk']}"
        parts.append(said)
    failed = {cell["stage"] for cell in cells if cell["status"] in FAILURES}
    if failed:
        parts.append(f"failed, and not on purpose: {numbers(failed)}")
    return f"Where it broke: {'; '.join(parts) or 'nowhere'}."


def skipped(env: Record, cells: Sequence[Record]) -> str:
    """Say which stages were skipped and why, and which were left out of the larger problems."""
    out = [cell for cell in cells if cell["status"] == "skipped" and not cell["paired"]]
    parts = [
        f"{numbers({cell['stage'] for cell in same})} ({same[0]['reason']})"
        for same in grouped(out, lambda cell: cell["reason"])
    ]
    largest: dict[Stage, int] = {}
    for cell in env["plan"]:
        if cell["stage"] < PEERS_FROM:
            largest[stage_of(cell)] = max(cell["nk"], largest.get(stage_of(cell), 0))
    top = max(largest.values(), default=0)
    special = {stage_of(stage) for stage in env["rungs"] if stage.get("few_queries")}
    for few, why in ((False, "too slow here"), (True, "made for few query rows")):
        left_out: dict[int, set[Stage]] = {}
        for stage, n in largest.items():
            if n < top and (stage in special) == few:
                left_out.setdefault(n, set()).add(stage)
        if left_out:
            bounds = (f"{called(env, group)} above N = {n}" for n, group in left_out.items())
            parts.append(f"{', '.join(bounds)} ({why})")
    return f"Skipped: {'; '.join(parts) or 'nothing'}."


def called(env: Record, stages: Collection[Stage]) -> str:
    """'stages 4, 6'; of a number that another stage of the run has, too, with the title."""
    every = labels(env)
    several = Counter(number for number, _ in every)
    if not any(several[number] > 1 for number, _ in stages):
        return numbers({number for number, _ in stages})
    parts = (every[each] if several[each[0]] > 1 else str(each[0]) for each in sorted(stages))
    return f"stages {', '.join(parts)}"
