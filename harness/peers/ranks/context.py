"""torch's context_parallel, with SDPA's cuDNN or flash backend: used by p117 and p118. Not a stage.

torch's prototype replaces scaled_dot_product_attention while its context is open. The backward pass
needs it, too: it is opened once and stays open.
"""

import functools
from typing import Any

import torch
from torch import distributed
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.peers.ranks import parts

BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]  # the first that takes it
declare = functools.partial(
    parts.declare, on_gpus=True, dtypes=("float16", "bfloat16"), options=("causal", "world")
)
OPEN: list[Any] = []  # the context: closed when it is forgotten


@functools.cache
def enter(rows: int, causal: bool) -> None:
    """Open the context for a sequence of so many rows; torch balances causal masks alone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental._attention import _cp_options, context_parallel

    _cp_options.enable_load_balance = causal
    mesh = init_device_mesh("cuda", (distributed.get_world_size(),))
    whole = torch.empty(rows, device="cuda")  # it wants a tensor to cut
    OPEN.append(
        context_parallel(mesh, buffers=[whole], buffer_seq_dims=[0], no_restore_buffers={whole})
    )
    OPEN[-1].__enter__()


def attend_by(
    rotation: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False
) -> torch.Tensor:  # fmt: skip
    """q, k, v (B, H, n, d), this rank's parts (parts.py) -> its part of o, (B, H, n, d)."""
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    enter(q.shape[2] * distributed.get_world_size(), causal)
    set_rotate_method(rotation)
    with sdpa_kernel(BACKENDS, set_priority=True):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
