"""A fake stage: the right answer, and a change to v."""

import stages
from stages.contract import Stage

STAGE = Stage(
    number=90, name="writes_to_v", title="writes_to_v", idea="the right answer, and a change to v"
)


def attend(q, k, v):
    o = stages.by_number(3).attend(q, k, v)
    v[..., -1, -1] += 1
    return o
