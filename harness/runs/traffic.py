"""The bytes that a stage really moves: measured by Nsight Compute, beside those that are predicted.

ncu runs each kernel of one call with the caches emptied before it, and counts the bytes that DRAM
read and wrote while it ran. What a kernel wrote last is still in the L2 cache when it ends, in
nobody's count: up to some tens of MB, which is much of a small output and nothing beside S and P.
(The L2's own count of writes is no help: on an H200 it comes out 1.5 times too large, since what
crosses to the other half of the cache is counted in both.)
"""

import csv
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from harness.isolation.roster import StageInfo
from harness.problems import cost
from harness.problems.problem import Problem
from harness.records import units
from harness.records.units import show_bytes
from harness.views import cell_tables

Record = dict[str, Any]

ROOT = Path(__file__).parents[2]
LIMIT = 300.0  # seconds for one stage under the profiler
METRICS = {  # what is counted, by ncu's name for it, in its base units
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "time_ns": "gpu__time_duration.sum",
}


class NoProfiler(RuntimeError):
    """ncu is missing or refuses; the message says which, in one line."""


def profile(stage: StageInfo, problem: Problem) -> Iterator[Record]:
    """The records, kind 'io', of each kernel that one call of `stage` on `problem` launches.

    Raises NoProfiler where ncu can't count.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise NoProfiler("ncu (Nsight Compute) is not on this machine: traffic can't be measured")
    metrics = ",".join(METRICS.values())
    command = [
        ncu, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none",
        "--profile-from-start", "off", "--metrics", metrics,
        sys.executable, "-m", "harness.runs.traffic_probe", str(stage.path),
        json.dumps(problem.to_json()),
    ]  # fmt: skip
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        raise NoProfiler(f"ncu took more than {LIMIT:g} s on stage {stage.number}") from None
    rows = parse(done.stdout)
    if done.returncode or not rows:
        said = [line for line in done.stdout.splitlines() if line.startswith("==ERROR==")]
        last = (said or done.stderr.splitlines() or ["it counted no kernel"])[-1]
        raise NoProfiler(f"ncu failed on stage {stage.number} ({stage.name}): {last.strip()}")
    fields = problem.to_json()
    for index, counts in enumerate(rows):
        yield {
            "kind": "io",
            "stage": stage.number,
            "name": stage.name,
            **fields,
            "seqlens_k": None,
            "launch": index,
            "kernel": counts["kernel"],
            "time_ms": counts["time_ns"] / 1e6,
            **{name: round(counts[name]) for name in METRICS if name != "time_ns"},
            "predicted_bytes": cost.hbm_bytes(problem, stage.traffic),
        }


def parse(text: str) -> list[dict[str, Any]]:
    """ncu's raw CSV page -> a dict a kernel launch: its name and METRICS, in base units.

    Lines of ncu's own start with '=='; the header's next line holds units.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(io.StringIO("\n".join(lines))))
    found = []
    for line in rows[1:]:
        counts: dict[str, Any] = {"kernel": line["Kernel Name"]}
        for name, metric in METRICS.items():
            if metric not in line:
                raise NoProfiler(f"ncu counts no {metric} on this GPU")
            counts[name] = float(line[metric].replace(",", ""))
        found.append(counts)
    return found


def moved(record: Mapping[str, Any]) -> int:
    """Bytes that DRAM read and wrote for one kernel."""
    return int(record["dram_read_bytes"] + record["dram_write_bytes"])


def short(kernel: str) -> str:
    """A kernel's name for people: no namespaces, templates or arguments."""
    plain = kernel.removeprefix("void ").replace("<unnamed>::", "")
    return plain.split("(")[0].split("<")[0].strip().split("::")[-1]


def by_stage(records: Sequence[Record]) -> list[list[Record]]:
    """The records of each (stage, problem), in the order of their first coming."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        identity = [record["stage"], record["name"], record["b"], record["h"], record["nk"]]
        groups.setdefault(json.dumps([*identity, record["d"], record["dtype"]]), []).append(record)
    return list(groups.values())


def show_table(records: Sequence[Record], titles: Mapping[tuple[int, str], str]) -> Table:
    """A row a kernel, then a row a stage with its sum beside the prediction."""
    shown = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="underline")
    for header in ("#", "kernel", "time", "read", "written", "TB/s", "predicted", "moved/pred."):
        shown.add_column(header, justify="left" if header == "kernel" else "right", no_wrap=True,
                         max_width=34 if header == "kernel" else None)  # fmt: skip
    for group in by_stage(records):
        for record in group:
            rate = moved(record) / record["time_ms"] / 1e9
            shown.add_row(
                "", Text(short(record["kernel"]), style="dim"),
                units.show_time(record["time_ms"]), show_bytes(record["dram_read_bytes"]),
                show_bytes(record["dram_write_bytes"]), f"{rate:.2f}",
            )  # fmt: skip
        first = group[0]
        total, milliseconds = sum(map(moved, group)), sum(r["time_ms"] for r in group)
        predicted = first["predicted_bytes"]
        reads = sum(record["dram_read_bytes"] for record in group)
        shown.add_row(
            str(first["stage"]),
            Text(f"{titles[first['stage'], first['name']]}, N = {first['nk']}", style="bold"),
            units.show_time(milliseconds), show_bytes(reads), show_bytes(total - reads),
            f"{total / milliseconds / 1e9:.2f}", show_bytes(predicted), f"{total / predicted:.2f}",
        )  # fmt: skip
    return shown


def piece(kernel: str) -> str:
    """What a kernel does for attention, by its name: scale, softmax, fused, or else a GEMM."""
    name = short(kernel).lower()
    for word, what in (("elementwise", "scale q"), ("softmax", "softmax"), ("attention", "fused")):
        if word in name:
            return what
    return "GEMM"


PIECES = {"scale q": ("#8C8C00", ""), "GEMM": ("#56B4E9", "//"), "softmax": ("#E69F00", ".."),
          "fused": ("#009E73", "xx")}  # fmt: skip


def plot(records: Sequence[Record], titles: Mapping[tuple[int, str], str], path: Path) -> None:
    """Bars of time, kernel by kernel, a panel an N: stage 3's pieces against one fused bar."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    sizes = sorted({record["nk"] for record in records})
    figure, axes = pyplot.subplots(1, len(sizes), figsize=(4.6 * len(sizes), 2.6), squeeze=False)
    for axis, n in zip(axes[0], sizes, strict=True):
        groups = by_stage([record for record in records if record["nk"] == n])
        for height, group in enumerate(groups):
            left = 0.0
            for record in group:
                colour, hatch = PIECES[piece(record["kernel"])]
                axis.barh(height, record["time_ms"], left=left, color=colour, edgecolor="black",
                          hatch=hatch, linewidth=0.8)  # fmt: skip
                left += record["time_ms"]
            axis.text(left, height, f" {units.show_time(left)}", va="center", fontsize=8)
        labels = [f"{group[0]['stage']} {titles[group[0]['stage'], group[0]['name']]}"
                  for group in groups]  # fmt: skip
        axis.set_yticks(range(len(groups)), labels, fontsize=8)
        axis.invert_yaxis()
        axis.set_xlabel("kernels, one after another (ms)", fontsize=9)
        axis.set_title(
            cell_tables.problem_title(next(r for r in records if r["nk"] == n)), fontsize=8
        )
        axis.margins(x=0.25)
    there = {piece(record["kernel"]) for record in records}
    handles = [Patch(facecolor=colour, edgecolor="black", hatch=hatch, label=what)
               for what, (colour, hatch) in PIECES.items() if what in there]  # fmt: skip
    figure.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncol=4,
                  frameon=False, fontsize=9)  # fmt: skip
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight", facecolor="white")
    pyplot.close(figure)
