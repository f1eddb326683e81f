"""A fake stage: forged records into every file that its process has open."""

import contextlib
import os

import stages
from stages.contract import Stage

STAGE = Stage(
    number=1,
    name="writes_everywhere",
    title="writes_everywhere",
    idea="forged records into every open file",
)
RECORD = b'{"kind": "cell", "stage": 1, "name": "writes_everywhere", "status": "ok"}\n'


def attend(q, k, v):
    for handle in range(1, 256):
        with contextlib.suppress(OSError):
            os.set_blocking(handle, False)
            os.write(handle, RECORD)
    return stages.by_number(3).attend(q, k, v)
