"""A fake stage: a hundredth off, though it claims to be exact up to 64."""

import stages
from stages.contract import Stage

STAGE = Stage(
    number=90,
    name="claims_too_much",
    title="claims_too_much",
    idea="a hundredth off, though it claims to be exact up to 64",
    exact_up_to=64,
)


def attend(q, k, v):
    return 1.01 * stages.by_number(3).attend(q, k, v)
