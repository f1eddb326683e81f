"""A fake stage: aborts."""

import os

from stages.contract import Stage

STAGE = Stage(number=1, name="aborts", title="aborts", idea="aborts")


def attend(q, k, v):
    os.abort()
