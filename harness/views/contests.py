"""Tables and CSV of `ladder bench`, from records alone.

Records that differ in contestant, N and batch only are a group: a table each of time and rate, of
speed-ups, of memory and skipped tiles. A suite's tables stand beside what its source says.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from harness.problems.problem import PEERS_FROM, YARDSTICK
from harness.records.units import significant
from harness.views import decode, table
from harness.views.cell_tables import MORE, titles
from harness.views.contest_groups import (
    Contestant,
    Figure,
    Record,
    contestants,
    group_title,
    groups,
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
    yardstick,
)
from harness.views.roofline import UNITS, roof_of
from harness.views.table import Column, Table

Row = tuple[str, str, Sequence[str]]  # label, unit, a text per N
SourceTable = tuple[str, Sequence[str], list[list[str]]]  # title, header, rows of texts

WIDTH = 80
LONGEST_NAME = 22
LEGEND = f"Timed in turns, in one process: medians, ratios of medians. {MORE}"


def time_rows(group: Sequence[Record], names: Mapping[Contestant, str]) -> list[Row]:
    """Two rows per contestant: the time of a call, and the rate."""
    unit = UNITS[group[0]["device"]][0]
    rows: list[Row] = []
    for contestant in contestants(group):
        label = f"{contestant[0]} {names[contestant]}"
        rows.append((label, "ms", texts_of(group, contestant, show_time)))
        rates = texts_of(group, contestant, show_rate)
        if any(rates):
            rows.append(("", unit, rates))
    return rows


def speedup_rows(group: Sequence[Record], names: Mapping[Contestant, str]) -> list[Row]:
    """A row for each stage of ours over each peer; the yardstick has none."""
    rows: list[Row] = []
    for ours in contestants(group):
        for peer in contestants(group):
            if ours[0] >= PEERS_FROM or ours[0] == YARDSTICK or peer[0] < PEERS_FROM:
                continue
            texts = texts_of(group, ours, show_speedup(peer))
            if any(text != "-" for text in texts):
                rows.append((f"{ours[0]} over {names[peer]}", "", texts))
    return rows


def memory_rows(group: Sequence[Record], names: Mapping[Contestant, str]) -> list[Row]:
    """Peak memory above the inputs, and the share of tiles never visited, where there is any."""
    rows: list[Row] = []
    for what, figure in (("peak", show_peak), ("skipped", show_skipped)):
        for contestant in contestants(group):
            texts = texts_of(group, contestant, figure)
            if any(text != "-" for text in texts):
                rows.append((f"{contestant[0]} {names[contestant]}", what, texts))
    return rows


def rich_tables(
    env: Record, records: Sequence[Record], ceilings: Sequence[Record] = (), width: int = WIDTH
) -> RenderableType:
    """Each group's tables and the reasons of what is missing; the suite's tables; the legend."""
    names = titles(env)
    parts: list[RenderableType] = []
    few = [record for record in records if decode.few_rows(record)]
    if few:
        parts += [decode.make_table(few, names, ceilings), *reasons(few), Text("")]
    for group in groups([record for record in records if not decode.few_rows(record)]):
        heads = [str(n) for n in sizes(group)]
        parts.append(Text(group_title(group), style="bold"))
        for make in (time_rows, speedup_rows, memory_rows):
            if rows := make(group, names):
                parts += [*layout(rows, heads, width), Text("")]
        lines = [*(Text(line, style="dim") for line in roof_lines(group, names, ceilings))]
        lines += reasons(group)
        parts += [*lines, *[Text("")] * bool(lines)]
    for title, header, body in source_tables(env, records, ceilings):
        parts += [Table([Column(head, wraps=True) for head in header], body, title), Text("")]
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


def roof_lines(
    group: Sequence[Record], names: Mapping[Contestant, str], ceilings: Sequence[Record]
) -> list[str]:
    """How much of the measured matrix rate the newest stage reaches at each N, where known."""
    ours, matrix = rivals(group)[0], roof_of(group[0], ceilings).matrix
    if ours is None or matrix is None:
        return []
    shares = texts_of(group, ours, lambda record: show_share(record, ceilings))
    return [
        f"{ours[0]} {names[ours]} reaches {', '.join(shares)} of the measured matrix rate, "
        f"{significant(matrix)} TFLOP/s"
    ]


def reasons(group: Sequence[Record]) -> list[Text]:
    """What `reason_lines` says, dimmed."""
    return [Text(line, style="dim") for line in reason_lines(group)]


def reason_lines(group: Sequence[Record]) -> list[str]:
    """Why there is no figure, one line per reason, with who and at which N."""
    found: dict[tuple[str, str], dict[int, list[str]]] = {}
    for record in group:
        if record["status"] != "ok":
            those = found.setdefault((record["status"], record["reason"]), {})
            those.setdefault(record["stage"], []).append(str(record["nk"]))
    lines = []
    for (status, reason), those in found.items():
        who = "; ".join(f"#{s} at {', '.join(dict.fromkeys(ns))}" for s, ns in those.items())
        lines.append(f"{status} {who}: {reason}")
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
    three: Contestant | None
    ours: Contestant | None
    peer: Contestant | None

    def each(self, figure: Figure) -> list[list[str]]:
        """Stage 3's figure, our stage's and the peer's, one text per N."""
        return [texts_of(self.group, who, figure) for who in (self.three, self.ours, self.peer)]

    def speedups(self) -> list[str]:
        """How many times faster our stage is than the peer, one text per N."""
        if self.peer is None:
            return ["-"] * len(sizes(self.group))
        return texts_of(self.group, self.ours, show_speedup(self.peer))

    def shares(self, ceilings: Sequence[Record]) -> list[str]:
        """How much of the measured matrix rate our stage reaches, one text per N."""
        return texts_of(self.group, self.ours, lambda record: show_share(record, ceilings))

    def split(self, who: Contestant | None) -> list[list[str]]:
        """Somebody's time forward, backward and for both, one text per N."""
        return [
            texts_of(same_but(self.records, self.group, way), who, show_time, sizes(self.group))
            for way in ("fwd", "bwd", "train")
        ]

    def rows(self, *columns: Sequence[str]) -> list[list[str]]:
        """Rows from columns of texts, N first."""
        heads = [str(n) for n in sizes(self.group)]
        return [list(row) for row in zip(heads, *columns, strict=True)]


def trios(records: Sequence[Record]) -> list[Trio]:
    """The trio of each group: our newest stage that was timed, the first peer that was."""
    return [Trio(group, records, yardstick(group), *rivals(group)) for group in groups(records)]


def source_tables(
    env: Record, records: Sequence[Record], ceilings: Sequence[Record] = ()
) -> list[SourceTable]:
    """The tables of the run's suite, one row per N, the source's figure in the last column.

    What the source doesn't tell is '-'. None where the run is of no suite.
    """
    make = SOURCE_TABLES.get(suite_of(env))
    made = [make(trio, titles(env), ceilings) for trio in trios(records)] if make else []
    return [table for table in made if table is not None]


def masked(group: Sequence[Record]) -> str:
    return f"d = {group[0]['d']}, {'causal' if group[0]['causal'] else 'no mask'}"


def name_of(contestant: Contestant | None, names: Mapping[Contestant, str]) -> str:
    return names[contestant] if contestant is not None else "-"


def forward_table(
    trio: Trio, names: Mapping[Contestant, str], ceilings: Sequence[Record]
) -> SourceTable:
    """Source 001's forward table: naive, SDPA, its own; and how many times faster."""
    three, ours, peer = trio.each(show_time)
    source = ["1.15-1.35x" if n >= 4096 else "-" for n in sizes(trio.group)]
    rival = name_of(trio.peer, names)
    header = ("N", "#3, ms", f"{rival}, ms", f"{name_of(trio.ours, names)}, ms", f"over {rival}",
              "source over SDPA")  # fmt: skip
    body = trio.rows(three, peer, ours, trio.speedups(), source)
    return f"forward, {masked(trio.group)}", header, body


def train_table(
    trio: Trio, names: Mapping[Contestant, str], ceilings: Sequence[Record]
) -> SourceTable | None:
    """Source 001's training table: forward, backward and both, of its own and of SDPA.

    None for a group of another direction: it is a part of its training's table.
    """
    if trio.group[0]["direction"] != "train":
        return None
    source = ["up to 1.17x" if n == 8192 else "-" for n in sizes(trio.group)]
    rival, own = name_of(trio.peer, names), name_of(trio.ours, names)
    header = ("N", f"{rival}: fwd, ms", "bwd", "both", f"{own}: fwd, ms", "bwd", "both",
              "faster", "source")  # fmt: skip
    split = [*trio.split(trio.peer), *trio.split(trio.ours)]
    return f"training, {masked(trio.group)}", header, trio.rows(*split, trio.speedups(), source)


def memory_table(
    trio: Trio, names: Mapping[Contestant, str], ceilings: Sequence[Record]
) -> SourceTable:
    """Source 001's memory table: peak memory of naive, SDPA, its own."""
    three, ours, peer = trio.each(show_peak)
    training = trio.group[0]["direction"] == "train"
    tells = {8192: "13% less than SDPA"} if training else {4096: "788 MB / 24 MB"}
    source = [tells.get(n, "-") for n in sizes(trio.group)]
    header = ("N", "#3", name_of(trio.peer, names), name_of(trio.ours, names), "source")
    title = f"peak memory, {'training' if training else 'forward'}, {masked(trio.group)}"
    return title, header, trio.rows(three, peer, ours, source)


def rate_table(
    trio: Trio, names: Mapping[Contestant, str], ceilings: Sequence[Record]
) -> SourceTable:
    """Source 004's figure as a table: TFLOP/s of standard, SDPA and its own against N."""
    three, ours, peer = trio.each(show_rate)
    source = [f"3-4 / {'190 (61%)' if n == 16384 else '-'}" for n in sizes(trio.group)]
    header = ("N", "standard, #3", name_of(trio.peer, names), name_of(trio.ours, names),
              "of the matrix rate", "source: standard / own")  # fmt: skip
    body = trio.rows(three, peer, ours, trio.shares(ceilings), source)
    return f"{UNITS[trio.group[0]['device']][0]}, {masked(trio.group)}", header, body


SOURCE_TABLES: dict[
    str, Callable[[Trio, Mapping[Contestant, str], Sequence[Record]], SourceTable | None]
] = {
    "001-forward": forward_table,
    "001-train": train_table,
    "001-memory": memory_table,
    "004": rate_table,
}
