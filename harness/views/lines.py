"""Plots from records alone: time, peak memory and error against N, one line per stage."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.records.schema import PROBLEM
from harness.views.cell_tables import titles
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

Record = Mapping[str, Any]

COLUMNS = 3  # of panels

MEASURES = {
    "time": ("time_ms", "time of a call (ms)"),
    "memory": ("peak_bytes", "peak memory above the inputs (MB)"),
    "error": ("err_f64_max", "max error against float64"),
}
# (measure, direction) -> the axis's title, where all the cells have that direction
TITLES = {
    ("time", "bwd"): "time of a backward pass (ms)",
    ("time", "train"): "time of forward and backward (ms)",
    ("memory", "bwd"): "peak memory above the forward pass's (MB)",
    ("error", "bwd"): "max error of dq, dk, dv against float64",
    ("error", "train"): "max error of o, dq, dk, dv against float64",
}
SIZES = ("nq", "nk")


def families(cells: Sequence[Record]) -> list[list[Record]]:
    """Cells that differ in N and stage only, grouped: one panel each. One Nq is a family."""
    groups: dict[str, list[Record]] = {}
    for cell in cells:
        fields = [cell[field] for field in PROBLEM if field not in (*SIZES, "seqlens_k", "seed")]
        fixed_nq = cell["nq"] if cell["nq"] != cell["nk"] else None
        groups.setdefault(json.dumps([*fields, fixed_nq]), []).append(cell)
    return list(groups.values())


def family_title(cell: Record) -> str:
    """What the cells of a panel have in common."""
    parts = [f"{cell['inputs']} input", f"d = {cell['d']}", f"b = {cell['b']}, h = {cell['h']}"]
    if cell["nq"] != cell["nk"]:
        parts.append(f"Nq = {cell['nq']}")
    parts.append(cell["dtype"] + (" tf32" if cell["precision"] == "tf32" else ""))
    if cell["causal"]:
        parts.append("causal")
    if cell["direction"] != "fwd":
        parts.append(cell["direction"])
    parts.append(cell["device"])
    return ", ".join(parts)


def points(cells: Sequence[Record], measure: str) -> list[tuple[int, float, bool]]:
    """(N, value, ok) of one stage's cells that have a place in a plot of `measure`, by N.

    Interpreted times are in no plot of time; a wrong stage's time is in none either. The values of
    zero have no place on a logarithmic axis.
    """
    field = MEASURES[measure][0]
    found = []
    for cell in cells:
        value = cell[field]
        if not value or cell["paired"] or cell["status"] not in ("ok", "wrong-by-design"):
            continue
        if measure == "time" and (cell["mode"] == "interpreted" or cell["status"] != "ok"):
            continue
        scale = 1 / (1 << 20) if measure == "memory" else 1.0
        found.append((cell["nk"], value * scale, cell["status"] == "ok"))
    return sorted(found)


def plot(env: Record, cells: Sequence[Record], folder: Path) -> list[Path]:
    """Write time.png, memory.png and error.png into `folder`, and return those written.

    A measure that no cell has is not drawn. Raises ImportError where matplotlib is missing.
    """
    found = [measure for measure in MEASURES if any_point(cells, measure)]
    return [plot_measure(env, cells, measure, folder) for measure in found]


def plot_measure(
    env: Record, cells: Sequence[Record], measure: str, folder: Path, look: Look = LIGHT
) -> Path:
    """Write one of MEASURES against N into `folder`, one panel per family of problems."""
    names = titles(env)
    style = marks((cell["stage"], cell["name"]) for cell in cells)
    panels = [group for group in families(cells) if any_point(group, measure)]
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    with in_look(look):
        figure = new_figure(4.3 * columns + 0.6, 3.9 * rows + 0.6)
        grid = figure.subplots(rows, columns, squeeze=False, sharey="row")
        axes = list(grid.flat)
        for axis in axes[len(panels) :]:
            axis.set_visible(False)
        for axis, group in zip(axes, panels, strict=False):
            for index, stage in enumerate(style):
                own = [cell for cell in group if (cell["stage"], cell["name"]) == stage]
                label = f"{stage[0]} {names[stage]}"
                width = layer(index, len(style))
                draw(axis, points(own, measure), style[stage], width, label, look)
            finish(axis, group, measure)
        for row in grid:
            row[0].set_ylabel(axis_title(cells, measure))
        legend(figure, axes[: len(panels)])
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{measure}{look.suffix}.png"
        figure.savefig(path)
    return path


def in_words(env: Record, cells: Sequence[Record], measure: str) -> str:
    """What the plot shows, for who doesn't see it: the ends of every line, panel by panel."""
    names = titles(env)
    said = []
    for group in (each for each in families(cells) if any_point(each, measure)):
        lines = []
        for stage, name in marks((cell["stage"], cell["name"]) for cell in group):
            own = [cell for cell in group if (cell["stage"], cell["name"]) == (stage, name)]
            if found := points(own, measure):
                ends = [f"{value:.2g} at N = {n}" for n, value, _ in (found[0], found[-1])]
                lines.append(f"{stage} {names[stage, name]}, {' to '.join(dict.fromkeys(ends))}")
                if wrong := [n for n, _, ok in found if not ok]:
                    lines[-1] += f", wrong by design from N = {wrong[0]}"
        said.append(f"{family_title(group[0])}: {'; '.join(lines)}")
    return f"Plot of the {axis_title(cells, measure)} against N. {'. '.join(said)}."


def axis_title(cells: Sequence[Record], measure: str) -> str:
    """What is drawn upwards: of one direction where all cells have it, of a call otherwise."""
    directions = {cell["direction"] for cell in cells}
    usual = MEASURES[measure][1]
    return TITLES.get((measure, directions.pop()), usual) if len(directions) == 1 else usual


def any_point(group: Sequence[Record], measure: str) -> bool:
    return bool(points(group, measure))


def draw(
    axis: Any, found: Sequence[tuple[int, float, bool]], style: Mark,
    width: Mapping[str, float], label: str, look: Look,
) -> None:  # fmt: skip
    """One stage's line; what is wrong by design has hollow marks."""
    if not found:
        return
    n, values, _ = zip(*found, strict=True)
    axis.plot(n, values, color=style.colour, linestyle=style.dash, linewidth=width["linewidth"])
    for good in (True, False):
        some = [(x, y) for x, y, ok in found if ok is good]
        if some:
            axis.plot(
                *zip(*some, strict=True),
                color=style.colour,
                marker=style.marker,
                markersize=width["markersize"],
                linestyle="none",
                markerfacecolor=style.colour if good else look.ground,
            )
    axis.plot([], [], label=label, **style.line)


def finish(axis: Any, group: Sequence[Record], measure: str) -> None:
    """Scales, labels and the note on what is not shown."""
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.xaxis.set_major_locator(FixedLocator(apart({cell["nk"] for cell in group})))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.set_xlabel("N (keys)")
    axis.set_title(family_title(group[0]), fontsize=9)
    axis.grid(True, which="major")
    notes = []
    if measure == "time" and any(cell["mode"] == "interpreted" for cell in group):
        notes.append("interpreted stages: no speed, not shown")
    if not all(ok for _, _, ok in points(group, measure)):
        notes.append("hollow: wrong by design")
    if measure == "memory" and any(cell["memory_meter"] == "process-rss" for cell in group):
        notes.append("resident set: below 1 MB it tells little")
    note_below(axis, notes)


def apart(sizes: Iterable[int]) -> list[int]:
    """Those that have room for a number below them: 65 has none right of 64."""
    shown: list[int] = []
    for size in sorted(sizes):
        if not shown or size > 1.1 * shown[-1]:
            shown.append(size)
    return shown
