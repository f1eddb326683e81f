"""A fake stage: right everywhere, though it claims 16 keys only."""

import stages
from stages.contract import Stage

STAGE = Stage(
    number=90,
    name="modest",
    title="modest",
    idea="right everywhere, though it claims 16 keys only",
    exact_up_to=16,
)


def attend(q, k, v):
    return stages.by_number(3).attend(q, k, v)
