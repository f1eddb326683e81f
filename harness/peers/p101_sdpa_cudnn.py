"""Peer: torch's SDPA with its cuDNN backend alone. For comparison only."""

from functools import partial

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

attend = partial(attend_on, SDPBackend.CUDNN_ATTENTION, STAGE)
