"""Stage 3, GEMM, softmax, GEMM in torch: the yardstick, and in float64 the oracle.

    Q * scale              (Nq, d), a small kernel of its own, before the three of the method
    S = (Q * scale) K^T    (Nq, Nk) written to memory
    P = softmax(S)         read, written
    O = P V                read again

Cost: 4 B H Nq Nk d FLOPs on the vendor's matrix units; S and P, 2 B H Nq Nk elements, live in
memory and cross the bus about four times.
What it bought: every operation is a whole matrix, so the interpreter's share is gone.
Still hurts: N x N through memory, twice: at large N time and memory are S and P. Stage 4 fuses.
"""

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
    traffic="three-kernel",
)


def hidden_keys(
    q: torch.Tensor, k: torch.Tensor, causal: bool, seqlens_k: torch.Tensor | None
) -> torch.Tensor:
    """The mask, True where query i may not see key j: bool, broadcastable to (B, H, Nq, Nk)."""
    Nq, Nk = q.shape[2], k.shape[2]
    offs_m = torch.arange(Nq, device=q.device)[:, None]  # (Nq, 1)
    offs_n = torch.arange(Nk, device=q.device)[None, :]  # (1, Nk)
    hidden = torch.zeros(1, 1, Nq, Nk, dtype=torch.bool, device=q.device)
    if causal:
        hidden = hidden | (offs_n > offs_m + Nk - Nq)  # (1, 1, Nq, Nk)
    if seqlens_k is not None:
        hidden = hidden | (offs_n >= seqlens_k[:, None, None, None])  # (B, 1, Nq, Nk)
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
    # q is scaled, not S: one kernel over N x d instead of one more over N x N
    s = (q * scale) @ k.transpose(-2, -1)  # (B, H, Nq, Nk)
    if not causal and seqlens_k is None:
        p = torch.softmax(s, dim=-1)  # (B, H, Nq, Nk)
    else:
        # the dtype's lowest number instead of -inf: a row that sees nothing is then uniform, not
        # NaN, and the second fill makes it 0, forward and backward
        hidden = hidden_keys(q, k, causal, seqlens_k)
        p = torch.softmax(s.masked_fill(hidden, torch.finfo(s.dtype).min), dim=-1)
        p = p.masked_fill(hidden, 0.0)  # (B, H, Nq, Nk)
    return p @ v  # (B, H, Nq, d)
