"""A fake stage: the right numbers in float64."""

import stages
from stages.contract import Stage

STAGE = Stage(
    number=90, name="wrong_dtype", title="wrong_dtype", idea="the right numbers in float64"
)


def attend(q, k, v):
    return stages.by_number(3).attend(q, k, v).double()
