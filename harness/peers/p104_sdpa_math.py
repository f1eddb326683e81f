"""Peer: torch's SDPA with its math backend alone. A row, never the yardstick."""

import torch
from torch.nn.attention import SDPBackend

from harness.peers.sdpa import attend_on
from stages.contract import Stage

STAGE = Stage(
    number=104,
    name="sdpa_math",
    title="SDPA, math",
    idea="torch's own operations, one after another: any dtype, any device",
    options=("causal", "gqa"),
    gradients=True,
    traffic="three-kernel",
)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False
) -> torch.Tensor:
    """SDPA on its math backend: shapes and errors as in harness/peers/sdpa.py."""
    return attend_on(SDPBackend.MATH, STAGE, q, k, v, causal)
