"""A fake stage: the right answer, and a change to q."""

import stages
from stages.contract import Stage

STAGE = Stage(
    number=90, name="writes_to_q", title="writes_to_q", idea="the right answer, and a change to q"
)


def attend(q, k, v):
    o = stages.by_number(3).attend(q, k, v)
    q[..., -1, -1] += 1
    return o
