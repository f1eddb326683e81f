"""A fake stage: announces a message of 4096 bytes and never sends it."""

import contextlib
import os
import stat

import stages
from stages.contract import Stage

STAGE = Stage(
    number=90,
    name="talks_endlessly",
    title="talks_endlessly",
    idea="announces a message of 4096 bytes and never sends it",
)
GARBAGE = b"\x00\x00\x10\x00"


def attend(q, k, v):
    if q.shape[2] > 16:  # not in the warm-up
        for handle in range(3, 256):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(handle).st_mode):
                    os.write(handle, GARBAGE)
    return stages.by_number(3).attend(q, k, v)
