"""Plots of `ladder run`: time, peak memory and error against N, one line per stage."""

from collections.abc import Sequence
from pathlib import Path

from harness.records.schema import PROBLEM, Record
from harness.views.cell_tables import Stage, grouped, labels, stage_of, stages_of
from harness.views.look import LIGHT, Look, draw_lines, legend, marks, n_axis, note_below, picture

# measure -> the record's field, and the axis's title
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


def families(cells: Sequence[Record]) -> list[list[Record]]:
    """Group cells that differ only in N and stage, one panel each; cells with equal Nq together."""
    same = [field for field in PROBLEM if field not in ("nq", "nk", "seqlens_k", "seed")]
    return grouped(
        cells,
        lambda cell: [
            *(cell[field] for field in same),
            cell["nq"] if cell["nq"] != cell["nk"] else None,
        ],
    )


def family_title(cell: Record) -> str:
    """What the cells of a panel have in common."""
    parts = (
        f"{cell['inputs']} input",
        f"d = {cell['d']}",
        f"b = {cell['b']}, h = {cell['h']}",
        "" if cell["nq"] == cell["nk"] else f"Nq = {cell['nq']}",
        cell["dtype"] + (" tf32" if cell["precision"] == "tf32" else ""),
        "causal" if cell["causal"] else "",
        "" if cell["direction"] == "fwd" else cell["direction"],
        cell["device"],
    )
    return ", ".join(filter(None, parts))


def points(cells: Sequence[Record], measure: str) -> list[tuple[int, float, bool]]:
    """The points (N, value, ok) of one stage's cells in a plot of `measure`, by N.

    Left out: interpreted times, times of wrong stages, and 0, since the axis is logarithmic.
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


def by_stage(group: Sequence[Record], measure: str) -> dict[Stage, list[tuple[int, float, bool]]]:
    """The `points` of each stage of a group."""
    return {
        stage: points([cell for cell in group if stage_of(cell) == stage], measure)
        for stage in stages_of(group)
    }


def plot(env: Record, cells: Sequence[Record], folder: Path) -> list[Path]:
    """Write time.png, memory.png and error.png into `folder`, and return those written.

    A measure without any point is not drawn. Raises ImportError where matplotlib is missing.
    """
    found = [measure for measure in MEASURES if any_point(cells, measure)]
    return [plot_measure(env, cells, measure, folder) for measure in found]


def plot_measure(
    env: Record, cells: Sequence[Record], measure: str, folder: Path, look: Look = LIGHT
) -> Path:
    """Write one of MEASURES against N into `folder`, one panel per family of problems."""
    groups = [group for group in families(cells) if any_point(group, measure)]
    path = folder / f"{measure}{look.suffix}.png"
    style = marks(stages_of(cells))
    with picture(path, look, len(groups), 3, 4.3, 3.9, sharey="row") as (figure, axes):
        for axis, group in zip(axes, groups, strict=True):
            draw_lines(axis, by_stage(group, measure), labels(env), style, look)
            axis.set_yscale("log")
            axis.set_title(family_title(group[0]), fontsize=9)
            n_axis(axis, [cell["nk"] for cell in group], "N (keys)")
            note_below(axis, notes(group, measure))
        for axis in axes[::3]:
            axis.set_ylabel(axis_title(cells, measure))
        legend(figure, axes)
    return path


def in_words(env: Record, cells: Sequence[Record], measure: str) -> str:
    """The plot in words, as alternative text: both ends of every line, panel by panel."""
    names = labels(env)
    said = []
    for group in (each for each in families(cells) if any_point(each, measure)):
        lines = []
        for stage, found in by_stage(group, measure).items():
            if found:
                ends = [f"{value:.2g} at N = {n}" for n, value, _ in (found[0], found[-1])]
                lines.append(f"{names[stage]}, {' to '.join(dict.fromkeys(ends))}")
                if wrong := [n for n, _, ok in found if not ok]:
                    lines[-1] += f", wrong by design from N = {wrong[0]}"
        said.append(f"{family_title(group[0])}: {'; '.join(lines)}")
    return f"Plot of the {axis_title(cells, measure)} against N. {'. '.join(said)}."


def axis_title(cells: Sequence[Record], measure: str) -> str:
    """The title of the vertical axis, with the direction where all cells have the same."""
    directions = {cell["direction"] for cell in cells}
    usual = MEASURES[measure][1]
    return TITLES.get((measure, directions.pop()), usual) if len(directions) == 1 else usual


def any_point(group: Sequence[Record], measure: str) -> bool:
    return bool(points(group, measure))


def notes(group: Sequence[Record], measure: str) -> list[str]:
    """Notes on a panel: what it leaves out, and how to read it."""
    said = {
        "interpreted stages: no speed, not shown": measure == "time"
        and any(cell["mode"] == "interpreted" for cell in group),
        "hollow: wrong by design": not all(ok for _, _, ok in points(group, measure)),
        "resident set: below 1 MB it tells little": measure == "memory"
        and any(cell["memory_meter"] == "process-rss" for cell in group),
    }
    return [note for note, so in said.items() if so]
