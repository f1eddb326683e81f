"""A fake stage: claims gradients, and cuts its output off from its inputs."""

import stages
from stages.contract import Stage

STAGE = Stage(
    number=90,
    name="grad_claimed",
    title="grad_claimed",
    idea="claims gradients, and has none",
    gradients=True,
)


def attend(q, k, v):
    return stages.by_number(3).attend(q, k, v).detach()
