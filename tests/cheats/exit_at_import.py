"""Ends its process while it is imported."""

import sys

from stages.contract import Stage

STAGE = Stage(
    number=5,
    name="mine",
    title="mine",
    idea="a cheat",
    needs=("triton",),
    dtypes=("float16", "bfloat16", "float32"),
)


sys.exit(0)


def attend(q, k, v):
    return q
