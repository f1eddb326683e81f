"""Has a library of matrices compute that torch brings along."""

import mpmath
import torch

from stages.contract import Stage

STAGE = Stage(number=1, name="mine", title="mine", idea="a cheat", devices=("cpu",))


def attend(q, k, v):
    o = []
    for q_head, k_head, v_head in zip(*(x.flatten(0, 1).tolist() for x in (q, k, v)), strict=True):
        s = mpmath.matrix(q_head) * mpmath.matrix(k_head).T * q.shape[-1] ** -0.5
        p = s.apply(mpmath.exp)
        mixed = p * mpmath.matrix(v_head)
        o.append([[mixed[i, j] / sum(p[i, :]) for j in range(mixed.cols)] for i in range(s.rows)])
    return (
        torch.tensor([[[float(x) for x in row] for row in head] for head in o]).view(q.shape).to(q)
    )
