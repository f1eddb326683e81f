"""Tables and CSV of `ladder bench`, from records alone.

Each group of records has a table of time and rate, one of speed-ups, one of memory and skipped
tiles. A suite's tables stand beside what its source says.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from harness.problems.problem import PEERS_FROM, YARDSTICK
from harness.records.schema import Record
from harness.records.units import significant
from harness.views import table
from harness.views.cell_tables import MORE, Stage, grouped, labels, stages_of, titles
from harness.views.contest_groups import (
    Figure,
    group_title,
    groups,
    mask_of,
    rivals,
    same_but,
    show_peak,
    show_rate,
    show_share,
    show_skipped,
    show_speedup,
    show_time,
    sizes,
    texts_of,
)
from harness.views.roofline import UNITS, roof_of
from harness.views.table import Column, Table

Row = tuple[str, str, Sequence[str]]  # label, unit, one text per N

WIDTH = 80
LONGEST_NAME = 22
LEGEND = f"Timed in turns, in one process: medians, ratios of medians. {MORE}"


def rows_of(env: Record, group: Sequence[Record]) -> list[list[Row]]:
    """The rows of a group's tables: times and rates; speed-ups over the peers; memory and tiles.

    Only a contestant's times have their row where there is no figure in it.
    """
    everyone, names, label = stages_of(group), titles(env), labels(env)
    times: list[Row] = []
    for contestant in everyone:
        times.append((label[contestant], "ms", texts_of(group, contestant, show_time)))
        rates = texts_of(group, contestant, show_rate)
        times += [("", UNITS[group[0]["device"]][0], rates)] if any(rates) else []
    speedups: list[Row] = [
        (f"{ours[0]} over {names[peer]}", "", texts_of(group, ours, show_speedup(peer)))
        for ours in everyone
        for peer in everyone
        if ours[0] < PEERS_FROM <= peer[0] and ours[0] != YARDSTICK
    ]
    memory: list[Row] = [
        (label[contestant], what, texts_of(group, contestant, figure))
        for what, figure in (("peak", show_peak), ("skipped", show_skipped))
        for contestant in everyone
    ]
    told = [[row for row in rows if set(row[2]) != {"-"}] for rows in (speedups, memory)]
    return [rows for rows in (times, *told) if rows]


def rich_tables(
    env: Record, records: Sequence[Record], ceilings: Sequence[Record] = (), width: int = WIDTH
) -> RenderableType:
    """Each group's tables and the reasons of what is missing; the suite's tables; the legend."""
    parts: list[RenderableType] = []
    for group in groups(records):
        parts.append(Text(group_title(group), style="bold"))
        for rows in rows_of(env, group):
            parts += [*layout(rows, [str(n) for n in sizes(group)], width), Text("")]
        lines = [*roof_lines(env, group, ceilings), *reason_lines(group)]
        parts += [*(Text(line, style="dim") for line in lines), *[Text("")] * bool(lines)]
    for made in source_tables(env, records, ceilings):
        parts += [made, Text("")]
    if said := SOURCES.get(suite_of(env)):
        parts += [Text(said), Text("")]
    return Group(*parts, Text(LEGEND, style="dim"))


def layout(rows: Sequence[Row], heads: Sequence[str], width: int) -> list[Table]:
    """One table, or where all N don't fit into `width` columns, several below each other."""
    label = min(LONGEST_NAME, max(len(row[0]) for row in rows))
    unit = max(len(row[1]) for row in rows)
    figure = max(len(text) for _, _, texts in rows for text in [*texts, *heads])
    each = max(1, (width - label - unit - 1) // (figure + 1))
    first = [Column("N", left=True, most=LONGEST_NAME), Column("")]
    parts = [slice(start, start + each) for start in range(0, len(heads), each)]
    return [
        Table(
            [*first, *(Column(head, width=figure) for head in heads[part])],
            [[name, Text(what, style="dim"), *texts[part]] for name, what, texts in rows],
        )
        for part in parts
    ]


def roof_lines(env: Record, group: Sequence[Record], ceilings: Sequence[Record]) -> list[str]:
    """How much of the measured matrix rate the newest stage reaches at each N, where known."""
    ours, matrix = rivals(group)[0], roof_of(group[0], ceilings).matrix
    if ours is None or matrix is None:
        return []
    shares = ", ".join(texts_of(group, ours, show_share(ceilings)))
    rate = f"{significant(matrix)} TFLOP/s"
    return [f"{labels(env)[ours]} reaches {shares} of the measured matrix rate, {rate}"]


def reason_lines(group: Sequence[Record]) -> list[str]:
    """Why there is no figure, one line per reason, with who and at which N."""
    lines = []
    out = [record for record in group if record["status"] != "ok"]
    for same in grouped(out, lambda record: [record["status"], record["reason"]]):
        who = "; ".join(
            f"#{own[0]['stage']} at {', '.join(str(record['nk']) for record in own)}"
            for own in grouped(same, lambda record: record["stage"])
        )
        lines.append(f"{same[0]['status']} {who}: {same[0]['reason']}")
    return lines


def as_csv(env: Record, records: Sequence[Record]) -> str:
    """One CSV table of all records, one column per speed-up, with the machine and its software."""
    machine = {
        "gpu" if env["device"] == "cuda" else "cpu": env["device_name"],
        **{field: env[field] for field in ("driver", "torch", "triton", "python", "date")},
    }
    peers = sorted({peer for record in records for peer in record["speedup"]})
    rows = []
    for record in records:
        ratios = {f"speedup_{peer}": record["speedup"].get(peer) for peer in peers}
        plain = {name: value for name, value in record.items() if name not in ("kind", "speedup")}
        rows.append({**plain, **ratios, **machine})
    return table.as_csv(rows)


# what the sources say of their own, and all that is known of it
SOURCE_001 = "Source 001: an RTX 4070 laptop, fp16, B = 2, H = 4;"
FORWARD_TIME = "1.15-1.35x over SDPA at N >= 4096"
FORWARD_MEMORY = "naive 788 MB against 24 MB at N = 4096"
SOURCES = {
    "001-forward": f"{SOURCE_001} {FORWARD_TIME}.",
    "001-train": f"{SOURCE_001} training up to 1.17x over SDPA at N = 8192, in 13% less memory.",
    "001-memory": f"{SOURCE_001} {FORWARD_MEMORY}; training in 13% less than SDPA.",
    "004": "Source 004: an A100, whose peak is 312 TFLOP/s; standard 3-4 TFLOP/s at every N; its "
    "own about 190 at N = 16384, 61% of the peak, level with SDPA from N = 4096 on.",
}


def suite_of(env: Record) -> str:
    """The suite that a run was of, '' where it was of none."""
    return str(env["arguments"].get("suite") or "")


@dataclass(frozen=True)
class Trio:
    """What the sources' tables compare in a group: stage 3, one of our stages and a peer.

    None stands for who is missing. `records` are the run's, for the group's other directions.
    """

    group: Sequence[Record]
    records: Sequence[Record]
    ceilings: Sequence[Record]
    three: Stage | None
    ours: Stage | None
    peer: Stage | None

    def each(self, figure: Figure) -> list[list[str]]:
        """Stage 3's figure, our stage's and the peer's, one text per N."""
        return [texts_of(self.group, who, figure) for who in (self.three, self.ours, self.peer)]

    def speedups(self) -> list[str]:
        """How many times faster our stage is than the peer, one text per N."""
        ours = self.ours if self.peer else None
        return texts_of(self.group, ours, show_speedup(self.peer or (0, "")))

    def shares(self) -> list[str]:
        """How much of the measured matrix rate our stage reaches, one text per N."""
        return texts_of(self.group, self.ours, show_share(self.ceilings))

    def split(self, who: Stage | None) -> list[list[str]]:
        """Somebody's time forward, backward and for both, one text per N."""
        ways = [same_but(self.records, self.group, way) for way in ("fwd", "bwd", "train")]
        return [texts_of(group, who, show_time, sizes(self.group)) for group in ways]

    def claims(self, said: Callable[[int], str | None]) -> list[str]:
        """What the source says at each N, '-' where that is nothing."""
        return [said(n) or "-" for n in sizes(self.group)]

    def rows(self, *columns: Sequence[str]) -> list[list[str]]:
        """Rows from columns of texts, N first."""
        heads = [str(n) for n in sizes(self.group)]
        return [list(row) for row in zip(heads, *columns, strict=True)]


def trios(records: Sequence[Record], ceilings: Sequence[Record] = ()) -> list[Trio]:
    """The trio of each group: our newest stage that was timed, the first peer that was."""
    found = []
    for group in groups(records):
        three = next((stage for stage in stages_of(group) if stage[0] == YARDSTICK), None)
        found.append(Trio(group, records, ceilings, three, *rivals(group)))
    return found


Made = tuple[str, list[tuple[str, list[str]]]]  # a title; columns: a header, one text per N


def source_tables(
    env: Record, records: Sequence[Record], ceilings: Sequence[Record] = ()
) -> list[Table]:
    """The tables of the run's suite, one row per N, the source's figure in the last column."""
    make = SOURCE_TABLES.get(suite_of(env))
    names, tables = titles(env), []
    for trio in trios(records, ceilings) if make else ():
        rival, own = (names[who] if who else "-" for who in (trio.peer, trio.ours))
        if make and (made := make(trio, rival, own)):
            title, columns = made
            heads = [Column(head, wraps=True) for head in ("N", *(head for head, _ in columns))]
            tables.append(Table(heads, trio.rows(*(texts for _, texts in columns)), title))
    return tables


# A source's tables: of a trio, and the names of its peer (`rival`) and of our stage (`own`).


def forward_table(trio: Trio, rival: str, own: str) -> Made:
    """Source 001's forward table: naive, SDPA, its own; and how many times faster."""
    three, ours, peer = trio.each(show_time)
    return f"forward, {mask_of(trio.group)}", [
        ("#3, ms", three),
        (f"{rival}, ms", peer),
        (f"{own}, ms", ours),
        (f"over {rival}", trio.speedups()),
        ("source over SDPA", trio.claims(lambda n: "1.15-1.35x" if n >= 4096 else None)),
    ]


def train_table(trio: Trio, rival: str, own: str) -> Made | None:
    """Source 001's training table: forward, backward and both, of its own and of SDPA.

    None for a group of another direction: it is a part of its training's table.
    """
    if trio.group[0]["direction"] != "train":
        return None
    heads = (f"{rival}: fwd, ms", "bwd", "both", f"{own}: fwd, ms", "bwd", "both")
    return f"training, {mask_of(trio.group)}", [
        *zip(heads, [*trio.split(trio.peer), *trio.split(trio.ours)], strict=True),
        ("faster", trio.speedups()),
        ("source", trio.claims({8192: "up to 1.17x"}.get)),
    ]


def memory_table(trio: Trio, rival: str, own: str) -> Made:
    """Source 001's memory table: peak memory of naive, SDPA, its own."""
    three, ours, peer = trio.each(show_peak)
    training = trio.group[0]["direction"] == "train"
    said = {8192: "13% less than SDPA"} if training else {4096: "788 MB / 24 MB"}
    title = f"peak memory, {'training' if training else 'forward'}, {mask_of(trio.group)}"
    return title, [("#3", three), (rival, peer), (own, ours), ("source", trio.claims(said.get))]


def rate_table(trio: Trio, rival: str, own: str) -> Made:
    """Source 004's figure as a table: TFLOP/s of standard, SDPA and its own against N."""
    three, ours, peer = trio.each(show_rate)
    said = trio.claims(lambda n: f"3-4 / {'190 (61%)' if n == 16384 else '-'}")
    return f"{UNITS[trio.group[0]['device']][0]}, {mask_of(trio.group)}", [
        ("standard, #3", three),
        (rival, peer),
        (own, ours),
        ("of the matrix rate", trio.shares()),
        ("source: standard / own", said),
    ]


SOURCE_TABLES: dict[str, Callable[[Trio, str, str], Made | None]] = {
    "001-forward": forward_table,
    "001-train": train_table,
    "001-memory": memory_table,
    "004": rate_table,
}
