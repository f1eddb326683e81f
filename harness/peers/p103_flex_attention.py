"""Peer: torch's FlexAttention, compiled. For comparison only."""

from functools import partial

from harness.peers.flex import attend_in
from stages.contract import Stage

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

attend = partial(attend_in, None, STAGE)
