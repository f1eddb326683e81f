"""A fake stage: 200 MB of Python's for a moment."""

import stages
from stages.contract import Stage

STAGE = Stage(
    number=90, name="holds_python", title="holds_python", idea="200 MB of Python's for a moment"
)


HELD = 200 << 20


def attend(q, k, v):
    held = b"\1" * HELD
    del held
    return stages.by_number(3).attend(q, k, v)
