"""Stage 3, GEMM, softmax, GEMM in torch: the yardstick, and in float64 the oracle.

    Q * scale              (Nq, d), a small kernel of its own, before the three of the method
    S = (Q * scale) K^T    (Nq, Nk) written to memory
    P = softmax(S)         read, written
    O = P V                read again

Cost: 4 B H Nq Nk d FLOPs on the vendor's matrix units; S and P, 2 B H Nq Nk elements, live in
memory and cross the bus about four times.
What it bought: every operation is on a whole matrix, so the interpreter's share is gone.
Still hurts: N x N through memory, twice: at large N, S and P take nearly all time and memory. And
both cross memory in q's dtype: in half precision a score of 100 is rounded to the next 1/16 or 1/2.
Stage 4 fuses, and keeps S in float32.
"""

import math

import torch

from stages.contract import Stage, check_inputs

STAGE = Stage(
    number=3,
    name="torch_three_gemm",
    title="torch, three GEMMs",
    idea="GEMM, softmax, GEMM: the yardstick",
    still_hurts="N x N through memory, twice",
    options=("causal", "seqlens_k", "gqa"),
    gradients=True,
    rounds_scores=True,
    traffic="three-kernel",
)


def hidden_keys(
    q: torch.Tensor, k: torch.Tensor, causal: bool, seqlens_k: torch.Tensor | None
) -> torch.Tensor:
    """The mask, True where query i may not see key j: bool, broadcastable to (B, H, Nq, Nk)."""
    Nq, Nk = q.shape[2], k.shape[2]
    offs_m = torch.arange(Nq, device=q.device)[:, None]  # (Nq, 1)
    offs_n = torch.arange(Nk, device=q.device)[None, :]  # (1, Nk)
    hidden = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=q.device)
    # exercise mask: offs_m (Nq, 1), offs_n (1, Nk), lengths (B,) -> hidden, for (B, 1, Nq, Nk)
    # step causal: where it is asked for, query i sees keys up to i + Nk - Nq -> (1, 1, Nq, Nk)
    if causal:
        hidden = hidden | (offs_n > offs_m + (Nk - Nq))  # (1, 1, Nq, Nk)
    # step lengths: where there are any, keys past a batch entry's are hidden -> (B, 1, Nq, Nk)
    if seqlens_k is not None:
        hidden = hidden | (offs_n >= seqlens_k[:, None, None, None])  # (B, 1, Nq or 1, Nk)
    # end of mask
    return hidden


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    seqlens_k: torch.Tensor | None = None,
) -> torch.Tensor:
    """Exact attention, differentiable by torch's own autograd.

    q (B, H, Nq, d), k and v (B, Hk, Nk, d) with Hk dividing H, any float dtype; `seqlens_k` (B,)
    int32 -> (B, H, Nq, d) in q's dtype. Float32 on a GPU is IEEE or TF32 as torch is set.
    Raises ValueError on input that breaks the contract (stages/contract.py).
    """
    check_inputs(STAGE, q, k, v, causal=causal, seqlens_k=seqlens_k)
    scale = q.shape[-1] ** -0.5
    if k.shape[1] != q.shape[1]:  # grouped heads: each key head serves H / Hk query heads
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # (B, H, Nk, d)
        v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)  # (B, H, Nk, d)
    masked = causal or seqlens_k is not None
    blind = None
    if masked:
        hidden = hidden_keys(q, k, causal, seqlens_k)  # (B or 1, 1, Nq or 1, Nk)
    if seqlens_k is not None or (causal and q.shape[2] > k.shape[2]):
        # Rows see keys from the first on, the last row the most. What doesn't count is set to 0
        # before the products, since 0 * NaN is NaN
        blind = hidden[..., :1]  # (B or 1, 1, Nq or 1, 1), rows that see no key
        unseen = hidden[..., -1:, :].transpose(-2, -1)  # (B or 1, 1, Nk, 1), keys that no row sees
        q, k, v = q.masked_fill(blind, 0.0), k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)
        hidden = hidden & ~blind  # the softmax of a row of -inf would be NaN
    # exercise products: q (B, H, Nq, d), k and v (B, H, Nk, d) -> o (B, H, Nq, d)
    # q is scaled, not S: one kernel over N x d instead of one more over N x N
    # step s: scaled scores; q (B, H, Nq, d), k (B, H, Nk, d) -> (B, H, Nq, Nk)
    s = (q * scale) @ k.transpose(-2, -1)  # (B, H, Nq, Nk)
    if masked:
        s.masked_fill_(hidden, -math.inf)  # in place: one pass over S, and no second S
    # step p: each row's weights; s (B, H, Nq, Nk) -> (B, H, Nq, Nk)
    p = torch.softmax(s, dim=-1)  # (B, H, Nq, Nk)
    # step o: weighted means; p (B, H, Nq, Nk), v (B, H, Nk, d) -> (B, H, Nq, d)
    o = p @ v  # (B, H, Nq, d)
    # end of products
    return o if blind is None else o.masked_fill(blind, 0.0)
