"""Judge whether a stage trains as SDPA does, by comparing its loss curve with SDPA's backends.

Two right implementations that start from the same seed have the same weights and batches, and
differ only in rounding, which training may amplify. How much it does is measured with SDPA's
backends. docs/training.md says why this rule was chosen, and how reliable the verdict is.

    windows    losses are averaged over WINDOW steps; the remaining steps at the end belong to the
               last window
    spread     at a window: the largest difference between two backends' averages, over all seeds
               and over the windows so far
    deviation  of a stage at a window: how far its average is from the mean of the backends'
               averages of the same seed
    allowed    FACTOR times the spread, or times one ulp of the float32 loss where that is larger

A stage is 'ok' where its deviation is allowed at every window of every seed, else 'outside'. With
fewer than LEAST_BACKENDS backends or LEAST_SEEDS seeds it is 'not judged'.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean, median
from typing import Any

from harness.records.schema import FAILURES, BadRecord

Record = Mapping[str, Any]
Farthest = tuple[float, float | None, int]  # a deviation, what is allowed, and the step

WINDOW = 25  # steps
FACTOR = 2.0
LEAST_BACKENDS = 3
LEAST_SEEDS = 3
ULP = 2.0**-23  # of float32, relative

NOT_JUDGED = "not judged"
OUTSIDE = "outside"


@dataclass(frozen=True)
class Verdict:
    """The verdict on one stage or backend, from its records, one per seed.

    `status` is 'ok', 'outside', 'not judged', or the status of a failed training. Losses are in
    nats per character, means over the seeds; `final` is the last window's. `deviation` is the one
    with the largest ratio to what is `allowed`, and `step` is the end of its window; where nothing
    is judged, it is the largest one and `allowed` is None. `tokens_per_s` is None where it was not
    measured, or the status isn't ok.
    """

    stage: int
    name: str
    reference: bool
    status: str
    reason: str
    final: float | None
    val_loss: float | None
    deviation: float | None
    allowed: float | None
    step: int | None
    tokens_per_s: float | None

    @property
    def failed(self) -> bool:
        """Whether the training failed or its curve is outside."""
        return self.status in (*FAILURES, OUTSIDE)


def check(records: Sequence[Record]) -> None:
    """Raise BadRecord unless all records are of the same training, with finite losses."""
    for record in records:
        for field in ("size", "dtype", "device", "steps"):
            if record[field] != (first := records[0][field]):
                raise BadRecord(f"{field}: got {record[field]!r} beside {first!r}, expected one")
        losses = record["losses"]
        if not 0 < record["steps"] >= len(losses):
            got = f"{len(losses)} losses of {record['steps']} steps"
            raise BadRecord(f"losses: got {got}, expected a step or more, and a loss each")
        if not all(isinstance(loss, float) and math.isfinite(loss) for loss in losses):
            raise BadRecord("losses: got what is no finite number among them")


def ends(steps: int) -> list[int]:
    """The steps at which the windows of `steps` steps end."""
    return [*range(WINDOW, steps - WINDOW + 1, WINDOW), steps]


def averages(losses: Sequence[float]) -> list[float]:
    """The mean loss of each window."""
    return [fmean(losses[start:end]) for start, end in pairwise([0, *ends(len(losses))])]


def finished(record: Record) -> bool:
    """Whether a record has a complete curve."""
    return record["status"] == "ok" and len(record["losses"]) == record["steps"]


def backends(records: Sequence[Record]) -> dict[int, list[list[float]]]:
    """Map each seed to the averaged curves of SDPA's backends that finished."""
    found: dict[int, list[list[float]]] = {}
    for record in records:
        if record["reference"] and finished(record):
            found.setdefault(record["seed"], []).append(averages(record["losses"]))
    return found


def means(records: Sequence[Record]) -> dict[int, list[float]]:
    """Map each seed to the mean of the backends' averaged curves."""
    return {
        seed: [fmean(column) for column in zip(*curves, strict=True)]
        for seed, curves in backends(records).items()
    }


def spread(records: Sequence[Record]) -> list[float] | None:
    """The spread of SDPA's backends at each window; None where no seed has two of them."""
    ranges = [
        [max(column) - min(column) for column in zip(*curves, strict=True)]
        for curves in backends(records).values()
        if len(curves) > 1
    ]
    widest = [max(column) for column in zip(*ranges, strict=True)]
    return list(accumulate(widest, max)) or None


def allowed(records: Sequence[Record]) -> list[float] | None:
    """How far a curve may be from the backends' mean, at each window; None: no spread."""
    wide = spread(records)
    if wide is None:
        return None
    levels = [max(column) for column in zip(*means(records).values(), strict=True)]
    return [FACTOR * max(x, ULP * level) for x, level in zip(wide, levels, strict=True)]


def deviations(record: Record, records: Sequence[Record]) -> list[float] | None:
    """How far a curve is from the backends' mean of its seed, at each window; None: no mean."""
    mean = means(records).get(record["seed"])
    if mean is None or not finished(record):
        return None
    return [abs(own - other) for own, other in zip(averages(record["losses"]), mean, strict=True)]


def why_not_judged(records: Sequence[Record]) -> str | None:
    """Why there are too few backends to judge by, or None."""
    counts = [len(curves) for curves in backends(records).values()]
    if sum(count >= LEAST_BACKENDS for count in counts) >= LEAST_SEEDS:
        return None
    there = f"got {len(counts)} seed(s) of {max(counts, default=0)} SDPA backend(s); "
    takes = f"a spread takes {LEAST_SEEDS} seeds of {LEAST_BACKENDS} backends"
    fewer = ", more than a CPU has: there, no curve is judged"
    on_cpu = any(record["device"] == "cpu" for record in records)
    return there + takes + fewer * on_cpu


def judge(records: Sequence[Record]) -> list[Verdict]:
    """Judge each stage and backend of a run, by number and name."""
    groups: dict[tuple[int, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record["stage"], record["name"]), []).append(record)
    return [judge_one(groups[key], records) for key in sorted(groups)]


def judge_one(own: Sequence[Record], records: Sequence[Record]) -> Verdict:
    """Judge one stage or backend from its `own` records and the `records` of all."""
    whole = [record for record in own if finished(record)]
    worst = farthest(whole, records)
    status, reason = status_of(own, records, worst)
    deviation, limit, step = worst or (None, None, None)
    finals = [averages(record["losses"])[-1] for record in whole]
    val_losses = [record["val_loss"] for record in whole if record["val_loss"] is not None]
    speeds = [record["tokens_per_s"] for record in whole if record["tokens_per_s"] is not None]
    return Verdict(
        stage=own[0]["stage"],
        name=own[0]["name"],
        reference=own[0]["reference"],
        status=status,
        reason=reason,
        final=fmean(finals) if finals else None,
        val_loss=fmean(val_losses) if val_losses else None,
        deviation=deviation,
        allowed=limit,
        step=step,
        tokens_per_s=median(speeds) if speeds and status == "ok" else None,
    )


def farthest(whole: Sequence[Record], records: Sequence[Record]) -> Farthest | None:
    """The deviation with the largest ratio to its allowed value, that value, and its step.

    None where there are no deviations. Where nothing is judged, the allowed value is None and the
    deviation is the largest one.
    """
    limits = None if why_not_judged(records) else allowed(records)
    found = [
        (deviation, None if limits is None else limits[index], ends(record["steps"])[index])
        for record in whole
        for index, deviation in enumerate(deviations(record, records) or ())
    ]
    return max(found, key=lambda one: one[0] / (one[1] or 1.0), default=None)


def status_of(
    own: Sequence[Record], records: Sequence[Record], worst: Farthest | None
) -> tuple[str, str]:
    """Status and reason of one stage or backend, whose farthest deviation is `worst`."""
    for record in sorted(own, key=lambda record: record["status"] not in FAILURES):
        if record["status"] != "ok":
            return record["status"], f"seed {record['seed']}: {record['reason']}"
    if own[0]["reference"]:
        return "ok", ""
    if reason := why_not_judged(records):
        return NOT_JUDGED, reason
    if worst is None:
        return NOT_JUDGED, "no SDPA backend finished its seeds"
    deviation, limit, step = worst
    if limit is not None and deviation > limit:
        return OUTSIDE, f"by step {step} off by {deviation:.2g}, allowed is {limit:.2g} at most"
    return "ok", ""
