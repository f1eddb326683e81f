"""How many times as fast one cell is as another, and the texts of a cell's figures."""

import statistics
from collections.abc import Sequence

from harness.problems.cost import hbm_bytes
from harness.problems.problem import PEERS_FROM, Problem
from harness.records.schema import PROBLEM, Record
from harness.records.units import fixed, show_bytes, significant
from harness.views.groups import THREE, Stage, ours, stage_of, stages_of

CLOSE = 0.5, 1.05  # between these a ratio is always shown with its quartiles, if it has any
DIGITS = (3, 4, 5)  # of a ratio with quartiles
# what records of the same rounds have in common
SHARED_IN_TURNS = [field for field in PROBLEM if field != "page_size"]
SMALL_PEAK = 1 << 20  # bytes: a smaller peak can't be measured by a process's resident memory
UNITS = {"cpu": ("GFLOP/s", 1e3), "cuda": ("TFLOP/s", 1.0)}  # unit, and how many a TFLOP/s is


def comparable(cell: Record) -> bool:
    """Whether a cell's time may be part of a ratio: right, and not interpreted."""
    return cell["status"] == "ok" and cell["mode"] != "interpreted" and cell["time_ms"] is not None


def tflops(cell: Record) -> float | None:
    """The rate of a cell: FLOPs over time, in 10^12 per second; None without a time."""
    return None if cell["time_ms"] is None else float(cell["flops"] / cell["time_ms"] / 1e9)


def rate(cell: Record) -> float:
    """The rate of a cell that has a time, in its device's unit (`UNITS`)."""
    return (tflops(cell) or 0.0) * UNITS[cell["device"]][1]


def bandwidth(cell: Record) -> float:
    """The bandwidth of a cell that has a time, TB/s, by the fewest bytes that any stage moves."""
    return float(hbm_bytes(Problem.from_json(cell)) / cell["time_ms"] / 1e9)


# ---- who is compared with whom


def others(group: Sequence[Record], cell: Record) -> list[Record]:
    """The cells of a problem that `cell` may be compared with."""
    able = [c for c in group if comparable(c) and c["paired"] == cell["paired"] and c is not cell]
    return able if comparable(cell) else []


def rivals(group: Sequence[Record], cell: Record) -> tuple[Record | None, Record | None]:
    """The cells that `cell` is shown against: the next lower comparable stage, and stage 3."""
    able = others(group, cell)
    lower = [other for other in able if other["stage"] < cell["stage"] < PEERS_FROM]
    stage3 = [other for other in able if stage_of(other) == THREE]
    return lower[-1] if lower else None, stage3[0] if stage3 else None


def leaders(cells: Sequence[Record]) -> tuple[Stage | None, Stage | None]:
    """The newest of our stages that was timed, stage 3 excluded; and the first peer that was."""
    found = stages_of([cell for cell in cells if comparable(cell)])
    peers = [stage for stage in found if stage[0] >= PEERS_FROM]
    return max((s for s in ours(found) if s != THREE), default=None), min(peers, default=None)


# ---- ratios


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


# ---- texts


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


def show_briefly(before: Record | None, after: Record | None, paired: bool = True) -> str:
    """As `show_step`, in a table without room: quartiles only where CLOSE, when they matter."""
    if after is None:
        return "-"
    ratio = times_faster(before, after)
    close = ratio is not None and CLOSE[0] <= ratio < CLOSE[1] and before is not after
    return show_ratio(ratio, paired, spread(before, after) if close else None)


def show_speedup(cell: Record | None, peer: Record | None) -> str:
    """How many times as fast a cell is as a peer's, briefly; '-' unless both were timed."""
    both = cell is not None and peer is not None and comparable(cell) and comparable(peer)
    return show_briefly(peer, cell) if both else "-"


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
