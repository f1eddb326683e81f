"""Which heads of a world's outputs are judged: the oracle of one head takes as long as its scores.

On one device all are. The whole of a long sequence would take a judge minutes for each output.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from harness.problems.problem import Problem

if TYPE_CHECKING:  # the runner imports no torch
    import torch

MOST_SCORES: Final = 1 << 34  # of all judged heads; 16 heads have as many at N = 32768


def judged_step(problem: Problem) -> int:
    """How far apart the key heads are that are judged, each with its query heads; 1: all are.

    One for each rank is, at least, so that each of a world's GPUs computes the oracles of some.
    """
    scores = problem.b * problem.nq * problem.nk * problem.h // problem.hk  # of a key head
    count = max(problem.world, MOST_SCORES // scores)
    if problem.world == 1 or count >= problem.hk:
        return 1
    return next(step for step in range(problem.hk // count, 0, -1) if problem.hk % step == 0)


def judged_heads(problem: Problem, x: "torch.Tensor") -> "torch.Tensor":
    """The judged heads of x (b, h or hk, n, d), an input or an output of `problem`."""
    step = judged_step(problem)
    return x if step == 1 else x.unflatten(1, (problem.hk, -1))[:, ::step].flatten(1, 2)


def judged_problem(problem: Problem) -> Problem:
    """The problem that `judged_heads` of its inputs are."""
    step = judged_step(problem)
    return replace(problem, h=problem.h // step, hk=problem.hk // step)
