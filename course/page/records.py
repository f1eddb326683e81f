"""Make of files of records what the page shows of them: tables, charts and rooflines, as JSON.

The views of harness/ decide which records may be compared, ranked and plotted; nothing here does.
Each row keeps the whole record but for its rounds, the line that it is in, and its run: file,
machine, software, arguments, commit and date. Numbers have six digits.
"""

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course.report import text
from harness.problems.problem import PEERS_FROM, YARDSTICK
from harness.records.code import built_in_files, read_declared, twin_files
from harness.records.schema import PROBLEM, BadRecord, Record
from harness.records.units import show_rate, show_time, significant
from harness.views import groups, plots, ratios, roofline
from harness.views.groups import Stage
from harness.views.look import marks

SHOWN = "cell", "ceiling"  # the kinds of records that the page shows
CHARTS = "time", "rate", "memory", "error"
LEFT_OUT = {"kind", "stage", "name", "paired", "rounds_ms", *PROBLEM}  # of a record in its row
DIGITS = 6
LEAST = 3  # stages and peers under a roof that is shown


@dataclass(frozen=True)
class Run:
    """A file of records: where it is, its env line and its records, all of one kind."""

    path: Path
    env: Record
    records: list[Record]


def collect(read: Mapping[Path, tuple[Record, list[Record]]]) -> dict[str, Any]:
    """What the page shows of records that were `read` from files, under the key 'records'.

    Raises BadRecord where a file was cut off, holds nothing, or no file holds a cell.
    """
    runs = [Run(path, *found) for path, found in read.items()]
    for run in runs:
        line = len(run.records) + 2
        if not run.path.read_bytes().endswith(b"\n"):
            what = "finish the run with --resume, or delete the line"
            raise BadRecord(f"{run.path}: line {line} was cut off: {what}")
        if not run.records:
            raise BadRecord(f"{run.path}: no record in it: nothing was measured to its end")
    found = {kind: [run for run in runs if run.records[0]["kind"] == kind] for kind in SHOWN}
    if not found["cell"]:
        kinds = ", ".join(sorted({run.records[0]["kind"] for run in runs}))
        raise BadRecord(f"got records of the kind {kinds}, expected some of the kind cell: what "
                        "`ladder run` and `ladder bench` write")  # fmt: skip
    return {"records": as_json(found["cell"], found["ceiling"])}


def as_json(measured: Sequence[Run], ceilings: Sequence[Run] = ()) -> dict[str, Any]:
    """What the page shows of runs of cells, and of the ceilings of their machines.

    runs       one object per file
    problems   one object per table: what was measured together, of one problem
    fields     the names of a row's values
    rows       one list per record
    charts     families of problems with their points, as places in `rows`, by what is shown
    roofs      problems with their roofs and points, FLOP/byte and TFLOP/s
    """
    here = text.codes()
    found: dict[str, Any] = {"runs": [], "problems": [], "rows": [], "charts": []}
    rows: list[dict[str, Any]] = []
    place: dict[int, int] = {}  # id of a record -> its place in rows
    for number, run in enumerate(measured):
        found["runs"].append(about(run, here))
        line = {id(record): index for index, record in enumerate(run.records, start=2)}
        stages, labels = groups.stages_of(run.records), groups.labels(run.env)
        varied = variants(stages)
        for group in tables_of(run.records):
            found["problems"].append({"run": number, **problem(group)})
            for cell in group:
                place[id(cell)] = len(rows)
                rows.append({
                    "problem": len(found["problems"]) - 1,
                    "who": stages.index(groups.stage_of(cell)), "line": line[id(cell)],
                    **{name: rounded(x) for name, x in cell.items() if name not in LEFT_OUT},
                    **texts(group, cell, labels, varied.get(groups.stage_of(cell))),
                })  # fmt: skip
        found["charts"] += charts(run.records, number, place)
    fields = list(rows[0]) if rows else []
    return found | {
        "fields": fields, "rows": [[row[name] for name in fields] for row in rows],
        "roofs": roofs(measured, ceilings, place),
    }  # fmt: skip


def about(run: Run, here: Mapping[Stage, str]) -> dict[str, Any]:
    """What all records of a run have in common; its stages and peers, with their colours."""
    env = run.env
    edited = text.edited_since(env, here)
    titles, style = groups.titles(env), marks(groups.stages_of(run.records))
    varied = variants(style)
    software = {name: env[name] for name in ("torch", "triton", "python", "driver") if env[name]}
    inside = run.path.is_absolute() and run.path.is_relative_to(text.ROOT)
    return {
        # no folder of the machine that the page is made on
        "file": run.path.relative_to(text.ROOT).as_posix() if inside else run.path.name,
        "machine": env["device_name"], "cores": env["cores"],
        "software": software | (env.get("versions") or {}),
        "command": command(env["arguments"]),
        "commit": env["commit"], "date": env["date"],
        "missing": max(0, len(env["plan"]) - len(run.records)),
        "stages": [
            {"number": number, "name": name, "title": titles[number, name],
             "colour": mark.colour, "edited": number in edited, "of": varied.get((number, name))}
            for (number, name), mark in style.items()
        ],
    }  # fmt: skip


def variants(stages: Collection[Stage]) -> dict[Stage, int]:
    """Map the variants among the stages of a run to the number of the stage that each one varies.

    A variant is a stage of a file that was given. Its number is that stage's, or one that is free:
    then the run has one stage besides, and the yardstick perhaps.
    """
    built_in = {
        (each["number"], each["name"])
        for each in map(read_declared, [*built_in_files(), *twin_files()])
    }
    numbers = {number for number, _ in built_in}
    beside = {number for number, _ in built_in.intersection(stages)} - {YARDSTICK}
    usual = next(iter(beside)) if len(beside) == 1 else None
    own = [stage for stage in groups.ours([*stages]) if stage not in built_in]
    found = {stage: stage[0] if stage[0] in numbers else usual for stage in own}
    return {stage: number for stage, number in found.items() if number is not None}


def command(arguments: Mapping[str, Any]) -> str:
    """The command line that was recorded: every argument, also those of the time's defaults."""
    words = ["ladder", str(arguments.get("command", "run"))]
    for name, value in arguments.items():
        for each in value if isinstance(value, list) else [value]:
            if name != "command" and each not in (None, False):
                words += [f"--{name}"] if each is True else [f"--{name}", str(each)]
    return shlex.join(words)


def rounded(value: Any) -> Any:
    """A value of a record, floats to DIGITS digits."""
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


# ---- tables


def tables_of(cells: Sequence[Record]) -> list[list[Record]]:
    """Cells that have a table together: of one problem, and all in turns or all alone."""
    return groups.grouped(
        sorted(cells, key=groups.stage_of), lambda cell: [cell["paired"], *map(cell.get, PROBLEM)]
    )


def problem(group: Sequence[Record]) -> dict[str, Any]:
    """What the cells of a table have in common."""
    first = group[0]
    mask = {(False, False): "none", (True, False): "causal", (False, True): "key lengths",
            (True, True): "causal and key lengths"}  # fmt: skip
    return {
        **{name: first[name] for name in PROBLEM if name != "causal"},
        "paired": first["paired"], "title": title(group),
        "kind": roofline.kind_of(first | {"products": None}),
        "mask": mask[first["causal"], first["seqlens_k"] is not None],
    }  # fmt: skip


def title(group: Sequence[Record], any_n: bool = False) -> str:
    """What the problems of a table, or a chart, have in common, in one line."""
    pages = group[0]["page_size"]
    # b shrinks where N grows
    said = re.sub(r"\bb N = (\d+),", r"b = \1 / N,", groups.title(group, any_n))
    return said + (f", pages of {pages}" if pages else "")


def texts(
    group: Sequence[Record], cell: Record, labels: Mapping[Stage, str], varies: int | None
) -> dict[str, Any]:
    """The texts of a cell's row, and whether its time may be compared.

    `over`: how many times as fast it is as stage 3, each peer, and the stage that it `varies`.
    """
    rivals = {
        labels[groups.stage_of(other)]: other
        for other in ratios.others(group, cell)
        if other["stage"] in (YARDSTICK, varies) or other["stage"] >= PEERS_FROM
    }
    unit, fast = ratios.UNITS[cell["device"]][0], ratios.comparable(cell)
    return {
        "fair": fast,
        "time": show_time(cell["time_ms"]),
        "rate": f"{significant(ratios.rate(cell))} {unit}" if fast else "-",
        "peak": ratios.show_peak(cell),
        "error": ratios.show_error(cell["err_f64_max"]),
        "over": {name: ratios.show_step(other, cell, cell["paired"])
                 for name, other in rivals.items()},
    }  # fmt: skip


# ---- charts


def charts(cells: Sequence[Record], run: int, place: Mapping[int, int]) -> list[dict[str, Any]]:
    """The families of a run that have points, as harness/views/plots.py decides.

    There are two stages or more, and two N: else there is nothing to see.

    `points`: what is shown -> [place in `rows`, value in ms, MB or the device's unit of rates].
    """
    found: dict[int, dict[str, Any]] = {}
    for what in CHARTS:
        for family in plots.panels(cells, what):
            unit = ratios.UNITS[family[0]["device"]][0]
            # a family begins with the same cell, whatever is shown
            chart = found.setdefault(id(family[0]), {
                "run": run, "title": title(family, any_n=True), "unit": unit,
                "points": {}, "notes": {},
            })  # fmt: skip
            shown = sorted(family, key=lambda cell: (groups.stage_of(cell), cell["nk"]))
            values = ((cell, plots.value_of(cell, family, what)) for cell in shown)
            points = [(cell, value) for cell, value in values if value]
            drawn = [cell for cell, _ in points]
            if min(len(groups.stages_of(drawn)), len(groups.sizes(drawn))) < 2:
                continue
            chart["points"][what] = [[place[id(cell)], rounded(value)] for cell, value in points]
            chart["notes"][what] = plots.notes(family, what)
    return [chart for chart in found.values() if chart["points"]]


def roofs(
    measured: Sequence[Run], ceilings: Sequence[Run], place: Mapping[int, int]
) -> list[dict[str, Any]]:
    """One problem each, with LEAST stages or more under the roofs of their machine.

    Runs of one machine share a problem; of a stage's several points that with the latest date.
    First come the problems on which most stages of ours have a point, five being enough; of these
    the largest first.
    """
    found = []
    for machine in dict.fromkeys(run.env["device_name"] for run in ceilings):
        runs = sorted(measured, key=lambda run: str(run.env["date"]))
        cells, own = (
            [each for run in some if run.env["device_name"] == machine for each in run.records]
            for some in (runs, ceilings)
        )
        for group in groups.by_problem(cells):
            latest = {(groups.stage_of(cell), roofline.kind_of(cell)): cell
                      for cell in group if roofline.place(cell)}  # fmt: skip
            for panel in roofline.panels([*latest.values()], own):
                if len({point.stage for point in panel.points}) >= LEAST:
                    found.append({"machine": machine, **roof(panel, place)})
    return sorted(found, key=lambda each: (each["weight"], each["flops"]), reverse=True)


def roof(panel: roofline.Panel, place: Mapping[int, int]) -> dict[str, Any]:
    """A panel's roofs and points; rates in the device's unit, and as texts."""
    unit, scale = ratios.UNITS[panel.device]
    first = panel.points[0].cell
    slope = panel.top.bandwidth
    ours = {point.stage for point in panel.points if point.stage[0] < PEERS_FROM}
    return {
        "title": groups.title(panel.cells), "unit": unit, "dtype": first["dtype"],
        "flops": first["flops"], "weight": min(len(ours), 5),
        "slope": None if slope is None else [scale * slope, f"copy {show_rate(slope, 'TB/s')}"],
        "levels": [
            [scale * each.matrix, f"{kind.split()[-1]} {show_rate(each.matrix, 'TFLOP/s')}"]
            for kind, each in panel.roofs.items() if each.matrix is not None
        ],
        "points": [
            [place[id(point.cell)], rounded(point.x), rounded(scale * point.y),
             roofline.kind_of(point.cell).split()[-1],
             roofline.show_share(roofline.share(point, panel.roof(point)))]
            for point in panel.points
        ],
    }  # fmt: skip
