"""A fake stage: a graph that works its gradients out once."""

import torch

import stages
from stages.contract import Stage

STAGE = Stage(
    number=90,
    name="grad_remembers",
    title="grad_remembers",
    idea="a graph that works its gradients out once",
    gradients=True,
)


def gradients(q, k, v, dO):
    """dq, dk, dv as stage 3 has them."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(stages.by_number(3).attend(*leaves), leaves, dO)


class Remembers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return stages.by_number(3).attend(q, k, v)

    @staticmethod
    def backward(ctx, dO):
        if not hasattr(ctx, "answer"):
            ctx.answer = gradients(*ctx.saved_tensors, dO)
        return ctx.answer


def attend(q, k, v):
    return Remembers.apply(q, k, v)
