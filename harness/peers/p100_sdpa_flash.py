"""Peer: torch's SDPA with its flash backend alone. For comparison only."""

from functools import partial

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

attend = partial(attend_on, SDPBackend.FLASH_ATTENTION, STAGE)
