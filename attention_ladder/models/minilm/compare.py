"""The judge of `ladder model`: compares hidden states with SDPA's and with a float64 model's.

It runs in its own process, without any stage. The parent process, which doesn't import torch, never
imports this module.
"""

import functools
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from attention_ladder.models.minilm.encoder import build_model, hidden_states, prepare
from attention_ladder.models.minilm.weights import FIGURES
from harness.isolation.child import hear, one_line, say
from harness.measures.accuracy import Error, explain
from harness.records.schema import Record

# The bounds of a stage's errors against the float64 model, in multiples of SDPA's errors: over 120
# texts in float32 and float16, stage 3's relative error was up to 1.4 times SDPA's, and its maximum
# error up to 2.4 times
MAX_FACTOR = 4.0
REL_FACTOR = 2.0


def judge(connection: Connection, order: Record, dtype: str, device: str) -> None:
    """Compare hidden states with those of the same model with SDPA, in their dtype and in float64.

    Sends 'ready'; then for each {'ids', 'path'} a 'verdict': whether all is finite, whether it is
    as exact as SDPA, why not, and the measured fields of a record. Or 'failed'.
    """
    try:
        prepare(dtype)
        like = getattr(torch, dtype)
        # both have the weights rounded to the dtype, so that only the arithmetic differs
        models = [
            build_model(order, like, "sdpa", device=device, compute=compute)
            for compute in (like, torch.float64)
        ]

        @functools.cache
        def references(ids: tuple[int, ...]) -> list[Tensor]:
            text = torch.tensor([ids], device=device)
            return [hidden_states(model, text).cpu().double() for model in models]

        say(connection, "ready")
        while True:
            message = hear(connection)
            by_sdpa, exact = references(tuple(message["ids"]))
            data = torch.frombuffer(bytearray(Path(message["path"]).read_bytes()), dtype=like)
            if data.numel() == exact.numel():
                hidden = data.view(exact.shape).double()
                found = compare(hidden, by_sdpa, exact, torch.finfo(like).eps)
            else:
                found = {"finite": False, "exact": False, "why": "its output was cut short"}
            say(connection, "verdict", **dict.fromkeys(FIGURES) | found)
    except BaseException as error:
        say(connection, "failed", status="crashed", reason=one_line(error))


def compare(hidden: Tensor, by_sdpa: Tensor, exact: Tensor, eps: float) -> Record:
    """Compare hidden states (L + 1, N, 384) with SDPA's and with float64's; returns the verdict.

    They are exact where the last one's error against float64 is within a small multiple of SDPA's
    error, plus an eps of the dtype for the last rounding.
    """
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


def embedding(hidden: Tensor) -> Tensor:
    """The sentence embedding (384,) of last hidden states (N, 384): their mean, normalised."""
    mean = hidden.mean(dim=0)  # (384,)
    return mean / mean.norm()
