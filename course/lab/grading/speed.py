"""Give points for speed on a GPU, if asked: a submission is timed in turns with our own stage."""

import math
import tempfile
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from course.lab import checks, labs
from course.lab.grading.machine import MAYBE_MACHINE
from harness.isolation.judge import Judge
from harness.isolation.roster import YOURS, BadStage, describe_files
from harness.isolation.scratch import scratch
from harness.problems import cost
from harness.problems.problem import DTYPES, Problem
from harness.runs.comparison import compare
from harness.runs.plan import Cell, Comparison, Limits

NAME = "speed"  # of the check
SLOW = "too slow"
CHANGED = "changed after it was graded"
FASTEST = 5e15  # FLOP/s that no GPU exceeds in half precision: a shorter time is false


@dataclass(frozen=True)
class Speed:
    """The speed check: a problem, and how many times as long as our stage a submission may take.

    [speed] in a file of points; q, k and v are (b, h, n, d).
    """

    points: float
    factor: float = 2.0
    b: int = 8
    h: int = 16
    n: int = 8192
    d: int = 64
    dtype: str = "float16"


def read_speed(table: Any) -> Speed:
    """Read the [speed] of a file of points; its points are checked as those of other checks.

    Raises ValueError where it is no such table.
    """
    keys = [field.name for field in fields(Speed)]
    if not isinstance(table, dict) or not {"points"} <= table.keys() <= {*keys}:
        expected = f"a table with points, and any of {', '.join(keys[1:])}"
        raise ValueError(f"[speed]: got {table!r}, expected {expected}")
    asked = Speed(**table)
    for name in ("b", "h", "n", "d"):
        if type(size := getattr(asked, name)) is not int or size < 1:
            raise ValueError(f"[speed]: {name}: got {size!r}, expected a whole number from 1 on")
    if type(asked.factor) not in (int, float) or not 0 < asked.factor < math.inf:
        raise ValueError(f"[speed]: factor: got {asked.factor!r}, expected a number above 0")
    if asked.dtype not in DTYPES:
        expected = f"one of {', '.join(DTYPES)}"
        raise ValueError(f"[speed]: dtype: got {asked.dtype!r}, expected {expected}")
    return asked


def judged(
    path: Path, stage: int, asked: Speed, seed: int, device: str = "cuda",
    sha256: str | None = None,
) -> str:  # fmt: skip
    """Return the check's result: 'ok', 'too slow', 'cheated', or the status of a run's record.

    `sha256`: of what the other checks were about; the result is CHANGED where it is not this.

    The times are taken as `ladder bench` takes them: processes in turns, each call with inputs of
    its own, and held to the parent's own clock.
    """
    with tempfile.TemporaryDirectory(dir=scratch()) as name:
        try:
            copy, digest = checks.copied(path, Path(name))
        except BadStage:
            return CHANGED
        if sha256 not in (None, digest):
            return CHANGED
        return timed(copy, stage, asked, seed, device)


def timed(path: Path, stage: int, asked: Speed, seed: int, device: str) -> str:
    """Time a submission that nobody changes meanwhile.

    Raises Unchecked where our own stage can't be timed here: that is no student's fault.
    """
    try:
        [ours], [mine] = describe_files([labs.source(stage)]), describe_files([path])
    except BadStage:
        return "crashed"
    problem = Problem(
        "normal", seed, asked.b, asked.h, asked.h, asked.n, asked.n, asked.d, asked.dtype,
        "ieee" if asked.dtype == "float32" else asked.dtype, False, None, device,
    )  # fmt: skip
    stages = [ours, replace(mine, name=YOURS, exact_up_to=None)]
    cells, limits = [Cell(stage, problem, paired=True) for stage in stages], Limits(rounds=20)
    with Judge(problem) as judge:
        reference, found = compare(Comparison(cells, limits), judge)
    if reference.status != "ok" or found.status in MAYBE_MACHINE:
        with Judge(problem) as judge:
            [alone] = compare(Comparison(cells[:1], limits), judge)
        if alone.status != "ok":
            said = f"our own stage, timed by itself, ends as {alone.status}: {alone.reason}"
            raise checks.Unchecked(f"[speed] can't be judged on this machine: {said}")
        return found.status if found.status != "ok" else "crashed"  # it has spoilt our stage's time
    if found.status != "ok" or not found.time_ms or not reference.time_ms:
        return found.status if found.status != "ok" else "skipped"
    if 1e-3 * found.time_ms < cost.flops(problem) / FASTEST:
        return "cheated"
    return "ok" if found.time_ms <= asked.factor * reference.time_ms else SLOW
