"""A fake stage: one NaN."""

import torch

from stages.contract import Stage

STAGE = Stage(number=90, name="gives_nan", title="gives_nan", idea="one NaN")


def attend(q, k, v):
    o = torch.zeros_like(q)
    o[..., 0, 0] = float("nan")
    return o
