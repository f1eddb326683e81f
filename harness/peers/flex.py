"""torch's FlexAttention, compiled: used by the peers p103 and p106. Not a stage itself."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from stages.contract import Stage, check_inputs


@functools.cache
def compiled(mode: str | None) -> Callable[..., Any]:
    """Compile flex_attention by torch.compile in `mode`, once per process."""
    from torch._inductor import select_algorithm
    from torch.nn.attention.flex_attention import flex_attention

    select_algorithm.PRINT_AUTOTUNE = False  # it would print pages
    return torch.compile(flex_attention, dynamic=False, mode=mode)


@functools.cache
def causal_mask(Nq: int, Nk: int) -> Any:
    """The block mask where query i sees keys up to i + Nk - Nq, made once for each size."""
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        return j <= i + Nk - Nq

    return create_block_mask(visible, None, None, Nq, Nk, device="cuda")


def attend_in(
    mode: str | None,
    stage: Stage,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
) -> torch.Tensor:
    """FlexAttention compiled in `mode`, with the same causal mask as our stages.

    q (B, H, Nq, d), k and v (B, Hk, Nk, d) -> (B, H, Nq, d). `stage`: the peer, against whose
    declaration the inputs are checked.
    """
    check_inputs(stage, q, k, v, causal=causal)
    mask = causal_mask(q.shape[2], k.shape[2]) if causal else None
    return compiled(mode)(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
