"""Has torch compute within an operation of its own, which has an allowed one's name."""

import torch

from stages.contract import Stage

STAGE = Stage(number=1, name="mine", title="mine", idea="a cheat", devices=("cpu",))


def softmax_of(q, k, v):
    """Attention, by torch."""
    return (torch.softmax(q.double() @ k.double().mT * q.shape[-1] ** -0.5, -1) @ v.double()).to(q)


library = torch.library.Library("view", "DEF")
library.define("attention(Tensor q, Tensor k, Tensor v) -> Tensor")
library.impl("attention", softmax_of, "CPU")


def attend(q, k, v):
    return torch.ops.view.attention(q, k, v)
