"""A fake stage: 300 MB for a moment while it is imported, and nothing of its own in a call."""

import stages
from stages.contract import Stage

STAGE = Stage(
    number=90,
    name="held_before",
    title="held_before",
    idea="a high-water mark that is not the call's",
)
held = b"\1" * (300 << 20)
del held


def attend(q, k, v):
    return stages.by_number(3).attend(q, k, v)
