"""Tables of `ladder run`, made from records alone: one per problem, with one row per stage."""

import json
import statistics
from collections.abc import Callable, Collection, Sequence
from typing import Any

from rich.console import Console

from harness.problems.problem import PEERS_FROM, YARDSTICK, YARDSTICK_NAME
from harness.records.schema import FAILURES, PROBLEM, Record
from harness.records.units import fixed, show_bytes, show_time, significant
from harness.views import table
from harness.views.table import Column, Table, Tables

Stage = tuple[int, str]  # number and name of a stage or peer
THREE = YARDSTICK, YARDSTICK_NAME

FORMATS = ("rich", "markdown", "csv", "json")
CLOSE = 0.5, 1.05  # between these a ratio is always shown with its quartiles, if it has any
DIGITS = (3, 4, 5)  # of a ratio with quartiles
# what records of the same rounds have in common
SHARED_IN_TURNS = [field for field in PROBLEM if field != "page_size"]
SMALL_PEAK = 1 << 20  # bytes: a smaller peak can't be measured by a process's resident memory

LEGEND = (
    "ok: exact by the float64 rule. wrong: misses it. wrong-by-design: declared inexact above its "
    "N. skipped, crashed, timeout, out-of-memory: no figure. interpreted: Triton without a GPU, "
    "no speed, never compared. ~: ratio of medians from one process per cell. Without ~: paired, "
    "all in one process, in turns: the median of the rounds' ratios, in brackets their quartiles "
    "(vs #3: from 0.5x to 1.05x), and the times are of these rounds. Errors are against stage 3 in "
    "float64, also stage 3's own."
)

# the legend in a terminal: one line of 80 columns
SHORT_LEGEND = "~: not in turns; errors: to float64."
MORE = "docs/measuring.md"

# added to the legend of other directions than forward
SHORT_LEGENDS = {"bwd": "bwd: dq, dk, dv from dO.", "train": "train: o, dq, dk, dv."}
LEGENDS = {
    "bwd": "bwd: dq, dk, dv from dO, the forward pass done before; its peak is above what that "
    "pass keeps, its errors are the largest among the three.",
    "train": "train: a call is o, then dq, dk, dv from dO; errors are the largest among the four.",
}

HEADERS = ("#", "stage", "time", "vs before", "vs #3", "peak", "max err", "rel err", "status")
TIME = HEADERS.index("time")


def grouped(records: Sequence[Record], key: Callable[[Record], object]) -> list[list[Record]]:
    """Group records with equal keys, in the order in which the keys first occur."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(json.dumps(key(record)), []).append(record)
    return list(groups.values())


def stage_of(record: Record) -> Stage:
    """Number and name of the stage of a record, or of a stage in the env line."""
    return record["stage"], record["name"]


def stages_of(records: Sequence[Record]) -> list[Stage]:
    """The stages and peers that have records, by number."""
    return sorted(set(map(stage_of, records)))


def titles(env: Record) -> dict[Stage, str]:
    """Map (stage, name) to the title in the run's env line."""
    return {stage_of(stage): stage["title"] for stage in env["rungs"]}


def labels(env: Record) -> dict[Stage, str]:
    """Map (stage, name) to number and title: '3 torch, three GEMMs'."""
    return {stage: f"{stage[0]} {title}" for stage, title in titles(env).items()}


def by_problem(cells: Sequence[Record]) -> list[list[Record]]:
    """Group cells by problem, in the order of the problems' first cells; stages by number."""
    groups = grouped(cells, lambda cell: [cell[field] for field in PROBLEM])
    return [sorted(group, key=stage_of) for group in groups]


def problem_title(cell: Record) -> str:
    """A problem in one line, without what is usual."""
    nq, nk, b, h = (cell[field] for field in ("nq", "nk", "b", "h"))
    parts = (
        f"N = {nk}" if nq == nk else f"Nq = {nq}, Nk = {nk}",
        f"d = {cell['d']}",
        "" if b == h == 1 else f"b = {b}, h = {h}",
        "" if cell["hk"] == h else f"hk = {cell['hk']}",
        cell["dtype"],
        "tf32" if cell["precision"] == "tf32" else "",
        f"{cell['inputs']} input",
        "causal" if cell["causal"] else "",
        "padded" if cell["seqlens_k"] is not None else "",
        "" if cell["direction"] == "fwd" else cell["direction"],
        cell["device"],
    )
    return ", ".join(filter(None, parts))


def comparable(cell: Record) -> bool:
    """Whether a cell's time may be part of a ratio: right, and not interpreted."""
    return cell["status"] == "ok" and cell["mode"] != "interpreted" and cell["time_ms"] is not None


def rivals(group: Sequence[Record], cell: Record) -> tuple[Record | None, Record | None]:
    """The cells that `cell` is compared with: the next lower comparable stage, and stage 3."""
    if not comparable(cell):
        return None, None
    others = [
        other
        for other in group
        if comparable(other) and other["paired"] == cell["paired"] and other is not cell
    ]
    lower = [other for other in others if other["stage"] < cell["stage"] < PEERS_FROM]
    stage3 = [other for other in others if stage_of(other) == THREE]
    return lower[-1] if lower else None, stage3[0] if stage3 else None


def ratios(group: Sequence[Record], cell: Record) -> tuple[float | None, float | None]:
    """How many times as fast `cell` is as the stage before it, and as stage 3 (`rivals`)."""
    before, stage3 = rivals(group, cell)
    return times_faster(before, cell), times_faster(stage3, cell)


def of_rounds(before: Record, after: Record) -> list[float]:
    """How many times as fast `after` is in each round; empty unless they shared two or more.

    They did where they are of one problem, in one piece or in pages: stages that take turns.
    """
    slow, fast = (cell.get("rounds_ms") or () for cell in (before, after))
    alike = all(before.get(field) == after.get(field) for field in SHARED_IN_TURNS)
    if not alike or len(slow) != len(fast) or len(slow) < 2:
        return []
    return [x / y for x, y in zip(slow, fast, strict=True)]


def times_faster(before: Record | None, after: Record) -> float | None:
    """How many times as fast `after` is; None where there is no `before`.

    The median of the rounds' ratios; of the two medians where there are no rounds of both.
    """
    if before is None:
        return None
    if rounds := of_rounds(before, after):
        return statistics.median(rounds)
    return float(before["time_ms"] / after["time_ms"])


def spread(before: Record | None, after: Record) -> tuple[float, float] | None:
    """The quartiles of the rounds' ratios, whose median is `times_faster`; None without rounds."""
    rounds = [] if before is None else of_rounds(before, after)
    if not rounds:
        return None
    first, _, third = statistics.quantiles(rounds, n=4, method="inclusive")
    return first, third


def rows_of(group: Sequence[Record]) -> list[Record]:
    """The cells of a problem that have a row: one per stage, the unpaired one where it exists."""
    rows = {stage_of(cell): cell for cell in sorted(group, key=lambda c: not c["paired"])}
    return [rows[stage] for stage in sorted(rows)]


def in_turns(group: Sequence[Record], cell: Record) -> Record | None:
    """The paired cell of the same stage, where it was measured."""
    same = (other for other in group if stage_of(other) == stage_of(cell))
    return next((other for other in same if other["paired"] and comparable(other)), None)


def show_ratio(ratio: float | None, paired: bool, spread: tuple[float, float] | None = None) -> str:
    """A ratio: of paired times 12.3x (12.1-12.5), three digits; of unpaired ones ~12x, two.

    There are more digits where the quartiles would else look the same; all have as many decimals.
    """
    if ratio is None:
        return "-"
    if not paired:
        return f"~{significant(ratio, 2)}x"
    for digits in DIGITS:
        shown, *quartiles = fixed([ratio, *(spread or ())], digits)
        if len({*quartiles}) != 1:
            break
    return f"{shown}x ({'-'.join(quartiles)})" if quartiles else f"{shown}x"


def show_step(before: Record | None, after: Record, paired: bool = True) -> str:
    """How many times as fast `after` is; with quartiles where both were timed in turns."""
    return show_ratio(times_faster(before, after), paired, spread(before, after))


def show_briefly(before: Record | None, after: Record, paired: bool = True) -> str:
    """As `show_step`, in a table without room: quartiles only where CLOSE, when they matter."""
    ratio = times_faster(before, after)
    close = ratio is not None and CLOSE[0] <= ratio < CLOSE[1] and before is not after
    return show_ratio(ratio, paired, spread(before, after) if close else None)


def show_peak(cell: Record) -> str:
    """The peak; '<1 MB' where it is too small for the process's resident memory to measure."""
    peak = cell["peak_bytes"]
    if peak is None:
        return "-"
    if cell["memory_meter"] == "process-rss" and peak < SMALL_PEAK:
        return "<1 MB"
    return show_bytes(peak)


def show_error(error: float | None) -> str:
    """An error, two digits; '0' for 0."""
    return "-" if error is None else "0" if error == 0 else f"{error:.2g}"


def row(group: Sequence[Record], cell: Record, title: str) -> list[str]:
    """The texts of one row, in the order of HEADERS."""
    turn = in_turns(group, cell)
    timed = turn or cell  # so that the ratio of two times in a table is the ratio shown
    before, stage3 = rivals(group, timed)
    interpreted = cell["mode"] == "interpreted" and cell["time_ms"] is not None
    return [
        str(cell["stage"]),
        title,
        show_time(timed["time_ms"]),
        "interpreted" if interpreted else show_step(before, timed, turn is not None),
        show_briefly(stage3, timed, turn is not None),
        show_peak(cell),
        show_error(cell["err_f64_max"]),
        show_error(cell["err_f64_rel"]),
        cell["status"],
    ]


def headers(cell: Record) -> list[str]:
    """HEADERS, with `cell`'s direction in the header of the time."""
    time = "time" if cell["direction"] == "fwd" else f"{cell['direction']} time"
    return [time if header == "time" else header for header in HEADERS]


def legend(cells: Sequence[Record]) -> str:
    """The full legend of the tables of these cells."""
    return LEGEND + "".join(f" {LEGENDS[direction]}" for direction in directions(cells))


def short_legend(cells: Sequence[Record]) -> str:
    """The legend in one line, with a link to the full explanation."""
    return " ".join([SHORT_LEGEND, *(SHORT_LEGENDS[each] for each in directions(cells)), MORE])


def directions(cells: Sequence[Record]) -> list[str]:
    """The directions of these cells that need an explanation, in the order of LEGENDS."""
    return [direction for direction in LEGENDS if any(c["direction"] == direction for c in cells)]


def tables(env: Record, cells: Sequence[Record]) -> list[Table]:
    """One table per problem, one row per stage; its notes are the reasons of what isn't ok."""
    names = titles(env)
    made = []
    for group in by_problem(cells):
        # ratios are computed among all cells of a problem, also paired ones, which have no rows
        shown, rows = rows_of(group), []
        for cell in shown:
            # an interpreted time means nothing
            dim = (TIME, TIME + 1) if cell["mode"] == "interpreted" else ()
            rows.append(table.verdict_row(row(group, cell, names[stage_of(cell)]), dim))
        lengths = group[0]["seqlens_k"]
        padded = [] if lengths is None else [f"  padded: {', '.join(map(str, lengths))} valid keys"]
        columns = [column(header) for header in headers(group[0])]
        noted = (*FAILURES, "ok")  # a stage that was wrong alone has its own note
        turns = [c for c in group if c["paired"] and c["status"] in noted and c not in shown]
        in_turn = [note.replace("  ", "  in turns: ", 1) for note in reasons(turns)]
        notes = [*padded, *reasons(shown), *in_turn]
        made.append(Table(columns, rows, problem_title(group[0]), notes))
    return made


def column(header: str) -> Column:
    """The layout of a column: on a narrow page titles are cut, then the relative error goes."""
    if header == "stage":
        return Column(header, left=True, least=10, most=24)
    if header == "vs #3":
        return Column(header, least=len("(0.000154-0.000159)"), wraps=True)  # quartiles go below it
    return Column(header, left=header == "status", gives_way=header == "rel err")


def reasons(group: Sequence[Record]) -> list[str]:
    """Why cells are not ok: one line per reason, with its stages."""
    found = grouped([c for c in group if c["reason"]], lambda c: [c["status"], c["reason"]])
    return [
        f"  {same[0]['status']} #{', #'.join(str(cell['stage']) for cell in same)}: "
        f"{same[0]['reason']}"
        for same in found
    ]


def markdown(env: Record, cells: Sequence[Record]) -> str:
    """The tables in Markdown, with the full legend below them."""
    return table.markdown(tables(env, cells), legend(cells))


def flat_rows(env: Record, cells: Sequence[Record]) -> list[dict[str, Any]]:
    """One dict per cell: the record, its stage's title, both ratios and quartiles, unrounded."""
    names = titles(env)
    rows = []
    for group in by_problem(cells):
        for cell in group:
            before, stage3 = ratios(group, cell)
            low, high = spread(rivals(group, cell)[0], cell) or (None, None)
            shown = {"vs_before": before, "vs_before_q1": low, "vs_before_q3": high}
            rows.append({**cell, "title": names[stage_of(cell)], **shown, "vs_stage3": stage3})
    return rows


def show(env: Record, cells: Sequence[Record], form: str, console: Console) -> None:
    """Print the tables in one of FORMATS: 'rich' is for people, the others for programs."""
    if form == "rich":
        console.print(Tables(tables(env, cells), short_legend(cells), alike=True))
    elif form == "markdown":
        console.file.write(markdown(env, cells) + "\n")
    else:
        as_text = table.as_csv if form == "csv" else table.as_json
        console.file.write(as_text(flat_rows(env, cells)) or "\n")


def closing(env: Record, cells: Sequence[Record]) -> list[str]:
    """The lines below a tour: the fastest stage, where one broke, what was skipped."""
    return [fastest(env, cells), broken(env, cells), skipped(env, cells)]


def fastest(env: Record, cells: Sequence[Record]) -> str:
    """Say which stage was fastest on the largest problem on which two or more can be compared.

    Only rows that are ok and not interpreted count, of stages that are exact at any N; no peers.
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
    if others:
        ratio = show_ratio(times_faster(others[0], first), paired=False)
        said += f", {ratio} as fast as {names[stage_of(others[0])]}"
    interpreted = {
        cell["stage"]
        for cell in cells
        if cell["mode"] == "interpreted" and cell["status"] != "skipped"  # which ran in no mode
    }
    apart = f" (interpreted, so not compared: {numbers(interpreted)})" if interpreted else ""
    return f"{said}; at {problem_title(first)}{apart}."


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
    largest: dict[int, int] = {}
    for cell in env["plan"]:
        if cell["stage"] < PEERS_FROM:
            largest[cell["stage"]] = max(cell["nk"], largest.get(cell["stage"], 0))
    top = max(largest.values(), default=0)
    special = {stage["stage"] for stage in env["rungs"] if stage.get("few_queries")}
    for few, why in ((False, "too slow here"), (True, "made for few query rows")):
        left_out: dict[int, set[int]] = {}
        for stage, n in largest.items():
            if n < top and (stage in special) == few:
                left_out.setdefault(n, set()).add(stage)
        if left_out:
            bounds = ", ".join(f"{numbers(group)} above N = {n}" for n, group in left_out.items())
            parts.append(f"{bounds} ({why})")
    return f"Skipped: {'; '.join(parts) or 'nothing'}."


def numbers(stages: Collection[int]) -> str:
    """'stage 7' or 'stages 0, 1, 2'."""
    listed = ", ".join(map(str, sorted(stages)))
    return f"stage {listed}" if len(stages) == 1 else f"stages {listed}"
