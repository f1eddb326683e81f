"""The tables of `ladder model`, from records alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.records import units
from harness.views import cell_tables

LEGEND = (
    "cosine: of the sentence embedding with SDPA's. max diff, rel diff: of the last hidden state "
    "from SDPA's. ok: as near to the model in float64 as SDPA is. time: one pass of the whole "
    "model as Python drives it, one text, on a CPU one thread; SDPA's in turns with it, in the "
    "same process. "
    "interpreted: Triton without a GPU, no speed, never compared. wrong-by-design: declared "
    "inexact above its N."
)
FULL_WIDTH = 92  # columns that a whole row takes
HEADERS = ("#", "stage", "cosine", "max diff", "rel diff", "time", "SDPA", "vs SDPA", "status")


def ratio(record: Mapping[str, Any]) -> float | None:
    """How many times faster a pass is with the stage than with SDPA; None where none is fair."""
    if not cell_tables.comparable(record) or record["sdpa_time_ms"] is None:
        return None
    return float(record["sdpa_time_ms"] / record["time_ms"])


def row(record: Mapping[str, Any], title: str) -> list[str]:
    """The texts of one row, in the order of HEADERS."""
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


def rich_tables(
    env: Mapping[str, Any], records: Sequence[Mapping[str, Any]], width: int
) -> RenderableType:
    """A table a text, a row a stage, the reasons of what isn't ok below it, the legend at the end.

    Below 92 columns the relative difference gives way.
    """
    titles = cell_tables.titles(env)
    narrow = width < FULL_WIDTH
    shown = [index for index, header in enumerate(HEADERS) if not (narrow and header == "rel diff")]
    parts: list[RenderableType] = []
    for tokens in sorted({record["tokens"] for record in records}):
        group = [record for record in records if record["tokens"] == tokens]
        group.sort(key=lambda record: (record["stage"], record["name"]))
        rows = [row(record, titles[record["stage"], record["name"]]) for record in group]
        first = group[0]
        parts.append(
            Text(f"MiniLM, {tokens} tokens, {first['dtype']}, {first['device']}", style="bold")
        )
        page = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="underline")
        for index in shown:
            header = HEADERS[index]
            longest = max(len(texts[index]) for texts in [list(HEADERS), *rows])
            page.add_column(
                header,
                justify="left" if header in ("stage", "status") else "right",
                no_wrap=True,
                width=min(longest, 15 if narrow else 22) if header == "stage" else longest,
            )
        for record, texts in zip(group, rows, strict=True):
            style = "dim" if record["mode"] == "interpreted" else ""
            styles = [style] * (len(texts) - 1)
            styles.append(cell_tables.STYLES.get(record["status"], "bold red"))
            page.add_row(*(Text(texts[index], style=styles[index]) for index in shown))
        parts += [page, *(Text(line, style="dim") for line in cell_tables.reasons(group)), Text("")]
    parts.append(Text(LEGEND, style="dim"))
    return Group(*parts)
