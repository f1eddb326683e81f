"""Has NumPy compute from lists of numbers; its kernel only copies."""

import numpy as np
import torch
import triton
import triton.language as tl

from stages.contract import Stage

STAGE = Stage(number=5, name="mine", title="mine", idea="a cheat", needs=("triton",))


@triton.jit
def copy_kernel(x_ptr, o_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


def copied(x):
    o = torch.empty_like(x)
    copy_kernel[(triton.cdiv(o.numel(), 64),)](x, o, o.numel(), BLOCK=64)
    return o


def attend(q, k, v):
    a, b, c = (np.array(x.tolist()) for x in (q, k, v))
    s = a @ b.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    p = np.exp(s - s.max(-1, keepdims=True))
    return copied(torch.tensor((p @ c / p.sum(-1, keepdims=True)).tolist()).to(q.dtype))
