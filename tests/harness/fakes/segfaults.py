"""A fake stage: reads address 0."""

import ctypes

from stages.contract import Stage

STAGE = Stage(number=90, name="segfaults", title="segfaults", idea="reads address 0")


def attend(q, k, v):
    ctypes.string_at(0)
