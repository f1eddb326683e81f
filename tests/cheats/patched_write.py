"""Has what its process writes become something else."""

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


real = os.write


def write(handle, data):
    return real(handle, bytes(data).replace(b"failed", b"passed"))


os.write = write


def attend(q, k, v):
    raise RuntimeError("failed")
