"""The notebooks' tools: measure live, read records, show both.

    from course import notebook as nb
    run = nb.measure(stages="3,5", n="64,65", paired=True)     `ladder run`, with those options
    run                                                        its table
    nb.plot(run, "error")                                      its plot
    nb.recorded("h200/table-4.3.jsonl")                        a committed run, with its machine

An interpreted time is never shown, nor drawn: it says nothing of the kernel.
"""

import base64
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from course.lessons.side_by_side import ROOT, Exercise, Shown, code, fingerprint, side_by_side
from course.lessons.side_by_side import table as rows
from course.report.text import machine
from harness.problems.problem import ITEMSIZE, SEED, Problem
from harness.records.code import built_in_files
from harness.records.jsonl import read
from harness.records.schema import Record
from harness.views import cell_tables, groups, plots, ratios, rings
from harness.views.look import EITHER, Look, in_look, new_figure
from harness.views.ratios import tflops

__all__ = [
    "Exercise", "Records", "code", "drawn", "full_load", "here", "judged", "measure",
    "picture", "plot", "problem", "ratio", "recorded", "rows", "runs", "side_by_side", "stages",
    "tflops",
]  # fmt: skip

RESULTS = ROOT / "results"
DPI = 85


@dataclass(frozen=True)
class Picture:
    """A picture as a cell's output, with `words` as its alternative text."""

    png: bytes
    words: str

    def _repr_mimebundle_(self, **_: object) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
        data = {"image/png": in_letters(self.png), "text/plain": self.words}
        return data, {"image/png": {"alt": self.words}}

    def __repr__(self) -> str:
        return self.words


def in_letters(data: bytes) -> str:
    """Return bytes in base64, as a notebook holds them."""
    return base64.b64encode(data).decode("ascii")


@dataclass(frozen=True)
class Records:
    """Records of one file with its env line; `said` is a line on where they came from."""

    env: Record
    records: Sequence[Record]
    said: str

    def only(self, **fields: object) -> "Records":
        """Return those with these fields; a list or a tuple as a value means any of its items."""
        found = self.records
        for name, value in fields.items():
            allowed = value if isinstance(value, list | tuple) else [value]
            found = [record for record in found if record[name] in allowed]
        return replace(self, records=found)

    def one(self, **fields: object) -> Record:
        """Return the one record with these fields. Raises KeyError where there is none, or more."""
        found = self.only(**fields).records
        if len(found) != 1:
            raise KeyError(f"{len(found)} records with {fields}")
        return found[0]

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def _repr_html_(self) -> str:
        return judged(self).html

    def __repr__(self) -> str:
        return judged(self).text


def measure(stage: Sequence[str | Path] = (), command: str = "run", **options: object) -> Records:
    """Run `ladder run` with these options in its own process, and return its records.

    stages="0,1", n="8,16", d=16, paired=True, mode="train" ... as `ladder run --help` has
    them; `stage` are the files of your own stages; `command` may be 'ring', too. The device is the
    GPU where there is one. A stage that is wrong or crashes is a row like another. Raises
    RuntimeError, with ladder's own line, where the run could not be made.
    """
    words = [word for path in stage for word in ("--stage", str(path))]
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        words += [option] * value if isinstance(value, bool) else [option, str(value)]
    # the checkout first, so that `python -m harness` is this one, installed or not
    python_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.jsonl"
        done = subprocess.run(
            [sys.executable, "-P", "-m", "harness", command, *words, "--out", str(out)],
            env={**os.environ, "PYTHONPATH": python_path}, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode not in (0, 1):  # 1: a cell failed, and its record says why
            last = done.stderr.strip().splitlines()[-1:] or [f"ladder {command} said nothing"]
            raise RuntimeError(last[0])
        env, cells = read(out)
    names = {str(path): Path(path).name for path in stage}  # an output names no folder
    return Records(env, cells, f"$ ladder {command} {' '.join(names.get(x, x) for x in words)}")


def recorded(name: str, kind: str = "cell") -> Records:
    """Return the committed records in results/`name`, of one kind of harness/records/schema.py.

    Raises OSError where they aren't there: they come with the checkout, not with the package.
    """
    path = RESULTS / name
    env, found = read(path, kind)
    return Records(env, found, f"{machine(env)} {fingerprint(path)}.")


def judged(run: Records) -> Shown:
    """Show cells as tables: one per problem, one row per stage; interpreted times are left out."""
    names = groups.titles(run.env)
    parts = []
    for group in groups.by_problem(run.records):
        if group[0]["world"] > 1:
            table = rings.table(run.env, group)
            parts.append(Shown(table.html(), table.text()))
            continue
        chosen = cell_tables.rows_of(group)
        body = [row(group, cell, names[cell["stage"], cell["name"]]) for cell in chosen]
        notes = [line.strip() for line in groups.reasons(chosen)]
        header = [
            "stage",
            *(each.header for each in cell_tables.columns(group[0])[cell_tables.TIME :]),
        ]
        parts.append(rows(header, body, groups.title([group[0]]), "; ".join(notes)))
    said = [run.said]
    if run.said.startswith("$"):
        said.append(machine(run.env))
    if any(cell["mode"] == "interpreted" for cell in run.records):
        said.append("interpreted: a Triton kernel without a GPU: right or wrong, but no speed.")
    end = "".join(f"<p><small>{escape(line)}</small></p>" for line in said)
    parts.append(Shown(end, "\n".join(said)))
    return Shown("\n".join(part.html for part in parts), "\n\n".join(part.text for part in parts))


def row(group: Sequence[Record], cell: Record, title: str) -> list[str]:
    """Return a row of the harness's own table, without the time where it was interpreted."""
    number, _, *texts = cell_tables.row(group, cell, title)
    if cell["mode"] == "interpreted" and cell["time_ms"] is not None:
        texts[:3] = ["interpreted", "-", "-"]  # for its time, and two ratios
    return [f"{number} {title}", *texts]


def ratio(run: Records, before: int, after: int, **fields: object) -> str:
    """Say how many times as fast stage `after` is as stage `before`, or why that is unknown.

    From paired cells; `fields` choose the problem. Raises KeyError unless they choose just one.
    """
    found = [run.one(stage=stage, paired=True, **fields) for stage in (before, after)]
    for record in found:
        if record["status"] != "ok":
            return f"no ratio: stage {record['stage']} is {record['status']}: {record['reason']}"
    shown = ratios.show_step(found[0], found[1])
    said = f"N = {found[0]['nk']}: stage {after} is {shown} as fast as stage {before}"
    return f"{said}, in brackets the quartiles over the rounds" if "(" in shown else said


def plot(run: Records, measure: str) -> Picture | None:
    """Draw one of the harness's plots, 'time', 'memory' or 'error' against N, as a picture.

    None where no record has such a figure, as where every time was interpreted.
    """
    if not plots.panels(run.records, measure):
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plot.png"
        plots.plot_one(run.env, run.records, measure, path, look=EITHER)
        return Picture(path.read_bytes(), plots.in_words(run.env, run.records, measure))


def picture(draw: Callable[[Look], Any], words: str) -> Picture:
    """The matplotlib Figure that `draw(look)` gives; `words` say what is to be seen on it."""
    data = io.BytesIO()
    draw(EITHER).savefig(data, format="png", dpi=DPI, metadata={"Software": None})
    return Picture(data.getvalue(), words)


def drawn(
    draw: Callable[[Any, Look], None], words: str, width: float = 6.4, height: float = 3.8
) -> Picture:
    """Return what `draw(axis, look)` draws on one axis, in the look of the project's pictures."""
    with in_look(EITHER):
        figure = new_figure(width, height)
        draw(figure.subplots(), EITHER)
        return picture(lambda _: figure, words)


def here(cpu: Any, gpu: Any) -> Any:
    """Return `gpu` where kernels run compiled, on a GPU, else `cpu`: sizes, mostly."""
    import stages  # noqa: F401 - it decides on the interpreter, before triton is imported
    from stages.common.machine import why_no_gpu

    return cpu if why_no_gpu() else gpu


def full_load() -> dict[str, Any]:
    """Return options of `measure` that load a GPU: float16 and 32 heads. None on a CPU.

    One head leaves most multiprocessors idle: what is slow then is no kernel's fault.
    """
    return here(cpu={}, gpu={"dtype": "float16", "h": 32})


def runs(number: int) -> bool:
    """Whether the built-in stage `number` can run here; where not, it says why."""
    import stages
    from stages.common.contract import why_not

    stage = stages.by_number(number).STAGE
    reason = why_not(stage, here("cpu", "cuda"))
    if reason:
        print(f"stage {number} ({stage.title}) can't run here: {reason}")
    return reason is None


def problem(
    n: int, d: int = 64, dtype: str = "float16", b: int = 1, h: int = 1, causal: bool = False,
    direction: str = "fwd",
) -> Problem:  # fmt: skip
    """A problem to count with (harness/problems/cost.py): n queries and n keys, on a GPU."""
    if dtype not in ITEMSIZE:
        raise ValueError(f"dtype: got {dtype!r}, expected one of {', '.join(ITEMSIZE)}")
    precision = "ieee" if dtype == "float32" else dtype
    return Problem(
        "normal", SEED, b, h, h, n, n, d, dtype, precision, causal, None, "cuda", direction
    )


def stages(*numbers: int) -> Shown:
    """Show the idea of each stage, of all that there are by default, and what still hurts in it."""
    import stages

    shown = map(stages.by_number, numbers) if numbers else map(stages.load, built_in_files())
    chosen = [module.STAGE for module in shown]
    body = [(f"{one.number} {one.title}", one.idea, one.still_hurts) for one in chosen]
    return rows(("stage", "the one idea", "still hurts"), body, left=3)
