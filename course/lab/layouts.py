"""Lay out the tensors that a check gives a stage, by wrapping the stage's own attend."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from harness.isolation.call import Given
from harness.problems.inputs import STEPS, strided
from harness.problems.problem import Problem

HIGH = 1000.0  # added to all scores of a row, past exp's overflow in float64: softmax is the same
LOW = -300.0  # added to all scores of a row of peaky inputs: all below exp's underflow in float32


def widened(
    tensors: Iterable[torch.Tensor], more: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v with one column more, whose share of every scaled score is `more`."""
    q, k, v = tensors
    d = q.shape[-1]
    q = torch.nn.functional.pad(q * ((d + 1) / d) ** 0.5, (0, 1), value=more * (d + 1) ** 0.5)
    k, v = torch.nn.functional.pad(k, (0, 1), value=1.0), torch.nn.functional.pad(v, (0, 1))
    return q, k, v


def stored(tensors: Iterable[torch.Tensor], layout: str) -> tuple[torch.Tensor, ...]:
    """Return q, k, v and maybe dO as a stage gets them: strides of their own, or low scores."""
    if layout == "low":
        return widened(tensors, LOW)
    return tuple(map(strided, tensors, STEPS)) if layout == "strided" else tuple(tensors)


def make_given(problem: Problem) -> Given:
    """Make the inputs of a problem; where gradients are asked for, with strides of their own."""
    return Given(problem, strided=problem.direction == "train")


def laid(attend: Callable[..., torch.Tensor], layout: str) -> Callable[..., torch.Tensor]:
    """Wrap `attend` to get its tensors in another layout; gradients flow back through it."""

    def attend_laid(*given: torch.Tensor, **options: Any) -> torch.Tensor:
        if layout == "strided":
            return attend(*stored(given, layout), **options)
        d = given[0].shape[-1]
        if layout == "low":
            q, k, v = stored(given, layout)
        else:  # high: a key before all others, of score 0: its weight is exp(-HIGH) = 0
            q, k, v = widened((x.double() for x in given), HIGH)
            k, v = (torch.nn.functional.pad(x, (0, 0, 1, 0)) for x in (k, v))
        return attend(q, k, v, **options)[..., :d].to(given[0])

    return attend_laid
