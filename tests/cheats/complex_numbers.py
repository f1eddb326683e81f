"""Has torch compute, by complex numbers whose imaginary parts are 0."""

import torch

from stages.contract import Stage

STAGE = Stage(number=1, name="mine", title="mine", idea="a cheat", devices=("cpu",))


def attend(q, k, v):
    q_c, k_c, v_c = (x.to(torch.complex128) for x in (q, k, v))
    p = torch.exp(q_c @ k_c.mT * q.shape[-1] ** -0.5)
    return ((p @ v_c) / p.sum(-1, keepdim=True)).real.to(q.dtype)
