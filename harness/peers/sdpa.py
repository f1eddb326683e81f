"""torch's SDPA with a single backend: used by p100, p101, p102 and p104. Not a stage itself.

Each backend has its own row, so that a table says which kernel was measured.
"""

import warnings

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from stages.contract import Stage, StageUnavailable, check_inputs

warnings.filterwarnings("ignore", module=__name__)  # torch warns why it takes no other backend
REFUSALS = ("No available kernel", "No viable backend")  # torch's words, on a GPU and on a CPU


def attend_on(
    backend: SDPBackend,
    stage: Stage,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
) -> torch.Tensor:
    """SDPA on `backend` alone; StageUnavailable where the backend refuses the problem.

    q (B, H, Nq, d), k and v (B, Hk, Nk, d) -> (B, H, Nq, d). SDPA's causal mask starts at the top
    left corner, ours ends at the bottom right: with Nq != Nk they differ, and ValueError is raised.
    """
    check_inputs(stage, q, k, v, causal=causal)
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"causal: got Nq = {q.shape[2]}, Nk = {k.shape[2]}; expected them equal")
    grouped = q.shape[1] != k.shape[1]
    try:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    except RuntimeError as error:
        if not any(words in str(error) for words in REFUSALS):
            raise
        raise StageUnavailable(f"torch's {stage.title} does not take this problem") from error
