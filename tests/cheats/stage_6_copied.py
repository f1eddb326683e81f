"""Has stage 6 compute, which stage 8 builds on; its kernel only copies."""

import torch
import triton
import triton.language as tl

from stages import s06_triton_flash2
from stages.contract import Stage

STAGE = Stage(number=8, name="mine", title="mine", idea="a cheat", needs=("triton",))


@triton.jit
def copy_kernel(x_ptr, o_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


def copied(x):
    o = torch.empty_like(x)
    copy_kernel[(triton.cdiv(o.numel(), 64),)](x, o, o.numel(), BLOCK=64)
    return o


def attend(q, k, v):
    return copied(s06_triton_flash2.attend(q, k, v))
