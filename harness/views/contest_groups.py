"""The records of `ladder bench` in groups, and the figure of each contestant at each N.

Records that differ in contestant, N and batch only are a group. A "figure" is the text that stands
in a table for a record, or for none.
"""

from collections.abc import Callable, Sequence

from harness.problems.problem import PEERS_FROM, YARDSTICK
from harness.records.schema import PROBLEM, Record
from harness.records.units import show_bytes, significant
from harness.views.cell_tables import Stage, grouped, stage_of, stages_of
from harness.views.roofline import UNITS, roof_of

Figure = Callable[[Record | None], str]

# what the records of a group have in common
SHARED = [field for field in PROBLEM if field not in ("b", "nq", "nk", "seed")]
# what stands in a column of figures instead of one
SHORT = {"out-of-memory": "OOM", "wrong-by-design": "design", "crashed": "crash",
         "timeout": "late", "skipped": "-"}  # fmt: skip


def groups(records: Sequence[Record]) -> list[list[Record]]:
    """Records that differ in contestant, N and batch only, grouped, in the order of their coming.

    Problems of one batch size and those whose batch shrinks as N grows may differ in nothing else:
    they come from different runs.
    """
    return grouped(records, lambda record: [record[field] for field in SHARED])


def same_but(records: Sequence[Record], group: Sequence[Record], direction: str) -> list[Record]:
    """The records of a group's problems in another direction."""
    first = {**group[0], "direction": direction}
    return [r for r in records if all(r[field] == first[field] for field in SHARED)]


def mask_of(group: Sequence[Record]) -> str:
    """A group's head dimension and mask, in words."""
    return f"d = {group[0]['d']}, {'causal' if group[0]['causal'] else 'no mask'}"


def group_title(group: Sequence[Record]) -> str:
    """What the records of a group have in common."""
    first = group[0]
    tokens = sorted({record["b"] * record["nq"] for record in group})
    of_all = f"{tokens[0]}..{tokens[-1]}" if len(tokens) > 1 else f"{tokens[0]}"
    one_batch = len({record["b"] for record in group}) == 1
    parts = (
        first["direction"],
        first["dtype"] + (" tf32" if first["precision"] == "tf32" else ""),
        mask_of(group),
        f"b = {first['b']}" if one_batch else f"b N = {of_all}",
        f"h = {first['h']}",
        "" if first["hk"] == first["h"] else f"hk = {first['hk']}",
        f"padded to {', '.join(map(str, first['seqlens_k']))} keys" if first["seqlens_k"] else "",
        "" if first["inputs"] == "normal" else f"{first['inputs']} input",
        first["device"],
    )
    return ", ".join(filter(None, parts))


def sizes(group: Sequence[Record]) -> list[int]:
    """The N of a group."""
    return sorted({record["nk"] for record in group})


def find(group: Sequence[Record], contestant: Stage, n: int) -> Record | None:
    """A contestant's record at N, None where it was no contestant at that N."""
    found = (r for r in group if stage_of(r) == contestant and r["nk"] == n)
    return next(found, None)


def texts_of(
    group: Sequence[Record], contestant: Stage | None, figure: Figure, ns: Sequence[int] = ()
) -> list[str]:
    """A contestant's figure at each N of the group, or of `ns`; '-' where it is None."""
    ns = ns or sizes(group)
    return ["-" if contestant is None else figure(find(group, contestant, n)) for n in ns]


def timed(record: Record) -> bool:
    """Whether a record has a time: right, and from the rounds."""
    return record["status"] == "ok" and record["time_ms"] is not None


def rivals(group: Sequence[Record]) -> tuple[Stage | None, Stage | None]:
    """The newest stage of ours that was timed, the yardstick apart; and the first peer that was."""
    found = stages_of([record for record in group if timed(record)])
    ours = [stage for stage in found if stage[0] < PEERS_FROM and stage[0] != YARDSTICK]
    peers = [stage for stage in found if stage[0] >= PEERS_FROM]
    return max(ours, default=None), min(peers, default=None)


def rate_of(record: Record) -> float:
    """What a record achieved, in its device's unit: GFLOP/s on a CPU, TFLOP/s on a GPU."""
    return float(record["tflops"]) * UNITS[record["device"]][1]


def show_time(record: Record | None) -> str:
    """The time in ms, or why there is none."""
    if record is None:
        return ""
    if timed(record):
        return significant(record["time_ms"])
    if record["status"] == "ok":
        return "interp." if record["mode"] == "interpreted" else "-"
    return SHORT.get(record["status"], str(record["status"]))


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


def show_speedup(peer: Stage) -> Figure:
    """How many times faster than that peer."""

    def show(record: Record | None) -> str:
        ratio = record["speedup"].get(peer[1]) if record is not None else None
        return "-" if ratio is None else f"{significant(ratio)}x"

    return show


def show_share(ceilings: Sequence[Record]) -> Figure:
    """How much of the measured matrix rate of its dtype is reached."""

    def show(record: Record | None) -> str:
        matrix = roof_of(record, ceilings).matrix if record is not None and timed(record) else None
        return f"{100 * record['tflops'] / matrix:.0f}%" if record is not None and matrix else "-"

    return show
