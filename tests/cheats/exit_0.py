"""Ends its process as if all were well."""

import os

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
    os._exit(0)
