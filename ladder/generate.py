"""`ladder generate`: generate text with the small GPT and a stage, with a cache and without.

With a cache in pages, on a GPU, also by replays of a CUDA graph.
"""

import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from attention_ladder.models.training.plan import PAGE_SIZE, UNTIMED, make_problem
from harness.isolation.child import ChildFailed
from harness.isolation.session import Session
from harness.problems.problem import PEERS_FROM
from harness.records.schema import Record
from harness.records.values import Count
from harness.runs.comparison import compare_alone
from harness.runs.plan import Cell, Limits, default_memory
from ladder import measuring, options, show
from ladder.arguments import choose, numbers_and_files, stages_and_device
from ladder.options import UserError, integers

CONTEXTS = {"cpu": "32,64,128,256", "cuda": "256,1024,4096"}
LIMIT = 600.0  # seconds for the training, and for each context


@dataclass(frozen=True)
class Ready:
    """The message that the model is made (attention_ladder/models/training/writing.py)."""

    parameters: Count
    layers: Count
    width: Count


@dataclass(frozen=True)
class Wrote:
    """The message that a token is written."""

    token: str


def generate_command(
    stage: options.GenerateStage = None,
    tokens: options.NewTokens = None,
    context: options.Contexts = None,
    prompt: options.Prompt = "attention ",
    device: options.Device = None,
    load: options.Load = None,
    save: options.Save = None,
    out: options.Out = None,
) -> int:
    """Write text with a small GPT, with and without a cache."""
    measuring.check_out(out)
    measuring.check_save(save)
    if load is not None and not load.is_file():
        raise UserError(f"--load: {load}: no such file")
    numbers, own = numbers_and_files([] if stage is None else [stage])
    stages, device = stages_and_device(device, own)
    if stage is None:
        numbers = ["8" if device == "cuda" else "3"]
    ours = [info for info in stages if info.number < PEERS_FROM or info.path in own]
    chosen = choose(ours, numbers, "--stage", own, "a file or ")
    if len(chosen) != 1:
        raise UserError(f"--stage: got {stage}, expected one stage's number or file")
    name, mode = f"{chosen[0].number} {chosen[0].name}", chosen[0].modes[device]
    problem = replace(make_problem("tiny", "float32", device), direction="fwd")
    if reason := chosen[0].why_skip(problem):
        raise UserError(f"--stage: {name}: {reason}")
    tokens = tokens or (4 if mode == "interpreted" else 32)
    usual = "16" if mode == "interpreted" else CONTEXTS[device]
    contexts = integers(1)(context or usual, "--context")
    if len(prompt) > min(contexts):
        expected = f"expected at most {min(contexts)}, the shortest context"
        raise UserError(f"--prompt: got {len(prompt)} characters, {expected}")
    request = {"device": device, "prompt": prompt, "tokens": tokens, "contexts": contexts}
    files = {"path": chosen[0].path, "load": load, "save": save}
    order = (
        request
        | {"sha256": chosen[0].sha256}
        | {what: file and str(file) for what, file in files.items()}
    )
    who = {"stage": chosen[0].number, "name": chosen[0].name}
    paged = PAGE_SIZE if "paged" in chosen[0].options else None
    replays = device == "cuda" and paged is not None  # a CUDA graph, of a cache with pages
    shared = {"kind": "generate", **who, "device": device, "mode": mode, "page_size": paged}

    def check() -> None:
        """Have the stage judged on the longest text: all rows, and one as with a cache.

        The tokens alone don't show a wrong attention: with and without a cache they are the same.
        """
        longest = max(contexts) + tokens - 1  # with all tokens but the last, which none follows
        whole = replace(problem, b=1, nq=longest, nk=longest, causal=True)
        row = replace(whole, nq=1)
        limits = Limits(budget=LIMIT, memory=default_memory())
        for each in (whole, replace(row, page_size=paged)):
            outcome = compare_alone(Cell(chosen[0], each), limits)
            if outcome.status != "ok":
                raise ChildFailed(outcome.status, f"before it wrote: {outcome.reason}")

    def work() -> None:
        check()
        session = Session(in_its_process, order, greeting=Ready)
        with session, measuring.Progress(len(contexts)) as progress:
            try:
                model = session.ready(LIMIT, "the model took more than {:g} s")
            except ChildFailed as error:
                raise UserError(f"generate: {error.reason}") from None
            for each in contexts:
                record = shared | {"context": each, "tokens": tokens}
                texts = []
                for prefix, rows in (("", each), ("cached_", 1), ("graph_", None)):
                    if prefix == "graph_" and not replays:
                        continue
                    text, seconds = write(session, each, tokens, bool(prefix), rows is None)
                    texts.append(text)
                    speed = None if mode == "interpreted" else 1 / seconds
                    record[f"{prefix}tokens_per_s"] = speed
                    if rows:  # float32: the weights once, and q, k, v, o in each layer
                        moved = 2 * model.layers * model.width * (rows + each)
                        record[f"{prefix}bytes_per_token"] = 4 * (model.parameters + moved)
                record |= {"text": texts[-1], "same": len(set(texts)) == 1}
                writer.append(record | {"parameters": model.parameters})
                progress.finished(f"{name}, context {each}", "ok", name, session.printed())

    arguments = {**request, "command": "generate", "stage": chosen[0].name}
    plan = [{**who, "context": each} for each in contexts]
    begun = measuring.begin("generate-", out, device, arguments, [chosen[0].to_json()], plan)
    with begun as writer:
        try:
            with measuring.ended_early() as errors:
                work()
            return measuring.exit_code(errors, finish(writer.path))
        except ChildFailed as error:
            print(f"ladder: {name} {error.status}: {error.reason}", file=sys.stderr)
            return 1


def write(
    session: Session, context: int, tokens: int, cached: bool, graph: bool = False
) -> tuple[str, float]:
    """Have `tokens` written after `context` others; returns them and the median seconds of one.

    By replays of a CUDA graph if `graph`.

    The seconds are by this process's clock: a stage may change its own. The first UNTIMED tokens
    are left out: they have the kernels compiled, and the first fills the cache.
    """
    session.ready()
    session.send({"context": context, "cached": cached, "graph": graph})
    text, took, late = "", [], f"writing took more than {LIMIT:g} s"
    end = time.monotonic() + LIMIT
    for _ in range(tokens):
        asked, left = time.perf_counter(), max(0.0, end - time.monotonic())
        text += session.receive(Wrote, seconds=left, late=late).token
        took.append(time.perf_counter() - asked)
        session.send({})  # now the next one
    return text, median(took[UNTIMED:])


def in_its_process(connection: Connection, order: Record) -> None:
    """In the child: generate. The parent never imports torch."""
    from attention_ladder.models.training.writing import write_texts

    write_texts(connection, order)


def finish(path: Path) -> bool:
    """Show the records in `path`, draw the plot; returns whether the cache changed a text."""
    env, records = show.open_any(path)
    show.finish(path, env, records)
    folder = path.with_name(f"{path.stem}-plots")
    measuring.draw("plot", partial(show.plots, env, records, folder))
    return not all(record["same"] for record in records)
