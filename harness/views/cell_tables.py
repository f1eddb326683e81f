"""Tables of times, of `ladder run` and `ladder bench` alike, made from cells alone.

A problem whose stages were measured alone has a table with one row per stage. A comparison, whose
stages took turns, shares its tables with the other N of its family: one column per N, time and
rate, speed-ups over the peers, memory. Few query rows have a table of their own, in TB/s.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harness.problems.problem import PEERS_FROM
from harness.records.schema import FAILURES, PROBLEM, Record
from harness.records.units import show_bytes, show_time, significant
from harness.views import groups, ratios, rings, table
from harness.views.groups import Stage
from harness.views.roofline import roof_of
from harness.views.table import Column, Table, Tables

MORE = "docs/measuring.md"
BETWEEN = f"from {ratios.CLOSE[0]:g}x to {ratios.CLOSE[1]:g}x"
LEGEND = (
    "ok: exact by the float64 rule. wrong: misses it. wrong-by-design: declared inexact above its "
    "N. skipped, crashed, timeout, out-of-memory: no figure. interpreted: Triton without a GPU, "
    "no speed, never compared. ~: ratio of medians from one process per cell. Without ~: paired, "
    "all in one process, in turns: the median of the rounds' ratios, in brackets their quartiles "
    f"(vs #3: only of ratios {BETWEEN}), and the times are of these rounds. Errors are against "
    "stage 3 in float64, also stage 3's own."
)
# the legend in a terminal: one line of 80 columns
SHORT_LEGEND = "~: not in turns; errors: to float64."
COMPARED = f"Medians, in turns. Ratios {BETWEEN} have quartiles."
REPLAYED = "Each call replayed as a CUDA graph."
# added to the legend of other directions than forward
SHORT_LEGENDS = {"bwd": "bwd: dq, dk, dv from dO.", "train": "train: o, dq, dk, dv."}
LEGENDS = {
    "bwd": "bwd: dq, dk, dv from dO, the forward pass done before; its peak is above what that "
    "pass keeps, its errors are the largest among the three.",
    "train": "train: a call is o, then dq, dk, dv from dO; errors are the largest among the four.",
}

# of a problem; on a narrow page titles are cut, then the relative error goes
COLUMNS = (
    Column("#"), Column("stage", left=True, least=10, most=24), Column("time"), Column("vs before"),
    # quartiles go below the ratio
    Column("vs #3", least=len("(0.000154-0.000159)"), wraps=True),
    Column("peak"), Column("max err"), Column("rel err", gives_way=True),
    Column("status", left=True),
)  # fmt: skip
TIME = 2  # its place among them
LONGEST_NAME = 22
# shown in place of a number
SHORT = {"out-of-memory": "OOM", "wrong-by-design": "design", "crashed": "crash",
         "timeout": "late", "skipped": "-"}  # fmt: skip
DECODED = ("b", "h", "hk", "nk", "d")
PAGED = "TB/s: the bytes of q, k, v, o over the time. pages of n: paged over in one piece, paired."


# ---- all tables of a file


def page(
    env: Record, cells: Sequence[Record], ceilings: Sequence[Record] = (), brief: bool = True
) -> Tables:
    """The tables of a run's cells, with their legend, of one line where it is `brief`.

    `ceilings`: of the same machine; where they are known, so is the share of them.
    """
    together = [cell for cell in cells if cell["world"] > 1]
    alone, compared = split([cell for cell in cells if cell["world"] == 1])
    made = [*rings.tables(env, together), *alone_tables(env, alone)]
    if few := [cell for cell in compared if groups.few_rows(cell)]:
        decoding = decode_table(env, few, ceilings)
        made.append(replace(decoding, notes=[*decoding.notes, *groups.reasons(failed(few))]))
    for family in groups.families([cell for cell in compared if not groups.few_rows(cell)]):
        made += comparison_tables(env, family, ceilings)
    said = [short_legend(alone) if brief else legend(alone)] if alone else []
    said += [rings.LEGEND] if together else []
    said += [REPLAYED] if compared and env["arguments"].get("graph") else []
    said += [f"{COMPARED} {MORE}"] if compared else []
    return Tables(made, " ".join(said))


def split(cells: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """The cells of problems on which stages were measured alone; those of all the others."""
    found: tuple[list[Record], list[Record]] = ([], [])
    for group in groups.by_problem(cells):
        found[all(cell["paired"] for cell in group)].extend(group)
    return found


def flat_rows(env: Record, cells: Sequence[Record]) -> list[dict[str, Any]]:
    """One dict per cell: the record, what follows from it, unrounded; the machine, its software."""
    names = groups.titles(env)
    machine = {
        "gpu" if env["device"] == "cuda" else "cpu": env["device_name"],
        **{field: env[field] for field in ("driver", "torch", "triton", "python", "date")},
        **(env.get("versions") or {}),
    }
    peers = [name for number, name in groups.stages_of(cells) if number >= PEERS_FROM]
    rows = []
    for group in groups.by_problem(cells):
        for cell in group:
            (before, three), time = ratios.rivals(group, cell), cell["time_ms"]
            low, high = ratios.spread(before, cell) or (None, None)
            over = {other["name"]: ratios.times_faster(other, cell)
                    for other in ratios.others(group, cell)}  # fmt: skip
            rows.append({
                **cell, "title": names[groups.stage_of(cell)],
                "vs_before": ratios.times_faster(before, cell),
                "vs_before_q1": low, "vs_before_q3": high,
                "vs_stage3": ratios.times_faster(three, cell), "tflops": ratios.tflops(cell),
                "tokens_per_s": cell["b"] * cell["nq"] / (1e-3 * time) if time else None,
                **{f"speedup_{peer}": over.get(peer) for peer in peers}, **machine,
            })  # fmt: skip
    return rows


def legend(cells: Sequence[Record]) -> str:
    """The full legend of the tables of these cells."""
    return LEGEND + "".join(f" {LEGENDS[direction]}" for direction in directions(cells))


def short_legend(cells: Sequence[Record]) -> str:
    """The legend in one line, with a link to the full explanation."""
    return " ".join([SHORT_LEGEND, *(SHORT_LEGENDS[each] for each in directions(cells)), MORE])


def directions(cells: Sequence[Record]) -> list[str]:
    """The directions of these cells that need an explanation, in the order of LEGENDS."""
    return [direction for direction in LEGENDS if any(c["direction"] == direction for c in cells)]


# ---- one problem, one row per stage


def alone_tables(env: Record, cells: Sequence[Record]) -> list[Table]:
    """One table per problem, one row per stage; its notes are the reasons of what isn't ok."""
    names = groups.titles(env)
    made = []
    for group in groups.by_problem(cells):
        # ratios are computed among all cells of a problem, also paired ones, which have no rows
        shown, rows = rows_of(group), []
        for cell in shown:
            # an interpreted time means nothing
            dim = (TIME, TIME + 1) if cell["mode"] == "interpreted" else ()
            rows.append(table.verdict_row(row(group, cell, names[groups.stage_of(cell)]), dim))
        noted = (*FAILURES, "ok")  # a stage that was wrong alone has its own note
        turns = [c for c in group if c["paired"] and c["status"] in noted and c not in shown]
        in_turn = [f"in turns: {reason}" for reason in groups.reasons(turns)]
        notes = [f"  {note}" for note in (*padded(group[0]), *groups.reasons(shown), *in_turn)]
        made.append(Table(columns(group[0]), rows, groups.title(group), notes))
    return made


def columns(cell: Record) -> list[Column]:
    """COLUMNS, with `cell`'s direction in the header of the time."""
    way = "" if cell["direction"] == "fwd" else f"{cell['direction']} "
    return [*COLUMNS[:TIME], Column(f"{way}time"), *COLUMNS[TIME + 1 :]]


def padded(cell: Record) -> list[str]:
    """A note of a cell's key lengths, where it has any."""
    lengths = cell["seqlens_k"]
    return [] if lengths is None else [f"padded: {', '.join(map(str, lengths))} valid keys"]


def rows_of(group: Sequence[Record]) -> list[Record]:
    """The cells of a problem that have a row: one per stage, the unpaired one where it exists."""
    rows = {groups.stage_of(cell): cell for cell in sorted(group, key=lambda c: not c["paired"])}
    return [rows[stage] for stage in sorted(rows)]


def in_turns(group: Sequence[Record], cell: Record) -> Record | None:
    """The paired cell of the same stage, where it was measured."""
    same = (other for other in group if groups.stage_of(other) == groups.stage_of(cell))
    return next((other for other in same if other["paired"] and ratios.comparable(other)), None)


def row(group: Sequence[Record], cell: Record, title: str) -> list[str]:
    """The texts of one row, in the order of COLUMNS."""
    turn = in_turns(group, cell)
    timed = turn or cell  # so that the ratio of two times in a table is the ratio shown
    before, stage3 = ratios.rivals(group, timed)
    interpreted = cell["mode"] == "interpreted" and cell["time_ms"] is not None
    return [
        str(cell["stage"]),
        title,
        show_time(timed["time_ms"]),
        "interpreted" if interpreted else ratios.show_step(before, timed, turn is not None),
        ratios.show_briefly(stage3, timed, turn is not None),
        ratios.show_peak(cell),
        ratios.show_error(cell["err_f64_max"]),
        ratios.show_error(cell["err_f64_rel"]),
        cell["status"],
    ]


# ---- comparisons, one column per N


def comparison_tables(
    env: Record, family: Sequence[Record], ceilings: Sequence[Record] = ()
) -> list[Table]:
    """Tables of a family: times and rates; speed-ups over the peers; memory and the rest.

    Rows without any number are left out, except those of times. The last table's notes are the
    newest stage's share of the measured matrix rate, where it is known, and the reasons of gaps.
    """
    everyone, names, label = groups.stages_of(family), groups.titles(env), groups.labels(env)
    at: dict[Stage, dict[int, Record]] = {stage: {} for stage in everyone}
    ns = groups.sizes(family)
    for cell in family:
        at[groups.stage_of(cell)].setdefault(cell["nk"], cell)

    def of(stage: Stage, what: str) -> list[str]:
        return [figure(at[stage].get(n), what) for n in ns]

    times = []
    for stage in everyone:
        rates = of(stage, "rate")
        times.append([label[stage], "ms", *of(stage, "time")])
        times += [["", ratios.UNITS[family[0]["device"]][0], *rates]] if any(rates) else []
    speedups = [
        [f"{stage[0]} over {names[peer]}", ""]
        + [ratios.show_speedup(at[stage].get(n), at[peer].get(n)) for n in ns]
        for stage in groups.ours(everyone)
        for peer in everyone
        if peer[0] >= PEERS_FROM and stage != groups.THREE
    ]
    others = [
        [label[stage], what, *of(stage, what)]
        for what in ("peak", "launch", "skipped")
        for stage in everyone
    ]
    left = ([row for row in rows if {*row[2:]} != {"-"}] for rows in (speedups, others))
    first = [Column("N", left=True, most=LONGEST_NAME), Column("")]
    columns = [*first, *(Column(str(n)) for n in ns)]
    made = [Table(columns, rows, repeats=len(first)) for rows in (times, *left) if rows]
    shares = share_of_roof(env, family, ceilings)
    notes = [*padded(family[0]), *shares, *groups.reasons(failed(family))]
    made[0] = replace(made[0], title=groups.title(family, any_n=True))
    made[-1] = replace(made[-1], notes=notes)
    return made


def failed(cells: Sequence[Record]) -> list[Record]:
    """The cells that are not ok."""
    return [cell for cell in cells if cell["status"] != "ok"]


def figure(cell: Record | None, what: str) -> str:
    """The text of a cell in a table of a family; without a time, the reason; also for no cell.

    `what`: the 'time' in ms, the 'rate', the 'peak' memory, the time that Python takes to 'launch',
    or the share of tiles 'skipped'.
    """
    none = "" if what in ("time", "rate") else "-"
    if cell is None:
        return none
    if what == "skipped":
        return "-" if cell["skip_ratio"] is None else f"{100 * cell['skip_ratio']:.1f}%"
    if not ratios.comparable(cell):
        status = "interp." if cell["status"] == "ok" else str(cell["status"])
        return SHORT.get(status, status) if what == "time" else none
    if what in ("time", "rate"):
        return significant(cell["time_ms"] if what == "time" else ratios.rate(cell))
    if what == "launch":
        return show_time(cell["launch_ms"])
    return "-" if cell["peak_bytes"] is None else show_bytes(cell["peak_bytes"])


def share_of_roof(env: Record, family: Sequence[Record], ceilings: Sequence[Record]) -> list[str]:
    """A line with the newest stage's share of the measured matrix rate at each N, where known."""
    newest, matrix = ratios.leaders(family)[0], roof_of(family[0], ceilings).matrix
    if newest is None or matrix is None:
        return []
    found = (groups.find(family, newest, n) for n in groups.sizes(family))
    shown = (cell if cell and ratios.comparable(cell) else None for cell in found)
    shares = (f"{100 * (ratios.tflops(c) or 0) / matrix:.0f}%" if c else "-" for c in shown)
    said = f"{groups.labels(env)[newest]} reaches {', '.join(shares)} of the measured matrix rate"
    return [f"{said}, {significant(matrix)} TFLOP/s"]


# ---- few query rows


def decoded(record: Record) -> str:
    """The shape of a record with few query rows, and its masks."""
    masks = (" causal" * record["causal"], " lengths" * bool(record["seqlens_k"]))
    return ", ".join(str(record[name]) for name in DECODED) + "".join(masks)


def decode_table(env: Record, cells: Sequence[Record], ceilings: Sequence[Record] = ()) -> Table:
    """The table of few query rows: our stages and the best peer in TB/s, then with pages.

    The bytes are the same for all: q, k, v and o. After the best peer: how many times as fast our
    newest stage is, its share of the measured read ceiling, and its speed with pages.
    """
    names = groups.labels(env)
    everyone = groups.stages_of([cell for cell in cells if cell["page_size"] is None])
    able = [cell for cell in cells if ratios.comparable(cell)]
    newest = max((s for s in groups.stages_of(able) if s in groups.ours(everyone)), default=None)
    pages = sorted({cell["page_size"] for cell in cells} - {None})
    roof = max((c["value"] for c in ceilings if c["what"] == "read"), default=None)
    rows = []
    for group in groups.grouped(cells, lambda c: [c[f] for f in PROBLEM if f != "page_size"]):
        at = {(groups.stage_of(cell), cell["page_size"]): cell for cell in group}
        going = {who: cell for who, cell in at.items() if ratios.comparable(cell)}
        peers = [cell for ((number, _), _), cell in going.items() if number >= PEERS_FROM]
        best = min(peers, key=lambda cell: float(cell["time_ms"]), default=None)
        mine = going.get((newest, None)) if newest else None
        texts = [decoded(group[0]), str(group[0]["nq"])]
        for stage in groups.ours(everyone):
            one = going.get((stage, None))
            why = figure(at.get((stage, None)), "time") or "-"
            texts.append(f"{ratios.bandwidth(one):.2f}" if one else why)
        in_pages = f" pages of {best['page_size']}" if best and best["page_size"] else ""
        name = f"{ratios.bandwidth(best):.2f} #{best['stage']}{in_pages}" if best else "-"
        texts += [name, ratios.show_briefly(best, mine)]
        texts += [f"{100 * ratios.bandwidth(mine) / roof:.0f}%" if mine and roof else "-"]
        paged = (going.get((newest, size)) if newest else None for size in pages)
        texts += [ratios.show_briefly(mine, cell) for cell in paged]
        rows.append(texts)
    stages = (f"#{number}" for number, _ in groups.ours(everyone))
    heads = ("Nq", *stages, "best peer", "over it", "of read")
    columns = [Column("B, H, Hk, N, d", left=True), *map(Column, heads)]
    columns += [Column(f"pages of {size}", wraps=True) for size in pages]
    ceiling = [f"The read ceiling is {significant(roof)} TB/s."] if roof else []
    notes = [PAGED, *ceiling, ", ".join(f"#{names[stage]}" for stage in everyone)]
    return Table(columns, rows, f"decoding, {cells[0]['dtype']}, {cells[0]['device']}", notes)
