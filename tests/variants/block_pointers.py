"""Block pointers, which pad what they load; and it shows what it gives back."""

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
def block(x_ptr, rows, d, first, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    return tl.make_block_ptr(x_ptr, (rows, d), (d, 1), (first, 0), (ROWS, BLOCK_D), (1, 0))


@triton.jit
def kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, Nq, Nk, d, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head, first = tl.program_id(1), tl.program_id(0) * BLOCK_M
    q = tl.load(
        block(q_ptr + head * Nq * d, Nq, d, first, BLOCK_M, BLOCK_D), None, None, (0, 1), "zero"
    )
    k_block = block(k_ptr + head * Nk * d, Nk, d, 0, BLOCK_N, BLOCK_D)
    v_block = block(v_ptr + head * Nk * d, Nk, d, 0, BLOCK_N, BLOCK_D)
    m_i = tl.full((BLOCK_M,), -1e30, dtype=tl.float32)
    l_i = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for start_n in range(0, Nk, BLOCK_N):
        k = tl.load(k_block, boundary_check=(0, 1), padding_option="zero")
        v = tl.load(v_block, boundary_check=(0, 1), padding_option="zero")
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where((start_n + tl.arange(0, BLOCK_N))[None, :] < Nk, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        alpha = tl.exp(m_i - m_new)
        p = tl.exp(s - m_new[:, None])
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m_i = m_new
        k_block, v_block = tl.advance(k_block, (BLOCK_N, 0)), tl.advance(v_block, (BLOCK_N, 0))
    o = (acc / l_i[:, None]).to(o_ptr.dtype.element_ty)
    tl.store(block(o_ptr + head * Nq * d, Nq, d, first, BLOCK_M, BLOCK_D), o, None, (0, 1))


def attend(q, k, v):
    """Attention, by the kernel."""
    q, k, v = (x.contiguous() for x in (q, k, v))
    B, H, Nq, d = q.shape
    o = torch.empty_like(q)
    kernel[(triton.cdiv(Nq, 16), B * H)](
        q, k, v, o, Nq, k.shape[2], d, d**-0.5,
        BLOCK_M=16, BLOCK_N=32, BLOCK_D=max(16, triton.next_power_of_2(d)),
    )  # fmt: skip
    print("o", o[0, 0])
    return o
