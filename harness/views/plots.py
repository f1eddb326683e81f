"""Plots of cells against N, made from records alone: PNG files, readable in grey.

    time.png       time of a call; of comparisons alone: latency.png
    memory.png     peak memory
    error.png      the largest error against float64; not of comparisons
    speedup.png    how many times as fast as each peer the newest stage is
    tflops.png     the rate, and its share of the measured matrix rate
    breakdown.png  the time of training, forward and backward

One panel per family of problems. Interpreted times, and times of wrong stages, are in no plot.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from harness.problems.problem import DIRECTIONS, PEERS_FROM
from harness.records.schema import Record
from harness.views import groups, rings
from harness.views.groups import Stage
from harness.views.look import (
    HOLLOW,
    LIGHT,
    Look,
    Style,
    draw_lines,
    legend,
    marks,
    n_axis,
    note_below,
    picture,
)  # fmt: skip
from harness.views.ratios import UNITS, comparable, leaders, rate, times_faster
from harness.views.roofline import roof_of

Cells = Sequence[Record]
Points = list[tuple[float, float, bool]]  # N, value, whether it is right

# the name of a plot's file -> what it shows
ALONE = {"time": "time", "memory": "memory", "error": "error"}
COMPARED = {
    "latency": "time", "memory": "memory", "speedup": "speedup", "tflops": "rate",
    "breakdown": "breakdown",
}  # fmt: skip
# what a plot shows -> its axis, by direction where all cells have the same
TITLES = {
    "time": {"": "time of a call (ms)", "bwd": "time of a backward pass (ms)",
             "train": "time of forward and backward (ms)"},
    "memory": {"": "peak memory above the inputs (MB)",
               "bwd": "peak memory above the forward pass's (MB)"},
    "error": {"": "max error against float64",
              "bwd": "max error of dq, dk, dv against float64",
              "train": "max error of o, dq, dk, dv against float64"},
}  # fmt: skip
LONGEST_BAR = 2.5  # in units of the newest stage's time: with longer bars the axis is logarithmic
WIDE = 8  # speed-ups that differ by more than this factor need a logarithmic axis


def plot(
    env: Record, cells: Cells, folder: Path, ceilings: Cells = (), look: Look = LIGHT,
    files: Mapping[str, str] = {},
) -> list[Path]:  # fmt: skip
    """Write those of `files` that have data into `folder`, and return their paths.

    By default ALONE, where stages were measured alone, else COMPARED. Raises ImportError where
    matplotlib is missing.
    """
    if any(cell["world"] > 1 for cell in cells):
        return rings.plot(env, cells, folder, look)
    if not files:
        files = COMPARED if all(cell["paired"] for cell in cells) else ALONE
    return [
        plot_one(env, cells, what, folder / f"{name}{look.suffix}.png", ceilings, look)
        for name, what in files.items()
        if panels(cells, what)
    ]


def plot_one(
    env: Record, cells: Cells, what: str, path: Path, ceilings: Cells = (), look: Look = LIGHT
) -> Path:
    """Write one plot into the file `path`, one panel per family of problems."""
    shown, names, style = panels(cells, what), groups.labels(env), marks(groups.stages_of(cells))
    columns = 2 if len(shown) == 4 else 3
    logarithmic = what in TITLES
    shared = {"sharey": "row"} if logarithmic else {}
    with picture(path, look, len(shown), columns, 4.3, 3.9, **shared) as (figure, axes):
        for axis, group in zip(axes, shown, strict=True):
            axis.set_title(groups.title(group, any_n=True), fontsize=9)
            if what == "breakdown":
                draw_breakdown(axis, group, cells, names, style, look)
                continue
            draw_lines(axis, by_stage(group, what), names, style, look)
            n_axis(axis, groups.sizes(group), "N (keys)")
            note_below(axis, notes(group, what))
            if logarithmic:
                axis.set_yscale("log")
            else:
                frame(axis, what, group, names, look)
            if what == "rate":
                share_axis(axis, group, ceilings)
        for axis in axes[::columns] if logarithmic else ():
            axis.set_ylabel(axis_title(cells, what))
        legend(figure, axes)
    return path


def panels(cells: Cells, what: str) -> list[Cells]:
    """The families that have anything to plot; of those measured alone, too, no paired cell.

    Comparisons of few query rows are in no plot: they have a table.
    """
    shown = [cell for cell in cells if not cell["paired"]]
    shown = shown or [cell for cell in cells if not groups.few_rows(cell)]
    if what == "breakdown":
        return [each for each in groups.families(shown) if parts_of_training(each, cells)]
    return [each for each in groups.families(shown) if any(by_stage(each, what).values())]


def by_stage(family: Cells, what: str) -> dict[Stage, Points]:
    """The points (N, value, ok) of each stage in a plot, by N.

    Left out: what has no value, and 0, since axes are logarithmic. 'speedup' has points for peers:
    how many times as fast as the peer the newest stage is.
    """
    found: dict[Stage, Points] = {}
    for cell in sorted(family, key=lambda cell: (groups.stage_of(cell), cell["nk"])):
        points = found.setdefault(groups.stage_of(cell), [])
        if value := value_of(cell, family, what):
            points.append((cell["nk"], value, cell["status"] == "ok"))
    return found


def value_of(cell: Record, family: Cells, what: str) -> float | None:
    """The value of a cell in a plot of its family; None or 0 where it has no point there."""
    if what in ("memory", "error"):
        if cell["status"] not in ("ok", "wrong-by-design"):
            return None
        scale, field = (1 << 20, "peak_bytes") if what == "memory" else (1, "err_f64_max")
        return float((cell[field] or 0) / scale)
    if not comparable(cell):
        return None
    if what == "speedup":
        ours = groups.find(family, leaders(family)[0], cell["nk"])
        other = ours is not None and comparable(ours) and cell["stage"] >= PEERS_FROM
        return times_faster(cell, ours) if ours and other else None
    return float(cell["time_ms"]) if what == "time" else rate(cell)


def in_words(env: Record, cells: Cells, what: str) -> str:
    """The plot in words, as alternative text: both ends of every line, panel by panel."""
    names = groups.labels(env)
    said = []
    for group in panels(cells, what):
        lines = []
        for stage, found in by_stage(group, what).items():
            if found:
                ends = [f"{value:.2g} at N = {n}" for n, value, _ in (found[0], found[-1])]
                lines.append(f"{names[stage]}, {' to '.join(dict.fromkeys(ends))}")
                if wrong := [n for n, _, ok in found if not ok]:
                    lines[-1] += f", wrong by design from N = {wrong[0]}"
        said.append(f"{groups.title(group, any_n=True)}: {'; '.join(lines)}")
    return f"Plot of the {axis_title(cells, what)} against N. {'. '.join(said)}."


def axis_title(cells: Cells, what: str) -> str:
    """The title of the vertical axis, with the direction where all cells have the same."""
    directions = {cell["direction"] for cell in cells}
    only = directions.pop() if len(directions) == 1 else ""
    return TITLES[what].get(only, TITLES[what][""])


def notes(family: Cells, what: str) -> list[str]:
    """Notes on a panel: what it leaves out, and how to read it."""
    points = [point for found in by_stage(family, what).values() for point in found]
    said = {
        "interpreted stages: no speed, not shown": what in ("time", "rate", "speedup")
        and any(cell["mode"] == "interpreted" and cell["status"] == "ok" for cell in family),
        HOLLOW: not all(ok for _, _, ok in points),
        "resident set: below 1 MB it tells little": what == "memory"
        and any(cell["memory_meter"] == "process-rss" for cell in family),
    }
    return [note for note, so in said.items() if so]


def frame(axis: Any, what: str, family: Cells, names: Mapping[Stage, str], look: Look) -> None:
    """Set the vertical axis of a plot of rates or speed-ups: from 0, where they are close."""
    low, high = axis.dataLim.intervaly
    if what == "speedup":
        newest = leaders(family)[0]
        axis.set_ylabel(f"#{names[newest]}: times faster" if newest else "", parse_math=False)
        axis.axhline(1.0, color=look.ink, linewidth=0.8)  # equally fast
    else:
        axis.set_ylabel(f"achieved ({UNITS[family[0]['device']][0]})")
    if what == "speedup" and high > WIDE * low:
        axis.set_yscale("log")
    else:
        axis.set_ylim(0, 1.08 * max(1e-9, axis.dataLim.y1))


def share_axis(axis: Any, family: Cells, ceilings: Cells) -> None:
    """Add an axis in per cent of the measured matrix rate, where `ceilings` have it."""
    matrix = roof_of(family[0], ceilings).matrix
    if matrix is not None:
        percent = 100 / (matrix * UNITS[family[0]["device"]][1])
        functions = (lambda y: y * percent, lambda share: share / percent)
        other = axis.secondary_yaxis("right", functions=functions)
        other.set_ylabel("% of the measured matrix rate")


def parts_of_training(family: Cells, cells: Cells) -> dict[Stage, dict[int, tuple[float, float]]]:
    """Map stage and N to forward and backward ms, for a family of training; {} for others.

    Backward is its own measurement, or else training minus forward. Directions are measured in
    different comparisons: the two parts of a bar are not from the same rounds.
    """
    found: dict[Stage, dict[int, tuple[float, float]]] = {}
    if family[0]["direction"] != "train":
        return found
    same = {field: family[0][field] for field in groups.FAMILY if field != "direction"}
    alike = [cell for cell in cells if same.items() <= cell.items() and comparable(cell)]
    passes = [[cell for cell in alike if cell["direction"] == each] for each in DIRECTIONS]
    for stage, n in product(groups.stages_of(family), groups.sizes(family)):
        forward, backward, both = (groups.find(those, stage, n) for those in passes)
        if forward and both:
            time = forward["time_ms"]
            rest = backward["time_ms"] if backward else both["time_ms"] - time
            if rest > 0:
                found.setdefault(stage, {})[n] = (time, rest)
    return found


def draw_breakdown(
    axis: Any, family: Cells, cells: Cells, names: Mapping[Stage, str], style: Style, look: Look
) -> None:
    """Draw one bar per stage or peer at each N: forward below, backward hatched on top of it.

    In units of the newest stage's training time at that N, so that all N fit on one axis.
    """
    found, newest = parts_of_training(family, cells), leaders(family)[0]
    base = newest if newest in found else min(found)
    width, top = 0.84 / len(found), 1.0
    for place, (stage, times) in enumerate(sorted(found.items())):
        parts = {
            index - 0.42 + (place + 0.5) * width: [ms / sum(found[base][n]) for ms in times[n]]
            for index, n in enumerate(groups.sizes(family))
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
    axis.set_xticks(range(len(groups.sizes(family))), groups.listed(family).split(", "))
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
