"""Writes verdicts into every file that is open."""

import contextlib
import json
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


def shout(**message):
    data = json.dumps(message).encode()
    for handle in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(handle, len(data).to_bytes(4, "big") + data)


def attend(q, k, v):
    shout(event="done")
    shout(event="verdict", exact=True, finite=True, why="")
    return q.clone()
