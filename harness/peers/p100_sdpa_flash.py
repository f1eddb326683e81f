"""Peer: torch's SDPA with its flash backend alone. A row, never the yardstick."""

import torch
from torch.nn.attention import SDPBackend

from harness.peers.sdpa import attend_on
from stages.contract import Stage

STAGE = Stage(
    number=100,
    name="sdpa_flash",
    title="SDPA, flash",
    idea="the vendor-neutral fused kernel, FlashAttention-2",
    needs=("cuda",),
    devices=("cuda",),
    dtypes=("float16", "bfloat16"),
    options=("causal", "gqa"),
    gradients=True,
)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False
) -> torch.Tensor:
    """SDPA on its flash backend: shapes and errors as in harness/peers/sdpa.py."""
    return attend_on(SDPBackend.FLASH_ATTENTION, STAGE, q, k, v, causal)
