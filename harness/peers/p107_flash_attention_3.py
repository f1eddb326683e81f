"""Peer: FlashAttention-3's forward pass, where it is installed (fa3-fwd). For comparison only."""

import torch

from stages.contract import Stage, StageUnavailable, check_inputs

STAGE = Stage(
    number=107,
    name="flash_attention_3",
    title="FlashAttention-3",
    idea="its authors' kernels for Hopper, in CUDA C++",
    needs=("cuda", "fa3-fwd"),
    capability=(8, 0),
    devices=("cuda",),
    dtypes=("bfloat16",),  # the package is built without float16 and without a backward pass
    options=("causal", "gqa"),
)

REFUSALS = ("does not support", "only supports", "multiple of")  # the package's words


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False
) -> torch.Tensor:
    """FlashAttention-3, whose causal mask ends at the bottom right, as ours.

    q (B, H, Nq, d), k and v (B, Hk, Nk, d) -> (B, H, Nq, d). Raises StageUnavailable where the
    package can't be loaded (it is built for one torch and one CUDA), and for a d that it has no
    kernel for: it takes multiples of 8 up to 256.
    """
    check_inputs(STAGE, q, k, v, causal=causal)
    try:
        from fa3_fwd_interface import flash_attn_func
    except (ImportError, OSError) as error:
        raise StageUnavailable(f"fa3-fwd can't be loaded here: {error}") from error
    try:
        o = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
    except RuntimeError as error:
        if not any(words in str(error) for words in REFUSALS):
            raise
        why = str(error).splitlines()[0]
        raise StageUnavailable(f"FlashAttention-3 does not take this problem: {why}") from error
    return o.transpose(1, 2)
