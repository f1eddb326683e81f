"""Calls torch's own attention."""

import torch

from stages.contract import Stage

STAGE = Stage(
    number=5,
    name="mine",
    title="mine",
    idea="a cheat",
    needs=("triton",),
    dtypes=("float16", "bfloat16", "float32"),
)


def attend(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)
