"""Calls the stage that is to be written."""

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


from stages.s05_triton_online import attend as solution


def attend(q, k, v):
    return solution(q, k, v)
