"""Tables and CSV of `ladder bench`, made from records alone.

Each group of records has a table of time and rate, one of speed-ups, one of memory and skipped
tiles. A suite also has tables with its source's own figures.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from harness.problems.problem import PEERS_FROM
from harness.records.schema import DIRECTIONS, Record
from harness.records.units import significant
from harness.views import contest_groups as bench
from harness.views import table
from harness.views.cell_tables import CLOSE, MORE, THREE, Stage, grouped, labels, stages_of, titles
from harness.views.roofline import UNITS, roof_of
from harness.views.table import Column, Table

Row = tuple[str, str, Sequence[str]]  # label, unit, one text per N

WIDTH = 80
LONGEST_NAME = 22
LEGEND = (
    f"In turns: medians; of ratios, too, with quartiles from {CLOSE[0]}x to {CLOSE[1]}x. {MORE}"
)
REPLAYED = "Each call replayed as a CUDA graph. "


def rows_of(env: Record, group: Sequence[Record]) -> list[list[Row]]:
    """The rows of a group's tables: times and rates; speed-ups over the peers; memory and the rest.

    Rows without any number are left out, except those of times.
    """
    everyone, names, label = stages_of(group), titles(env), labels(env)
    times: list[Row] = []
    for contestant in everyone:
        times.append((label[contestant], "ms", bench.texts_of(group, contestant, "time")))
        rates = bench.texts_of(group, contestant, "rate")
        times += [("", UNITS[group[0]["device"]][0], rates)] if any(rates) else []
    speedups: list[Row] = [
        (f"{ours[0]} over {names[peer]}", "", bench.texts_of(group, ours, "speedup", peer))
        for ours in everyone
        for peer in everyone
        if ours[0] < PEERS_FROM <= peer[0] and ours != THREE
    ]
    memory: list[Row] = [
        (label[contestant], what, bench.texts_of(group, contestant, what))
        for what in ("peak", "launch", "skipped")
        for contestant in everyone
    ]
    others = [[row for row in rows if set(row[2]) != {"-"}] for rows in (speedups, memory)]
    return [rows for rows in (times, *others) if rows]


def rich_tables(
    env: Record, records: Sequence[Record], ceilings: Sequence[Record] = (), width: int = WIDTH
) -> RenderableType:
    """All groups' tables with the reasons of missing values; the suite's tables; the legend."""
    parts: list[RenderableType] = []
    if few := [record for record in records if bench.few_rows(record)]:
        parts += [bench.decode_table(env, few, ceilings), *dim(reason_lines(few)), Text("")]
    for group in bench.groups(records):
        parts.append(Text(bench.group_title(group), style="bold"))
        for rows in rows_of(env, group):
            parts += [*layout(rows, [str(n) for n in bench.sizes(group)], width), Text("")]
        lines = [*roof_lines(env, group, ceilings), *reason_lines(group)]
        parts += [*dim(lines), *[Text("")] * bool(lines)]
    for made in source_tables(env, records, ceilings):
        parts += [made, Text("")]
    if said := SOURCES.get(suite_of(env)):
        parts += [Text(said), Text("")]
    replayed = REPLAYED if env["arguments"].get("graph") else ""
    return Group(*parts, Text(replayed + LEGEND, style="dim"))


def layout(rows: Sequence[Row], heads: Sequence[str], width: int) -> list[Table]:
    """Lay rows out as one table, or as several where not all N fit into `width` columns."""
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
    """A line with the newest stage's share of the measured matrix rate at each N, where known."""
    ours, matrix = bench.rivals(group)[0], roof_of(group[0], ceilings).matrix
    if ours is None or matrix is None:
        return []
    shares = ", ".join(bench.texts_of(group, ours, "share", ceilings=ceilings))
    rate = f"{significant(matrix)} TFLOP/s"
    return [f"{labels(env)[ours]} reaches {shares} of the measured matrix rate, {rate}"]


def dim(lines: Sequence[str]) -> list[Text]:
    """Dimmed lines."""
    return [Text(line, style="dim") for line in lines]


def reason_lines(group: Sequence[Record]) -> list[str]:
    """Why values are missing: one line per reason, with the stages and N."""
    lines = []
    out = [record for record in group if record["status"] != "ok"]
    for same in grouped(out, lambda record: [record["status"], record["reason"]]):
        who = "; ".join(
            f"#{own[0]['stage']} at {', '.join(dict.fromkeys(str(record['nk']) for record in own))}"
            for own in grouped(same, lambda record: record["stage"])
        )
        lines.append(f"{same[0]['status']} {who}: {same[0]['reason']}")
    return lines


def as_csv(env: Record, records: Sequence[Record]) -> str:
    """All records as one CSV table, one column per speed-up, with the machine and its software."""
    machine = {
        "gpu" if env["device"] == "cuda" else "cpu": env["device_name"],
        **{field: env[field] for field in ("driver", "torch", "triton", "python", "date")},
        **(env.get("versions") or {}),
    }
    peers = sorted({peer for record in records for peer in record["speedup"]})
    rows = []
    for record in records:
        ratios = {f"speedup_{peer}": record["speedup"].get(peer) for peer in peers}
        plain = {name: value for name, value in record.items() if name not in ("kind", "speedup")}
        rows.append({**plain, **ratios, **machine})
    return table.as_csv(rows)


# the sources' own results and machines, as far as they are known
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
    """The suite of a run, '' where it has none."""
    return str(env["arguments"].get("suite") or "")


@dataclass(frozen=True)
class Trio:
    """The three that a source's table compares in a group: stage 3, one of our stages, a peer.

    A missing one is None. `records` are all of the run, for the group's other directions.
    """

    group: Sequence[Record]
    records: Sequence[Record]
    ceilings: Sequence[Record]
    three: Stage | None
    ours: Stage | None
    peer: Stage | None

    def texts(self, who: str, what: str) -> list[str]:
        """The values of `who`, which is 'three', 'ours' or 'peer': one `bench.show` per N.

        'speedup' is over the peer; 'fwd', 'bwd' and 'train' are the times of these directions.
        """
        stage, group, ns = getattr(self, who), self.group, bench.sizes(self.group)
        if what in DIRECTIONS:
            group, what = bench.same_but(self.records, group, what), "time"
        return bench.texts_of(group, stage, what, self.peer, self.ceilings, ns)

    def rows(self, *columns: str) -> list[list[str]]:
        """One row per N, with N first; each of `columns` names a stage and a value: 'ours time'."""
        heads = [str(n) for n in bench.sizes(self.group)]
        texts = [self.texts(*column.split()) for column in columns]
        return [list(row) for row in zip(heads, *texts, strict=True)]


def trios(records: Sequence[Record], ceilings: Sequence[Record] = ()) -> list[Trio]:
    """The trio of each group: stage 3, our newest stage that was timed, the first timed peer."""
    found = []
    for group in bench.groups(records):
        three = THREE if THREE in stages_of(group) else None
        found.append(Trio(group, records, ceilings, three, *bench.rivals(group)))
    return found


@dataclass(frozen=True)
class SourceTable:
    """One of a source's tables, made from our records.

    `columns`: a header, and the stage and value below it (`Trio.rows`). The last column has what
    the source reports at an N, for training or a forward pass; '-' where it reports nothing.
    """

    title: str
    columns: Sequence[tuple[str, str]]
    source: str
    says: Callable[[int, bool], str | None]


SOURCE_TABLES = {
    "001-forward": SourceTable(
        "forward, {mask}",
        [("#3, ms", "three time"), ("{peer}, ms", "peer time"), ("{ours}, ms", "ours time"),
         ("over {peer}", "ours speedup")],
        "source over SDPA",
        lambda n, _: "1.15-1.35x" if n >= 4096 else None,
    ),
    "001-train": SourceTable(
        "training, {mask}",
        [("{peer}: fwd, ms", "peer fwd"), ("bwd", "peer bwd"), ("both", "peer train"),
         ("{ours}: fwd, ms", "ours fwd"), ("bwd", "ours bwd"), ("both", "ours train"),
         ("faster", "ours speedup")],
        "source",
        lambda n, _: "up to 1.17x" if n == 8192 else None,
    ),
    "001-memory": SourceTable(
        "peak memory, {direction}, {mask}",
        [("#3", "three peak"), ("{peer}", "peer peak"), ("{ours}", "ours peak")],
        "source",
        lambda n, training: {
            (8192, True): "13% less than SDPA", (4096, False): "788 MB / 24 MB",
        }.get((n, training)),
    ),
    "004": SourceTable(
        "{unit}, {mask}",
        [("standard, #3", "three rate"), ("{peer}", "peer rate"), ("{ours}", "ours rate"),
         ("of the matrix rate", "ours share")],
        "source: standard / own",
        lambda n, _: f"3-4 / {'190 (61%)' if n == 16384 else '-'}",
    ),
}  # fmt: skip


def source_tables(
    env: Record, records: Sequence[Record], ceilings: Sequence[Record] = ()
) -> list[Table]:
    """The tables of the run's suite, one row per N; none for a run without a suite."""
    made, suite, names = [], suite_of(env), titles(env)
    for trio in trios(records, ceilings) if suite in SOURCE_TABLES else ():
        first, table = trio.group[0], SOURCE_TABLES[suite]
        training = first["direction"] == "train"
        if suite == "001-train" and not training:
            continue  # its times are columns of the table of training
        words = {
            "peer": names[trio.peer] if trio.peer else "-",
            "ours": names[trio.ours] if trio.ours else "-",
            "mask": bench.mask_of(trio.group),
            "direction": "training" if training else "forward",
            "unit": UNITS[first["device"]][0],
        }
        headers = ["N", *(header.format(**words) for header, _ in table.columns), table.source]
        rows = trio.rows(*(column for _, column in table.columns))
        body = [[*row, table.says(int(row[0]), training) or "-"] for row in rows]
        columns = [Column(header, wraps=True) for header in headers]
        made.append(Table(columns, body, table.title.format(**words)))
    return made
