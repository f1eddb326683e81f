"""Tiles of 256 keys, of 64 rows, and of 64 columns or more, whatever d is."""

import torch
import triton
import triton.language as tl

from stages.contract import Stage

STAGE = Stage(
    number=5,
    name="mine",
    title="mine",
    idea="the online softmax",
    needs=("triton",),
    dtypes=("float16", "bfloat16", "float32"),
)


@triton.jit
def kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, Nq, Nk, d, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head, rows = tl.program_id(1), tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    q_at = (head * Nq + rows[:, None]) * d + offs_d[None, :]
    q_mask = (rows[:, None] < Nq) & (offs_d[None, :] < d)
    q = tl.load(q_ptr + q_at, mask=q_mask, other=0.0)
    m_i = tl.full((BLOCK_M,), -1e38, dtype=tl.float32)
    l_i = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for start_n in range(0, Nk, BLOCK_N):
        keys = start_n + tl.arange(0, BLOCK_N)
        at = (head * Nk + keys[:, None]) * d + offs_d[None, :]
        mask = (keys[:, None] < Nk) & (offs_d[None, :] < d)
        k = tl.load(k_ptr + at, mask=mask, other=0.0)
        v = tl.load(v_ptr + at, mask=mask, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where(keys[None, :] < Nk, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        alpha = tl.exp(m_i - m_new)
        p = tl.exp(s - m_new[:, None])
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        acc += tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m_i = m_new
    acc = acc / l_i[:, None]
    tl.store(o_ptr + q_at, acc.to(o_ptr.dtype.element_ty), mask=q_mask)


def attend(q, k, v):
    """Attention, by the kernel."""
    q, k, v = (x.contiguous() for x in (q, k, v))
    B, H, Nq, d = q.shape
    o = torch.empty_like(q)
    kernel[(triton.cdiv(Nq, 64), B * H)](
        q, k, v, o, Nq, k.shape[2], d, d**-0.5,
        BLOCK_M=64, BLOCK_N=256, BLOCK_D=max(64, triton.next_power_of_2(d)),
    )  # fmt: skip
    return o
