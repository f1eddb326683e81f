"""Stage 5's loop in NumPy, for machines without Triton: tile by tile, all rows of a head at once.

The loop is stage 5's:

    m_i = lowest, l_i = 0, acc = 0
    for each tile of BLOCK_N keys:
        m_new = max(m_i, max s)
        alpha = exp(m_i - m_new)         what the past is worth under the new max
        p = exp(s - m_new)
        l_i = l_i * alpha + sum p
        acc = acc * alpha + p v
    o = acc / l_i
"""

from typing import Any

import numpy as np
import torch

from stages.contract import Stage, check_inputs

STAGE = Stage(
    number=5,
    name="numpy_online",
    title="NumPy Online",
    idea="running max, running sum, correction: exact",
    devices=("cpu",),
    worth_up_to={"cpu": 1024},
)

BLOCK_N = 64  # keys per tile
Array = np.ndarray[Any, Any]


def attend_head(q: Array, k: Array, v: Array, scale: float) -> Array:
    """One head: q (Nq, d), k and v (Nk, d) -> o (Nq, d), all float64."""
    (Nq, d), Nk = q.shape, len(k)
    m_i = np.full(Nq, np.finfo(np.float64).min)  # (Nq,), running max of each row's scores
    l_i = np.zeros(Nq)  # (Nq,), running sum of exp(s - m_i)
    acc = np.zeros((Nq, d))

    # exercise online: q (Nq, d), k and v (Nk, d), m_i, l_i, acc -> acc (Nq, d), the output
    for start_n in range(0, Nk, BLOCK_N):
        k_tile, v_tile = k[start_n : start_n + BLOCK_N], v[start_n : start_n + BLOCK_N]
        # step s: scaled scores; q (Nq, d), k_tile (keys, d) -> (Nq, keys)
        s = q @ k_tile.T * scale  # (Nq, keys)
        # step m_new: each row's max so far; m_i (Nq,), s (Nq, keys) -> (Nq,)
        m_new = np.maximum(m_i, s.max(1))  # (Nq,)
        # step alpha: what the past is worth under the new max; m_i, m_new -> (Nq,)
        alpha = np.exp(m_i - m_new)  # (Nq,), 0 at the first tile
        # step p: exponentials under the new max; s, m_new -> (Nq, keys)
        p = np.exp(s - m_new[:, None])  # (Nq, keys)
        # step l_i: the sum so far, the past under the new max; l_i, alpha, p -> (Nq,)
        l_i = l_i * alpha + p.sum(1)
        # step past: acc under the new max; acc (Nq, d), alpha (Nq,)
        acc = acc * alpha[:, None]
        # step acc: this tile's share; p (Nq, keys), v_tile (keys, d) -> (Nq, d)
        acc += p @ v_tile
        # step m_i: the max that the next tile begins with; m_new -> (Nq,)
        m_i = m_new

    # step o: the output; acc (Nq, d), l_i (Nq,) -> (Nq, d)
    o = acc / l_i[:, None]  # (Nq, d)
    # end of online
    return np.asarray(o)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Exact attention by the online softmax, in float64 whatever the dtype. Forward only.

    q (B, H, Nq, d), k and v (B, H, Nk, d), any float dtype -> (B, H, Nq, d) in q's dtype.
    Raises ValueError on input that breaks the contract (stages/common/contract.py).
    """
    check_inputs(STAGE, q, k, v)
    heads = [x.double().flatten(0, 1).numpy(force=True) for x in (q, k, v)]  # (B * H, N, d)
    scale = q.shape[-1] ** -0.5
    o = [attend_head(a, b, c, scale) for a, b, c in zip(*heads, strict=True)]
    return torch.from_numpy(np.stack(o)).view(q.shape).to(q)
