"""A fake stage: announces a message of 2**62 bytes."""

import contextlib
import os
import stat

import stages
from stages.contract import Stage

STAGE = Stage(
    number=90, name="talks_hugely", title="talks_hugely", idea="announces a message of 2**62 bytes"
)
GARBAGE = b"\xff\xff\xff\xff" + (1 << 62).to_bytes(8, "big")


def attend(q, k, v):
    if q.shape[2] > 16:  # not in the warm-up
        for handle in range(3, 256):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(handle).st_mode):
                    os.write(handle, GARBAGE)
    return stages.by_number(3).attend(q, k, v)
