"""Calls that no stage can answer from memory: each has its own inputs, and one is kept and judged.

While a stage is timed, one element of q (of dO for a backward pass) is another one at each call, so
that an answer remembered by content is never asked for again. What the stage returned from one call
that is drawn at random among all that were timed is kept: the judge undoes what the change did to
it (`undo`) and compares the rest as it compares the first answer.

On a GPU a change would count as the stage's own time: there only the calls that may be kept have
one.
"""

from collections.abc import Callable, Sequence
from random import random
from typing import Any

from harness.problems.directions import OUTPUTS
from harness.problems.problem import Problem

VALUES = 1024  # that an element may take
FORGIVEN = 0.25  # of what a change did to an output: rounding may differ by so much


class Watched:
    """`call`, made with an element of `x` changed; `kept` are its outputs from one such call."""

    def __init__(self, call: Callable[[], Any], x: Any) -> None:
        import torch

        self.call = call
        self.often = x.device.type == "cpu"
        bits = getattr(torch, f"int{8 * x.element_size()}")
        # as long as a row of x, so that a row's scores change with any of its elements
        size = 2 * x.double().square().sum(-1).mean().sqrt()
        values = (size * (0.5 + torch.rand(VALUES, device=x.device))).to(x.dtype)
        self.values = values.view(bits).tolist()
        cells = x.data.view(bits).view(-1)
        self.cells: Any = memoryview(cells.numpy()) if self.often else cells
        self.size, self.count, self.due = cells.numel(), 0, 1
        self.change: tuple[int, int] | None = None
        self.kept: Sequence[Any] = ()

    def __call__(self) -> Any:
        self.count += 1
        due = self.count == self.due
        if not (due or self.often):
            return self.call()
        at = int(random() * self.size)
        was = self.cells[at] if self.often else self.cells[at].clone()  # no GPU is waited for
        self.cells[at] = self.values[self.count % VALUES]
        try:
            outputs = self.call()
        finally:
            self.cells[at] = was  # others are given the same x
        if due:
            # so each call is as likely as any other to be the last that is kept; few on a GPU
            self.due = (
                int(self.count * (1 / (1 - random()) if self.often else 2 + 6 * random())) + 1
            )
            self.change = (at, self.values[self.count % VALUES])
            self.kept = [x.clone() if hasattr(x, "clone") else x for x in outputs]
        return outputs


def undo(
    outputs: Sequence[Any], truths: Sequence[Any], problem: Problem, given: Sequence[Any],
    change: tuple[int, int],
) -> list[Any]:  # fmt: skip
    """`outputs` less what the `change` of one element did to them, all in float64.

    Raises ValueError where there is no such element or value. `truths`: what they were without it;
    `given`: q, k, v, dO without it.
    """
    import torch

    at, value = change
    x = given[3 if problem.direction == "bwd" else 0]
    if not 0 <= at < x.numel():
        raise ValueError(f"element {at} of {x.numel()}")
    b, h, i = (int(n) for n in torch.unravel_index(torch.tensor(at), x.shape)[:3])
    hk = h * problem.hk // problem.h
    seen = problem.nk if problem.seqlens_k is None else problem.seqlens_k[b]
    if problem.causal:
        seen = max(0, min(seen, i + 1 + problem.nk - problem.nq))
    k, v = (y[b, hk, :seen].double() for y in given[1:3])  # (seen, d)
    row = [given[0][b, h, i], given[3][b, h, i]]  # q and dO, (d)
    before = row_terms(row[0], k, v, row[1])
    cells = x.view(getattr(torch, f"int{8 * x.element_size()}")).view(-1)
    was = cells[at].clone()
    cells[at] = value
    after = row_terms(row[0], k, v, row[1])
    cells[at] = was
    where = {"o": (b, h, i), "dq": (b, h, i)}
    undone = []
    for name, output, truth in zip(OUTPUTS[problem.direction], outputs, truths, strict=True):
        here = where.get(name, (b, hk, slice(seen)))
        moved = torch.zeros_like(output)
        moved[here] = after[name] - before[name]
        off = output - moved - truth
        off = off.sign() * (off.abs() - FORGIVEN * moved.abs()).clamp_min(0)
        undone.append(truth + off / 2)  # the bounds are those of the unchanged problem
    return undone


def row_terms(q: Any, k: Any, v: Any, dO: Any) -> dict[str, Any]:
    """What one query row gives: its o and dq (d), and its part of dk and dv (seen, d)."""
    import torch

    q, dO, scale = q.double(), dO.double(), q.shape[-1] ** -0.5
    p = torch.softmax(k @ q * scale, dim=0)  # (seen)
    o = p @ v
    ds = p * (v @ dO - o @ dO) * scale
    return {"o": o, "dq": ds @ k, "dk": torch.outer(ds, q), "dv": torch.outer(p, dO)}
