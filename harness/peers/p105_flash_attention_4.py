"""Peer: FlashAttention-4, where it is installed (flash-attn-4). A row, never the yardstick."""

import torch

from stages.contract import Stage, StageUnavailable, check_inputs

STAGE = Stage(
    number=105,
    name="flash_attention_4",
    title="FlashAttention-4",
    idea="its authors' kernels in CuTe's Python, one for each generation of GPUs",
    needs=("cuda", "flash-attn-4"),
    capability=(8, 0),
    devices=("cuda",),
    dtypes=("float16", "bfloat16"),
    options=("causal", "gqa"),
    gradients=True,
)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False
) -> torch.Tensor:
    """FlashAttention-4, whose causal mask ends at the bottom right, as ours.

    q (B, H, Nq, d), k and v (B, Hk, Nk, d) -> (B, H, Nq, d). Raises StageUnavailable for a d that
    it has no kernel for: it takes multiples of 8, how large depends on the GPU.
    """
    check_inputs(STAGE, q, k, v, causal=causal)
    from flash_attn.cute import flash_attn_func

    try:
        o, _ = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
    except (AssertionError, NotImplementedError) as error:
        raise StageUnavailable(f"FlashAttention-4 does not take this problem: {error}") from error
    return o.transpose(1, 2)
