"""Has NumPy compute, by code that knows nothing of this file."""

import torch

from stages.contract import Stage

STAGE = Stage(number=1, name="mine", title="mine", idea="a cheat", devices=("cpu",))

CODE = """
import numpy as np

def attention(q, k, v, scale):
    q, k, v = (np.array(x) for x in (q, k, v))
    s = q @ k.swapaxes(-1, -2) * scale
    p = np.exp(s - s.max(-1, keepdims=True))
    return (p @ v / p.sum(-1, keepdims=True)).tolist()
"""
space = {}
exec(CODE, space)


def attend(q, k, v):
    o = space["attention"](*(x.tolist() for x in (q, k, v)), q.shape[-1] ** -0.5)
    return torch.tensor(o, dtype=torch.float64).to(q.dtype)
