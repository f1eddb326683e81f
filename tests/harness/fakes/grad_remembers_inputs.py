"""A fake stage: gradients for the v that it first saw at this address, scaled by dO's size."""

import torch

import stages
from stages.contract import Stage

STAGE = Stage(
    number=90,
    name="grad_remembers_inputs",
    title="grad_remembers_inputs",
    idea="gradients for the v that it first saw at this address",
    gradients=True,
)
seen = {}


class Remembers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        # what it remembers is a copy: v itself may change under it
        ctx.v = seen.setdefault((v.data_ptr(), v.shape), v.clone())
        ctx.save_for_backward(q, k)
        return stages.by_number(3).attend(q, k, v)

    @staticmethod
    def backward(ctx, dO):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (*ctx.saved_tensors, ctx.v)]
            return torch.autograd.grad(stages.by_number(3).attend(*leaves), leaves, dO)


def attend(q, k, v):
    return Remembers.apply(q, k, v)
