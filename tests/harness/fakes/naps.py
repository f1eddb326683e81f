"""A fake stage: sleeps 20 ms, then stage 3."""

import time

import stages
from stages.contract import Stage

STAGE = Stage(
    number=90, name="naps", title="naps", idea="sleeps 20 ms, then stage 3", gradients=True
)


def attend(q, k, v):
    time.sleep(0.02)
    return stages.by_number(3).attend(q, k, v)
