"""Run the encoder of transformers with a stage as its attention, in the stage's own process.

Each call has one unpadded text, so that no mask is needed. The parent process, which doesn't import
torch, never imports this module.
"""

import functools
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import stages
from attention_ladder.models.attention_interface import register
from harness.isolation.call import blame
from harness.isolation.child import hear, say
from harness.measures.accuracy import set_precision
from harness.measures.timing import alternate, time_once
from harness.problems.problem import Problem
from harness.records.schema import Record

TURN_SECONDS = 0.3  # of sampling each of the two that take turns


def run_texts(connection: Connection, path: str, order: Record) -> None:
    """Run texts through the model with the stage in the file `path` as its attention.

    Sends 'ready'. For each 'text' {'ids', 'out'} it writes the hidden states to the file `out` and
    sends 'output' with the time of the pass; for 'time' it sends 'done' with the timings of the
    stage and of SDPA. Or 'failed'.
    """
    problem = Problem.from_json(order["problem"])
    try:
        module = stages.load(path, sha256=order.get("sha256"))
        prepare(problem.dtype)
        dtype, device = getattr(torch, problem.dtype), problem.device
        model = build_model(order, dtype, register(module), device=device)
        sdpa: Any = None
        say(connection, "ready")
        while True:
            message = hear(connection)
            if message["event"] == "text":
                ids = torch.tensor([message["ids"]], device=device)
                hidden, first_ms = time_once(functools.partial(hidden_states, model, ids), device)
                flat = hidden.cpu().contiguous().reshape(-1)
                Path(message["out"]).write_bytes(flat.view(torch.uint8).numpy().tobytes())
                say(connection, "output", first_ms=first_ms)
                continue
            sdpa = sdpa or build_model(order, dtype, "sdpa", device=device)
            with torch.no_grad():
                calls = [functools.partial(each, ids) for each in (model, sdpa)]
                for call in calls:
                    call()
                # timed as on the model's device, also where the stage computes on the CPU
                ours, theirs = alternate(calls, [device] * 2, 2 * TURN_SECONDS)
            say(
                connection, "done", samples=len(ours.samples_ms),
                time_ms=ours.median_ms, time_iqr_ms=ours.iqr_ms,
                sdpa_time_ms=theirs.median_ms, sdpa_time_iqr_ms=theirs.iqr_ms,
            )  # fmt: skip
    except BaseException as error:
        say(connection, "failed", **blame(error))


def prepare(dtype: str) -> None:
    """Set this process up: one thread (timing.py says why), IEEE, no network, no log output."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    if dtype == "float32":
        set_precision("ieee")


def build_model(
    order: Record, dtype: torch.dtype, attention: str, *, device: str, compute: Any = None
) -> Any:
    """Build the encoder with its weights rounded to `dtype`; it computes in `compute` or `dtype`.

    It has no pooler, which embeddings don't use. Raises RuntimeError where a weight is missing.
    """
    from safetensors.torch import load_file
    from transformers import BertConfig, BertModel

    config = BertConfig(**order["config"], attn_implementation=attention)
    model = BertModel(config, add_pooling_layer=False)
    ours = model.state_dict().keys()
    state = load_file(order["path"])
    model.load_state_dict({name: x.to(dtype) for name, x in state.items() if name in ours})
    return model.eval().to(device=device, dtype=compute or dtype)


@torch.no_grad()
def hidden_states(model: Any, ids: Tensor) -> Tensor:
    """The hidden states (L + 1, N, 384) of the text `ids` (1, N): embeddings, then each layer."""
    return torch.cat(model(ids, output_hidden_states=True).hidden_states)
