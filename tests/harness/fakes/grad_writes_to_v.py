"""A fake stage: the right gradients, and a change to v in the backward pass."""

import torch

import stages
from stages.contract import Stage

STAGE = Stage(
    number=90,
    name="grad_writes_to_v",
    title="grad_writes_to_v",
    idea="the right gradients, and a change to v in the backward pass",
    gradients=True,
)


def gradients(q, k, v, dO):
    """dq, dk, dv as stage 3 has them."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(stages.by_number(3).attend(*leaves), leaves, dO)


class WritesToV(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return stages.by_number(3).attend(q, k, v)

    @staticmethod
    def backward(ctx, dO):
        found = gradients(*ctx.saved_tensors, dO)
        ctx.saved_tensors[2].data[..., -1, -1] += 1
        return found


def attend(q, k, v):
    return WritesToV.apply(q, k, v)
