"""Has NumPy compute, where loops are asked for."""

import numpy as np
import torch

from stages.contract import Stage

STAGE = Stage(number=1, name="mine", title="mine", idea="a cheat", devices=("cpu",))


def attend(q, k, v):
    a, b, c = (np.array(x.tolist()) for x in (q, k, v))
    s = a @ b.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    p = np.exp(s - s.max(-1, keepdims=True))
    return torch.tensor((p @ c / p.sum(-1, keepdims=True)).tolist(), dtype=q.dtype)
