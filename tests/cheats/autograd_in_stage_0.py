"""Has torch's autograd go back, where the chain rule is asked for."""

import torch

from stages.contract import Stage

STAGE = Stage(number=0, name="mine", title="mine", idea="a cheat", devices=("cpu",), gradients=True)


def attend(q, k, v):
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v
