"""A fake stage: infinite, though it owns up to being inexact."""

import torch

from stages.contract import Stage

STAGE = Stage(
    number=90,
    name="gives_inf",
    title="gives_inf",
    idea="infinite, though it owns up to being inexact",
    exact_up_to=1,
)


def attend(q, k, v):
    return torch.full_like(q, float("inf"))
