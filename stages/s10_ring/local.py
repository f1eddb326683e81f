"""Attention on one rank: the best stage that the machine has, as functions of plain tensors.

    forward(q, k, v, causal, seqlens_k) -> o, lse
    backward(q, k, v, o, lse, do, causal, seqlens_k, wanted) -> dq, dk, dv in float32

The backward pass may be given k and v that are a part of those which o and lse were made of. With
the lse of all keys, p = 2^(s - lse) is the weight of these keys among all; with the o of all keys,
delta = rowsum(do * o) is, too. So the gradients of the parts add up to those of the whole.

On a GPU this is stage 9 or stage 7, whose kernels round o once, to q's dtype. Elsewhere, and for
float64, it is written in torch, in blocks of rows: nothing Nq x Nk is ever in memory.
"""

import functools
import math
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stages import s03_torch_three_gemm as s03
from stages.common.contract import why_not, why_not_dtype
from stages.common.inputs import dtype_name

LOG2_E = math.log2(math.e)
BLOCK = 1 << 24  # scores of a block of rows
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class Local(NamedTuple):
    """A stage, and its passes."""

    stage: ModuleType
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Any]  # Gradients


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are kept in."""
    return torch.promote_types(dtype, torch.float32)


def best(q: Tensor) -> Local:
    """The best stage for `q` on this machine: 9, 7 or 3."""
    return best_of(q.device.type, q.dtype)


@functools.cache
def best_of(device: str, dtype: torch.dtype) -> Local:
    """The best stage for tensors on `device`, 'cpu' or 'cuda'."""
    if device == "cuda":
        from stages import s07_triton_training as s07
        from stages import s09_gluon_hopper as s09

        for stage, launch in ((s09, s09.launch.launch_for), (s07, s07.launch)):
            missing = why_not(stage.STAGE, device)
            if not missing and not why_not_dtype(stage.STAGE, dtype_name(dtype), device):
                return in_triton(stage, launch)
    return Local(s03, torch_forward, torch_backward)


def in_triton(stage: ModuleType, launch: Callable[..., Gradients]) -> Local:
    """Stage 7 or 9; `launch` is what its backward pass launches."""
    from stages import s07_triton_training as s07

    in_float32 = functools.partial(launch, wide=True)
    backward = functools.partial(s07.backward, launch=in_float32)
    return Local(stage, stage.PASSES.forward_with_lse, backward)


def row_blocks(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, seqlens_k: Tensor | None
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor]]:
    """Yield blocks of rows: which, q, k and v in float32 with as many heads, and the scores.

    Scores (B, H, rows, Nk) are in base 2, -inf where a key isn't seen. Under a causal mask Nq = Nk.
    """
    (B, H, Nq, d), (Hk, Nk) = q.shape, k.shape[1:3]
    q, k, v = (x.to(wide(x.dtype)) for x in (q, k, v))
    hidden = torch.zeros(1, 1, 1, Nk, dtype=torch.bool, device=q.device)
    if seqlens_k is not None:
        hidden = s03.hidden_keys(q[:, :, :1], k, False, seqlens_k)  # (B, 1, 1, Nk)
        unseen = hidden.mT  # (B, 1, Nk, 1); what these keys hold doesn't count: 0 * NaN is NaN
        k, v = k.masked_fill(unseen, 0.0), v.masked_fill(unseen, 0.0)
    k, v = (x.repeat_interleave(H // Hk, dim=1) for x in (k, v))  # (B, H, Nk, d)
    offs_n = torch.arange(Nk, device=q.device)
    step = max(1, BLOCK // (B * H * Nk))
    for start in range(0, Nq, step):
        rows = slice(start, min(start + step, Nq))
        offs_m = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
        s = (q[:, :, rows] * (d**-0.5 * LOG2_E)) @ k.mT  # (B, H, rows, Nk)
        s.masked_fill_(hidden | (offs_n > offs_m) if causal else hidden, -torch.inf)
        yield rows, q[:, :, rows], k, v, s


def torch_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, seqlens_k: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return o (B, H, Nq, d) and lse (B, H, Nq) in base 2, both float32, or float64 for float64."""
    o = torch.empty(q.shape, dtype=wide(q.dtype), device=q.device)
    lse = torch.empty(q.shape[:3], dtype=o.dtype, device=q.device)
    for rows, _, _, v_all, s in row_blocks(q, k, v, causal, seqlens_k):
        m = s.amax(-1, keepdim=True)  # (B, H, rows, 1)
        p = torch.exp2(s - m.masked_fill(m == -torch.inf, 0.0))
        total = p.sum(-1, keepdim=True)  # 0, and o is NaN, where all scores are -inf
        o[:, :, rows] = (p / total) @ v_all
        lse[:, :, rows] = (m + torch.log2(total))[..., 0]
    if seqlens_k is not None:
        o.masked_fill_((seqlens_k == 0)[:, None, None, None], 0.0)  # these rows see no key
    return o, lse


def torch_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool,
    seqlens_k: Tensor | None, wanted: tuple[bool, bool, bool],
) -> Gradients:  # fmt: skip
    """Return dq, dk, dv in lse's dtype, from the o and lse of all keys, of which k is a part."""
    Hk, scale = k.shape[1], q.shape[3] ** -0.5
    blind = (lse == -torch.inf)[..., None]  # (B, H, Nq, 1): what these rows hold doesn't count
    q, o, do = (x.to(lse.dtype).masked_fill(blind, 0.0) for x in (q, o, do))
    lse = lse[..., None].masked_fill(blind, 0.0)  # (B, H, Nq, 1)
    delta = (do * o).sum(-1, keepdim=True)  # (B, H, Nq, 1)
    dq = torch.empty_like(q)
    dk, dv = (x.new_zeros(q.shape[:2] + x.shape[2:], dtype=lse.dtype) for x in (k, v))
    for rows, q_rows, k_all, v_all, s in row_blocks(q, k, v, causal, seqlens_k):
        p = torch.exp2(s - lse[:, :, rows])  # (B, H, rows, Nk)
        do_rows = do[:, :, rows]
        dv += p.mT @ do_rows
        ds = p * (do_rows @ v_all.mT - delta[:, :, rows])
        dq[:, :, rows] = (ds @ k_all) * scale
        dk += (ds.mT @ q_rows) * scale
    dk, dv = (x.unflatten(1, (Hk, -1)).sum(2) for x in (dk, dv))  # over the heads of a group
    return dq if wanted[0] else None, dk if wanted[1] else None, dv if wanted[2] else None
