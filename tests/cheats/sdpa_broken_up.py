"""Calls torch's own attention where torch breaks it up into two products and a softmax."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from stages.contract import Stage

STAGE = Stage(number=3, name="mine", title="mine", idea="a cheat", gradients=True)


def attend(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)
