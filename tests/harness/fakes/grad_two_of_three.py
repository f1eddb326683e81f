"""A fake stage: two gradients for three inputs."""

import torch

import stages
from stages.contract import Stage

STAGE = Stage(
    number=90,
    name="grad_two_of_three",
    title="grad_two_of_three",
    idea="two gradients for three inputs",
    gradients=True,
)


def gradients(q, k, v, dO):
    """dq, dk, dv as stage 3 has them."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(stages.by_number(3).attend(*leaves), leaves, dO)


class TwoOfThree(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return stages.by_number(3).attend(q, k, v)

    @staticmethod
    def backward(ctx, dO):
        return gradients(*ctx.saved_tensors, dO)[:2]


def attend(q, k, v):
    return TwoOfThree.apply(q, k, v)
