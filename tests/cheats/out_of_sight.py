"""Has torch compute where its modes are left."""

import torch
from torch.utils._python_dispatch import _disable_current_modes

from stages.contract import Stage

STAGE = Stage(number=1, name="mine", title="mine", idea="a cheat", devices=("cpu",))


def softmax_of(q, k, v):
    """Attention, by torch."""
    return (torch.softmax(q.double() @ k.double().mT * q.shape[-1] ** -0.5, -1) @ v.double()).to(q)


def attend(q, k, v):
    with _disable_current_modes():
        return softmax_of(q, k, v)
