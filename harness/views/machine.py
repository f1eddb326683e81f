"""Tables and plots of a machine's ceilings, and of the bytes that stages move (`ladder io`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from harness.records.schema import Record
from harness.records.units import show_bytes, show_rate, show_time
from harness.views.groups import Stage, grouped, stage_of, stages_of, title, titles
from harness.views.look import LIGHT, Look, Style, marks, picture
from harness.views.table import Cell, Column, Table

PIECES = {"scale q": "", "GEMM": "//", "softmax": "..", "fused": "xx"}  # part -> hatching


def ceiling_title(record: Record) -> str:
    """A ceiling in one line."""
    if record["what"] == "copy":
        text = f"copy, {show_bytes(record['size'] / 2)}"
    elif record["what"] == "read":
        how = f" ({record['how']})" if record.get("how") else ""
        text = f"read, {show_bytes(record['size'])}{how}"
    else:
        tf32 = " tf32" if record["precision"] == "tf32" else ""
        text = f"{record['dtype']}{tf32} product, {record['size']}^3"
    threads = record["threads"]
    return text if threads is None else f"{text}, {threads} thread{'s' if threads > 1 else ''}"


def ceilings_table(env: Record, records: Sequence[Record]) -> Table:
    """The ceilings of a machine as a small table."""
    rows = []
    for record in records:
        iqr = "-" if record["time_iqr_ms"] is None else f"{record['time_iqr_ms']:.2g} ms"
        rate, time = show_rate(record["value"], record["unit"]), f"{record['time_ms']:.3g} ms"
        rows.append([ceiling_title(record), rate, time, iqr, str(record["samples"])])
    headers = ("rate", "time of a call", "IQR", "samples")
    title = f"{env['device_name']}, torch {env['torch']}"
    return Table([Column("ceiling", left=True), *map(Column, headers)], rows, title, gap=2)


def moved(record: Record) -> int:
    """The bytes that one kernel read from and wrote to DRAM."""
    return int(record["dram_read_bytes"] + record["dram_write_bytes"])


def short(kernel: str) -> str:
    """A kernel's name without namespaces, templates and arguments."""
    plain = kernel.removeprefix("void ").replace("<unnamed>::", "")
    return plain.split("(")[0].split("<")[0].strip().split("::")[-1]


def by_stage(records: Sequence[Record]) -> list[list[Record]]:
    """Group records by (stage, problem), in the order of their first records."""
    fields = ("stage", "name", "b", "h", "nk", "d", "dtype")
    return grouped(records, lambda record: [record[field] for field in fields])


def traffic_table(env: Record, records: Sequence[Record]) -> Table:
    """A table with one row per kernel, and one per stage with the sum and the prediction."""
    rows: list[list[Cell]] = []
    names = titles(env)
    for group in by_stage(records):
        for record in group:
            name = Text(short(record["kernel"]), style="dim")
            rows.append(["", name, *traffic([record]), "", ""])
        first = group[0]
        what = f"{names[stage_of(first)]}, N = {first['nk']}"
        predicted = first["predicted_bytes"]
        said = [show_bytes(predicted), f"{sum(map(moved, group)) / predicted:.2f}"]
        rows.append([str(first["stage"]), Text(what, style="bold"), *traffic(group), *said])
    headers = ("time", "read", "written", "TB/s", "predicted", "moved/pred.")
    kernel = Column("kernel", left=True, most=34)
    return Table([Column("#"), kernel, *map(Column, headers)], rows)


def traffic(kernels: Sequence[Record]) -> list[str]:
    """The sums over kernels: time, bytes read, bytes written, TB/s of both."""
    time = sum(record["time_ms"] for record in kernels)
    read, written = (sum(x[f"dram_{way}_bytes"] for x in kernels) for way in ("read", "write"))
    rate = (read + written) / time / 1e9
    return [show_time(time), show_bytes(read), show_bytes(written), f"{rate:.2f}"]


def piece(kernel: str) -> str:
    """The part of attention that a kernel computes, by its name: one of PIECES."""
    name = short(kernel).lower()
    for word, what in (("elementwise", "scale q"), ("softmax", "softmax"), ("attention", "fused")):
        if word in name:
            return what
    return "GEMM"


def plot_traffic(env: Record, records: Sequence[Record], path: Path, look: Look = LIGHT) -> None:
    """Plot the time of each kernel as bars, one panel per N, in the stages' colours."""
    by_n = [[r for r in records if r["nk"] == n] for n in sorted({r["nk"] for r in records})]
    style = marks(stages_of(records))
    height = 1.1 + 0.45 * max(len(by_stage(each)) for each in by_n)
    with picture(path, look, len(by_n), len(by_n), 4.8, height) as (figure, axes):
        from matplotlib.patches import Patch

        for axis, each in zip(axes, by_n, strict=True):
            draw_kernels(axis, each, titles(env), style, look)
        pieces = {piece(record["kernel"]) for record in records}
        handles = [
            Patch(facecolor=look.ground, edgecolor=look.ink, hatch=hatch, label=what)
            for what, hatch in PIECES.items()
            if what in pieces
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9)


def draw_kernels(
    axis: Any, records: Sequence[Record], names: Mapping[Stage, str], style: Style, look: Look
) -> None:
    """Draw one row of bars per stage, one bar per kernel, with the total time at the end."""
    groups = by_stage(records)
    for height, group in enumerate(groups):
        left = 0.0
        for record in group:
            axis.barh(
                height, record["time_ms"], left=left, edgecolor=look.ink, linewidth=0.8,
                color=style[stage_of(record)].colour, hatch=PIECES[piece(record["kernel"])],
            )  # fmt: skip
            left += record["time_ms"]
        axis.text(left, height, f" {show_time(left)}", va="center", fontsize=8)
    ticks = [f"{group[0]['stage']} {names[stage_of(group[0])]}" for group in groups]
    axis.set_yticks(range(len(groups)), ticks, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("kernels, one after another (ms)", fontsize=9)
    axis.set_title(title(records[:1]), fontsize=8)
    axis.margins(x=0.25)
