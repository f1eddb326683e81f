"""Plots of `ladder bench`, made from records alone: PNG files, readable in grey.

    latency.png    time of a call against N
    memory.png     peak memory against N
    speedup.png    how many times faster the newest stage is than each peer
    tflops.png     the rate against N, and its share of the measured matrix rate (source 004)
    breakdown.png  the time of training, forward and backward (source 001)

One panel per group of records. Records without a time, or interpreted, are in no plot.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.problems.problem import PEERS_FROM
from harness.records.schema import Record
from harness.views import contest_groups as bench
from harness.views.cell_tables import Stage, labels, stages_of, times_faster
from harness.views.look import (
    LIGHT,
    Look,
    Mark,
    draw_lines,
    legend,
    marks,
    n_axis,
    note_below,
    picture,
)  # fmt: skip
from harness.views.roofline import UNITS, roof_of

Group = Sequence[Record]

# plot -> the name of its file
PLOTS = {name: name for name in ("latency", "memory", "speedup", "tflops", "breakdown")}
LONGEST_BAR = 2.5  # in units of the newest stage's time: with longer bars the axis is logarithmic
WIDE = 8  # speed-ups that differ by more than this factor need a logarithmic axis


def plot(
    env: Record, records: Group, folder: Path, ceilings: Sequence[Record] = (),
    look: Look = LIGHT, plots: Mapping[str, str] = PLOTS,
) -> list[Path]:  # fmt: skip
    """Write those of `plots` that have data into `folder`, and return their paths.

    Raises ImportError where matplotlib is missing.
    """
    names, style = labels(env), marks(stages_of(records))
    written = []
    for what, file in plots.items():
        shown = [
            group
            for group in bench.groups(records)
            if (parts_of_training(group, records) if what == "breakdown" else points(what, group))
        ]
        if not shown:
            continue
        written.append(folder / f"{file}{look.suffix}.png")
        with picture(written[-1], look, len(shown), 2, 4.8, 3.9) as (figure, axes):
            for axis, group in zip(axes, shown, strict=True):
                if what == "breakdown":
                    draw_breakdown(axis, group, records, names, style, look)
                else:
                    draw_lines(axis, points(what, group), names, style, look)
                    frame(axis, what, group, names, look)
                if what == "tflops":
                    share_axis(axis, group, ceilings)
                axis.set_title(bench.group_title(group), fontsize=9)
            legend(figure, axes)
    return written


def points(what: str, group: Group) -> dict[Stage, list[tuple[float, float, bool]]]:
    """The points (N, value, True) of each stage or peer, for any of PLOTS but 'breakdown'.

    'speedup' has points for peers: how many times as fast as the peer the newest stage is.
    """
    newest = bench.rivals(group)[0]
    found: dict[Stage, list[tuple[float, float, bool]]] = {}
    for stage in stages_of(group):
        for n in bench.sizes(group):
            record = bench.find(group, newest if what == "speedup" and newest else stage, n)
            if record is None or not bench.timed(record):
                continue
            value = {
                "latency": record["time_ms"],
                "memory": (record["peak_bytes"] or 0) / (1 << 20),
                "speedup": ahead_of(bench.find(group, stage, n), record),
                "tflops": bench.rate_of(record),
            }[what]
            if value:
                found.setdefault(stage, []).append((n, value, True))
    return found


def ahead_of(peer: Record | None, record: Record) -> float | None:
    """How many times as fast as another's a record is; None where that isn't a peer's, or timed."""
    other = peer is not None and peer is not record and peer["stage"] >= PEERS_FROM
    return times_faster(peer, record) if other and peer and bench.timed(peer) else None


def frame(axis: Any, what: str, group: Group, names: Mapping[Stage, str], look: Look) -> None:
    """Set scales, labels and grid; add a note where stages are left out."""
    newest = bench.rivals(group)[0]
    titles = {
        "latency": "time of a call (ms)",
        "memory": "peak memory above the inputs (MB)",
        "speedup": f"#{names[newest]}: times faster" if newest else "",
        "tflops": f"achieved ({UNITS[group[0]['device']][0]})",
    }
    axis.set_ylabel(titles[what], parse_math=False)
    n_axis(axis, bench.sizes(group))
    low, high = axis.dataLim.intervaly
    if what == "speedup":
        axis.axhline(1.0, color=look.ink, linewidth=0.8)  # equally fast
    if what in ("latency", "memory") or (what == "speedup" and high > WIDE * low):
        axis.set_yscale("log")
    else:
        axis.set_ylim(0, 1.08 * max(1e-9, axis.dataLim.y1))
    if any(r["mode"] == "interpreted" and r["status"] == "ok" for r in group):
        note_below(axis, ["interpreted stages: no speed, not shown"])


def share_axis(axis: Any, group: Group, ceilings: Sequence[Record]) -> None:
    """Add an axis in per cent of the measured matrix rate, where `ceilings` have it."""
    matrix = roof_of(group[0], ceilings).matrix
    if matrix is not None:
        percent = 100 / (matrix * UNITS[group[0]["device"]][1])
        functions = (lambda y: y * percent, lambda share: share / percent)
        other = axis.secondary_yaxis("right", functions=functions)
        other.set_ylabel("% of the measured matrix rate")


def parts_of_training(group: Group, records: Group) -> dict[Stage, dict[int, tuple[float, float]]]:
    """Map stage and N to forward and backward ms, for a group of training; {} for other groups.

    Backward is its own measurement, or else training minus forward. Directions are measured in
    different comparisons: the two parts of a bar are not from the same rounds.
    """
    found: dict[Stage, dict[int, tuple[float, float]]] = {}
    directions = [bench.same_but(records, group, name) for name in ("fwd", "bwd", "train")]
    for stage in stages_of(group) if group[0]["direction"] == "train" else ():
        for n in bench.sizes(group):
            each = (bench.find(direction, stage, n) for direction in directions)
            forward, backward, both = (r["time_ms"] if r and bench.timed(r) else None for r in each)
            if forward is None or both is None:
                continue
            rest = both - forward if backward is None else backward
            if rest > 0:
                found.setdefault(stage, {})[n] = (forward, rest)
    return found


def draw_breakdown(
    axis: Any, group: Group, records: Group, names: Mapping[Stage, str],
    style: Mapping[Stage, Mark], look: Look,
) -> None:  # fmt: skip
    """Draw one bar per stage or peer at each N: forward below, backward hatched on top of it.

    In units of the newest stage's training time at that N, so that all N fit on one axis.
    """
    found, newest = parts_of_training(group, records), bench.rivals(group)[0]
    base = newest if newest in found else min(found)
    width, top = 0.84 / len(found), 1.0
    for place, (stage, times) in enumerate(sorted(found.items())):
        parts = {
            index - 0.42 + (place + 0.5) * width: [ms / sum(found[base][n]) for ms in times[n]]
            for index, n in enumerate(bench.sizes(group))
            if n in times and n in found[base]
        }
        if not parts:
            continue
        forward, backward = zip(*parts.values(), strict=True)
        colour = style[stage].colour
        axis.bar(list(parts), forward, width, color=colour, edgecolor=look.ink, linewidth=0.5,
                 label=names[stage])  # fmt: skip
        axis.bar(list(parts), backward, width, bottom=forward, color=look.ground, hatch="////",
                 edgecolor=colour, linewidth=1.2)  # fmt: skip
        top = max(top, *map(sum, parts.values()))
    axis.axhline(1.0, color=look.ink, linewidth=0.8)
    axis.set_xticks(range(len(bench.sizes(group))), [str(n) for n in bench.sizes(group)])
    axis.set_xlabel("N")
    scale = ""
    if top > LONGEST_BAR:
        scale = ", logarithmic scale"
        ticks = [digit * 10.0**power for power in range(-1, 6) for digit in (1, 2, 5)]
        axis.set_yscale("log")
        axis.set_ylim(0.1, 1.2 * top)
        shown = [tick for tick in ticks if tick < 1.2 * top]
        axis.set_yticks(shown, [f"{tick:g}" for tick in shown])
        axis.set_yticks([], minor=True)
    axis.set_ylabel(f"time / #{names[base]}'s{scale}", parse_math=False)
    note_below(axis, ["plain: forward, hatched on top: backward; by number from the left"])
