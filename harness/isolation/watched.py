"""Detect a stage that caches its outputs while it is timed: change its inputs, check one output.

While a stage is timed, one element of q (of dO for a backward pass) is different at each call, so
that outputs cached by content are of no use. The outputs of one timed call, drawn at random, are
kept: the judge removes the effect of the change from them (`undo`) and compares the rest as it
compares the first outputs.

On a GPU the time of a change would count as the stage's own: there only the calls whose outputs may
be kept have a changed element.
"""

from collections.abc import Callable, Sequence
from random import random
from typing import Any

from harness.problems.directions import OUTPUTS
from harness.problems.problem import Problem

VALUES = 1024  # different values of the changed element
FORGIVEN = 0.25  # of a change's effect on an output: rounding may differ by so much


class Watched:
    """`call` with one element of `x` changed; `kept` are the outputs of one such call."""

    def __init__(self, call: Callable[[], Any], x: Any) -> None:
        import torch

        self.call = call
        self.often = x.device.type == "cpu"
        bits = getattr(torch, f"int{8 * x.element_size()}")
        # as large as the norm of a row of x, so that any element changes the row's scores
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
        was = self.cells[at] if self.often else self.cells[at].clone()  # waits for no GPU
        self.cells[at] = self.values[self.count % VALUES]
        try:
            outputs = self.call()
        finally:
            self.cells[at] = was  # other stages use the same x
        if due:
            # on a CPU each call is equally likely to be the last one kept; on a GPU few are kept
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
    """Remove the effect of the `change` of one element from `outputs`; all in float64.

    Raises ValueError where there is no such element or value. `truths`: the exact outputs without
    the change; `given`: q, k, v, dO without the change.
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
        effect = torch.zeros_like(output)
        effect[here] = after[name] - before[name]
        error = output - effect - truth
        error = error.sign() * (error.abs() - FORGIVEN * effect.abs()).clamp_min(0)
        undone.append(truth + error / 2)  # halved: the bounds are those of the unchanged problem
    return undone


def row_terms(q: Any, k: Any, v: Any, dO: Any) -> dict[str, Any]:
    """Compute one query row's o and dq (d), and its terms of dk and dv (seen, d)."""
    import torch

    q, dO, scale = q.double(), dO.double(), q.shape[-1] ** -0.5
    p = torch.softmax(k @ q * scale, dim=0)  # (seen)
    o = p @ v
    ds = p * (v @ dO - o @ dO) * scale
    return {"o": o, "dq": ds @ k, "dk": torch.outer(ds, q), "dv": torch.outer(p, dO)}
