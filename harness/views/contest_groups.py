"""Groups of `ladder bench` records, and the values of each stage or peer at each N.

The records of a group differ only in stage, N and batch size.
"""

from collections.abc import Sequence

from harness.problems.problem import PEERS_FROM
from harness.records.schema import PROBLEM, Record
from harness.records.units import show_bytes, show_time, significant
from harness.views.cell_tables import (
    THREE,
    Stage,
    grouped,
    labels,
    show_briefly,
    stage_of,
    stages_of,
)
from harness.views.roofline import UNITS, roof_of
from harness.views.table import Column, Table

# what the records of a group have in common
SHARED = [field for field in PROBLEM if field not in ("b", "nq", "nk", "seed")]
DECODED = ("b", "h", "hk", "nk", "d")
PAGED = "TB/s: the bytes of q, k, v, o over the time. pages of n: paged over in one piece, paired."
# shown in place of a number
SHORT = {"out-of-memory": "OOM", "wrong-by-design": "design", "crashed": "crash",
         "timeout": "late", "skipped": "-"}  # fmt: skip


def groups(records: Sequence[Record]) -> list[list[Record]]:
    """Group records that differ only in stage, N and batch size, in their first records' order.

    A fixed batch size and one that shrinks as N grows are not distinguished: they are in different
    runs. Problems with few query rows are left to `decode_table`.
    """
    many = [record for record in records if not few_rows(record)]
    return grouped(many, lambda record: [record[field] for field in SHARED])


def few_rows(record: Record) -> bool:
    """Whether there are fewer queries than keys."""
    return bool(record["nq"] < record["nk"])


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


def find(group: Sequence[Record], contestant: Stage | None, n: int) -> Record | None:
    """The record of a stage or peer at N, None where it has none."""
    found = (r for r in group if stage_of(r) == contestant and r["nk"] == n)
    return next(found, None)


def timed(record: Record) -> bool:
    """Whether a record is right and has a time."""
    return record["status"] == "ok" and record["time_ms"] is not None


def rivals(group: Sequence[Record]) -> tuple[Stage | None, Stage | None]:
    """The newest of our stages that was timed, stage 3 excluded; and the first peer that was."""
    found = stages_of([record for record in group if timed(record)])
    ours = [stage for stage in found if stage[0] < PEERS_FROM and stage != THREE]
    peers = [stage for stage in found if stage[0] >= PEERS_FROM]
    return max(ours, default=None), min(peers, default=None)


def rate_of(record: Record) -> float:
    """The rate of a record in its device's unit: GFLOP/s on a CPU, TFLOP/s on a GPU."""
    return float(record["tflops"]) * UNITS[record["device"]][1]


def show(
    record: Record | None, what: str, peer: Record | None = None, ceilings: Sequence[Record] = ()
) -> str:
    """The text of a record in a table; without a time, the reason; also for no record.

    `what`: the 'time' in ms, the 'rate', the 'peak' memory, the time that Python takes to 'launch',
    the share of tiles 'skipped', the 'speedup' over `peer`, or the 'share' of the matrix rate among
    the `ceilings`.
    """
    if record is None:
        return "" if what in ("time", "rate") else "-"
    if what == "skipped":
        return "-" if record["skip_ratio"] is None else f"{100 * record['skip_ratio']:.1f}%"
    if what == "speedup":
        return show_briefly(peer, record) if timed(record) and peer and timed(peer) else "-"
    if not timed(record):
        none = "interp." if record["mode"] == "interpreted" else "-"
        why = none if record["status"] == "ok" else SHORT.get(record["status"], record["status"])
        return {"time": str(why), "rate": ""}.get(what, "-")
    if what == "time":
        return significant(record["time_ms"])
    if what == "rate":
        return significant(rate_of(record))
    if what == "launch":
        return "-" if record["launch_ms"] is None else show_time(record["launch_ms"])
    if what == "peak":
        return "-" if record["peak_bytes"] is None else show_bytes(record["peak_bytes"])
    matrix = roof_of(record, ceilings).matrix
    return f"{100 * record['tflops'] / matrix:.0f}%" if matrix else "-"


def texts_of(
    group: Sequence[Record], contestant: Stage | None, what: str, peer: Stage | None = None,
    ceilings: Sequence[Record] = (), ns: Sequence[int] = (),
) -> list[str]:  # fmt: skip
    """`show` of a stage or peer at each N of the group, or at `ns`; '-' where it is None."""
    ns = ns or sizes(group)
    found = ((find(group, contestant, n), find(group, peer, n)) for n in ns)
    return ["-" if contestant is None else show(x, what, y, ceilings) for x, y in found]


def bandwidth(record: Record) -> float:
    """The bandwidth of a record that has a time, TB/s."""
    return float(record["hbm_bytes"] / record["time_ms"] / 1e9)


def ahead(before: Record | None, after: Record | None) -> str:
    """How many times as fast `after` is, in the same rounds."""
    return show_briefly(before, after) if after else "-"


def shapes(records: Sequence[Record], *besides: str) -> list[list[Record]]:
    """Those in one piece that differ in contestant, or in what is named `besides`, alone."""
    whole = [record for record in records if record["page_size"] is None]
    fields = [field for field in PROBLEM if field not in besides]
    return grouped(whole, lambda record: [record[field] for field in fields])


def decoded(record: Record) -> str:
    """The shape of a record with few query rows, and its masks."""
    masks = (" causal" * record["causal"], " lengths" * bool(record["seqlens_k"]))
    return ", ".join(str(record[name]) for name in DECODED) + "".join(masks)


def decode_table(env: Record, records: Sequence[Record], ceilings: Sequence[Record] = ()) -> Table:
    """The table of few query rows: our stages and the best peer in TB/s, then with pages.

    The bytes are the same for all: q, k, v and o. After the best peer: how many times as fast our
    newest stage is, its share of the measured read ceiling, and its speed with pages.
    """
    names = labels(env)
    everyone = stages_of([record for record in records if record["page_size"] is None])
    ours = [stage for stage in everyone if stage[0] < PEERS_FROM]
    able = [record for record in records if timed(record)]
    newest = max((s for s in stages_of(able) if s in ours), default=None)
    sizes = sorted({record["page_size"] for record in records} - {None})
    roof = max((c["value"] for c in ceilings if c["what"] == "read"), default=None)
    rows = []
    for group in grouped(records, lambda r: [r[f] for f in PROBLEM if f != "page_size"]):
        at = {(stage_of(r), r["page_size"]): r for r in group}
        going = {who: record for who, record in at.items() if timed(record)}
        peers = [r for ((number, _), _), r in going.items() if number >= PEERS_FROM]
        best = min(peers, key=lambda r: float(r["time_ms"]), default=None)
        mine = going.get((newest, None)) if newest else None
        texts = [decoded(group[0]), str(group[0]["nq"])]
        for stage in ours:
            one = going.get((stage, None))
            why = show(at.get((stage, None)), "time") or "-"
            texts.append(f"{bandwidth(one):.2f}" if one else why)
        in_pages = f" pages of {best['page_size']}" if best and best["page_size"] else ""
        name = f"{bandwidth(best):.2f} #{best['stage']}{in_pages}" if best else "-"
        texts += [name, ahead(best, mine)]
        texts += [f"{100 * bandwidth(mine) / roof:.0f}%" if mine and roof else "-"]
        texts += [ahead(mine, going.get((newest, size)) if newest else None) for size in sizes]
        rows.append(texts)
    heads = [*(f"#{number}" for number, _ in ours), "best peer", "over it", "of read"]
    pages = [f"pages of {size}" for size in sizes]
    columns = [Column("B, H, Hk, N, d", left=True), *map(Column, ["Nq", *heads])]
    columns += [Column(head, wraps=True) for head in pages]
    ceiling = [f"The read ceiling is {significant(roof)} TB/s."] if roof else []
    notes = [PAGED, *ceiling, ", ".join(f"#{names[stage]}" for stage in everyone)]
    return Table(columns, rows, f"decoding, {records[0]['dtype']}, {records[0]['device']}", notes)
