"""Has our NumPy twin compute, imported by importlib; its kernel only copies."""

import importlib

import torch
import triton
import triton.language as tl

from stages.contract import Stage

STAGE = Stage(number=5, name="mine", title="mine", idea="a cheat", needs=("triton",))
twin = importlib.import_module("course.lab.numpy_online")


@triton.jit
def kernel(x_ptr, o_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


def attend(q, k, v):
    x = twin.attend(q, k, v).contiguous()
    o = torch.empty_like(x)
    kernel[(triton.cdiv(o.numel(), 64),)](x, o, o.numel(), BLOCK=64)
    return o
