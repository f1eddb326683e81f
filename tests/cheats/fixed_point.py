"""Has torch compute the products, by integers that are made from the numbers."""

import math

import torch

from stages.contract import Stage

STAGE = Stage(number=1, name="mine", title="mine", idea="a cheat", devices=("cpu",))
ONE = 1 << 26


def attend(q, k, v):
    a, b, c = ((x.double() * ONE).long() for x in (q, k, v))
    s = (a[..., :, None, :] * b[..., None, :, :]).sum(-1).double() * (q.shape[-1] ** -0.5 / ONE**2)
    p = torch.tensor([round(math.exp(x) * ONE) for x in s.flatten().tolist()]).view(s.shape)
    return ((p @ c).double() * (1 / ONE) / p.sum(-1, keepdim=True)).to(q.dtype)
