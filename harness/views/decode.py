"""The table of few query rows against many keys, such as the decode suite's, from records alone.

The figure is TB/s: the bytes of q, k, v and o over the time, the same bytes for all contestants.
Beside it: how many times faster our newest stage is than the best peer, its share of the measured
read ceiling, and what is left of it where k and v lie in pages.
"""

from collections.abc import Sequence

from harness.problems.problem import PEERS_FROM
from harness.records.schema import PROBLEM, Record
from harness.records.units import significant
from harness.views import contest_groups as bench
from harness.views.cell_tables import grouped, labels, stage_of, stages_of, times_faster
from harness.views.table import Column, Table

SHAPE = ("b", "h", "hk", "nk", "d")
NOTE = "TB/s: the bytes of q, k, v, o over the time. pages of n: paged over in one piece, paired."


def rate(record: Record) -> float:
    """TB/s of a record that has a time."""
    return float(record["hbm_bytes"] / record["time_ms"] / 1e9)


def times(before: Record | None, after: Record | None) -> str:
    """How many times faster `after` is, medians of the same rounds."""
    ratio = times_faster(before, after) if after else None
    return "-" if ratio is None else f"{ratio:.2f}x"


def make_table(env: Record, records: Sequence[Record], ceilings: Sequence[Record] = ()) -> Table:
    """A row per problem: our stages, the best peer, how far ahead of it, and with pages."""
    names = labels(env)
    everyone = stages_of([record for record in records if record["page_size"] is None])
    ours = [stage for stage in everyone if stage[0] < PEERS_FROM]
    timed = [record for record in records if bench.timed(record)]
    newest = max((s for s in stages_of(timed) if s in ours), default=None)
    sizes = sorted({record["page_size"] for record in records} - {None})
    roof = max((c["value"] for c in ceilings if c["what"] == "read"), default=None)
    rows = []
    for group in grouped(records, lambda r: [r[f] for f in PROBLEM if f != "page_size"]):
        at = {(stage_of(r), r["page_size"]): r for r in group}
        going = {who: record for who, record in at.items() if bench.timed(record)}
        peers = [r for ((number, _), _), r in going.items() if number >= PEERS_FROM]
        best = min(peers, key=lambda r: float(r["time_ms"]), default=None)
        mine = going.get((newest, None)) if newest else None
        texts = [", ".join(str(group[0][name]) for name in SHAPE), str(group[0]["nq"])]
        for stage in ours:
            one = going.get((stage, None))
            why = bench.show(at.get((stage, None)), "time") or "-"
            texts.append(f"{rate(one):.2f}" if one else why)
        texts += [f"{rate(best):.2f} #{best['stage']}" if best else "-", times(best, mine)]
        texts += [f"{100 * rate(mine) / roof:.0f}%" if mine and roof else "-"]
        texts += [times(mine, going.get((newest, size)) if newest else None) for size in sizes]
        rows.append(texts)
    heads = [*(f"#{number}" for number, _ in ours), "best peer", "over it", "of read"]
    pages = [f"pages of {size}" for size in sizes]
    columns = [Column("B, H, Hk, N, d", left=True), *map(Column, ["Nq", *heads])]
    columns += [Column(head, wraps=True) for head in pages]
    ceiling = [f"The read ceiling is {significant(roof)} TB/s."] if roof else []
    notes = [NOTE, *ceiling, ", ".join(f"#{names[stage]}" for stage in everyone)]
    return Table(columns, rows, f"decoding, {records[0]['dtype']}, {records[0]['device']}", notes)
