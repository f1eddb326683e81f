"""A fake stage: the harness's own word, its figures left out."""

import contextlib
import os
import stat

import stages
from stages.contract import Stage

STAGE = Stage(
    number=90,
    name="talks_half",
    title="talks_half",
    idea="the harness's own word, its figures left out",
)
GARBAGE = b"\x00\x00\x00\x13" + b'{"event": "output"}'


def attend(q, k, v):
    if q.shape[2] > 16:  # not in the warm-up
        for handle in range(3, 256):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(handle).st_mode):
                    os.write(handle, GARBAGE)
    return stages.by_number(3).attend(q, k, v)
