"""The tables of `ladder model`, from records alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from harness.records import units
from harness.views import cell_tables
from harness.views.table import Column, Table, Tables

LEGEND = f"Embedding and last hidden state against SDPA's; vs SDPA: in turns. {cell_tables.MORE}"
COLUMNS = (
    Column("#"), Column("stage", left=True, least=15, most=22), Column("cosine"),
    Column("max diff"), Column("rel diff", gives_way=True), Column("time"), Column("SDPA"),
    Column("vs SDPA"), Column("status", left=True),
)  # fmt: skip


def ratio(record: Mapping[str, Any]) -> float | None:
    """How many times faster a pass is with the stage than with SDPA; None where none is fair."""
    if not cell_tables.comparable(record) or record["sdpa_time_ms"] is None:
        return None
    return float(record["sdpa_time_ms"] / record["time_ms"])


def row(record: Mapping[str, Any], title: str) -> list[str]:
    """The texts of one row, in the order of COLUMNS."""
    interpreted = record["mode"] == "interpreted" and record["time_ms"] is not None
    return [
        str(record["stage"]),
        title,
        "-" if record["cosine"] is None else f"{record['cosine']:.6f}",
        cell_tables.show_error(record["max_hidden_diff"]),
        cell_tables.show_error(record["rel_hidden_diff"]),
        units.show_time(record["time_ms"]),
        units.show_time(record["sdpa_time_ms"]),
        "interpreted" if interpreted else cell_tables.show_ratio(ratio(record), paired=True),
        record["status"],
    ]


def tables(env: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Tables:
    """One table per text, one row per stage, the reasons of what isn't ok below it."""
    titles = cell_tables.titles(env)
    made = []
    for tokens in sorted({record["tokens"] for record in records}):
        group = [record for record in records if record["tokens"] == tokens]
        group.sort(key=lambda record: (record["stage"], record["name"]))
        rows = []
        for record in group:
            texts = row(record, titles[record["stage"], record["name"]])
            dim = "dim" if record["mode"] == "interpreted" else ""
            styles = [dim] * (len(texts) - 1)
            styles.append(cell_tables.STYLES.get(record["status"], "bold red"))
            rows.append([Text(*styled) for styled in zip(texts, styles, strict=True)])
        title = f"MiniLM, {tokens} tokens, {group[0]['dtype']}, {group[0]['device']}"
        made.append(Table(COLUMNS, rows, title, cell_tables.reasons(group)))
    return Tables(made, LEGEND)
