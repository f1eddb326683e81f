"""Peer: torch's SDPA with its flash backend alone. A row, never the yardstick."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from stages.contract import Stage, StageUnavailable, check_inputs

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
    """SDPA on that backend alone; StageUnavailable where the backend won't take the problem.

    q (B, H, Nq, d), k and v (B, Hk, Nk, d) -> (B, H, Nq, d). SDPA's causal mask starts at the top
    left corner, ours ends at the bottom right: with Nq != Nk they differ, and ValueError is raised.
    """
    check_inputs(STAGE, q, k, v, causal=causal)
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"causal: got Nq = {q.shape[2]}, Nk = {k.shape[2]}; expected them equal")
    grouped = q.shape[1] != k.shape[1]
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        raise StageUnavailable(f"torch's {STAGE.title} does not take this problem") from error
