"""Peer: torch's FlexAttention, with autotuned launch configurations. For comparison only."""

from functools import partial

from harness.peers.flex import attend_in
from stages.contract import Stage

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
    few_queries=True,  # elsewhere tuning would add minutes to every comparison
)

attend = partial(attend_in, "max-autotune-no-cudagraphs", STAGE)
