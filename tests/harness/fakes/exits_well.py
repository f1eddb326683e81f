"""A fake stage: ends as if all were well."""

import sys

from stages.contract import Stage

STAGE = Stage(number=90, name="exits_well", title="exits_well", idea="ends as if all were well")


def attend(q, k, v):
    sys.exit(0)
