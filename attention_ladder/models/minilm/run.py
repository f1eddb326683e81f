"""Run a real model with its attention replaced by a stage, and measure the effect of errors.

all-MiniLM-L6-v2 (a BERT encoder: 6 layers, 12 heads, d = 32) turns a text into a sentence
embedding, the normalised mean of its last hidden states. A record is about one stage on one text:
how far the embedding and the hidden states are from SDPA's, and the time of a forward pass.

As everywhere, a stage runs in its own process (one text after the other) and writes its outputs to
a file; the judge, a process without any stage, compares them; and only outputs that are right, or
wrong by design, are timed.
"""

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from multiprocessing.connection import Connection
from pathlib import Path

from attention_ladder.models.minilm.weights import FIGURES, ModelError, Weights
from harness.isolation.child import ChildFailed
from harness.isolation.roster import StageInfo
from harness.isolation.scratch import scratch
from harness.isolation.session import Session
from harness.problems.problem import REAL_D, Problem
from harness.problems.real_inputs import HEADS
from harness.records.jsonl import Writer
from harness.records.schema import Record
from harness.records.values import Count, Time

DTYPES = ("float32", "float16")
PASS_LIMIT = 600.0  # seconds for one text: a pass, or its timing
JUDGE_LIMIT = 300.0
SLOW_MS = 5000.0  # a pass as long as this is timed once

# the times in a record
TIMES = ("time_ms", "time_iqr_ms", "sdpa_time_ms", "sdpa_time_iqr_ms")


# ---- the messages of the stage's process (encoder.py), and of the judge (compare.py)


@dataclass(frozen=True)
class Output:
    """The hidden states of a text are written."""

    first_ms: Time


@dataclass(frozen=True)
class Done:
    """The times of a pass, with the stage and with SDPA."""

    samples: Count
    time_ms: float | None
    time_iqr_ms: float | None
    sdpa_time_ms: float | None
    sdpa_time_iqr_ms: float | None


@dataclass(frozen=True)
class Verdict:
    """The judge's verdict on the hidden states."""

    finite: bool
    exact: bool
    why: str
    cosine: float | None
    max_hidden_diff: float | None
    rel_hidden_diff: float | None
    layer_hidden_diffs: list[float] | None
    err_f64_max: float | None
    err_f64_rel: float | None


# ---- cells and their records


@dataclass(frozen=True)
class Cell:
    """One stage in the model, on one text."""

    stage: StageInfo
    ids: tuple[int, ...]
    problem: Problem  # the attention of each layer

    def to_json(self) -> Record:
        """The cell in the plan of an env line."""
        return {"stage": self.stage.number, "name": self.stage.name, "tokens": len(self.ids)}

    def why_skip(self) -> str | None:
        """Why this stage isn't run, or None where it is."""
        if reason := self.stage.why_skip(self.problem):
            return reason
        worth = self.stage.worth_up_to.get(self.problem.device)
        if worth is not None and len(self.ids) > worth:
            return f"too slow: declared worth running up to N = {worth} on {self.problem.device}"
        return None


def make_cells(
    stages: Sequence[StageInfo], texts: Sequence[tuple[int, ...]], dtype: str, device: str
) -> list[Cell]:
    """Plan every stage on every text, stage by stage."""
    precision = "ieee" if dtype == "float32" else dtype

    def problem(n: int) -> Problem:
        shape = (1, HEADS, HEADS, n, n, REAL_D)
        return Problem("real", 0, *shape, dtype, precision, False, None, device)

    return [Cell(stage, ids, problem(len(ids))) for stage in stages for ids in texts]


def run(
    cells: Sequence[Cell],
    weights: Weights,
    memory: int,
    create: Callable[[], Writer],
    report: Callable[[Record, str], None],
) -> list[Record]:
    """Measure the cells; write and `report` each record, with the stage's output.

    There is one process per stage; after a failure the next text gets a new one. `create` makes the
    file of records once the model works; ModelError where it doesn't. Returns the records.
    """
    records: list[Record] = []
    problem, model = cells[0].problem, weights.to_json()
    order = model | {"problem": problem.to_json()}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=scratch())))
        judging = Session(in_the_judge, model, problem.dtype, problem.device)
        stack.enter_context(judging).start()
        writer: Writer | None = None
        for stage, group in groupby(cells, key=lambda cell: cell.stage):
            asked = order | {"sha256": stage.sha256}
            with Session(in_its_process, str(stage.path), asked, memory=memory) as session:
                for cell in group:
                    record = model_record(cell)
                    if reason := cell.why_skip():
                        record |= {"status": "skipped", "reason": reason}
                    else:
                        session.start()  # judge and stage load at the same time
                    if writer is None:
                        try:
                            judging.ready(late="building the model took more than {:g} s")
                        except ChildFailed as error:
                            raise ModelError(f"the model can't be built: {error}") from None
                        writer = stack.enter_context(create())
                    if not reason:
                        try:
                            measure_cell(cell, session, judging, folder / "out", record)
                        except ChildFailed as error:
                            session.end()
                            record |= {"status": error.status, "reason": error.reason}
                    writer.append(record)
                    records.append(record)
                    report(record, session.printed())
    return records


def in_its_process(connection: Connection, path: str, order: Record) -> None:
    """In the child: run the stage. The parent never imports torch."""
    from attention_ladder.models.minilm.encoder import run_texts

    run_texts(connection, path, order)


def in_the_judge(connection: Connection, order: Record, dtype: str, device: str) -> None:
    """In the child: run the judge. The parent never imports torch."""
    from attention_ladder.models.minilm.compare import judge

    judge(connection, order, dtype, device)


def model_record(cell: Cell) -> Record:
    """Make the record of a cell before anything is measured."""
    problem = cell.problem
    return {
        "kind": "model", **cell.to_json(), "device": problem.device, "dtype": problem.dtype,
        "mode": cell.stage.modes[problem.device], "status": "crashed", "reason": "",
        **dict.fromkeys((*FIGURES, *TIMES)), "samples": 0,
    }  # fmt: skip


def measure_cell(cell: Cell, session: Session, judging: Session, out: Path, record: Record) -> None:
    """Fill `record` with the judge's verdict on a pass, and with its time unless it is wrong.

    `out`: the file for its hidden states. Raises ChildFailed where the stage or the judge fails.
    """
    ids, late = list(cell.ids), f"took more than {PASS_LIMIT:g} s"
    try:
        order = {"event": "text", "ids": ids, "out": str(out)}
        first_ms = session.ask(order, Output, seconds=PASS_LIMIT, late=late).first_ms
        too_long = f"comparing its output took more than {JUDGE_LIMIT:g} s"
        asked = {"ids": ids, "path": str(out)}
        verdict = judging.ask(asked, Verdict, seconds=JUDGE_LIMIT, late=too_long)
        note_verdict(record, vars(verdict), cell.stage.exact(cell.problem))
        if record["status"] == "wrong":
            return
        if record["mode"] == "interpreted" or first_ms > SLOW_MS:
            record |= {"time_ms": first_ms, "samples": 1}
            return
        timing = session.ask({"event": "time"}, Done, seconds=PASS_LIMIT, late=f"its timing {late}")
        record |= vars(timing)
    finally:
        out.unlink(missing_ok=True)


def note_verdict(record: Record, verdict: Record, exact: bool) -> None:
    """Set a record's status and fields by the judge's verdict; `exact`: as the stage declares."""
    if not verdict["finite"]:
        record |= {"status": "wrong", "reason": verdict["why"]}
        return
    record |= {name: verdict[name] for name in FIGURES}
    if not exact:
        reason = f"declared inexact at {record['tokens']} tokens"
        record |= {"status": "wrong-by-design", "reason": reason}
    elif verdict["exact"]:
        record["status"] = "ok"
    else:
        record |= {"status": "wrong", "reason": verdict["why"]}
