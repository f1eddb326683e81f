"""Lay out the tensors that a check gives a stage, by wrapping the stage's own attend."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from harness.isolation.changes import Given
from harness.problems.inputs import STEPS, strided
from harness.problems.problem import Problem

HIGH = 1000.0  # added to all scores of a row: exp overflows in float64, softmax is the same
LOW = -1000.0  # added to all scores of every other row of peaky inputs: exp is 0 there, in float64
FAR = 128  # this many keys come last; LOW makes their weight 0

pad = torch.nn.functional.pad
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def widened(tensors: Iterable[torch.Tensor], *shares: torch.Tensor | float) -> Tensors:
    """Return q, k and v with more columns, each with its share of every scaled score.

    A share is a number, or one per row, (nq, 1).
    """
    q, k, v = tensors
    d, width = q.shape[-1], q.shape[-1] + len(shares)
    q = q * (width / d) ** 0.5
    columns = [(torch.as_tensor(x) * width**0.5).to(q).expand(*q.shape[:-1], 1) for x in shares]
    k, v = (pad(x, (0, len(shares)), value=1.0) for x in (k, v))
    return torch.cat((q, *columns), -1), k, v


def low(tensors: Iterable[torch.Tensor]) -> Tensors:
    """Return q, k and v: every other row's scores are low, and the last keys have no weight."""
    q, k, v = tensors
    k, v = pad(k, (0, 0, 0, FAR)), pad(v, (0, 0, 0, FAR), value=1.0)
    rows = LOW * (torch.arange(q.shape[2]) % 2)[:, None]
    q, k, v = widened((q, k, v), rows, LOW)
    others = torch.arange(k.shape[2]) < k.shape[2] - FAR
    k = torch.cat((k[..., :-1], k[..., -1:].masked_fill(others[:, None], 0.0)), -1)
    return q, k, v


def stored(tensors: Iterable[torch.Tensor], layout: str) -> tuple[torch.Tensor, ...]:
    """Return q, k, v and maybe dO as a stage gets them: strides of their own, or low scores."""
    if layout == "low":
        return low(tensors)
    return tuple(map(strided, tensors, STEPS)) if layout == "strided" else tuple(tensors)


def make_given(problem: Problem) -> Given:
    """Make the inputs of a problem; where gradients are asked for, with strides of their own.

    They are the same whatever default dtype and device the submission has set.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    with torch.device("cpu"):
        given = Given(problem, strided=problem.direction == "train")
    torch.set_default_dtype(default)
    return given


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
            k, v = (pad(x, (0, 0, 1, 0)) for x in (k, v))
        return attend(q, k, v, **options)[..., :d].to(given[0])

    return attend_laid
