"""Peer: torch's SDPA with its cuDNN backend alone. A row, never the yardstick."""

import torch
from torch.nn.attention import SDPBackend

from harness.peers.sdpa import attend_on
from stages.contract import Stage

STAGE = Stage(
    number=101,
    name="sdpa_cudnn",
    title="SDPA, cuDNN",
    idea="the vendor's own kernel",
    needs=("cuda",),
    devices=("cuda",),
    dtypes=("float16", "bfloat16"),
    options=("causal", "gqa"),
    gradients=True,
)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False
) -> torch.Tensor:
    """SDPA on its cuDNN backend: shapes and errors as in harness/peers/sdpa.py."""
    return attend_on(SDPBackend.CUDNN_ATTENTION, STAGE, q, k, v, causal)
