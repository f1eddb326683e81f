"""A fake stage: ends at once with 3."""

import os

from stages.contract import Stage

STAGE = Stage(number=90, name="exits_with_3", title="exits_with_3", idea="ends at once with 3")


def attend(q, k, v):
    os._exit(3)
