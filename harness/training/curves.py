"""Whether a stage trains as SDPA does: its loss curve held against the curves of SDPA's backends.

Two right attentions from the same seed see the same weights and batches, and differ in rounding
alone, which training carries on and may amplify. How much it does is measured, not guessed: SDPA's
own backends are such attentions. So

    windows    losses are averaged over WINDOW steps: a step's loss is mostly its batch. What is
               left of the steps at the end belongs to the last window.
    spread     at a window: the largest difference between two backends' averages, over all seeds
               and over the windows so far. One seed's backends may cross and agree by chance: the
               other seeds, and what they differed by before, say how far they stray. Windows to
               come say nothing: what goes wrong early isn't excused by noise that comes late.
    deviation  of a stage at a window: how far its average is from the mean of the backends'
               averages of the same seed.
    allowed    FACTOR times the spread. The spread counts as an ulp of the float32 loss at least:
               below it, two curves that agree can't be told from two that don't.

A stage is 'ok' where its deviation is allowed at every window of every seed, else 'outside'.

What that is worth, where the stage's differences are draws of the same kind as the backends' (3
seeds, 20 windows, by simulation): beside 4 backends such a stage falls outside in 1 of 300 runs,
beside 3 in 1 of 65, beside 2 in 1 of 7; in 1 of 70, 1 of 12 and nearly half of them where all
differences grow by two thirds a window. So with fewer than LEAST_BACKENDS backends or LEAST_SEEDS
seeds nothing is judged; the deviation is told all the same. A stage whose rounding errors are
larger than any backend's may fall outside and train well: outside means that it is no draw of the
same kind, not that it learns nothing. And where training itself is unstable, so that a rounding
error turns a seed's curve, the spread is wide and a wrong stage may hide in it: the plot shows it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any

from harness.records.schema import FAILURES, BadRecord

Record = Mapping[str, Any]
Key = tuple[int, str]

WINDOW = 25  # steps
FACTOR = 2.0
LEAST_BACKENDS = 3
LEAST_SEEDS = 3
ULP = 2.0**-23  # of float32, relative

NOT_JUDGED = "not judged"
OUTSIDE = "outside"


@dataclass(frozen=True)
class Verdict:
    """What the records of one contestant, one record per seed, come to.

    `status` is 'ok', 'outside', 'not judged', or what kept it from training. Losses are in nats a
    character, means over the seeds; `final` is the last window's. `deviation` is the largest beside
    what is `allowed`, and `step` where its window ends; where nothing is judged it is the largest,
    and `allowed` is None.
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
    tokens_per_s: float | None  # None where there is no speed to show: not measured, or unchecked

    @property
    def failed(self) -> bool:
        """Whether something is wrong with it."""
        return self.status in (*FAILURES, OUTSIDE)


def check(records: Sequence[Record]) -> None:
    """Raise BadRecord unless the records are of one training, and their losses numbers."""
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
    return [WINDOW * index for index in range(1, steps // WINDOW)] + [steps]


def averages(losses: Sequence[float]) -> list[float]:
    """The mean loss of each window."""
    last = ends(len(losses))
    return [
        math.fsum(losses[start:end]) / (end - start)
        for start, end in zip([0, *last[:-1]], last, strict=True)
    ]


def finished(record: Record) -> bool:
    """Whether a record has a whole curve."""
    return record["status"] == "ok" and len(record["losses"]) == record["steps"]


def backends(records: Sequence[Record]) -> dict[int, list[list[float]]]:
    """seed -> the averaged curves of SDPA's backends that have finished."""
    found: dict[int, list[list[float]]] = {}
    for record in records:
        if record["reference"] and finished(record):
            found.setdefault(record["seed"], []).append(averages(record["losses"]))
    return found


def means(records: Sequence[Record]) -> dict[int, list[float]]:
    """seed -> the mean of the backends' averaged curves."""
    return {
        seed: [math.fsum(column) / len(column) for column in zip(*curves, strict=True)]
        for seed, curves in backends(records).items()
    }


def spread(records: Sequence[Record]) -> list[float] | None:
    """The spread of SDPA's backends at each window; None where no seed has two of them."""
    ranges = [
        [max(column) - min(column) for column in zip(*curves, strict=True)]
        for curves in backends(records).values()
        if len(curves) > 1
    ]
    if not ranges:
        return None
    return list(accumulate((max(column) for column in zip(*ranges, strict=True)), max))


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
    return [abs(own - there) for own, there in zip(averages(record["losses"]), mean, strict=True)]


def why_not_judged(records: Sequence[Record]) -> str | None:
    """Why the backends' spread is no measure, or None where it is."""
    counts = [len(curves) for curves in backends(records).values()]
    if sum(count >= LEAST_BACKENDS for count in counts) >= LEAST_SEEDS:
        return None
    return (
        f"got {len(counts)} seed(s) of {max(counts, default=0)} SDPA backend(s); a spread takes "
        f"{LEAST_SEEDS} seeds of {LEAST_BACKENDS} backends"
    )


def judge(records: Sequence[Record]) -> list[Verdict]:
    """The verdict on each contestant of a run, SDPA's backends too, by number and name."""
    groups: dict[Key, list[Record]] = {}
    for record in records:
        groups.setdefault((record["stage"], record["name"]), []).append(record)
    return [judge_one(groups[key], records) for key in sorted(groups)]


def judge_one(own: Sequence[Record], records: Sequence[Record]) -> Verdict:
    """The verdict on one contestant from its `own` records, those of all beside them."""
    whole = [record for record in own if finished(record)]
    limits = None if why_not_judged(records) else allowed(records)
    worst = farthest(whole, records, limits)
    deviation, limit, step = worst or (None, None, None)
    status, reason = status_of(own, records, worst)
    speeds = [record["tokens_per_s"] for record in whole if record["tokens_per_s"] is not None]
    val_losses = [record["val_loss"] for record in whole if record["val_loss"] is not None]
    return Verdict(
        stage=own[0]["stage"],
        name=own[0]["name"],
        reference=own[0]["reference"],
        status=status,
        reason=reason,
        final=mean([averages(record["losses"])[-1] for record in whole]),
        val_loss=mean(val_losses),
        deviation=deviation,
        allowed=limit,
        step=step,
        tokens_per_s=median(speeds) if speeds and status == "ok" else None,
    )


def farthest(
    whole: Sequence[Record], records: Sequence[Record], limits: Sequence[float] | None
) -> tuple[float, float | None, int] | None:
    """The deviation that is largest beside what is allowed, that, and its step; None: no mean."""
    found = []
    for record in whole:
        for index, deviation in enumerate(deviations(record, records) or ()):
            limit = None if limits is None else limits[index]
            found.append((deviation, limit, ends(record["steps"])[index]))
    return max(found, key=lambda one: one[0] / (one[1] or 1.0), default=None)


def status_of(
    own: Sequence[Record],
    records: Sequence[Record],
    worst: tuple[float, float | None, int] | None,
) -> tuple[str, str]:
    """Status and reason of one contestant; `worst` is what `farthest` found."""
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


def mean(values: Sequence[float]) -> float | None:
    """The mean, None of nothing."""
    return math.fsum(values) / len(values) if values else None
