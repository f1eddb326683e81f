"""The pictures of docs/log/hopper.md that show a kernel from within: its waits, its timeline."""

from collections.abc import Sequence
from pathlib import Path

from harness.records.schema import Record
from harness.views.groups import labels, stage_of, stages_of, title, titles
from harness.views.look import LIGHT, Look, marks, picture

# the profiler's name -> ours
WAITS = {
    "long_scoreboard": "global memory", "not_selected": "its turn", "wait": "its last instruction",
    "barrier": "the other warps", "short_scoreboard": "shared memory, exponentials",
}  # fmt: skip
# part of a consumer's work (tools/timeline.py) -> its colour in a look, and hatching
DOING = {"products": ("ground", "//"), "softmax": ("blue", "")}
UNITS = {"tensor_op_hmma_cycles_active": "matrix units", "xu": "exponentials", "alu": "integers"}


def plot_profile(env: Record, records: Sequence[Record], path: Path, look: Look = LIGHT) -> None:
    """Plot what the warps of each kernel wait for, and how busy the units are: two panels."""
    style, room = marks(stages_of(records)), 0.8 / len(records)
    panels = ("waits", WAITS, "% of a warp's time"), ("units", UNITS, "% of a unit's peak")
    with picture(path, look, 2, 2, 4.8, 3.0) as (figure, axes):
        for axis, (what, names, label) in zip(axes, panels, strict=True):
            for place, record in enumerate(records):
                shares = [100 * record[what].get(name, 0) for name in names]
                heights = [
                    row + room * (place - (len(records) - 1) / 2) for row in range(len(names))
                ]
                stage = stage_of(record)
                bars = axis.barh(
                    heights, shares, 0.9 * room, color=style[stage].colour,
                    label=labels(env)[stage],
                )  # fmt: skip
                axis.bar_label(bars, fmt="%.0f%%", padding=2, fontsize=8)
            axis.set_yticks(range(len(names)), list(names.values()), fontsize=8)
            axis.invert_yaxis()
            axis.set_xlabel(label, fontsize=9)
            axis.margins(x=0.15)
        figure.suptitle(title(records[:1]), fontsize=8)
        figure.legend(
            *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9
        )


def plot_timeline(env: Record, records: Sequence[Record], path: Path, look: Look = LIGHT) -> None:
    """Plot what the consumers of one CTA do over some KV tiles, one panel per kernel, one scale."""
    longest = max(record["shown_cycles"] for record in records) / 1000
    with picture(path, look, len(records), 1, 8.0, 1.6, sharex=True) as (figure, axes):
        from matplotlib.patches import Patch

        drawn = {
            part: {"facecolor": getattr(look, colour), "hatch": hatch, "edgecolor": look.ink}
            for part, (colour, hatch) in DOING.items()
        }
        for axis, record in zip(axes, records, strict=True):
            rows = sorted({span["consumer"] for span in record["spans"]})
            for span in record["spans"]:
                start, end = span["start"] / 1000, span["end"] / 1000
                axis.barh(
                    rows.index(span["consumer"]), end - start, left=start, linewidth=0.6,
                    **drawn[span["part"]],
                )  # fmt: skip
            axis.set_yticks(range(len(rows)), [f"consumer {row}" for row in rows], fontsize=8)
            axis.invert_yaxis()
            axis.set_title(titles(env)[stage_of(record)], fontsize=9, loc="left")
        axes[0].set_xlim(0, longest)
        axes[-1].set_xlabel("thousand cycles", fontsize=9)
        handles = [Patch(**style, label=part) for part, style in drawn.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=9)
