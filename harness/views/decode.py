"""The tables of `ladder bench --suite decode`, from records alone: few query rows, many keys.

A row per problem. The figure is TB/s: the bytes of q, k, v and o over the time, the same bytes for
all contestants. Beside it how many times faster our newest stage is than the best peer, its share
of the measured read ceiling, and what of it is left where k and v lie in pages.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from harness.problems.problem import PEERS_FROM
from harness.records.units import significant
from harness.views.contest_groups import contestants, no_figure, timed
from harness.views.table import Column, Table

Record = Mapping[str, Any]

SHAPE = ("b", "h", "hk", "nk", "d", "dtype", "causal", "device", "inputs", "seed", "nq")
HEAD = ("B, H, Hk, N, d", "Nq")
NOTE = "TB/s: the bytes of q, k, v, o over the time. pages of n: paged over in one piece, paired."


def few_rows(record: Record) -> bool:
    """Whether a record belongs into these tables: fewer queries than keys."""
    return bool(record["nq"] < record["nk"])


def problems(records: Sequence[Record]) -> list[list[Record]]:
    """The records of each problem, pages or none, in the order of their coming."""
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        found.setdefault(tuple(record[name] for name in SHAPE), []).append(record)
    return list(found.values())


def rate(record: Record | None) -> str:
    """TB/s, or why there are none."""
    if record is None or not timed(record):
        return no_figure(record) or "-"
    return f"{record['hbm_bytes'] / record['time_ms'] / 1e9:.2f}"


def read_ceiling(ceilings: Sequence[Record]) -> float | None:
    """TB/s of reading alone, where it was measured."""
    return max((c["value"] for c in ceilings if c["what"] == "read"), default=None)


def make_table(
    records: Sequence[Record], names: Mapping[tuple[int, str], str], ceilings: Sequence[Record] = ()
) -> Table:
    """A row per problem: our stages, the best peer, how far ahead of it, and with pages."""
    whole = [record for record in records if record["page_size"] is None]
    ours = [c for c in contestants(whole) if c[0] < PEERS_FROM]
    newest = max(
        contestants([r for r in whole if timed(r) and r["stage"] < PEERS_FROM]), default=None
    )
    sizes = sorted({r["page_size"] for r in records} - {None})
    roof = read_ceiling(ceilings)
    rows = []
    for group in problems(records):
        at = {(r["stage"], r["name"], r["page_size"]): r for r in group}
        peers = [r for r in group if r["stage"] >= PEERS_FROM and timed(r)]
        best = min(peers, key=lambda r: r["time_ms"], default=None)
        mine = at.get((*newest, None)) if newest is not None else None
        mine = mine if mine is not None and timed(mine) else None
        texts = [", ".join(str(group[0][name]) for name in SHAPE[:5]), str(group[0]["nq"])]
        texts += [rate(at.get((*stage, None))) for stage in ours]
        texts += [f"{rate(best)} #{best['stage']}" if best is not None else "-"]
        texts += [over(best, mine)]
        share = mine and roof and mine["hbm_bytes"] / mine["time_ms"] / 1e9 / roof
        texts += [f"{100 * share:.0f}%" if share else "-"]
        for size in sizes:
            paged = at.get((*newest, size)) if newest is not None else None
            texts += [over(mine, paged if paged is not None and timed(paged) else None)]
        rows.append(texts)
    heads = [f"#{number}" for number, _ in ours] + ["best peer", "over it", "of read"]
    heads += [f"pages of {size}" for size in sizes]
    columns = [Column(HEAD[0], left=True), Column(HEAD[1])]
    columns += [Column(head, wraps=head.startswith("pages")) for head in heads]
    those = ", ".join(f"#{n} {names[n, name]}" for n, name in contestants(whole))
    first = records[0]
    title = f"decoding, {first['dtype']}, {first['device']}"
    ceiling = [f"The read ceiling is {significant(roof)} TB/s."] if roof else []
    return Table(columns, rows, title, [NOTE, *ceiling, those])


def over(slow: Record | None, fast: Record | None) -> str:
    """How many times faster `fast` is, medians of the same rounds."""
    if slow is None or fast is None:
        return "-"
    return f"{slow['time_ms'] / fast['time_ms']:.2f}x"
