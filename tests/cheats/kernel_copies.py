"""Has torch compute, and a kernel copy what it has computed."""

import torch
import triton
import triton.language as tl

from stages.contract import Stage

STAGE = Stage(
    number=5,
    name="mine",
    title="mine",
    idea="a cheat",
    needs=("triton",),
    dtypes=("float16", "bfloat16", "float32"),
)


@triton.jit
def copy_kernel(x_ptr, o_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


def attend(q, k, v):
    p = torch.softmax(q.float() @ k.float().mT * q.shape[-1] ** -0.5, -1)
    done = (p @ v.float()).to(q.dtype)
    o = torch.empty_like(done)
    copy_kernel[(triton.cdiv(o.numel(), 64),)](done, o, o.numel(), BLOCK=64)
    return o
