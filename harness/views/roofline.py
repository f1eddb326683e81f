"""Roofline plots, made from records alone: a run's cells and the ceilings of its machine.

One panel per family of problems. A point is one stage on one problem: its x is the arithmetic
intensity, counted flops over counted hbm_bytes (harness/problems/cost.py), its y flops over time.
The slanted roof is the copy bandwidth times the intensity, a flat one the matrix rate. The bytes
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
from harness.views.groups import Stage, families, labels, sizes, stage_of, title, titles
from harness.views.look import (
    DARK,
    DASHES,
    HOLLOW,
    LIGHT,
    Look,
    draw_lines,
    halo,
    legend,
    marks,
    note_below,
    picture,
)  # fmt: skip
from harness.views.ratios import UNITS, tflops
from harness.views.table import Column, Table

STAGE_THREADS = {"cpu": 1, "cuda": None}  # a CPU stage is timed with one (measures/timing.py)
NO_ROOF = "no matrix rate for {} among the ceilings: the bandwidth roof alone"
NO_SLOPE = "no copy among the ceilings: the matrix roof alone"
BY_DESIGN = "wrong-by-design"  # the status of stage 4 where N is more than a tile
ABOVE = "above 100%: bytes counted as memory's stayed in a cache"
# products that stand for one of float32 -> their dtype and precision, and how many they are
SPLIT = {"bf16x6": ("bfloat16", "bfloat16", 6), "tf32x3": ("float32", "tf32", 3)}
ASIDE = 19.0  # points of type between two stages of one intensity, which are drawn side by side


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
    """Problems that differ in N alone: their roofs, by kind of products, and their points."""

    device: str
    roofs: dict[str, Roof]
    points: list[Point]

    @property
    def cells(self) -> list[Record]:
        return [point.cell for point in self.points]

    @property
    def one_size(self) -> bool:
        """Whether all have the same N, so that fused kernels have the same intensity."""
        return len(sizes(self.cells)) == 1

    def roof(self, point: Point) -> Roof:
        return self.roofs[kind_of(point.cell)]

    @property
    def top(self) -> Roof:
        """The highest of the roofs."""
        return max(self.roofs.values(), key=lambda roof: roof.matrix or 0)


def place(cell: Record) -> Point | None:
    """The point of a cell that was timed alone, not interpreted, in a forward pass; or None.

    It is ok, or wrong by design. A CPU stage in a run on a GPU has no point: the ceilings are the
    GPU's.
    """
    right = cell["status"] in ("ok", BY_DESIGN)
    if not right or cell["mode"] == "interpreted" or cell["paired"]:
        return None
    if not cell["time_ms"] or not cell["flops"] or cell["direction"] != "fwd":
        return None
    if cell["device"] == "cuda" and cell["memory_meter"] == "process-rss":
        return None
    return Point(cell, intensity(cell["flops"], cell["hbm_bytes"]), tflops(cell) or 0.0)


def kind_of(cell: Record) -> str:
    """The dtype, and how its products are made: 'float32 ieee', 'float32 bf16x6', 'float16'."""
    made = cell.get("products")
    how = made if made in SPLIT else cell["precision"]
    return str(cell["dtype"]) if how == cell["dtype"] else f"{cell['dtype']} {how}"


def roof_of(cell: Record, ceilings: Sequence[Record]) -> Roof:
    """The roof of a cell's products, device and threads among the ceilings."""
    device = cell["device"]
    own = [c for c in ceilings if (c["device"], c["threads"]) == (device, STAGE_THREADS[device])]
    usual = cell["dtype"], cell["precision"], 1
    dtype, precision, parts = SPLIT.get(str(cell.get("products")), usual)
    kind = ("matmul", dtype, precision)
    matrix = [c["value"] / parts for c in own if (c["what"], c["dtype"], c["precision"]) == kind]
    copy = [c["value"] for c in own if c["what"] == "copy"]
    return Roof(max(matrix, default=None), max(copy, default=None))


def panels(cells: Sequence[Record], ceilings: Sequence[Record]) -> list[Panel]:
    """The panels of a run, in the order of the cells; points by stage, then by N."""
    found = []
    for family in families(cells):
        points = [point for cell in family if (point := place(cell)) is not None]
        if points:
            points.sort(key=lambda point: (point.stage, point.cell["nk"], point.cell["nq"]))
            roofs = {kind_of(point.cell): roof_of(point.cell, ceilings) for point in points}
            found.append(Panel(family[0]["device"], roofs, points))
    return found


def share(point: Point, roof: Roof) -> float | None:
    """The point's share of its roof, such as 0.5; None where a part of the roof is unknown."""
    bound = roof.at(point.x)
    return point.y / bound if bound and roof.ridge else None


def show(env: Record, found: Sequence[Panel], console: Console) -> None:
    """Print the points as text: one table per panel, and its roofs below."""
    for panel in found:
        lines = []
        for kind, roof in panel.roofs.items():
            parts = [show_rate(roof.matrix, "TFLOP/s")] if roof.matrix is not None else []
            parts += [show_rate(roof.bandwidth, "TB/s")] if roof.bandwidth is not None else []
            parts += [f"they meet at {significant(roof.ridge)} FLOP/byte"] if roof.ridge else []
            lines += [f"roof of {kind}: {', '.join(parts)}"] if parts else []
            lines += roof.missing(kind)
        if any((share(point, panel.roof(point)) or 0) > 1 for point in panel.points):
            lines.append(ABOVE)
        console.print(table_of(env, panel, lines))
        console.print()


def table_of(env: Record, panel: Panel, notes: Sequence[str]) -> Table:
    """A table of the points of one panel, one row each."""
    headers = ("#", "stage", "N", "FLOP/byte", "rate", "% of the roof", "roof")
    names, rows = titles(env), []
    for point in panel.points:
        roof, wrong = panel.roof(point), point.cell["status"] == BY_DESIGN
        name = names[point.stage] + f" ({BY_DESIGN})" * wrong
        who = [str(point.cell["stage"]), name, str(point.cell["nk"])]
        rate = [significant(point.x), show_rate(point.y, "TFLOP/s"), show_share(share(point, roof))]
        lower = "-" if roof.ridge is None else "memory" if point.x < roof.ridge else "matrix"
        rows.append([*who, *rate, lower])
    columns = [Column(header, left=header in ("stage", "roof")) for header in headers]
    return Table(columns, rows, title(panel.cells, any_n=True), notes, gap=2)


def show_share(part: float | None) -> str:
    """A share in per cent, two digits and at least a whole one: 71%, 0.53%."""
    return "-" if part is None else f"{significant(100 * part, 2 if part < 1 else 3)}%"


def draw(env: Record, found: Sequence[Panel], folder: Path, dark: bool = False) -> Path:
    """Write roofline.png into `folder`, or roofline-dark.png where it is to be `dark`.

    One colour and marker per stage. Where a panel has several N, they are at the points; where it
    has one, the stages' numbers. Raises ImportError where matplotlib is missing.
    """
    look = DARK if dark else LIGHT
    style = marks(point.stage for panel in found for point in panel.points)
    path = folder / f"roofline{look.suffix}.png"
    with picture(path, look, len(found), 2 if len(found) > 2 else 1, 5.2, 4.0) as (figure, axes):
        for axis, panel in zip(axes, found, strict=True):
            frame(axis, panel)
            draw_lines(axis, by_stage(panel), labels(env), style, look, aside(panel))
        legend(figure, axes)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # the code below needs final positions
        for axis, panel in zip(axes, found, strict=True):
            draw_roofs(axis, panel, look)
            draw_numbers(axis, panel, look) if panel.one_size else draw_names(axis, panel, look)
    return path


def by_stage(panel: Panel) -> dict[Stage, list[tuple[float, float, bool]]]:
    """The points of each stage, by number: FLOP/byte, the rate in the device's unit, whether ok."""
    found: dict[Stage, list[tuple[float, float, bool]]] = {}
    for each in panel.points:
        y = UNITS[panel.device][1] * each.y
        found.setdefault(each.stage, []).append((each.x, y, each.cell["status"] == "ok"))
    return found


def side_by_side(panel: Panel) -> list[list[Stage]]:
    """The stages of a panel with one N, those of one intensity together.

    Fused kernels have the same at the same N, and often nearly the same rate.
    """
    found: dict[str, list[Stage]] = {}
    for stage, points in by_stage(panel).items():
        found.setdefault(significant(points[0][0]), []).append(stage)
    return list(found.values()) if panel.one_size else []


def aside(panel: Panel) -> dict[Stage, float]:
    """How far beside its place each stage is drawn, in points of type."""
    return {
        stage: ASIDE * (index - (len(near) - 1) / 2)
        for near in side_by_side(panel)
        for index, stage in enumerate(near)
    }


def frame(axis: Any, panel: Panel) -> None:
    """Set scales, title, labels with units, notes on missing roofs and hollow marks."""
    (unit, scale), roof = UNITS[panel.device], panel.top
    xs, ys = ([getattr(point, way) for point in panel.points] for way in "xy")
    axis.set(
        xscale="log", yscale="log",
        # room for the points, the ridge and text; a slanted roof without a flat one may run out
        xlim=(min(*xs, roof.ridge or xs[0]) / 3, max(*xs, roof.ridge or 0) * 8),
        ylim=(scale * min(ys) / 2, scale * max(*ys, roof.matrix or 0) * 2),
        xlabel="arithmetic intensity (FLOP per HBM byte, counted)", ylabel=f"achieved ({unit})",
    )  # fmt: skip
    axis.grid(True, which="major")
    said = title(panel.cells, any_n=not panel.one_size)
    axis.set_title(said if panel.one_size else f"{said}; N at the points", fontsize=9)
    notes = [note for kind, each in panel.roofs.items() for note in each.missing(kind)]
    wrong = any(cell["status"] == BY_DESIGN for cell in panel.cells)
    note_below(axis, [*dict.fromkeys(notes), *[HOLLOW] * wrong])


def draw_roofs(axis: Any, panel: Panel, look: Look) -> None:
    """Draw the known roofs up to where they meet, each with its value; the first one's solid."""
    roof, scale = panel.top, UNITS[panel.device][1]
    low, high = axis.get_xlim()
    (x0, y0), (x1, y1) = axis.transData.transform([(1.0, 1.0), (10.0, 10.0)])
    slant = degrees(atan2(y1 - y0, x1 - x0))  # of y = c x on logarithmic scales
    line: dict[str, Any] = {"color": look.ink, "linewidth": 2.2, "solid_capstyle": "round"}
    words: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9, "va": "bottom"}
    if roof.bandwidth is not None:
        rate, ends = scale * roof.bandwidth, [low, roof.ridge or high]
        axis.plot(ends, [rate * x for x in ends], **line)
        # the text runs along the slope, above it, near the left edge
        left = max(low, axis.get_ylim()[0] / rate) * 1.3
        text = f"copy {show_rate(roof.bandwidth, 'TB/s')}"
        axis.annotate(text, (left, rate * left), xytext=(-2, 5), rotation=slant,
                      rotation_mode="anchor", **words)  # fmt: skip
    for dash, (kind, each) in zip(DASHES, panel.roofs.items()):
        if each.matrix is not None:
            ends = [each.ridge or low, high]
            axis.plot(ends, [scale * each.matrix] * 2, linestyle=dash, **line)
            text = f"{kind.split()[-1]} products {show_rate(each.matrix, 'TFLOP/s')}"
            # between a lower roof and the highest one are points: it is named below, at its left
            above = {"xytext": (-4, 4), "ha": "right"}
            below = {"xytext": (4, -4), "ha": "left", "va": "top"}
            end, place = (high, above) if each is roof else (ends[0], below)
            axis.annotate(text, (end, scale * each.matrix), **{**words, **place})


def draw_numbers(axis: Any, panel: Panel, look: Look) -> None:
    """Write each stage's number above its mark, and what those side by side have in common.

    That is their intensity, below them; and, left of the first that has points of several kinds of
    products, which kind each of these is.
    """
    shift, found = aside(panel), by_stage(panel)
    words = {"textcoords": "offset points", "fontsize": 9, "path_effects": halo(look)}
    for stage, points in found.items():
        x, y, _ = max(points, key=lambda point: point[1])
        axis.annotate(str(stage[0]), (x, y), xytext=(shift[stage], 7), ha="center", **words)
    for near in side_by_side(panel):
        x, y, _ = min((point for stage in near for point in found[stage]), key=lambda each: each[1])
        if len(near) > 1:
            said = f"side by side: all have {x:.4g} FLOP/byte"
            axis.annotate(said, (x, y), xytext=(0, -10), ha="center", va="top", **words)
        for stage in near:
            kinds = [kind_of(p.cell).split()[-1] for p in panel.points if p.stage == stage]
            if len(set(kinds)) > 1:
                for kind, (x, y, _) in zip(kinds, found[stage], strict=True):
                    place = {"xytext": (shift[stage] - 7, 0), "ha": "right", "va": "center"}
                    axis.annotate(kind, (x, y), **place, **words)
                break


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
    lines = [list(line) for _, line in groupby(panel.points, lambda point: point.stage)]
    ends = [point for line in lines for point in line[:1] + line[1:][-1:]]
    return ends + [point for line in lines for point in line[1:-1]]
