"""Has NumPy compute, where a kernel is asked for."""

import numpy as np
import torch

from stages.contract import Stage

STAGE = Stage(
    number=5,
    name="mine",
    title="mine",
    idea="a cheat",
    needs=("triton",),
    dtypes=("float16", "bfloat16", "float32"),
)


def attend(q, k, v):
    q64, k64, v64 = (x.double().numpy() for x in (q, k, v))
    s = q64 @ k64.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    p = np.exp(s - s.max(-1, keepdims=True))
    return torch.from_numpy(p @ v64 / p.sum(-1, keepdims=True)).to(q.dtype)
