"""Has torch compute, where loops are asked for."""

import torch

from stages.contract import Stage

STAGE = Stage(number=1, name="mine", title="mine", idea="a cheat", devices=("cpu",))


def attend(q, k, v):
    return (torch.softmax(q.double() @ k.double().mT * q.shape[-1] ** -0.5, -1) @ v.double()).to(q)
