"""Call a stage in its own process: what the call is, what comes out, and whose fault an error is.

`prepare_for` makes the call, forward, backward or both, or one that reads from a paged cache. It
takes no arguments and reads its inputs again, in place, each time.
"""

import contextlib
import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, cast

from harness.isolation.child import one_line
from harness.problems.directions import OUTPUTS
from harness.problems.problem import Problem
from harness.records.schema import Products

if TYPE_CHECKING:  # the parent imports this, and no torch
    import torch

WARM_UP_ROWS: Final = 16

Tensors = tuple[Any, ...]  # torch.Tensor each; None where there is no gradient
Attend = Callable[..., "torch.Tensor"]
Call = Callable[[], Tensors]


class WrongOutput(Exception):
    """A stage returned something that is no output of the problem, or changed its inputs."""


class BadGradient(Exception):
    """An output that can't be differentiated; the message names the tensor and says why."""


# ---- the call


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
        """Returns o, dq, dk, dv; with `keep` dq, dk, dv alone, and o's graph is kept for more."""
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
    """A BadGradient where `error` comes from the stage's gradients, else None.

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


REFUSED: Final = "invalid gradient at index"  # torch's words


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


# ---- around the call


def bind(attend: Callable[..., Any], problem: Problem) -> Callable[..., Any]:
    """Bind the problem's options to `attend`; a problem without options calls attend(q, k, v)."""
    import torch

    options: dict[str, Any] = {"causal": True} if problem.causal else {}
    if problem.seqlens_k is not None:
        lengths = torch.tensor(problem.seqlens_k, dtype=torch.int32, device=problem.device)
        options["seqlens_k"] = lengths
    if not options:
        return attend
    return lambda q, k, v: attend(q, k, v, **options)


def start_afresh(problem: Problem) -> None:
    """Undo what the stages called before have left in this process; before each stage's own calls.

    Without it the notes of one stage's launches would be read as the next one's, and a number of
    threads, a precision or a switch that one stage sets would hold for all that follow.
    """
    import torch

    from harness.measures.accuracy import set_precision
    from stages.common import inputs, tuner

    tuner.latest.clear()
    inputs.asked_for.clear()
    if (builder := interpreter_builder()) is not None:
        builder.grid_idx = None
    gc.enable()
    torch.set_num_threads(1)  # timing.py says why
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    if problem.device == "cuda" and problem.dtype == "float32":
        set_precision(problem.precision)


def launch_configs() -> dict[str, dict[str, int]] | None:
    """Kernel -> the configuration that it was tuned to since `start_afresh`; None without any."""
    from stages.common import tuner

    return dict(tuner.latest) or None


def products() -> Products | None:
    """How a kernel of ours multiplied float32 since `start_afresh`; None where none did."""
    from stages.common import inputs

    return cast("Products | None", next(iter(inputs.asked_for), None))


def was_interpreted() -> bool:
    """Whether any kernel has run in Triton's interpreter since `start_afresh`."""
    return getattr(interpreter_builder(), "grid_idx", None) is not None


def interpreter_builder() -> Any:
    """What Triton's interpreter notes a launch in; None where it was never imported."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    return getattr(interpreter, "interpreter_builder", None)


def warm_up(attend: Callable[..., Any], problem: Problem, given: tuple[Any, ...]) -> None:
    """Make one tiny call, so that one-time setup does not count as memory of the measured call."""
    with contextlib.suppress(Exception):  # a stage may refuse tiny inputs
        tiny: list[Any] = [x if x is None else x[:1, :, :WARM_UP_ROWS].contiguous() for x in given]
        lengths = problem.seqlens_k and (min(problem.seqlens_k[0], tiny[1].shape[2]),)
        bound = bind(attend, replace(problem, seqlens_k=lengths))
        prepare(bound, problem.direction, *tiny)()


# ---- what comes out


def write_outputs(
    outputs: tuple[Any, ...], problem: Problem, given: tuple[Any, ...], path: str
) -> None:
    """Write the bytes of all outputs to a file for the judge, one after the other.

    Raises WrongOutput where one has another shape, dtype or device than its input: q for o and dq,
    k for dk, v for dv.
    """
    import torch

    q, k, v, _ = given
    like = {"o": q, "dq": q, "dk": k, "dv": v}
    with Path(path).open("wb") as file:
        for name, x in zip(OUTPUTS[problem.direction], outputs, strict=True):
            prefix = "returned" if problem.direction == "fwd" else f"{name}: returned"
            if x is None and name != "o":
                raise WrongOutput(f"{name}: there is none, no gradient reaches {name[1:]}")
            if type(x) is not torch.Tensor:  # a subclass may delay its computation
                raise WrongOutput(f"{prefix} {type(x).__name__}, expected a tensor")
            check_like(x, like[name], prefix)
            flat = x.detach().cpu().resolve_neg().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)


def check_like(x: Any, like: Any, prefix: str = "returned") -> None:
    """Raise WrongOutput where `x` has another shape, dtype or device than `like`."""
    if why := unlike(x, like):
        raise WrongOutput(f"{prefix} {why}")


def blame(error: BaseException) -> dict[str, Any]:
    """Status and reason of a stage that failed with `error`."""
    import torch

    from stages.contract import StageUnavailable

    text = one_line(error)
    if isinstance(error, (WrongOutput, BadGradient)):
        return {"status": "wrong", "reason": str(error)}
    if isinstance(error, StageUnavailable):
        return {"status": "skipped", "reason": str(error)}
    out_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if out_of_memory or "can't allocate memory" in str(error):
        return {"status": "out-of-memory", "reason": text}
    return {"status": "crashed", "reason": text}
