"""Helpers for the generated parts of README and docs: find records, write Markdown tables."""

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from harness.records.code import (
    built_in_files,
    code_of,
    declared,
    files_of,
    peer_files,
    rank_peer_files,
)
from harness.records.jsonl import read
from harness.records.schema import Record
from harness.views import cell_tables, groups, ratios
from harness.views.table import Column, Table, Tables

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RESULTS = ROOT / "results"
CPU, GPU = RESULTS / "cpu", RESULTS / "h200"
# of two GPUs, and of four
RINGS = {world: sorted(RESULTS.glob(f"*-x{world}/ring*.jsonl")) for world in (2, 4)}

SIZES = (1024, 4096, 16384)
ALL_SIZES = (1024, 2048, 4096, 8192, 16384)
MASKS = {False: "none", True: "causal"}
READING = "[how to read a table]({}measuring.md#reading-a-table)"  # {}: the relative path to docs/


def rows(header: str, body: Iterable[Sequence[object]], mark: str = "---:") -> str:
    """A Markdown table; its first column is left-aligned, the others as `mark` says.

    `header`: the columns' names with " | " between them.
    """
    first, *others = header.split(" | ")
    columns = [Column(first, left=True), *(Column(each, left=mark == "---") for each in others)]
    return Table(columns, [[*map(str, row)] for row in body]).markdown()


def part(header: str, body: Iterable[Sequence[object]], note: str, *envs: Record) -> str:
    """A table, its legend in one line, and one line for each machine that it was measured on."""
    return "\n\n".join(filter(None, [rows(header, body), note, machine(*envs)]))


def find(cells: Sequence[Record], **fields: object) -> Record:
    """The one record with those fields. Raises KeyError where there is none, or several."""
    found = [c for c in cells if all(c[name] == value for name, value in fields.items())]
    if len(found) != 1:
        raise KeyError(f"{len(found)} records with {fields}")
    return found[0]


def both(cells: Sequence[Record], old: int, new: int, **fields: object) -> tuple[Record, Record]:
    """The records with those fields of two stages. Raises KeyError as `find` does."""
    return find(cells, stage=old, **fields), find(cells, stage=new, **fields)


def factor(cells: Sequence[Record], old: int, new: int, **fields: object) -> str:
    """How many times as fast `new` is as `old`, timed in turns, with quartiles."""
    before, after = both(cells, old, new, paired=True, **fields)
    fair = ratios.comparable(before) and ratios.comparable(after)
    return ratios.show_step(before, after) if fair else "-"


def problems(
    sizes: Sequence[int], ds: Sequence[int] = (64, 128), masks: Mapping[bool, str] = MASKS
) -> Iterator[tuple[str, dict[str, object]]]:
    """The sources' problems by d, mask and N: a title, and the fields that find their records."""
    for d, causal, n in product(ds, masks, sizes):
        mask = f"{masks[causal]}, " * (len(masks) > 1)
        yield f"d = {d}, {mask}N = {n}", {"d": d, "causal": causal, "nk": n}


def measured(cells: Sequence[Record]) -> Iterator[tuple[str, dict[str, object]]]:
    """Of the sources' problems those that have records, as `problems`: a run may be cut off."""
    for title, at in problems(sorted({cell["nk"] for cell in cells})):
        if any(at.items() <= cell.items() for cell in cells):
            yield title, at


def problem_but_n(cell: Record) -> str:
    """A cell's problem in one line, without its N."""
    return groups.title([cell]).split(", ", 1)[1]


def as_shown(path: Path, **fields: object) -> str:
    """The tables of a file's cells with those fields, as by `ladder show --format markdown`."""
    env, cells = read(path)
    cells = [c for c in cells if all(c[name] == value for name, value in fields.items())]
    note = f"Errors are against float64; {READING.format('')}."
    made = (replace(table, notes=()) for table in cell_tables.page(env, cells).tables)
    return Tables([*made], note).markdown() + f"\n\n{machine(env)}"


def codes() -> dict[groups.Stage, str]:
    """The digest of the code of each stage and peer as it is here, by number and name."""
    found = {}
    for path in [x for first in (*built_in_files(), *peer_files()) for x in files_of(first)]:
        if path.suffix == ".py" and (about := declared(path)):
            number, name = (ast.literal_eval(about[each]) for each in ("number", "name"))
            found[number, name] = code_of(path)
    for path in rank_peer_files():  # they have the numbers and names of their files
        number, _, name = path.stem[1:].partition("_")
        found[int(number), name] = code_of(path)
    return found


def edited_since(env: Record, here: Mapping[groups.Stage, str] | None = None) -> set[int]:
    """The stages of a run whose code was edited after they were measured.

    A peer counts, and a stage whose record doesn't say what its code was. `here`: from `codes`.
    """
    here = codes() if here is None else here
    planned = {cell["stage"] for cell in env["plan"]}  # a suite may measure only some of the stages
    edited = set()
    for stage in env["rungs"]:
        code = here.get((stage["stage"], stage["name"]))
        # `ladder train` has some of SDPA's backends, without a file
        shown = code and "sha256" in stage and (not planned or stage["stage"] in planned)
        if shown and stage.get("code") != code:
            edited.add(stage["stage"])
    return edited


def versions(env: Record) -> str:
    """The versions of CUDA and of the peers of a run, for a line; '' for an older record."""
    titles = {stage["title"] for stage in env["rungs"]} | {"CUDA"}
    titles |= {"cuDNN"} if any("cuDNN" in title for title in titles) else set()
    known = env.get("versions") or {}
    return "".join(f", {what} {number}" for what, number in known.items() if what in titles)


def machine(*envs: Record, shown: Collection[int] | None = None) -> str:
    """The machines of records, one line each, and which of the `shown` stages were edited since.

    None: all that were measured are shown.
    """
    found: dict[str, tuple[set[str], set[int]]] = {}
    for env in envs:
        cores = f", {env['cores']} cores" if env["device"] == "cpu" else ""
        triton = f", Triton {env['triton']}" if env["triton"] else ""
        where = f"{env['device_name']}{cores}; torch {env['torch']}{triton}{versions(env)}"
        days, edited = found.setdefault(where, (set(), set()))
        days.add(env["date"][:10])
        edited |= edited_since(env) if shown is None else edited_since(env) & set(shown)
    lines = []
    for where, (days, edited) in found.items():
        line = f"Measured on: {where}; {' to '.join(sorted({min(days), max(days)}))}"
        line += f"; {groups.numbers(edited)} edited since" if edited else ""
        lines.append(f"{line}.")
    return "\n\n".join(lines)
