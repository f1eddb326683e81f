"""A table of text, in a terminal, in Markdown and in HTML; and records as CSV and JSON."""

import csv
import io
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from harness.records.schema import Record

STYLES = {"ok": "green", "wrong-by-design": "yellow", "not judged": "yellow", "skipped": "dim"}
Cell = str | Text  # text, with or without a style

# a number with its unit; a narrow cell must not break between the two
UNIT = re.compile(r"(?<=\d) (?=(?:[num]?s|[kKMGT]?B(?:/s)?|[kKMGT]?FLOP(?:/s)?|%)(?![\w/]))")
NO_BREAK = "\N{NO-BREAK SPACE}"

WIDTH, LEAST = 100, 40  # columns of a page; a narrower terminal breaks the lines itself
NARROW = 80  # columns of a text
# alignment in HTML, for Jupyter, too, whose style sheet would align text right
LEFT = 'align="left" style="text-align:left"'
RIGHT = 'align="right" style="text-align:right"'


class Page(Console):
    """A console that cuts nothing: rows wider than the terminal continue on the next line."""

    def print(self, *objects: Any, **how: Any) -> None:
        """Console.print without cropping."""
        super().print(*objects, **{"crop": False, **how})


def make_page() -> Console:
    """A console on standard output, 40 to 100 columns wide, 100 where it is no terminal."""
    console = Page()
    console.width = max(LEAST, min(WIDTH, console.width)) if console.is_terminal else WIDTH
    return console


class Shown:
    """What rich can print, as text."""

    def text(self, width: int = NARROW) -> str:
        """What a terminal of `width` columns shows; no colours, no blanks at the ends of lines."""
        out = io.StringIO()
        # in a notebook rich would show it at once, as an output of its own, and write nothing
        Page(file=out, width=width, color_system=None, force_jupyter=False).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


@dataclass(frozen=True)
class Column:
    """A column: its header, alignment and width.

    Texts longer than `most` are cut, on a narrow page those longer than `least`; a column that
    `gives_way` is left out where that isn't enough; one that `wraps` has texts of several lines,
    also in place of being cut.
    Others are as wide as their widest text, or `width`.
    """

    header: str
    left: bool = False
    least: int | None = None
    most: int | None = None
    width: int = 0
    gives_way: bool = False
    wraps: bool = False


@dataclass(frozen=True)
class Table(Shown):
    """Rows of text under `columns`, with a title above and notes below.

    Where not all columns fit and it `repeats` the first few, the others follow in further tables.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    notes: Sequence[str] = ()
    gap: int = 1  # blanks between two columns
    repeats: int = 0

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield from laid_out([self], options.max_width)

    @property
    def lines(self) -> list[Sequence[Cell]]:
        """The headers, then the rows."""
        return [[column.header for column in self.columns], *self.rows]

    def markdown(self) -> str:
        """The title, the rows, and the notes, one paragraph each."""
        title = [f"**{self.title}**", ""] if self.title else []
        notes = [line for note in self.notes for line in ("", note.strip())]
        marks = "".join("---|" if column.left else "---:|" for column in self.columns)
        header, *rows = map(markdown_row, self.lines)
        return "\n".join([*title, header, f"|{marks}", *rows, *notes])

    def html(self) -> str:
        """The title, a plain <table>, and the notes."""

        def line(tag: str, row: Sequence[Cell]) -> str:
            sides = (LEFT if column.left else RIGHT for column in self.columns)
            cells = (f"<{tag} {side}>{escape(str(x))}</{tag}>" for side, x in zip(sides, row))
            return f"<tr>{''.join(cells)}</tr>"

        title = [f"<p><b>{escape(self.title)}</b></p>"] if self.title else []
        notes = [f"<p>{escape(note)}</p>" for note in self.notes]
        rows = [line("td" if i else "th", row) for i, row in enumerate(self.lines)]
        return "\n".join([*title, "<table>", *rows, "</table>", *notes])

    def parts(self, page: int) -> list["Table"]:
        """The table, or where it `repeats` columns as many as a page of that width asks for."""
        widths = [max(map(len, texts)) for texts in zip(*self.lines, strict=True)]
        first, rest = widths[: self.repeats], widths[self.repeats :]
        room = page - sum(first) - self.gap * (len(first) - 1)
        each = max(1, room // (max(rest, default=0) + self.gap))
        if not first or len(rest) <= each:
            return [self]
        columns = [*self.columns[: self.repeats]]
        columns += [replace(column, width=max(rest)) for column in self.columns[self.repeats :]]
        found = []
        for start in range(self.repeats, len(widths), each):
            chosen = [*range(self.repeats), *range(start, min(start + each, len(widths)))]
            rows = [[row[i] for i in chosen] for row in self.rows]
            found.append(Table([columns[i] for i in chosen], rows, gap=self.gap))
        found[0] = replace(found[0], title=self.title)
        found[-1] = replace(found[-1], notes=self.notes)
        return found

    def shown(self, widths: Mapping[int, int]) -> Iterator[RenderableType]:
        """The table for rich, with the column widths from `layout`."""
        if self.title:
            yield Text(self.title, style="bold")
        free = {i for i in widths if self.columns[i].wraps and self.columns[i].least is None}
        needed = sum(widths.values()) + self.gap * (len(widths) - 1)
        shown = RichTable(
            box=None, padding=(0, self.gap, 0, 0), pad_edge=False, header_style="underline",
            width=None if free else max(1, needed),  # else rich would cut numbers on a narrow page
        )  # fmt: skip
        for index, width in widths.items():
            column = self.columns[index]
            shown.add_column(
                Text(column.header),  # not markup
                justify="left" if column.left else "right",
                no_wrap=not column.wraps,
                width=None if index in free else width,
                overflow="fold" if column.wraps else "ellipsis",
            )
        for row in self.rows:
            # text from records must not be read as markup
            shown.add_row(*(Text(x) if isinstance(x := row[i], str) else x for i in widths))
        yield shown
        yield from (Text(note, style="dim") for note in self.notes)


@dataclass(frozen=True)
class Tables(Shown):
    """Tables below each other with one legend; those with equally many columns share widths."""

    tables: Sequence[Table]
    legend: str = ""

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield from laid_out(self.tables, options.max_width, [Text("")])
        if self.legend:
            yield Text(self.legend, style="dim")

    def markdown(self) -> str:
        """The tables and the legend in Markdown."""
        made = (table.markdown() for table in self.tables)
        return "\n\n".join(filter(None, [*made, self.legend]))

    def html(self) -> str:
        """The tables and the legend in HTML."""
        legend = [f"<p>{escape(self.legend)}</p>"] if self.legend else []
        return "\n".join([*(table.html() for table in self.tables), *legend])


def laid_out(
    tables: Sequence[Table], page: int, after: Sequence[Text] = ()
) -> Iterator[RenderableType]:
    """Tables for rich, `after` each of them, and what the page lacks or cuts."""
    parts, widths = [], []
    for table in tables:
        own = table.parts(page)
        beside = own if table.repeats else [other for other in tables if not other.repeats]
        for part in own:
            alike = [other for other in beside if len(other.columns) == len(part.columns)]
            parts.append(part)
            widths.append(layout(alike, page))
            yield from part.shown(widths[-1])
            yield from after
    yield from unshown(parts, widths, page)


def layout(tables: Sequence[Table], page: int) -> dict[int, int]:
    """The width of each column that fits on a page of `page` characters, for all `tables`."""
    columns, gap = tables[0].columns, tables[0].gap
    widths = {}
    for i, column in enumerate(columns):
        widest = max(len(row[i]) for table in tables for row in table.lines)
        widths[i] = max(column.width, min(widest, column.most or widest))
    least = {i: min(widths[i], columns[i].least or widths[i]) for i in widths}

    def excess() -> int:
        return sum(width + gap for width in widths.values()) - gap - page

    for i in [i for i, column in enumerate(columns) if column.gives_way]:
        if excess() > sum(widths[j] - least[j] for j in widths if j != i):
            del widths[i]
    for i in widths:
        widths[i] = max(least[i], widths[i] - max(0, excess()))
    return widths


def unshown(
    tables: Sequence[Table], widths: Sequence[Mapping[int, int]], page: int
) -> Iterator[Text]:
    """A line that says which columns of `tables`, laid out in `widths`, the page lacks or cuts.

    None where the page is wide enough.
    """
    found: dict[str, dict[str, None]] = {"left out": {}, "cut": {}}
    for table, shown in zip(tables, widths):
        for i, column in enumerate(table.columns):
            widest = max((len(row[i]) for row in table.rows), default=0)
            if i not in shown:
                found["left out"][column.header] = None
            elif not column.wraps and shown[i] < min(widest, column.most or widest):
                found["cut"][column.header] = None
    if said := [f"{how}: {', '.join(names)}" for how, names in found.items() if names]:
        text = f"To fit {page} columns, {'; '.join(said)}. A wider window shows all."
        yield Text(text, style="dim")


def verdict_row(texts: Sequence[str], dim: Collection[int] = ()) -> list[Cell]:
    """A row that ends with a coloured status; the columns in `dim` are faint."""
    faint = [Text(text, "dim" if i in dim else "") for i, text in enumerate(texts[:-1])]
    return [*faint, Text(texts[-1], STYLES.get(texts[-1], "bold red"))]


def markdown_row(texts: Iterable[object]) -> str:
    """A row of a Markdown table, with no line break between a number and its unit."""
    cells = (UNIT.sub(NO_BREAK, str(text)).replace("|", r"\|") for text in texts)
    return f"| {' | '.join(cells)} |"


def as_csv(records: Sequence[Record]) -> str:
    """Records as CSV with a header line; lists and objects become JSON. '' for no records."""
    out = io.StringIO()
    if records:
        writer = csv.DictWriter(out, fieldnames=list(records[0]), lineterminator="\n")
        writer.writeheader()
        for record in records:
            nested = {k: json.dumps(v) for k, v in record.items() if isinstance(v, (list, dict))}
            writer.writerow(record | nested)
    return out.getvalue()


def as_json(records: Sequence[Record]) -> str:
    """The records as a list in JSON."""
    return json.dumps(records, indent=1) + "\n"
