"""Peer: torch's SDPA on a CPU, its fused kernel alone. For comparison only."""

from functools import partial

from torch.nn.attention import SDPBackend

from harness.peers.sdpa import attend_on
from stages.contract import Stage

STAGE = Stage(
    number=109,
    name="sdpa_cpu",
    title="SDPA, CPU",
    idea="torch's own fused kernel for a CPU, in C++: FlashAttention-2's tiles",
    devices=("cpu",),
    options=("causal", "gqa"),
    gradients=True,
)

attend = partial(attend_on, SDPBackend.FLASH_ATTENTION, STAGE)
