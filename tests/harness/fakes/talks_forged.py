"""A fake stage: the harness's own message, with figures of another kind."""

import contextlib
import json
import os
import stat

import stages
from stages.contract import Stage

STAGE = Stage(
    number=90,
    name="talks_forged",
    title="talks_forged",
    idea="the harness's own message, with figures of another kind",
)
FORGED = {
    "event": "checked",
    "first_call_ms": "quick",
    "call_ms": "quick",
    "peak_bytes": -1.5,
    "memory_meter": ["none"],
}


def attend(q, k, v):
    if q.shape[2] > 16:  # not in the warm-up
        message = json.dumps(FORGED).encode()
        for handle in range(3, 256):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(handle).st_mode):
                    os.write(handle, len(message).to_bytes(4, "big") + message)
    return stages.by_number(3).attend(q, k, v)
