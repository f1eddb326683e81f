"""Calls torch's own attention in TorchScript, where torch breaks it up."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from stages.contract import Stage

STAGE = Stage(number=3, name="mine", title="mine", idea="a cheat", gradients=True)


@torch.jit.script
def attention(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def attend(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return attention(q, k, v)
