"""What one call is in each direction: forward, backward, or both, as training has it.

    fwd     o = attend(q, k, v)
    bwd     dq, dk, dv from dO, through an output that is there already
    train   both: o = attend(q, k, v), then dq, dk, dv from dO

A call returns all that it computes, so that all of it can be checked. Gradients are
d(sum o * dO) / d(q, k, v), dO (b, h, nq, d) ~ N(0, 1) from the problem's seed.
"""

from collections.abc import Callable

import torch

from harness.problem import Problem

# direction -> what a call returns, in this order
OUTPUTS = {"fwd": ("o",), "bwd": ("dq", "dk", "dv"), "train": ("o", "dq", "dk", "dv")}
SEED_OF_DO = 1  # added to the problem's seed: dO is no copy of q

Tensors = tuple[torch.Tensor, ...]
Attend = Callable[..., torch.Tensor]


def make_output_gradient(problem: Problem) -> torch.Tensor:
    """dO ~ N(0, 1), (b, h, nq, d), of the problem's dtype and on its device."""
    generator = torch.Generator().manual_seed(problem.seed + SEED_OF_DO)
    dO = torch.randn((problem.b, problem.h, problem.nq, problem.d), generator=generator)
    return dO.to(device=problem.device, dtype=getattr(torch, problem.dtype))


def prepare(
    attend: Attend, direction: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    dO: torch.Tensor | None,
) -> Callable[[], Tensors]:  # fmt: skip
    """The call to be measured: it takes nothing and returns what OUTPUTS names.

    For 'bwd' the forward pass is done here, once; the call goes through its graph again and again.
    """
    if direction == "fwd":
        return lambda: (attend(q, k, v),)
    leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
    if direction == "bwd":
        o = attend(*leaves)
        return lambda: torch.autograd.grad(o, leaves, dO, retain_graph=True)

    def train() -> Tensors:
        o = attend(*leaves)
        return (o.detach(), *torch.autograd.grad(o, leaves, dO))

    return train
