"""Measure with Nsight Compute the bytes that a stage moves, and what its warps wait for.

ncu runs each kernel of one call with the caches emptied before it, and counts the bytes that DRAM
read and wrote while it ran. The bytes that a kernel wrote last are still in the L2 cache when it
ends, and are not counted: up to some tens of MB, a large part of a small output but negligible
beside S and P. (The L2's own count of writes doesn't help: on an H200 it is 1.5 times too large,
since bytes that cross to the other half of the cache are counted in both halves.)

ncu also reports, for a warp's time between two instructions, the part spent on each reason to wait,
and for each unit how busy it was. It runs a kernel several times for that, with empty caches.

ncu runs this module as a program, which makes one call of one stage between profiler marks:
``python -m harness.runs.traffic STAGE_FILE PROBLEM_JSON``
"""

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

from harness.isolation.roster import StageInfo
from harness.problems import cost
from harness.problems.problem import Problem
from harness.records.schema import Record

LIMIT: Final = 300.0  # seconds for one stage under the profiler
METRICS: Final = {  # what is counted, by ncu's name for it, in its base units
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "time_ns": "gpu__time_duration.sum",
}
SECTIONS: Final = ("WarpStateStats", "ComputeWorkloadAnalysis")  # ncu's sections of:
WAITS: Final = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
UNITS: Final = re.compile(r"sm__(?:inst_executed_)?pipe_(\w+)\.avg\.pct_of_peak_sustained_active")


class NoProfiler(RuntimeError):
    """ncu is missing or fails; the message says which, in one line."""


def profile(stage: StageInfo, problem: Problem) -> Iterator[Record]:
    """Yield a record, kind 'io', for each kernel that one call of `stage` on `problem` launches.

    Raises NoProfiler where ncu can't count.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise NoProfiler("ncu (Nsight Compute) is not on this machine: traffic can't be measured")
    metrics = ",".join(METRICS.values())
    command = [
        ncu, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none",
        "--profile-from-start", "off", "--metrics", metrics,
        *(word for section in SECTIONS for word in ("--section", section)),
        sys.executable, "-P", "-m", "harness.runs.traffic", str(stage.path),
        json.dumps(problem.to_json()),
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True, text=True, timeout=LIMIT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NoProfiler(f"ncu took more than {LIMIT:g} s on stage {stage.number}") from None
    rows = parse(done.stdout)
    if done.returncode or not rows:
        errors = [line for line in done.stdout.splitlines() if line.startswith("==ERROR==")]
        last = (errors or done.stderr.splitlines() or ["it counted no kernel"])[-1]
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
            "waits": counts["waits"],
            "units": counts["units"],
        }


def parse(text: str) -> list[dict[str, Any]]:
    """Parse ncu's raw CSV page: a dict for each kernel launch, its name and METRICS in base units.

    `waits`: reason -> its share of the time between two instructions of a warp; `units`: name of a
    unit -> the share of its peak rate. Both are empty where ncu doesn't report them. ncu's own
    messages start with '=='; the line after the header has the units.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(io.StringIO("\n".join(lines))))
    found = []
    for line in rows[1:]:
        counts: dict[str, Any] = {"kernel": line["Kernel Name"]}
        for name, metric in METRICS.items():
            if metric not in line:
                raise NoProfiler(f"ncu counts no {metric} on this GPU")
            counts[name] = number(line[metric])
        waits = matching(WAITS, line)
        whole = sum(waits.values())
        counts["waits"] = {reason: warps / whole for reason, warps in waits.items() if warps}
        counts["units"] = {unit: busy / 100 for unit, busy in matching(UNITS, line).items() if busy}
        found.append(counts)
    return found


def matching(pattern: re.Pattern[str], line: dict[str, str]) -> dict[str, float]:
    """The columns that match `pattern`: its first group -> the number in that column, if any."""
    found = {match[1]: line[name] for name in line if (match := pattern.fullmatch(name))}
    return {name: number(text) for name, text in found.items() if text and text[0].isdigit()}


def number(text: str) -> float:
    """Read a number from ncu, with commas between thousands."""
    return float(text.replace(",", ""))


def probe(path: str, problem_json: str) -> None:
    """Under ncu: warm the stage up, then make one call that is profiled."""
    import torch

    import stages
    from harness.isolation.call import bind
    from harness.measures.accuracy import set_precision
    from harness.problems.inputs import make_inputs

    problem = Problem.from_json(json.loads(problem_json))
    if problem.dtype == "float32":
        set_precision(problem.precision)
    attend = bind(stages.load(path).attend, problem)
    q, k, v = make_inputs(problem)
    for _ in range(2):
        attend(q, k, v)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    attend(q, k, v)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    probe(*sys.argv[1:3])
