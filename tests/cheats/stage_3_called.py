"""Calls stage 3."""

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


import stages


def attend(q, k, v):
    return stages.by_number(3).attend(q, k, v)
