"""A fake stage: ends at once with 0."""

import os

from stages.contract import Stage

STAGE = Stage(number=90, name="exits_at_once", title="exits_at_once", idea="ends at once with 0")


def attend(q, k, v):
    os._exit(0)
