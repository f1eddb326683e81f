"""A fake stage: allocates 4 TiB at once."""

import torch

from stages.contract import Stage

STAGE = Stage(
    number=90, name="asks_too_much", title="asks_too_much", idea="allocates 4 TiB at once"
)


def attend(q, k, v):
    return torch.ones(1 << 40) + q
