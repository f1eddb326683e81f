"""Roofline plots, made from records alone: a run's cells and the ceilings of its machine.

One panel per dtype and precision. A point is one stage on one problem: its x is the arithmetic
intensity, counted flops over counted hbm_bytes (harness/problems/cost.py), its y flops over time.
The slanted roof is the copy bandwidth times the intensity, the flat one the matrix rate. The bytes
of a point above the slanted roof stayed in a cache. (Williams, Waterman and Patterson 2009.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import atan2, degrees
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.problems.cost import intensity
from harness.records.schema import Record
from harness.records.units import show_rate, significant
from harness.views.groups import Stage, families, labels, stage_of, title, titles
from harness.views.look import DARK, DASHES, LIGHT, Look, halo, legend, marks, note_below, picture
from harness.views.ratios import UNITS, tflops
from harness.views.table import Column, Table

STAGE_THREADS = {"cpu": 1, "cuda": None}  # a CPU stage is timed with one (measures/timing.py)
NO_ROOF = "no matrix rate for {} among the ceilings: the bandwidth roof alone"
NO_SLOPE = "no copy among the ceilings: the matrix roof alone"
ABOVE = "above 100%: bytes counted as memory's stayed in a cache"


@dataclass(frozen=True)
class Roof:
    """The roof of one dtype and precision: TFLOP/s of a matrix product, TB/s of a copy."""

    matrix: float | None
    bandwidth: float | None

    def at(self, x: float) -> float | None:
        """The bound in TFLOP/s at intensity `x`, FLOP/byte: min(matrix, bandwidth x), or None."""
        bounds = [self.matrix, self.bandwidth and self.bandwidth * x]
        return min((bound for bound in bounds if bound is not None), default=None)

    @property
    def ridge(self) -> float | None:
        """The intensity, FLOP/byte, where the two roofs meet; kernels below it are memory-bound."""
        return self.matrix / self.bandwidth if self.matrix and self.bandwidth else None

    def missing(self, kind: str) -> list[str]:
        """Say which part of the roof of `kind` the ceilings lack."""
        said = [] if self.matrix is not None else [NO_ROOF.format(kind)]
        return said + ([] if self.bandwidth is not None else [NO_SLOPE])


@dataclass(frozen=True)
class Point:
    """A cell on the roofline: x in FLOP/byte, y in TFLOP/s."""

    cell: Record
    x: float
    y: float

    @property
    def stage(self) -> Stage:
        return stage_of(self.cell)


@dataclass(frozen=True)
class Panel:
    """One dtype and precision: its roof, and its points, grouped by problems that differ in N."""

    kind: str
    device: str
    roof: Roof
    groups: list[list[Point]]

    @property
    def points(self) -> list[Point]:
        return [point for group in self.groups for point in group]


def place(cell: Record) -> Point | None:
    """The point of a cell that is ok, timed alone, not interpreted, and a forward pass; or None.

    A CPU stage in a run on a GPU has no point: the ceilings are the GPU's.
    """
    if cell["status"] != "ok" or cell["mode"] == "interpreted" or cell["paired"]:
        return None
    if not cell["time_ms"] or not cell["flops"] or cell["direction"] != "fwd":
        return None
    if cell["device"] == "cuda" and cell["memory_meter"] == "process-rss":
        return None
    return Point(cell, intensity(cell["flops"], cell["hbm_bytes"]), tflops(cell) or 0.0)


def kind_of(cell: Record) -> str:
    """The dtype, and the precision of its products: 'float32 ieee', 'float16'."""
    same = cell["precision"] == cell["dtype"]
    return str(cell["dtype"]) if same else f"{cell['dtype']} {cell['precision']}"


def roof_of(cell: Record, ceilings: Sequence[Record]) -> Roof:
    """The roof of a cell's dtype, precision, device and threads among the ceilings."""
    device = cell["device"]
    own = [c for c in ceilings if (c["device"], c["threads"]) == (device, STAGE_THREADS[device])]
    kind = ("matmul", cell["dtype"], cell["precision"])
    matrix = [c["value"] for c in own if (c["what"], c["dtype"], c["precision"]) == kind]
    copy = [c["value"] for c in own if c["what"] == "copy"]
    return Roof(max(matrix, default=None), max(copy, default=None))


def panels(cells: Sequence[Record], ceilings: Sequence[Record]) -> list[Panel]:
    """The panels of a run, in the order of the cells; points by stage, then by N."""
    found: dict[str, list[list[Point]]] = {}
    for family in families(cells):
        group = [point for cell in family if (point := place(cell)) is not None]
        if group:
            group.sort(key=lambda point: (point.stage, point.cell["nk"], point.cell["nq"]))
            found.setdefault(kind_of(family[0]), []).append(group)
    return [
        Panel(kind, groups[0][0].cell["device"], roof_of(groups[0][0].cell, ceilings), groups)
        for kind, groups in found.items()
    ]


def share(point: Point, roof: Roof) -> float | None:
    """The point's share of its roof, such as 0.5; None where a part of the roof is unknown."""
    bound = roof.at(point.x)
    return point.y / bound if bound and roof.ridge else None


def show(env: Record, found: Sequence[Panel], console: Console) -> None:
    """Print the points as text: one table per group, and the roof below those of a panel."""
    for panel in found:
        roof = panel.roof
        parts = [show_rate(roof.matrix, "TFLOP/s")] if roof.matrix is not None else []
        parts += [show_rate(roof.bandwidth, "TB/s")] if roof.bandwidth is not None else []
        parts += [f"they meet at {significant(roof.ridge)} FLOP/byte"] if roof.ridge else []
        lines = [f"roof of {panel.kind}: {', '.join(parts)}"] if parts else []
        lines += roof.missing(panel.kind)
        if any((share(point, roof) or 0) > 1 for point in panel.points):
            lines.append(ABOVE)
        for group in panel.groups:
            console.print(table_of(env, group, roof, lines if group is panel.groups[-1] else ()))
        console.print()


def table_of(env: Record, group: Sequence[Point], roof: Roof, notes: Sequence[str]) -> Table:
    """A table of the points of one group, one row each."""
    headers = ("#", "stage", "N", "FLOP/byte", "rate", "% of the roof", "roof")
    names, rows = titles(env), []
    for point in group:
        who = [str(point.cell["stage"]), names[point.stage], str(point.cell["nk"])]
        rate = [significant(point.x), show_rate(point.y, "TFLOP/s"), show_share(share(point, roof))]
        lower = "-" if roof.ridge is None else "memory" if point.x < roof.ridge else "matrix"
        rows.append([*who, *rate, lower])
    columns = [Column(header, left=header in ("stage", "roof")) for header in headers]
    return Table(columns, rows, title([point.cell for point in group], any_n=True), notes, gap=2)


def show_share(part: float | None) -> str:
    """A share in per cent, two digits and at least a whole one: 71%, 0.53%."""
    return "-" if part is None else f"{significant(100 * part, 2 if part < 1 else 3)}%"


def draw(env: Record, found: Sequence[Panel], folder: Path, dark: bool = False) -> Path:
    """Write roofline.png into `folder`, or roofline-dark.png where it is to be `dark`.

    One colour and marker per stage, one dash per family of problems, N beside the points. Raises
    ImportError where matplotlib is missing.
    """
    look = DARK if dark else LIGHT
    names = labels(env)
    style = marks(point.stage for panel in found for point in panel.points)
    path = folder / f"roofline{look.suffix}.png"
    with picture(path, look, len(found), 2, 5.4, 4.6) as (figure, axes):
        for axis, panel in zip(axes, found, strict=True):
            frame(axis, panel, look)
        for stage, mark in style.items():
            axes[0].plot([], [], color=mark.colour, marker=mark.marker, label=names[stage])
        legend(figure, axes[:1])
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # the code below needs final positions
        for axis, panel in zip(axes, found, strict=True):
            draw_roof(axis, panel, look)
            scale = UNITS[panel.device][1]
            for dash, group in enumerate(panel.groups):
                for stage, mark in style.items():
                    own = [(point.x, scale * point.y) for point in group if point.stage == stage]
                    line = mark.line | {"linestyle": DASHES[dash % len(DASHES)]}
                    axis.plot(*zip(*own), markersize=6, linewidth=1.4, **line)
            draw_names(axis, panel, look)
    return path


def frame(axis: Any, panel: Panel, look: Look) -> None:
    """Set scales, title, labels with units, a note on missing roofs, a legend of the dashes."""
    from matplotlib.lines import Line2D

    (unit, scale), roof = UNITS[panel.device], panel.roof
    xs, ys = ([getattr(point, way) for point in panel.points] for way in "xy")
    axis.set(
        xscale="log", yscale="log",
        # room for the points, the ridge and text; a slanted roof without a flat one may run out
        xlim=(min(*xs, roof.ridge or xs[0]) / 4, max(*xs, roof.ridge or 0) * 3),
        ylim=(scale * min(ys) / 3, scale * max(*ys, roof.matrix or 0) * 3),
        xlabel="arithmetic intensity (FLOP per HBM byte, counted)", ylabel=f"achieved ({unit})",
    )  # fmt: skip
    axis.grid(True, which="major")
    shared, apart = differences(
        [title([point.cell for point in group], any_n=True) for group in panel.groups]
    )
    axis.set_title(f"{shared}; N at the points", fontsize=9)
    if len(panel.groups) > 1:
        handles = [
            Line2D([], [], color=look.ink, linestyle=DASHES[dash % len(DASHES)], label=label)
            for dash, label in enumerate(apart)
        ]
        axis.legend(handles=handles, loc="lower right", fontsize=7, frameon=False, handlelength=3)
    note_below(axis, roof.missing(panel.kind))


def draw_roof(axis: Any, panel: Panel, look: Look) -> None:
    """Draw the known roofs up to where they meet, each with its value."""
    roof, scale = panel.roof, UNITS[panel.device][1]
    low, high = axis.get_xlim()
    (x0, y0), (x1, y1) = axis.transData.transform([(1.0, 1.0), (10.0, 10.0)])
    slant = degrees(atan2(y1 - y0, x1 - x0))  # of y = c x on logarithmic scales
    line: dict[str, Any] = {"color": look.ink, "linewidth": 2.2, "solid_capstyle": "round"}
    words: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8, "va": "bottom"}
    if roof.bandwidth is not None:
        rate, ends = scale * roof.bandwidth, [low, roof.ridge or high]
        axis.plot(ends, [rate * x for x in ends], **line)
        # the text runs along the slope, above it, near the left edge
        left = max(low, axis.get_ylim()[0] / rate) * 1.3
        text = f"copy {show_rate(roof.bandwidth, 'TB/s')}"
        axis.annotate(text, (left, rate * left), xytext=(-2, 5), rotation=slant,
                      rotation_mode="anchor", **words)  # fmt: skip
    if roof.matrix is not None:
        axis.plot([roof.ridge or low, high], [scale * roof.matrix] * 2, **line)
        text = f"{panel.kind} products {show_rate(roof.matrix, 'TFLOP/s')}"
        axis.annotate(text, (high, scale * roof.matrix), xytext=(-4, 4), ha="right", **words)


def draw_names(axis: Any, panel: Panel, look: Look) -> None:
    """Write N below and right of each point, the ends of each line first.

    A text that would cover another, a marker or a line is left out.
    """
    from matplotlib.transforms import Bbox

    scale = UNITS[panel.device][1]
    pixel = axis.figure.dpi / 72  # a point of type
    points = by_weight(panel)
    where = axis.transData.transform([(point.x, scale * point.y) for point in points])
    taken = [Bbox.from_bounds(x, y, 0, 0).padded(4 * pixel) for x, y in where]
    lines = [axis.transData.transform_path(line.get_path()) for line in axis.get_lines()]
    for point, (x, y) in zip(points, where, strict=True):
        text = str(point.cell["nk"])
        box = Bbox.from_bounds(x + 4 * pixel, y - 11 * pixel, 4.6 * len(text) * pixel, 7 * pixel)
        if box.count_overlaps(taken) or any(x.intersects_bbox(box, filled=False) for x in lines):
            continue
        taken.append(box)
        axis.annotate(
            text, (point.x, scale * point.y), xytext=(4, -4), textcoords="offset points",
            fontsize=7, va="top", path_effects=halo(look),
        )  # fmt: skip


def by_weight(panel: Panel) -> list[Point]:
    """The points of a panel: first and last of each stage's line, then those between."""
    lines = [list(line) for group in panel.groups for _, line in groupby(group, lambda x: x.stage)]
    ends = [point for line in lines for point in line[:1] + line[1:][-1:]]
    return ends + [point for line in lines for point in line[1:-1]]


def differences(labels: Sequence[str]) -> tuple[str, list[str]]:
    """Split comma-separated titles into the parts that all share, and the rest of each."""
    parts = [label.split(", ") for label in labels]
    shared = [part for part in parts[0] if all(part in other for other in parts)]
    apart = [", ".join(part for part in own if part not in shared) for own in parts]
    return ", ".join(shared), apart
