"""The picture of the memory hierarchy: speed and size of each level, what attention keeps there.

Solid bars were measured by `ladder ceilings` on the machine of the record. Hatched bars are cited,
typical figures of other machines, for the levels that were not measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from course.lessons import cited
from harness.views.look import Look, in_look, new_figure

Record = Mapping[str, Any]

TB, GB = 1e12, 1e9
LEFT, RIGHT = 5 * GB, 1000 * TB  # least ends of the axis, with room for text at the right
STEP, GAP = 0.44, 0.4  # between bars, and added between levels


@dataclass(frozen=True)
class Bar:
    """A bandwidth, from `low` to `high` bytes per second, and the text beside it."""

    low: float
    high: float
    said: str
    measured: bool


@dataclass(frozen=True)
class Level:
    """A level of the hierarchy: its bars from the top down, and what attention keeps there."""

    name: str
    size: str
    lives: str
    bars: Sequence[Bar]


def hatched(figure: str, unit: str, said: str) -> Bar:
    """A bar that this project has not measured; its figure replaces the {} in `said`."""
    low, high = (end * (TB if unit == "TB/s" else GB) for end in cited.ends(figure))
    return Bar(low, high, said.format(f"{figure} {unit}"), measured=False)


SRAM = Level(
    cited.SRAM.name,
    f"{cited.SRAM.size} (A100), {cited.SRAM.cycles} cycles",
    "lives here: q, a tile of k and v, s, p, m_i, l_i, acc",
    [hatched(cited.SRAM.rate, "TB/s", "{}: A100")],
)
HBM_CITED = hatched(cited.HBM.rate, "TB/s", f"{{}}: A100, {cited.HBM.size}")
NVLINK_SAID = "{} in generations 2 to 4 (source 002, corrected)"
NVLINK = [hatched(cited.NVLINK_EACH, "GB/s", NVLINK_SAID)]
PCIE_SAID = {5: "generation 5: {} achieved", 4: "generation 4: {}", 3: "generation 3: {}"}
PCIE = [hatched(cited.PCIE[which].achieved, "GB/s", said) for which, said in PCIE_SAID.items()]
LINKS = (
    Level("NVLink, one link, each way", "to another GPU", "", NVLINK),
    Level("PCIe x16, each way", "to the host", "", PCIE),
)


def levels(ceilings: Sequence[Record]) -> list[Level]:
    """The levels from the fastest down, with their measured bars.

    `ceilings` are one machine's records (harness/records/schema.py: Ceiling); a copy on a GPU is
    HBM's, one on a CPU is main memory's. Raises ValueError where no copy is among them.
    """
    copies = [record for record in ceilings if record["what"] == "copy"]
    if not copies:
        raise ValueError("no copy among the ceilings: nothing measured to show")
    bars = [Bar(r["value"] * TB, r["value"] * TB, said(r), measured=True) for r in copies]
    on_gpu = copies[0]["device"] == "cuda"
    hbm = Level(
        cited.HBM.name,
        f"tens of GB, {cited.HBM.cycles} cycles",
        "lives here: q, k, v, o; in stage 3 S and P, too",
        [*bars, HBM_CITED] if on_gpu else [HBM_CITED],
    )
    host = Level("main memory (CPU)", "", "a CPU's stages keep all here, but what is cached", bars)
    return [SRAM, hbm, *([] if on_gpu else [host]), *LINKS]


def said(copy: Record) -> str:
    """The text beside a measured copy."""
    threads = copy["threads"]
    by = "" if threads is None else f", {threads} thread{'s' if threads > 1 else ''}"
    return f"{rate(copy['value'] * TB)} measured: a copy, read and written{by}"


def rate(value: float) -> str:
    """Bytes per second, three digits: 4.26 TB/s, 12.3 GB/s."""
    return f"{value / TB:.3g} TB/s" if value >= TB else f"{value / GB:.3g} GB/s"


def notes(env: Record, ceilings: Sequence[Record]) -> str:
    """Notes: the origin of the bars, and the FLOPs of the fastest product per byte copied."""
    lines = [
        f"Solid: measured on {env['device_name'] or env['cpu']}, torch {env['torch']}, "
        f"{env['date'][:10]}. Hatched: cited, sources 002 and 004."
    ]
    products = [record for record in ceilings if record["what"] == "matmul"]
    if products:
        best = max(products, key=lambda record: record["value"])
        copied = max(record["value"] for record in ceilings if record["what"] == "copy")
        lines.append(
            f"Matrix products reach {best['value']:.3g} TFLOP/s in {best['dtype']}: "
            f"{best['value'] / copied:.0f} FLOPs in the time of one byte copied. What does fewer "
            "a byte waits for memory."
        )
    return "\n".join(lines)


def figure(env: Record, ceilings: Sequence[Record], look: Look) -> Any:
    """Draw one row per level, the fastest at the top; bandwidth on a logarithmic x axis."""
    shown = levels(ceilings)
    with in_look(look):
        picture = new_figure(10.4, 1.6 + 0.95 * len(shown))
        axis = picture.subplots()
        left = min([LEFT, *(bar.low / 2 for level in shown for bar in level.bars)])
        top = 0.0
        for level in shown:
            rows = max(2, len(level.bars))  # the text beside a single bar needs the room of two
            first = top + STEP * (rows - len(level.bars)) / 2
            for index, bar in enumerate(level.bars):
                draw(axis, bar, first + STEP * index, left, look)
            name(axis, level, top + STEP * (rows - 1) / 2, look)
            top += STEP * rows + GAP
        axis.set_xscale("log")
        axis.set_xlim(left, RIGHT)
        axis.set_ylim(top - GAP, -STEP)
        axis.set_yticks([])
        marks = [x for x in (GB, 10 * GB, 100 * GB, TB, 10 * TB) if x >= left]
        axis.set_xticks(marks, [rate(mark) for mark in marks])
        axis.set_xticks([], minor=True)
        axis.grid(True, axis="x")
        axis.set_xlabel("bandwidth, logarithmic scale")
        picture.supxlabel(notes(env, ceilings), fontsize=8.5, color=look.soft)
    return picture


def draw(axis: Any, bar: Bar, y: float, left: float, look: Look) -> None:
    """Draw a bar from `left` to its low end, empty from there to its high end, and its text."""
    style: dict[str, Any] = {"height": 0.82 * STEP, "facecolor": look.blue, "edgecolor": look.ink}
    if bar.measured:
        axis.barh(y, bar.low - left, left=left, **style)
    else:
        style |= {"facecolor": look.ground, "edgecolor": look.orange}
        axis.barh(y, bar.low - left, left=left, hatch="////", **style)
        axis.barh(y, bar.high - bar.low, left=bar.low, **style)
    weight = "bold" if bar.measured else "normal"
    axis.annotate(
        bar.said, (bar.high, y), xytext=(5, 0), textcoords="offset points", va="center",
        fontsize=8.5, fontweight=weight,
    )  # fmt: skip


def name(axis: Any, level: Level, y: float, look: Look) -> None:
    """Write the name of a level at the left, with size and latency in grey below."""
    lines = [line for line in (level.size, level.lives) if line]
    up = 5 * len(lines)
    where: dict[str, Any] = {
        "xy": (0, y), "xycoords": ("axes fraction", "data"), "textcoords": "offset points",
        "ha": "right",
    }  # fmt: skip
    axis.annotate(level.name, xytext=(-8, up), va="center", fontweight="bold", **where)
    below = "\n".join(lines)
    axis.annotate(below, xytext=(-8, up - 7), va="top", fontsize=8, color=look.soft, **where)
