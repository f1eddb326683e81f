"""Calls stage 3."""

import stages
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
    return stages.by_number(3).attend(q, k, v)
