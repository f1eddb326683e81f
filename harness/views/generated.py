"""What `ladder generate` shows, from records alone: a table, and generate.png."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.records.units import show_bytes, significant
from harness.views import cell_tables
from harness.views.look import LIGHT, in_look, new_figure
from harness.views.table import Column, Table

Record = Mapping[str, Any]
WAYS = (("", "no cache"), ("cached_", "cache"))
NOTE = "Bytes: counted, the weights once and q, k, v, o in each layer. Tokens: the likeliest each."


def make_table(env: Record, records: Sequence[Record]) -> Table:
    """A row per context; no speed where the stage was interpreted."""
    first = records[0]
    timed = all(record["cached_tokens_per_s"] for record in records)
    columns = [Column("context")]
    columns += [Column(f"tokens/s, {what}") for _, what in WAYS if timed]
    columns += [Column(f"bytes/token, {what}") for _, what in WAYS] + [Column("same tokens")]
    rows = []
    for record in records:
        speeds = [significant(record[f"{way}tokens_per_s"]) for way, _ in WAYS if timed]
        moved = [show_bytes(record[f"{way}bytes_per_token"]) for way, _ in WAYS]
        rows.append([str(record["context"]), *speeds, *moved, "yes" if record["same"] else "NO"])
    cache = f"pages of {first['page_size']}" if first["page_size"] else "contiguous"
    title = cell_tables.titles(env)[first["stage"], first["name"]]
    title = f"{first['stage']} {title}, {first['device']}, {first['mode']}; cache: {cache}"
    return Table(columns, rows, title, [NOTE], gap=2)


def plot(records: Sequence[Record], path: Path) -> None:
    """Speed, where there is one, and bytes against the context; may raise ImportError, OSError."""
    figures = [("tokens_per_s", "tokens per second"), ("bytes_per_token", "bytes per token")]
    figures = [each for each in figures if all(r[each[0]] for r in records)]
    with in_look(LIGHT):
        figure = new_figure(5.0 * len(figures), 4)
        for axis, (name, label) in zip(figure.subplots(1, len(figures), squeeze=False)[0], figures):
            for (way, what), style in zip(WAYS, ("o--", "s-"), strict=True):
                lengths = [record["context"] for record in records]
                axis.plot(lengths, [record[way + name] for record in records], style, label=what)
            axis.set(xlabel="context (tokens)", ylabel=label, xscale="log", yscale="log")
            axis.grid(True)
            axis.legend()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
