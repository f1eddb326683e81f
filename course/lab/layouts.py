"""Lay out the tensors that a check gives a stage, by wrapping the stage's own attend."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from harness.isolation.call import Given
from harness.problems.problem import Problem

HIGH = 1000.0  # added to all scores of a row, past exp's overflow in float64: softmax is the same
LOW = -500.0  # added to all scores of every other row of peaky inputs: below exp's underflow there
FAR = 128  # keys after all others, their scores less by LOW: their weight is 0
STEPS = 2, 3, 4, 1  # of q, k, v and dO, where they are strided: none as another


def strided(x: torch.Tensor, step: int) -> torch.Tensor:
    """`x` (B, H, N, d) stored as (B, N, H, d + 4, step), NaN between its columns and after them."""
    B, H, N, d = x.shape
    stored = x.new_full((B, N, H, d + 4, step), torch.nan)
    stored[..., :d, 0] = x.transpose(1, 2)
    return stored.transpose(1, 2)[..., :d, 0]


def stored(tensors: Iterable[torch.Tensor], layout: str) -> tuple[torch.Tensor, ...]:
    """Return q, k, v and maybe dO as they are stored in a layout, each with strides of its own."""
    return tuple(map(strided, tensors, STEPS)) if layout == "strided" else tuple(tensors)


def make_given(problem: Problem) -> Given:
    """Make the inputs of a problem; where gradients are asked for, with strides of their own.

    They are the same whatever default dtype and device the submission has set.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    with torch.device("cpu"):
        given = Given(problem)
    torch.set_default_dtype(default)
    if problem.direction == "train":
        given.tensors = stored(given.tensors, "strided")
    return given


def laid(attend: Callable[..., torch.Tensor], layout: str) -> Callable[..., torch.Tensor]:
    """Wrap `attend` to get its tensors in another layout; gradients flow back through it."""

    def attend_laid(*given: torch.Tensor, **options: Any) -> torch.Tensor:
        if layout == "strided":
            return attend(*stored(given, layout), **options)
        q, k, v = given if layout == "low" else (x.double() for x in given)
        pad, d = torch.nn.functional.pad, q.shape[-1]
        more = 2 if layout == "low" else 1  # columns, whose share of a score is added to the others
        q, whole = q * ((d + more) / d) ** 0.5, (d + more) ** 0.5
        if layout == "low":
            rows = LOW * (torch.arange(q.shape[2]) % 2).to(q)[:, None].expand(*q.shape[:3], 1)
            q = pad(torch.cat((q, rows * whole), -1), (0, 1), value=LOW * whole)
            k = pad(pad(k, (0, 1), value=1.0), (0, 1))
            k, v = pad(k, (0, 0, 0, FAR)), pad(v, (0, 2, 0, FAR), value=1.0)
            k[..., -FAR:, d:] = 1.0
        else:  # a key before all others, of score 0: its weight is exp(-HIGH) = 0
            q = pad(q, (0, 1), value=HIGH * whole)
            k, v = pad(k, (0, 1), value=1.0), pad(v, (0, 1))
            k, v = (pad(x, (0, 0, 1, 0)) for x in (k, v))
        return attend(q, k, v, **options)[..., :d].to(given[0])

    return attend_laid
