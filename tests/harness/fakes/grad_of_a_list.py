"""A fake stage: the right output, in a list."""

import stages
from stages.contract import Stage

STAGE = Stage(
    number=90,
    name="grad_of_a_list",
    title="grad_of_a_list",
    idea="the right output, in a list",
    gradients=True,
)


def attend(q, k, v):
    return [stages.by_number(3).attend(q, k, v)]
