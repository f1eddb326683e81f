"""Peer: torch's FlexAttention, compiled. A row, never the yardstick."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from stages.contract import Stage, check_inputs

STAGE = Stage(
    number=103,
    name="flex_attention",
    title="FlexAttention",
    idea="a kernel generated from a description of the scores",
    needs=("cuda",),
    devices=("cuda",),
    dtypes=("float16", "bfloat16"),
    options=("causal", "gqa"),
    gradients=True,
)


@functools.cache
def compiled() -> Callable[..., Any]:
    """flex_attention through torch.compile, once a process."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@functools.cache
def causal_mask(Nq: int, Nk: int) -> Any:
    """The block mask of query i seeing keys up to i + Nk - Nq, made once for each size."""
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        return j <= i + Nk - Nq

    return create_block_mask(visible, None, None, Nq, Nk, device="cuda")


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False
) -> torch.Tensor:
    """FlexAttention, its causal mask as ours.

    q (B, H, Nq, d), k and v (B, Hk, Nk, d) -> (B, H, Nq, d).
    """
    check_inputs(STAGE, q, k, v, causal=causal)
    mask = causal_mask(q.shape[2], k.shape[2]) if causal else None
    return compiled()(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
