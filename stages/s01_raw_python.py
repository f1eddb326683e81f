"""Stage 1, raw Python: the loops of stage 0 on plain floats.

    for each query row:
        s[j] = sum_c q[c] * k[j][c] * scale      Nk dot products of length d
        p[j] = exp(s[j] - max s) / sum           softmax, safe
        o[c] = sum_j p[j] * v[j][c]              d dot products of length Nk

Cost: 4 B H Nq Nk d FLOPs, each a few bytecodes; it keeps only a row of Nk scores.
What it bought: no object and no edge per operation, so roughly twenty times as fast as stage 0.
Still hurts: the interpreter. Every float is boxed and every `*` is dispatched. Stage 2 compiles.
"""

import math

import torch

from stages.common.operators import untraced
from stages.contract import Stage, check_inputs

STAGE = Stage(
    number=1,
    name="raw_python",
    title="raw Python",
    idea="the same loops on plain floats",
    still_hurts="the interpreter",
    devices=("cpu",),
    worth_up_to={"cpu": 64, "cuda": 64},
)

Matrix = list[list[float]]


def attend_head(q: Matrix, k: Matrix, v: Matrix, scale: float) -> Matrix:
    """One head: q (Nq, d), k and v (Nk, d) as nested lists of floats -> o (Nq, d)."""
    # exercise head: q (Nq, d), k and v (Nk, d), nested lists of floats -> o (Nq, d)
    v_columns = list(zip(*v, strict=True))  # (d, Nk)
    o = []
    for q_row in q:
        # step s: the scaled scores of a row; q_row (d,), k (Nk, d) -> (Nk,)
        s = [sum(a * b for a, b in zip(q_row, k_row)) * scale for k_row in k]  # (Nk,)
        # step m_i: what keeps exp in range; s (Nk,) -> a number
        m_i = max(s)
        # step p: the weights before they are divided by their sum; s (Nk,), m_i -> (Nk,)
        p = [math.exp(x - m_i) for x in s]  # (Nk,)
        # step l_i: what the weights add up to; p (Nk,) -> a number
        l_i = sum(p)
        # step o: the weighted mean of v's rows; p (Nk,), l_i, v_columns (d, Nk) -> (d,)
        o.append([sum(a * b for a, b in zip(p, v_column)) / l_i for v_column in v_columns])  # (d,)
    # end of head
    return o


@untraced
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Exact attention, forward only, in double precision whatever the dtype.

    q (B, H, Nq, d), k and v (B, H, Nk, d), any float dtype -> (B, H, Nq, d) in q's dtype.
    Raises ValueError on input that breaks the contract (stages/contract.py).
    """
    check_inputs(STAGE, q, k, v)
    scale = q.shape[-1] ** -0.5
    o = [
        [
            attend_head(q_head, k_head, v_head, scale)
            for q_head, k_head, v_head in zip(q_heads, k_heads, v_heads)
        ]
        for q_heads, k_heads, v_heads in zip(q.tolist(), k.tolist(), v.tolist())
    ]
    return torch.tensor(o, dtype=torch.float64, device="cpu").to(device=q.device, dtype=q.dtype)
