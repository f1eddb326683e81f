"""A fake stage: attends to k instead of v."""

import stages
from stages.contract import Stage

STAGE = Stage(number=90, name="ignores_v", title="ignores_v", idea="attends to k instead of v")


def attend(q, k, v):
    return stages.by_number(3).attend(q, k, k)
