"""Has torch compute, by two products and a softmax."""

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


def softmax_of(q, k, v):
    """Attention, by torch."""
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


def attend(q, k, v):
    return softmax_of(q.float(), k.float(), v.float()).to(q.dtype)
