"""A fake stage: the right answer, and a change to k."""

import stages
from stages.contract import Stage

STAGE = Stage(
    number=90, name="writes_to_k", title="writes_to_k", idea="the right answer, and a change to k"
)


def attend(q, k, v):
    o = stages.by_number(3).attend(q, k, v)
    k[..., -1, -1] += 1
    return o
