"""The measured call, forward, backward or both, and how a stage that caches is detected.

`prepare` makes the call. To detect a stage that caches its outputs, it is called again after its
inputs were changed in a way that torch's version counters don't show (`ask_again`): attention is
linear in v and gradients in dO, and a change of sign or of the exponent is exact, so the right new
outputs are known.

While a stage is timed (`Watched`), one element of q (of dO for a backward pass) is different at
each call, so that outputs cached by content are of no use. The outputs of one timed call, drawn at
random, are kept: the judge removes the effect of the change from them and compares the rest as it
compares the first outputs. On a GPU the time of a change would count as the stage's own: there only
the calls whose outputs may be kept have a changed element.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from random import Random, random
from types import ModuleType
from typing import TYPE_CHECKING, Any

from harness.problems.problem import Problem

if TYPE_CHECKING:  # the runner reads AGAIN, and imports no torch
    import torch

# direction -> for each repeated call: which inputs are changed, and the factor by which each output
# then differs. A backward pass may cache in its graph or beside it: it is called through the same
# graph (for which v must not change), then through a new one.
AGAIN = {
    "fwd": (("v", (-1.0,)),),
    "bwd": (("dO", (2.0, 2.0, 2.0)), ("v and dO", (-2.0, -2.0, 2.0))),
    "train": (("v and dO", (-1.0, -2.0, -2.0, 2.0)),),
}
# a call that is made for a file, though it is never timed: the last of AGAIN's changes, and strides
STRIDED = "q, k and v that are not contiguous, v with the other sign"
VALUES = 1024  # different values of the changed element

Tensors = tuple[Any, ...]  # torch.Tensor each; None where there is no gradient
Attend = Callable[..., "torch.Tensor"]
Call = Callable[[], Tensors]


class BadGradient(Exception):
    """An output that can't be differentiated; the message names the tensor and says why."""


def prepare(
    attend: Attend, direction: str, q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor",
    dO: "torch.Tensor | None",
) -> Call:  # fmt: skip
    """Make the call to be measured: it takes no arguments and returns what OUTPUTS names.

    Every call reads q, k, v again, in place. For 'bwd' the forward pass is done here, once. A
    gradient that torch does not compute is None. BadGradient is raised, here or in the call, where
    the output carries no gradient at all, or torch refuses a gradient's shape.
    """
    if direction == "fwd":
        return lambda: (attend(q, k, v),)
    leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
    return Backward(attend, leaves, dO) if direction == "bwd" else Train(attend, leaves, dO)


def prepare_for(
    problem: Problem, module: ModuleType, attend: Attend, tensors: "Sequence[Any]"
) -> Call:
    """Make the call of a stage on `problem`: `prepare`'s, or one that reads a paged cache.

    `attend` is the stage's own with the problem's options; `tensors` are q, k, v and dO or None.
    """
    if problem.page_size:
        return PagedCall(module, problem, *tensors[:3])
    return prepare(attend, problem.direction, *tensors)


class Train:
    """Forward and backward: o, dq, dk, dv."""

    def __init__(self, attend: Attend, leaves: Tensors, dO: Any) -> None:
        self.attend, self.leaves, self.dO = attend, leaves, dO

    def __call__(self) -> Tensors:
        return self.outputs(self.attend(*self.leaves))

    def outputs(self, o: Any, keep: bool = False) -> Tensors:
        """Compute the gradients from `o`: returns o, dq, dk, dv; with `keep`, dq, dk, dv alone.

        `keep`: the graph of `o` is kept for further calls.
        """
        import torch

        if type(o) is not torch.Tensor:  # a subclass may delay its computation
            raise BadGradient(why_no_gradient(o, self.dO))
        try:
            forward = () if keep else (o.detach(),)
            return forward + torch.autograd.grad(
                o, self.leaves, self.dO, retain_graph=keep, allow_unused=True
            )
        except Exception as error:
            if at_fault := explain(error, o, self.attend, self.leaves, self.dO):
                raise at_fault from error
            raise


class Backward(Train):
    """Backward alone, each time through the same graph: dq, dk, dv."""

    def __init__(self, attend: Attend, leaves: Tensors, dO: Any) -> None:
        super().__init__(attend, leaves, dO)
        self.o: Any = None
        keep_buffers()
        self.rebuild()

    def rebuild(self) -> None:
        """Do the forward pass again; the old graph is freed first."""
        self.o = None
        self.o = self.attend(*self.leaves)
        if reason := why_no_gradient(self.o, self.dO):
            raise BadGradient(reason)

    def __call__(self) -> Tensors:
        return self.outputs(self.o, keep=True)


def keep_buffers() -> None:
    """Have torch.compile keep what a forward pass saves, so that backward can run repeatedly."""
    import torch._functorch.config

    with contextlib.suppress(AttributeError):  # before torch 2.6 there is no such setting
        torch._functorch.config.donated_buffer = False


def why_no_gradient(o: Any, dO: Any) -> str | None:
    """Why the output `o` can't be differentiated, or None where it can."""
    import torch

    if type(o) is not torch.Tensor:
        return f"o: returned {type(o).__name__}, expected a tensor"
    if why := unlike(o, dO):
        return f"o: returned {why}"
    if not o.requires_grad:
        return "o: does not require grad, so that dq, dk and dv are missing"
    return None


def unlike(x: Any, like: Any) -> str | None:
    """How the kind, shape, dtype or device of `x` differs from that of `like`, or None."""
    kind = ("is_nested", "layout") if hasattr(x, "is_nested") else ()  # of a tensor
    for what in (*kind, "shape", "dtype", "device"):
        got, expected = getattr(x, what, None), getattr(like, what)
        if got != expected:
            return f"{what} {show(got)}, expected {show(expected)}"
    return None


def show(value: Any) -> str:
    """A shape, dtype or device as people write it."""
    return str(tuple(value)) if hasattr(value, "numel") else str(value).removeprefix("torch.")


def explain(
    error: Exception, o: Any, attend: Attend, leaves: Tensors, dO: Any
) -> BadGradient | None:
    """Return a BadGradient where `error` comes from the stage's gradients, else None.

    Torch names a gradient of a wrong shape only by its index among the arguments of the function
    that made it. Computing each of dq, dk, dv alone shows which of them it is.
    """
    import torch

    if reason := why_no_gradient(o, dO):
        return BadGradient(reason)
    if "number of gradients" in str(error):
        return BadGradient(f"dq, dk, dv: {error}")
    if REFUSED not in str(error):
        return None
    for index, name in enumerate(("dq", "dk", "dv")):
        alone = [x.detach() for x in leaves]
        alone[index].requires_grad_()
        try:
            torch.autograd.grad(attend(*alone), alone[index], dO)
        except Exception as own:
            if REFUSED in str(own):
                return BadGradient(f"{name}: {str(own).split(' - ', 1)[-1]}")
    return BadGradient(str(error))


REFUSED = "invalid gradient at index"  # torch's words


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


class PagedCall:
    """The measured call: `attend_paged` of a stage's module; returns (o,).

    The cache contains the problem's k and v before the call. Pages are allocated in an order
    shuffled by the problem's seed, as in a cache where sequences were added and removed.
    """

    def __init__(self, module: ModuleType, problem: Problem, q: Any, k: Any, v: Any) -> None:
        pages = problem.b * -(-problem.nk // int(problem.page_size or 1))
        self.module, self.problem, self.inputs = module, problem, (q, k, v)
        self.cache = module.PagedCache(
            pages, problem.page_size, problem.hk, problem.d, k.dtype, k.device, sequences=problem.b
        )
        Random(problem.seed).shuffle(self.cache.free_pages)
        self.sequences: list[int] = []
        self.rebuild()

    def rebuild(self) -> None:
        """Fill the cache again from the present k and v."""
        while self.sequences:
            self.cache.free(self.sequences.pop())
        for b in range(self.problem.b):
            self.cache.append(b, self.inputs[1][b], self.inputs[2][b])
            self.sequences.append(b)

    def __call__(self) -> tuple[Any]:
        q = self.inputs[0]
        causal = self.problem.causal
        return (self.module.attend_paged(q, self.cache, self.sequences, causal=causal),)


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
