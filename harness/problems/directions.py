"""What a call computes in each direction: forward, backward, or both (training).

    fwd     o = attend(q, k, v)
    bwd     dq, dk, dv from dO, by backward through an output computed before
    train   both: o = attend(q, k, v), then dq, dk, dv from dO

A call returns all that it computes, so that all of it can be checked.
"""

from typing import TYPE_CHECKING, Final

from harness.problems.problem import Problem

if TYPE_CHECKING:  # the runner reads the table below, and imports no torch
    import torch

# direction -> what a call returns, in this order
OUTPUTS: Final = {"fwd": ("o",), "bwd": ("dq", "dk", "dv"), "train": ("o", "dq", "dk", "dv")}
SEED_OF_DO: Final = 1  # added to the problem's seed, so that dO is no copy of q


def make_output_gradient(problem: Problem) -> "torch.Tensor":
    """Draw dO ~ N(0, 1), (b, h, nq, d), in the problem's dtype and on its device."""
    import torch

    generator = torch.Generator().manual_seed(problem.seed + SEED_OF_DO)
    dO = torch.randn((problem.b, problem.h, problem.nq, problem.d), generator=generator)
    return dO.to(device=problem.device, dtype=getattr(torch, problem.dtype))
