"""The inputs of a stage, and how a stage that caches its outputs is detected.

A stage is called again after its inputs were changed in a way that torch's version counters don't
show (`ask_again`): attention is linear in v and gradients in dO, and a change of sign or of the
exponent is exact, so the right new outputs are known.

While a stage is timed (`Watched`), one element of q (of dO for a backward pass) is different at
each call, so that outputs cached by content are of no use. The outputs of one timed call, drawn at
random, are kept: the judge removes the effect of the change from them and compares the rest as it
compares the first outputs. On a GPU the time of a change would count as the stage's own: there only
the calls whose outputs may be kept have a changed element.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from random import random
from typing import TYPE_CHECKING, Any, Final

from harness.isolation.call import Call, WrongOutput
from harness.problems.problem import Problem

if TYPE_CHECKING:  # the parent reads AGAIN, and imports no torch
    import torch

NAMES: Final = ("q", "k", "v", "dO")
# direction -> for each repeated call: which inputs are changed, and the factor by which each output
# then differs. A backward pass may cache in its graph or beside it: it is called through the same
# graph (for which v must not change), then through a new one.
AGAIN: Final = {
    "fwd": (("v", (-1.0,)),),
    "bwd": (("dO", (2.0, 2.0, 2.0)), ("v and dO", (-2.0, -2.0, 2.0))),
    "train": (("v and dO", (-1.0, -2.0, -2.0, 2.0)),),
}
# a call that is made for a file, though it is never timed: the last of AGAIN's changes, and strides
STRIDED: Final = "q, k and v that are not contiguous, v with the other sign"
VALUES: Final = 1024  # different values of the changed element


class Given:
    """The inputs of the stages in a process, and copies: q, k, v, dO (None for a forward pass).

    `strided`: they have strides of their own (problems/inputs.py). `changed`: v and dO are those of
    the last of AGAIN, so that outputs of an earlier call are of no use.
    """

    def __init__(self, problem: Problem, strided: bool = False, changed: bool = False) -> None:
        from harness.problems import inputs
        from harness.problems.directions import make_output_gradient

        dO: Any = None if problem.direction == "fwd" else make_output_gradient(problem)
        self.tensors: tuple[Any, ...] = (*inputs.make_inputs(problem), dO)
        if changed:
            factors = zip(self.tensors, (1, 1, -1, 2), strict=True)
            self.tensors = tuple(None if x is None else factor * x for x, factor in factors)
        if strided:
            pairs = zip(self.tensors, inputs.STEPS, strict=True)
            self.tensors = tuple(None if x is None else inputs.strided(x, n) for x, n in pairs)
        self.copies = [None if x is None else x.clone() for x in self.tensors]

    def part(self, shard: "Callable[[torch.Tensor], torch.Tensor]") -> "Given":
        """The inputs of one rank: of each tensor what `shard` returns, in memory of its own."""
        found = copy.copy(self)
        found.tensors = tuple(
            None if x is None else shard(x).contiguous().clone() for x in self.tensors
        )
        found.copies = [None if x is None else x.clone() for x in found.tensors]
        return found

    def check_unwritten(self) -> None:
        """Raise WrongOutput where an input has changed in any bit; first restore it.

        The next stage needs the right inputs. They are restored in place, since calls that were
        prepared before read them there.
        """
        import torch

        changed = []
        for name, x, kept in zip(NAMES, self.tensors, self.copies, strict=True):
            if kept is not None and (x.shape != kept.shape or not torch.equal(x, kept)):
                changed.append(name)
                if x.shape != kept.shape:
                    x.resize_(kept.shape)
                x.data.copy_(kept)  # unseen by the version counter, so that graphs stay valid
        if changed:
            raise WrongOutput(f"changed its input {changed[0]}")


def ask_again(call: Call, direction: str, v: "torch.Tensor", dO: Any) -> Iterator[Call]:
    """Yield the call to make for each entry of AGAIN, with its inputs changed in place.

    The inputs are restored after each call. `v` and `dO` are those that `call` was prepared with.
    They are changed through .data, which torch's version counters don't count.
    """
    for changed, _ in AGAIN[direction]:
        negate, double = "v" in changed, "dO" in changed
        try:
            if negate:
                v.data.neg_()
            if double:
                dO.data.mul_(2.0)
            if negate and hasattr(call, "rebuild"):  # it keeps what it computed from v
                call.rebuild()
            yield call
        finally:
            if negate:
                v.data.neg_()
            if double:
                dO.data.mul_(0.5)


class Kept:
    """`call`, called by all ranks of a world with the same inputs; `kept` is what it returned last.

    An element that changes in one rank alone, as `Watched` has it, would need the judge to know
    which row of the whole sequence that is. Of rows of launches, too, the last outputs are kept:
    there the ranks' copies could overtake each other.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self.inner, self.call, self.change = call, self, None
        self.kept: Sequence[Any] = ()
        self.returned: Sequence[Any] = ()

    def __call__(self) -> Any:
        self.kept = self.inner()
        return self.kept

    def overwritten(self) -> bool:
        """Nothing was kept beside what was returned."""
        return False


class Watched:
    """`call` with one element of `x` changed; `kept` are copies of what one such call returned.

    `replayed`: it is a CUDA graph, whose outputs have the same place at each call.
    """

    def __init__(self, call: Callable[[], Any], x: Any, replayed: bool = False) -> None:
        import torch

        self.call, self.replayed = call, replayed
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
        self.returned: Sequence[Any] = ()

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
            after = 1 / (1 - random()) if self.often else 2 + 6 * random()
            self.due = int(self.count * after) + 1
            self.change = (at, self.values[self.count % VALUES])
            self.kept = [x.clone() if hasattr(x, "clone") else x for x in outputs]
            self.returned = () if self.replayed else outputs
        return outputs

    def overwritten(self) -> bool:
        """Whether an output of the kept call has changed since it was returned."""
        import torch

        return not all(map(torch.equal, self.returned, self.kept))
