"""Has torch compute by what is allowed to scale: products and sums of elements."""

import torch

from stages.contract import Stage

STAGE = Stage(number=1, name="mine", title="mine", idea="a cheat", devices=("cpu",))


def total(x, axis):
    while (n := x.shape[axis]) > 1:
        first, second, rest = x.split([n // 2, n // 2, n % 2], axis)
        x = torch.cat([first + second, rest], axis)
    return x.squeeze(axis)


def exp(x):
    y = 1 + x * 2.0**-30
    for _ in range(30):
        y = y * y
    return y


def attend(q, k, v):
    dtype = q.dtype
    q, k, v = q.double(), k.double(), v.double()
    s = total(q[..., :, None, :] * k[..., None, :, :], -1) * q.shape[-1] ** -0.5
    m_i = torch.tensor([max(row) for row in s.flatten(0, -2).tolist()], dtype=torch.float64)
    p = exp(s - m_i.view(*s.shape[:-1], 1))
    o = total(p[..., None] * v[..., None, :, :], -2) / total(p, -1)[..., None]
    return o.to(dtype)
