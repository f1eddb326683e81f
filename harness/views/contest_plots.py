"""Plots of `ladder bench`, from records alone: PNG files, readable in grey.

    latency.png    time of a call against N
    memory.png     peak memory against N
    speedup.png    how many times faster the newest stage is than each peer
    tflops.png     what is achieved against N, and how much of the measured matrix rate (source 004)
    breakdown.png  training's time, forward and backward (source 001)

One panel per group of records. What has no time, or was interpreted, is in no plot.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.problems.problem import PEERS_FROM
from harness.views.cell_tables import titles
from harness.views.contest_groups import (
    Contestant,
    contestants,
    find,
    group_title,
    groups,
    rate_of,
    rivals,
    same_but,
    sizes,
    timed,
)
from harness.views.decode import few_rows
from harness.views.look import (
    LIGHT,
    Look,
    Mark,
    in_look,
    layer,
    legend,
    marks,
    new_figure,
    note_below,
)
from harness.views.roofline import UNITS, roof_of

Record = Mapping[str, Any]
Group = Sequence[Record]
Value = Callable[[Record], float | None]
Panel = Callable[[Any, Group], None]  # draws a group into an axis
Marks = Mapping[Contestant, Mark]

COLUMNS = 2  # of panels
HATCH = "////"  # of the backward part
LONGEST_BAR = 2.5  # in times of the newest stage: with longer ones the axis is logarithmic
WIDE = 8  # peers whose speed-ups are further apart than this factor need a logarithmic axis


def plot(
    env: Record, records: Sequence[Record], folder: Path, ceilings: Sequence[Record] = (),
    look: Look = LIGHT,
) -> list[Path]:  # fmt: skip
    """Write the plots that there is something for into `folder`, and return their paths.

    Raises ImportError where matplotlib is missing.
    """
    records = [record for record in records if not few_rows(record)]  # they are a table
    names = titles(env)
    style = marks(contestants(records))

    def lines(value: Value, label: str, scale: str) -> Panel:
        def panel(axis: Any, group: Group) -> None:
            draw_lines(axis, group, value, style, names)
            frame(axis, group, label, scale)

        return panel

    def speedups(axis: Any, group: Group) -> None:
        draw_speedups(axis, group, style, names, look)

    def rates(axis: Any, group: Group) -> None:
        unit = UNITS[group[0]["device"]][0]
        draw_lines(axis, group, rate_of, style, names)
        frame(axis, group, f"achieved ({unit})", "linear")
        share_axis(axis, group, ceilings)

    def breakdown(axis: Any, group: Group) -> None:
        draw_breakdown(axis, group, records, style, names, look)

    every = [group for group in groups(records) if any(timed(record) for record in group)]
    with_memory = [group for group in every if any(peak_mb(r) for r in group if timed(r))]
    rivalled = [group for group in every if None not in rivals(group)]
    trained = [group for group in every if parts_of_training(group, records)]
    found = (
        ("latency", every, lines(time_ms, "time of a call (ms)", "log")),
        ("memory", with_memory, lines(peak_mb, "peak memory above the inputs (MB)", "log")),
        ("speedup", rivalled, speedups),
        ("tflops", every, rates),
        ("breakdown", trained, breakdown),
    )
    return [
        write(folder / f"{name}{look.suffix}.png", panels, draw, look)
        for name, panels, draw in found
        if panels
    ]


def time_ms(record: Record) -> float | None:
    return float(record["time_ms"])


def peak_mb(record: Record) -> float | None:
    peak = record["peak_bytes"]
    return peak / (1 << 20) if peak else None


def write(path: Path, panels: Sequence[Group], draw: Panel, look: Look) -> Path:
    """Write one picture: one panel per group, two side by side, one legend below."""
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    with in_look(look):
        figure = new_figure(4.8 * columns + 0.4, 3.9 * rows + 0.3)
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        for axis, group in zip(axes, panels, strict=False):
            draw(axis, group)
            axis.set_title(group_title(group), fontsize=9)
        legend(figure, axes[: len(panels)])
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return path


def draw_lines(
    axis: Any, group: Group, value: Value, style: Marks,
    names: Mapping[Contestant, str],
) -> None:  # fmt: skip
    """One line per contestant: its value at each N where it was timed."""
    for index, contestant in enumerate(style):
        found = [
            (n, value(r)) for n in sizes(group) if (r := find(group, contestant, n)) and timed(r)
        ]
        points = [(n, y) for n, y in found if y]
        if points:
            axis.plot(
                *zip(*points, strict=True), label=f"{contestant[0]} {names[contestant]}",
                **style[contestant].line, **layer(index, len(style)),
            )  # fmt: skip


def draw_speedups(
    axis: Any, group: Group, style: Marks, names: Mapping[Contestant, str], look: Look
) -> None:
    """One line per peer: how many times faster the newest stage is; 1 is as fast."""
    ours = rivals(group)[0]
    assert ours is not None
    shown: list[float] = []
    for peer in contestants(group):
        found = [(n, find(group, ours, n)) for n in sizes(group)]
        points = [(n, r["speedup"][peer[1]]) for n, r in found if r and peer[1] in r["speedup"]]
        if peer[0] >= PEERS_FROM and points:
            shown += [ratio for _, ratio in points]
            axis.plot(
                *zip(*points, strict=True), label=f"{peer[0]} {names[peer]}",
                linewidth=1.6, markersize=6, **style[peer].line,
            )  # fmt: skip
    axis.axhline(1.0, color=look.ink, linewidth=0.8)
    scale = "log" if shown and max(shown) > WIDE * min(shown) else "linear"
    frame(axis, group, f"#{ours[0]} {names[ours]}: times faster", scale)


def frame(axis: Any, group: Group, label: str, scale: str) -> None:
    """Scales, labels, grid; a note where something is left out."""
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

    axis.set_xscale("log", base=2)
    axis.set_yscale(scale)
    if scale == "linear":
        axis.set_ylim(0, 1.08 * max(1e-9, axis.dataLim.y1))
    axis.xaxis.set_major_locator(FixedLocator(sizes(group)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.set_xlabel("N")
    axis.set_ylabel(label)
    axis.grid(True, which="major")
    if any(r["mode"] == "interpreted" and r["status"] == "ok" for r in group):
        note_below(axis, ["interpreted stages: no speed, not shown"])


def share_axis(axis: Any, group: Group, ceilings: Sequence[Record]) -> None:
    """A second axis, per cent of the measured matrix rate, where that is among the ceilings."""
    matrix = roof_of(group[0], ceilings).matrix
    if matrix is None:
        return
    whole = matrix * UNITS[group[0]["device"]][1]
    other = axis.secondary_yaxis(
        "right", functions=(lambda y: 100 * y / whole, lambda share: share * whole / 100)
    )
    other.set_ylabel("% of the measured matrix rate")


def parts_of_training(
    group: Group, records: Sequence[Record]
) -> dict[Contestant, dict[int, tuple[float, float]]]:
    """contestant -> N -> forward and backward ms of a group of training; {} for any other group.

    Backward is what was measured as such, or else training less forward. A run's directions are
    contests of their own: what is stacked here was not measured in the same rounds.
    """
    if group[0]["direction"] != "train":
        return {}
    found: dict[Contestant, dict[int, tuple[float, float]]] = {}
    forward, backward = (same_but(records, group, direction) for direction in ("fwd", "bwd"))
    for contestant in contestants(group):
        for n in sizes(group):
            both, first, second = (find(g, contestant, n) for g in (group, forward, backward))
            if both is None or first is None or not timed(both) or not timed(first):
                continue
            rest = both["time_ms"] - first["time_ms"]
            if second is not None and timed(second):
                rest = second["time_ms"]
            if rest > 0:
                found.setdefault(contestant, {})[n] = (first["time_ms"], rest)
    return found


def draw_breakdown(
    axis: Any, group: Group, records: Sequence[Record], style: Marks,
    names: Mapping[Contestant, str], look: Look,
) -> None:  # fmt: skip
    """One bar per contestant at each N: forward below, backward hatched on top of it.

    In units of the newest stage's training time at that N, so that all N fit on one axis.
    """
    found = parts_of_training(group, records)
    base = rivals(group)[0]
    base = base if base in found else min(found)
    width = 0.84 / len(found)
    tops = [1.0]
    for place, contestant in enumerate(sorted(found)):
        colour = style[contestant].colour
        label: str | None = f"{contestant[0]} {names[contestant]}"
        for index, n in enumerate(sizes(group)):
            if n not in found[contestant] or n not in found[base]:
                continue
            unit = sum(found[base][n])
            forward, backward = (part / unit for part in found[contestant][n])
            x = index - 0.42 + (place + 0.5) * width
            axis.bar(x, forward, width, color=colour, edgecolor=look.ink, linewidth=0.5,
                     label=label)  # fmt: skip
            axis.bar(
                x, backward, width, bottom=forward, color=look.ground, hatch=HATCH,
                edgecolor=colour, linewidth=1.2,
            )  # fmt: skip
            tops.append(forward + backward)
            label = None
    axis.axhline(1.0, color=look.ink, linewidth=0.8)
    axis.set_xticks(range(len(sizes(group))), [str(n) for n in sizes(group)])
    scale = ""
    if max(tops) > LONGEST_BAR:
        scale = ", logarithmic scale"
        log_axis(axis, 1.2 * max(tops))
    axis.set_xlabel("N")
    axis.set_ylabel(f"time / #{base[0]} {names[base]}'s{scale}")
    note_below(axis, ["plain: forward, hatched on top: backward; by number from the left"])


def log_axis(axis: Any, top: float) -> None:
    """Bars on a logarithmic axis, its ticks in plain numbers: 0.1, 0.2, 0.5, 1, 2, 5, 10."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    axis.set_yscale("log")
    axis.set_ylim(0.1, top)
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
