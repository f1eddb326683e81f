"""The records of `ladder bench` in groups, and the figure of each contestant at each N.

Records that differ in contestant, N and batch only are a group.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from harness.problems.problem import PEERS_FROM, YARDSTICK, YARDSTICK_NAME
from harness.records.schema import PROBLEM
from harness.records.units import show_bytes, significant
from harness.views.roofline import UNITS, roof_of

Record = Mapping[str, Any]
Contestant = tuple[int, str]  # number and name
Figure = Callable[[Record | None], str]  # what stands in a table for a record, or for none

WITHIN = ("b", "nq", "nk", "seed")  # what may differ within a group
# what stands in a column of figures instead of one
SHORT = {"out-of-memory": "OOM", "wrong-by-design": "design", "crashed": "crash",
         "timeout": "late", "skipped": "-"}  # fmt: skip


def groups(records: Sequence[Record]) -> list[list[Record]]:
    """Records that differ in contestant, N and batch only, grouped, in the order of their coming.

    Problems of one batch size and those whose batch shrinks as N grows may differ in nothing else:
    they come from different runs.
    """
    found: dict[str, list[Record]] = {}
    for record in records:
        identity = [record[field] for field in PROBLEM if field not in WITHIN]
        found.setdefault(json.dumps(identity), []).append(record)
    return list(found.values())


def group_title(group: Sequence[Record]) -> str:
    """What the records of a group have in common."""
    first = group[0]
    dtype = first["dtype"] + (" tf32" if first["precision"] == "tf32" else "")
    parts = [first["direction"], dtype, f"d = {first['d']}"]
    parts.append("causal" if first["causal"] else "no mask")
    batches = {record["b"] for record in group}
    tokens = {record["b"] * record["nq"] for record in group}
    if len(batches) == 1:
        parts.append(f"b = {first['b']}")
    else:
        least = f"{min(tokens)}.." if len(tokens) > 1 else ""
        parts.append(f"b N = {least}{max(tokens)}")
    parts.append(f"h = {first['h']}")
    if first["hk"] != first["h"]:
        parts.append(f"hk = {first['hk']}")
    if first["seqlens_k"] is not None:
        parts.append(f"padded to {', '.join(map(str, first['seqlens_k']))} keys")
    if first["inputs"] != "normal":
        parts.append(f"{first['inputs']} input")
    return ", ".join([*parts, first["device"]])


def contestants(group: Sequence[Record]) -> list[Contestant]:
    """The contestants of a group, by number."""
    return sorted({(record["stage"], record["name"]) for record in group})


def sizes(group: Sequence[Record]) -> list[int]:
    """The N of a group."""
    return sorted({record["nk"] for record in group})


def find(group: Sequence[Record], contestant: Contestant, n: int) -> Record | None:
    """A contestant's record at N, None where it was no contestant at that N."""
    for record in group:
        if (record["stage"], record["name"], record["nk"]) == (*contestant, n):
            return record
    return None


def timed(record: Record) -> bool:
    """Whether a record has a time: right, and from the rounds."""
    return record["status"] == "ok" and record["time_ms"] is not None


def rivals(group: Sequence[Record]) -> tuple[Contestant | None, Contestant | None]:
    """The newest stage of ours that was timed, the yardstick apart; and the first peer that was."""
    timed_ones = contestants([record for record in group if timed(record)])
    ours = [c for c in timed_ones if c[0] < PEERS_FROM and c != (YARDSTICK, YARDSTICK_NAME)]
    peers = [c for c in timed_ones if c[0] >= PEERS_FROM]
    return max(ours, default=None), min(peers, default=None)


def rate_of(record: Record) -> float:
    """What a record achieved, in its device's unit: GFLOP/s on a CPU, TFLOP/s on a GPU."""
    return float(record["tflops"]) * UNITS[record["device"]][1]


def no_figure(record: Record | None) -> str:
    """Why there is no time."""
    if record is None:
        return ""
    if record["status"] == "ok":
        return "interp." if record["mode"] == "interpreted" else "-"
    status: str = record["status"]
    return SHORT.get(status, status)


def show_time(record: Record | None) -> str:
    """The time in ms, or why there is none."""
    if record is None or not timed(record):
        return no_figure(record)
    return significant(record["time_ms"])


def show_rate(record: Record | None) -> str:
    """The rate, nothing where there is no time."""
    return significant(rate_of(record)) if record is not None and timed(record) else ""


def show_peak(record: Record | None) -> str:
    """The peak memory above the inputs."""
    if record is None or not timed(record) or record["peak_bytes"] is None:
        return "-"
    return show_bytes(record["peak_bytes"])


def show_skipped(record: Record | None) -> str:
    """The share of tiles never visited, where the stage counts them."""
    if record is None or record["skip_ratio"] is None:
        return "-"
    return f"{100 * record['skip_ratio']:.1f}%"


def show_speedup(peer: Contestant) -> Figure:
    """How many times faster than that peer."""

    def show(record: Record | None) -> str:
        ratio = record["speedup"].get(peer[1]) if record is not None else None
        return "-" if ratio is None else f"{significant(ratio)}x"

    return show


def texts_of(
    group: Sequence[Record],
    contestant: Contestant | None,
    figure: Figure,
    ns: Sequence[int] | None = None,
) -> list[str]:
    """A contestant's figure at each N of the group, or of `ns`; of no contestant, nothing."""
    ns = sizes(group) if ns is None else ns
    return ["-" if contestant is None else figure(find(group, contestant, n)) for n in ns]


def show_share(record: Record | None, ceilings: Sequence[Record]) -> str:
    """How much of the measured matrix rate of its dtype a record reaches."""
    matrix = roof_of(record, ceilings).matrix if record is not None and timed(record) else None
    return f"{100 * record['tflops'] / matrix:.0f}%" if record is not None and matrix else "-"


def same_but(records: Sequence[Record], group: Sequence[Record], direction: str) -> list[Record]:
    """The records of a group's problems in another direction."""
    first = {**group[0], "direction": direction}
    alike = [field for field in PROBLEM if field not in WITHIN]
    return [r for r in records if all(r[field] == first[field] for field in alike)]


def yardstick(group: Sequence[Record]) -> Contestant | None:
    """Stage 3, the sources' naive or standard one, where it is in the group."""
    return next((c for c in contestants(group) if c == (YARDSTICK, YARDSTICK_NAME)), None)
