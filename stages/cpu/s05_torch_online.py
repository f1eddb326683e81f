"""Stage 5 on a CPU, torch "Online": the kernel's loop line by line, native.

    one block: BLOCK_M query rows of one head       a program of the kernel; here one after another
    q  stays in the cache; m_i = lowest, l_i = 0, acc = 0
    for each tile of BLOCK_N keys:
        s = q k^T * scale                (BLOCK_M, BLOCK_N), never leaves the cache
        m_new = max(m_i, max s)
        alpha = exp(m_i - m_new)         what the past is worth under the new max
        p = exp(s - m_new)
        l_i = l_i * alpha + sum p
        acc = acc * alpha + p v
    o = acc / l_i

Cost: 4 B H Nq Nk d FLOPs; s and p take BLOCK_M BLOCK_N numbers each, which a CPU's cache holds, in
place of the Nq Nk of stage 3, which memory has to; some ten calls of torch per tile.
What it bought: stage 5's numbers and its lesson, with a time, where there is no GPU.
Still hurts: every tile costs ten calls and passes over p that a compiled kernel does in one; one
core. torch's own fused kernel (the peer sdpa_cpu) is in C++ and does it all.
"""

import torch

from stages.contract import Stage, check_inputs

STAGE = Stage(
    number=5,
    name="torch_online",
    title="torch Online",
    idea="running max, running sum, correction: exact",
    still_hurts="ten calls of torch for every tile",
    devices=("cpu",),
)

BLOCK_M, BLOCK_N = 1024, 64  # query rows, and keys per tile


def attend_block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, scale: float
) -> None:
    """One block of one head: q (rows, d), k and v (Nk, d) -> o (rows, d), of whatever dtype."""
    (rows, d), Nk = q.shape, len(k)
    m_i = q.new_full((rows,), torch.finfo(q.dtype).min)  # -inf - -inf is NaN
    l_i = q.new_zeros(rows)  # running sum of exp(s - m_i)
    acc = q.new_zeros(rows, d)

    # exercise tiles: q (rows, d), k and v (Nk, d) -> acc (rows, d), divided by the row sums
    for start_n in range(0, Nk, BLOCK_N):
        k_tile = k[start_n : start_n + BLOCK_N]  # (keys, d), fewer keys in the last tile
        v_tile = v[start_n : start_n + BLOCK_N]  # (keys, d)
        # step s: scaled scores; q (rows, d), k_tile (keys, d) -> (rows, keys)
        s = q @ k_tile.T * scale  # (rows, keys)
        # step m_new: each row's max so far; m_i (rows,), s (rows, keys) -> (rows,)
        m_new = torch.maximum(m_i, s.amax(1))  # (rows,)
        # step alpha: what the past is worth under the new max; m_i, m_new -> (rows,)
        alpha = torch.exp(m_i - m_new)  # (rows,), 0 at the first tile
        # step p: exponentials under the max, none above 1; s, m_new -> (rows, keys)
        p = torch.exp(s - m_new[:, None])  # (rows, keys)
        # step l_i: the sum so far, the past under the new max; l_i, alpha, p -> (rows,)
        l_i = l_i * alpha + p.sum(1)
        # step past: acc under the new max; acc (rows, d), alpha (rows,)
        acc = acc * alpha[:, None]
        # step acc: this tile's share of the output; p, v_tile (keys, d) -> (rows, d)
        acc += p @ v_tile  # (rows, d)
        # step m_i: the max that the next tile begins with; m_new -> (rows,)
        m_i = m_new

    # step o: the output; acc (rows, d), l_i (rows,) -> (rows, d)
    acc = acc / l_i[:, None]
    # end of tiles
    o.copy_(acc)


@torch.no_grad()
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Exact attention by the online softmax, in torch on a CPU. Forward only.

    q (B, H, Nq, d), k and v (B, H, Nk, d), any float dtype -> (B, H, Nq, d) in q's dtype, computed
    in float32, from float64 in float64.
    Raises ValueError on input that breaks the contract (stages/contract.py).
    """
    check_inputs(STAGE, q, k, v)
    B, H, Nq, d = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    o = q.new_empty((B, H, Nq, d))
    for b in range(B):
        for h in range(H):
            k_head, v_head = k[b, h].to(wide), v[b, h].to(wide)  # (Nk, d)
            for start_m in range(0, Nq, BLOCK_M):
                block = slice(start_m, start_m + BLOCK_M)
                attend_block(q[b, h, block].to(wide), k_head, v_head, o[b, h, block], d**-0.5)
    return o
