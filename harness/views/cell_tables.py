"""Tables from records alone: one a problem, a row a stage."""

import csv
import io
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.problems.problem import PEERS_FROM, YARDSTICK
from harness.records.schema import PROBLEM
from harness.records.units import show_bytes, show_time, significant

Record = Mapping[str, Any]

FORMATS = ("rich", "markdown", "csv", "json")
WIDTH = 100
SHORTEST_TITLE, LONGEST_TITLE = 12, 24  # columns of a stage's title
SMALL_PEAK = 1 << 20  # bytes below which a process's resident set tells nothing

LEGEND = (
    "ok: exact by the float64 rule. wrong: misses it. wrong-by-design: declared inexact above its "
    "N. skipped, crashed, timeout, out-of-memory: no figure. interpreted: Triton without a GPU, "
    "no speed, never compared. ~: ratio of medians from one process per cell. Without ~: paired, "
    "all in one process, in turns; in brackets the quartiles of the rounds' ratios, and the times "
    "are of these rounds. Errors are against stage 3."
)

# what else is to be known of a table that is no forward pass's
LEGENDS = {
    "fwd": "",
    "bwd": " bwd: dq, dk, dv from dO, the forward pass done before; its peak is above what that "
    "pass holds, its errors are the largest among the three.",
    "train": " train: a call is o, then dq, dk, dv from dO; errors are the largest among the four.",
}

HEADERS = ("#", "stage", "time", "vs before", "vs #3", "peak", "max err", "rel err", "status")
STAGE_FILE, TIME, REL_ERR = (HEADERS.index(header) for header in ("stage", "time", "rel err"))
TIMES = {"fwd": "time", "bwd": "bwd time", "train": "train time"}


def by_problem(cells: Sequence[Record]) -> list[list[Record]]:
    """The cells grouped by problem in the order of their first coming, stages by number within."""
    groups: dict[str, list[Record]] = {}
    for cell in cells:
        groups.setdefault(json.dumps([cell[field] for field in PROBLEM]), []).append(cell)
    return [
        sorted(group, key=lambda cell: (cell["stage"], cell["name"])) for group in groups.values()
    ]


def problem_title(cell: Record) -> str:
    """What a problem is, in a line; what is as usual isn't said."""
    n = f"N = {cell['nk']}"
    if cell["nq"] != cell["nk"]:
        n = f"Nq = {cell['nq']}, Nk = {cell['nk']}"
    parts = [n, f"d = {cell['d']}"]
    if (cell["b"], cell["h"]) != (1, 1):
        parts.append(f"b = {cell['b']}, h = {cell['h']}")
    if cell["hk"] != cell["h"]:
        parts.append(f"hk = {cell['hk']}")
    parts.append(cell["dtype"])
    if cell["precision"] == "tf32":
        parts.append("tf32")
    parts.append({"real": "real input"}.get(cell["inputs"], f"{cell['inputs']} input"))
    if cell["causal"]:
        parts.append("causal")
    if cell["seqlens_k"] is not None:
        parts.append("padded")
    if cell["direction"] != "fwd":
        parts.append(cell["direction"])
    parts.append(cell["device"])
    return ", ".join(parts)


def key_lengths(cell: Record) -> list[str]:
    """A line with the valid keys of each batch entry, where the problem is padded."""
    if cell["seqlens_k"] is None:
        return []
    return [f"  padded: {', '.join(map(str, cell['seqlens_k']))} valid keys"]


def comparable(cell: Record) -> bool:
    """Whether a cell's time may stand in a ratio: right, and not interpreted."""
    return cell["status"] == "ok" and cell["mode"] != "interpreted" and cell["time_ms"] is not None


def rivals(group: Sequence[Record], cell: Record) -> tuple[Record | None, Record | None]:
    """Whom `cell` is held against: the stage before it, and stage 3.

    The stage before is the next lower one of the ladder whose time may be compared. None where
    there is nothing to compare.
    """
    if not comparable(cell):
        return None, None
    others = [
        other
        for other in group
        if comparable(other) and other["paired"] == cell["paired"] and other is not cell
    ]
    lower = [other for other in others if other["stage"] < cell["stage"] < PEERS_FROM]
    stage3 = [other for other in others if other["stage"] == YARDSTICK]
    return lower[-1] if lower else None, stage3[0] if stage3 else None


def ratios(group: Sequence[Record], cell: Record) -> tuple[float | None, float | None]:
    """How many times faster `cell` is than the stage before it, and than stage 3 (`rivals`)."""
    before, stage3 = rivals(group, cell)
    return times_faster(before, cell), times_faster(stage3, cell)


def times_faster(before: Record | None, after: Record) -> float | None:
    """The median of `before` over that of `after`; None where there is no `before`."""
    return None if before is None else float(before["time_ms"] / after["time_ms"])


def spread(before: Record | None, after: Record) -> tuple[float, float] | None:
    """The quartiles of how many times faster `after` is, round by round.

    None where the two were not timed in the same rounds, or in fewer than two, or by a version that
    kept no rounds.
    """
    slow, fast = ((cell or {}).get("rounds_ms") or () for cell in (before, after))
    if len(slow) != len(fast) or len(slow) < 2:
        return None
    of_rounds = [x / y for x, y in zip(slow, fast, strict=True)]
    first, _, third = statistics.quantiles(of_rounds, n=4, method="inclusive")
    return first, third


def show_step(before: Record, after: Record) -> str:
    """How many times faster `after` is, timed in turns with `before`, with its spread."""
    return show_ratio(times_faster(before, after), True, spread(before, after))


def rows_of(group: Sequence[Record]) -> list[Record]:
    """The cells of a problem that have a row: one per stage, unpaired where there are both."""
    rows = {(cell["stage"], cell["name"]): cell for cell in group if cell["paired"]}
    rows |= {(cell["stage"], cell["name"]): cell for cell in group if not cell["paired"]}
    return [rows[stage] for stage in sorted(rows)]


def in_turns(group: Sequence[Record], cell: Record) -> Record | None:
    """The paired cell of the same stage, where it was measured."""
    for other in group:
        same = (other["stage"], other["name"]) == (cell["stage"], cell["name"])
        if same and other["paired"] and comparable(other):
            return other
    return None


def show_ratio(ratio: float | None, paired: bool, spread: tuple[float, float] | None = None) -> str:
    """A ratio: of paired medians 12.3x (12.1-12.5), three digits; of unpaired ones ~12x, two."""
    if ratio is None:
        return "-"
    if not paired:
        return f"~{significant(ratio, 2)}x"
    quartiles = "" if spread is None else f" ({'-'.join(map(significant, spread))})"
    return f"{significant(ratio)}x{quartiles}"


def show_peak(cell: Record) -> str:
    """The peak; an honest '<1 MB' where the process's resident set can't tell more."""
    peak = cell["peak_bytes"]
    if peak is None:
        return "-"
    if cell["memory_meter"] == "process-rss" and peak < SMALL_PEAK:
        return "<1 MB"
    return show_bytes(peak)


def show_error(error: float | None) -> str:
    """An error, two digits; 0 is said as it is."""
    return "-" if error is None else "0" if error == 0 else f"{error:.2g}"


def titles(env: Record) -> dict[tuple[int, str], str]:
    """(stage, name) -> title, as the run's env line keeps them."""
    return {(stage["stage"], stage["name"]): stage["title"] for stage in env["rungs"]}


def row(group: Sequence[Record], cell: Record, title: str) -> list[str]:
    """The texts of one row, in the order of HEADERS."""
    turn = in_turns(group, cell)
    timed = turn or cell  # a reader may divide two times, and finds the ratio
    before, stage3 = rivals(group, timed)
    interpreted = cell["mode"] == "interpreted" and cell["time_ms"] is not None
    step = show_ratio(times_faster(before, timed), turn is not None, spread(before, timed))
    return [
        str(cell["stage"]),
        title,
        show_time(timed["time_ms"]),
        "interpreted" if interpreted else step,
        show_ratio(times_faster(stage3, timed), turn is not None),
        show_peak(cell),
        show_error(cell["err_stage3_max"]),
        show_error(cell["err_stage3_rel"]),
        cell["status"],
    ]


def headers(cell: Record) -> list[str]:
    """HEADERS, the time's saying of what: of `cell`'s direction."""
    shown = list(HEADERS)
    shown[TIME] = TIMES[cell["direction"]]
    return shown


def legend(cells: Sequence[Record]) -> str:
    """LEGEND, and what it takes to read the directions that there are."""
    found = {cell["direction"] for cell in cells}
    return LEGEND + "".join(text for direction, text in LEGENDS.items() if direction in found)


STYLES = {"ok": "green", "wrong-by-design": "yellow", "skipped": "dim"}


def rich_tables(env: Record, cells: Sequence[Record], width: int) -> RenderableType:
    """A rich table a problem, the reasons of what isn't ok below it, the legend at the end.

    No figure is ever cut: what is too wide for `width` columns costs the stages' titles their ends,
    then the column of relative errors.
    """
    names = titles(env)
    groups = [rows_of(group) for group in by_problem(cells)]
    # ratios are among all cells of a problem, paired ones too, which have no row of their own
    texts_of = [
        [row(group, cell, names[cell["stage"], cell["name"]]) for cell in chosen]
        for group, chosen in zip(by_problem(cells), groups, strict=True)
    ]
    lines = [headers(group[0]) for group in groups]
    shown, widths = layout([*lines, *(texts for rows in texts_of for texts in rows)], width)
    parts: list[RenderableType] = []
    for group, rows in zip(groups, texts_of, strict=True):
        parts.append(Text(problem_title(group[0]), style="bold"))
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="underline")
        for index in shown:
            left = HEADERS[index] in ("stage", "status")
            table.add_column(
                headers(group[0])[index],
                justify="left" if left else "right",
                no_wrap=True,
                width=widths[index],
            )
        for cell, texts in zip(group, rows, strict=True):
            styles = [""] * (len(texts) - 1) + [STYLES.get(cell["status"], "bold red")]
            if cell["mode"] == "interpreted":  # its time says nothing, its error is the lesson
                styles[TIME] = styles[TIME + 1] = "dim"
            table.add_row(*(Text(texts[index], style=styles[index]) for index in shown))
        notes = [*key_lengths(group[0]), *reasons(group)]
        parts += [table, *(Text(line, style="dim") for line in notes), Text("")]
    parts.append(Text(legend(cells), style="dim"))
    return Group(*parts)


def layout(rows: Sequence[Sequence[str]], width: int) -> tuple[list[int], list[int]]:
    """Which columns are shown, and the width of each, the same for all tables of a run.

    `rows`: the texts of every row, headers' too.
    """
    widths = [max((len(texts[i]) for texts in rows), default=0) for i in range(len(HEADERS))]
    shown = list(range(len(HEADERS)))

    def excess() -> int:
        return sum(widths[i] + 1 for i in shown) - 1 - width

    widths[STAGE_FILE] = min(LONGEST_TITLE, widths[STAGE_FILE])
    if excess() > widths[STAGE_FILE] - SHORTEST_TITLE:
        shown.remove(REL_ERR)
    widths[STAGE_FILE] = max(
        min(SHORTEST_TITLE, widths[STAGE_FILE]), widths[STAGE_FILE] - max(0, excess())
    )
    return shown, widths


def reasons(group: Sequence[Record]) -> list[str]:
    """Why cells are not ok, a line a reason with the stages that it is true of."""
    found: dict[tuple[str, str], list[str]] = {}
    for cell in group:
        if cell["reason"]:
            found.setdefault((cell["status"], cell["reason"]), []).append(str(cell["stage"]))
    return [
        f"  {status} #{', #'.join(stages)}: {reason}" for (status, reason), stages in found.items()
    ]


# a number, then what it is of; a narrow cell must not break between the two
UNIT = re.compile(r"(?<=\d) (?=(?:[num]?s|[kKMGT]?B(?:/s)?|[kKMGT]?FLOP(?:/s)?|%)(?![\w/]))")
NO_BREAK = "\N{NO-BREAK SPACE}"


def markdown_row(texts: Iterable[object]) -> str:
    """A row of a Markdown table; no number in it is parted from its unit."""
    cells = (UNIT.sub(NO_BREAK, str(text)).replace("|", r"\|") for text in texts)
    return f"| {' | '.join(cells)} |"


def markdown(env: Record, cells: Sequence[Record]) -> str:
    """The tables in Markdown."""
    names = titles(env)
    lines = []
    for group in by_problem(cells):
        lines += [f"**{problem_title(group[0])}**", ""]
        lines.append(f"| {' | '.join(headers(group[0]))} |")
        marks = ["---" if header in ("stage", "status") else "---:" for header in HEADERS]
        lines.append(f"| {' | '.join(marks)} |")
        for cell in rows_of(group):
            texts = row(group, cell, names[cell["stage"], cell["name"]])
            lines.append(markdown_row(texts))
        lines.append("")
    return "\n".join([*lines, legend(cells)])


def flat_rows(env: Record, cells: Sequence[Record]) -> list[dict[str, Any]]:
    """A dict a cell: the record, its stage's title, both ratios and a spread, unrounded."""
    names = titles(env)
    rows = []
    for group in by_problem(cells):
        for cell in group:
            before, stage3 = ratios(group, cell)
            low, high = spread(rivals(group, cell)[0], cell) or (None, None)
            title = names[cell["stage"], cell["name"]]
            shown = {"vs_before": before, "vs_before_q1": low, "vs_before_q3": high}
            rows.append({**cell, "title": title, **shown, "vs_stage3": stage3})
    return rows


def flat(row: Record) -> dict[str, Any]:
    """A record for a line of CSV: what holds several values becomes JSON."""
    return {
        name: json.dumps(value) if isinstance(value, (list, dict)) else value
        for name, value in row.items()
    }


def as_csv(env: Record, cells: Sequence[Record]) -> str:
    """One CSV table of all cells, a header line first."""
    rows = flat_rows(env, cells)
    out = io.StringIO()
    if rows:
        writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(flat, rows))
    return out.getvalue().rstrip("\n")


def page() -> Console:
    """Standard output, at most 100 columns wide, and just so where it is no terminal."""
    console = Console()
    console.width = min(WIDTH, console.width) if console.is_terminal else WIDTH
    return console


def show(env: Record, cells: Sequence[Record], form: str, console: Console) -> None:
    """Print the tables in one of FORMATS: 'rich' is for people, the others for programs."""
    if form == "rich":
        console.print(rich_tables(env, cells, console.width))
        return
    render = {
        "markdown": markdown,
        "csv": as_csv,
        "json": lambda env, cells: json.dumps(flat_rows(env, cells), indent=1),
    }[form]
    console.file.write(render(env, cells) + "\n")
