"""Peer: torch's SDPA with its efficient backend alone. For comparison only."""

from functools import partial

from torch.nn.attention import SDPBackend

from harness.peers.sdpa import attend_on
from stages.contract import Stage

STAGE = Stage(
    number=102,
    name="sdpa_efficient",
    title="SDPA, efficient",
    idea="the fused kernel that takes float32, too",
    needs=("cuda",),
    devices=("cuda",),
    dtypes=("float16", "bfloat16", "float32"),
    options=("causal", "gqa"),
    gradients=True,
)

attend = partial(attend_on, SDPBackend.EFFICIENT_ATTENTION, STAGE)
