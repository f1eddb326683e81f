"""Peer: torch's SDPA with its math backend alone. For comparison only."""

from functools import partial

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

attend = partial(attend_on, SDPBackend.MATH, STAGE)
