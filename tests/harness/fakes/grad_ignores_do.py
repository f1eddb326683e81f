"""A fake stage: gradients of the plain sum, whatever dO is."""

import torch

import stages
from stages.contract import Stage

STAGE = Stage(
    number=90,
    name="grad_ignores_do",
    title="grad_ignores_do",
    idea="gradients of the plain sum, whatever dO is",
    gradients=True,
)


def gradients(q, k, v, dO):
    """dq, dk, dv as stage 3 has them."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(stages.by_number(3).attend(*leaves), leaves, dO)


class IgnoresDO(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return stages.by_number(3).attend(q, k, v)

    @staticmethod
    def backward(ctx, dO):
        return gradients(*ctx.saved_tensors, torch.ones_like(dO))


def attend(q, k, v):
    return IgnoresDO.apply(q, k, v)
