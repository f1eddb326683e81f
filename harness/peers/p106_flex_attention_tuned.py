"""Peer: torch's FlexAttention, its launch configurations tried out. A row, never the yardstick."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from harness.peers.p103_flex_attention import causal_mask
from stages.contract import Stage, check_inputs

STAGE = Stage(
    number=106,
    name="flex_attention_tuned",
    title="FlexAttention, tuned",
    idea="FlexAttention with max-autotune: the fastest of its configurations",
    needs=("cuda",),
    devices=("cuda",),
    dtypes=("float16", "bfloat16"),
    options=("causal", "gqa"),
    gradients=True,
    few_queries=True,  # elsewhere it would be minutes of tuning in every comparison
)


@functools.cache
def compiled() -> Callable[..., Any]:
    """flex_attention through torch.compile, tuned for each shape, once a process."""
    from torch._inductor import select_algorithm
    from torch.nn.attention.flex_attention import flex_attention

    select_algorithm.PRINT_AUTOTUNE = False  # pages of choices
    return torch.compile(flex_attention, dynamic=False, mode="max-autotune-no-cudagraphs")


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False
) -> torch.Tensor:
    """FlexAttention, tuned, its causal mask as ours.

    q (B, H, Nq, d), k and v (B, Hk, Nk, d) -> (B, H, Nq, d).
    """
    check_inputs(STAGE, q, k, v, causal=causal)
    mask = causal_mask(q.shape[2], k.shape[2]) if causal else None
    return compiled()(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
