"""The stages in Triton as operators of torch: torch.compile has them in its graph, without a break.

    ladder::s07_triton_training            (q, k, v, causal, seqlens_k) -> o
    ladder::s07_triton_training_forward    the same -> o and lse, where gradients are wanted
    ladder::s07_triton_training_backward   do, all these, and which are wanted -> dq, dk, dv

and the same for each stage; one that is forward only has just the first. They are used only inside
torch.compile: an operator's call takes longer than a stage's own.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from stages.common.contract import Stage
from stages.common.inputs import autocast, check_inputs

Function = TypeVar("Function", bound=Callable[..., Any])
INPUTS = "Tensor q, Tensor k, Tensor v, bool causal, Tensor? seqlens_k"


class Passes(NamedTuple):
    """The passes of a stage as functions of tensors, which know nothing of torch's graph.

    forward   (q, k, v, causal, seqlens_k) -> o, lse
    backward  (q, k, v, o, lse, do, causal, seqlens_k, wanted) -> dq, dk, dv; None where not wanted

    Both take checked arguments. The node of torch's graph and the operators call them.
    """

    stage: Stage
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor | None, Tensor | None, Tensor | None]]


class Operators:
    """The operators of the stage whose `attend` this is; with its `passes`, those that train."""

    def __init__(
        self, stage: Stage, attend: Callable[..., Tensor], passes: Passes | None = None
    ) -> None:
        self.stage, self.attend, self.passes = stage, attend, passes
        name = "ladder::" + attend.__module__.rpartition(".")[2]
        self.plain = operator(f"{name}({INPUTS}) -> Tensor", self.run, like_plain)
        self.training: Any = None
        if passes is not None:
            schema = f"{name}_forward({INPUTS}) -> (Tensor, Tensor)"
            self.training = operator(schema, self.forward, like_forward)
            schema = f"{name}_backward(Tensor do, {INPUTS}, Tensor o, Tensor lse, bool[] wanted)"
            self.passed = operator(
                f"{schema} -> (Tensor, Tensor, Tensor)", self.backward, like_backward
            )
            self.training.register_autograd(self.differentiate, setup_context=keep)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, seqlens_k: Tensor | None
    ) -> Tensor:
        options = {"causal": causal or None, "seqlens_k": seqlens_k}  # some stages take neither
        return self.attend(q, k, v, **{n: x for n, x in options.items() if x is not None})

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, seqlens_k: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert self.passes is not None
        check_inputs(self.stage, q, k, v, causal=causal, seqlens_k=seqlens_k)
        return self.passes.forward(q, k, v, causal, seqlens_k)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, seqlens_k: Tensor | None,
        o: Tensor, lse: Tensor, wanted: Sequence[bool],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        assert self.passes is not None
        found = self.passes.backward(q, k, v, o, lse, do, causal, seqlens_k, tuple(wanted))
        return tuple(q.new_empty(0) if x is None else x for x in found)  # no two the same one

    def differentiate(self, ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, seqlens_k, o, lse = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:3])
        dq, dk, dv = self.passed(do, q, k, v, ctx.causal, seqlens_k, o, lse, wanted)
        return dq, dk, dv, None, None

    def takes(
        self, q: Any = None, k: Any = None, v: Any = None, *more: Any, causal: Any = False,
        seqlens_k: Any = None, **others: Any,
    ) -> bool:  # fmt: skip
        """Whether there is an operator for these; else `attend` is called, which says why not."""
        if more or others:
            return False
        tensors = isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
        if not tensors or q.ndim != 4 or not isinstance(causal, bool):
            return False
        return self.training is not None or not wanted_of(q, k, v)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False,
        seqlens_k: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`attend` by an operator. q, k, v and the output as there; traced by torch.compile."""
        if self.training is None:
            return self.plain(q, k, v, causal, seqlens_k)
        q, k, v = autocast(q, k, v)  # as such a stage's attend does
        if wanted_of(q, k, v):
            return self.training(q, k, v, causal, seqlens_k)[0]
        return self.plain(q, k, v, causal, seqlens_k)


def operator(schema: str, function: Callable[..., Any], like: Callable[..., Any]) -> Any:
    """A new operator of torch; `like` says what it gives: shapes, dtypes, device, contiguous."""

    def run(*args: Any) -> Any:
        with torch.no_grad():
            return function(*args)

    name, bracket, rest = schema.partition("(")
    made = torch.library.custom_op(name, run, mutates_args=(), schema=bracket + rest)
    made.register_fake(like)
    return made


def like_plain(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape)


def like_forward(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


def like_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    wanted = rest[-1]
    dq, dk, dv = (
        x.new_empty(x.shape if want else 0) for x, want in zip((q, k, v), wanted, strict=True)
    )
    return dq, dk, dv


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """What the backward pass needs: no N x N."""
    q, k, v, ctx.causal, seqlens_k = inputs
    ctx.save_for_backward(q, k, v, seqlens_k, *output)


def wanted_of(*tensors: Tensor) -> bool:
    """Whether gradients are wanted of any of them."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def recording() -> bool:
    """Whether make_fx or torch.jit.trace is recording what torch is called with."""
    if torch.jit.is_tracing():
        return True
    key = torch._C._TorchDispatchModeKey.PROXY
    # make_fx(pre_dispatch=True) has a stack of modes to itself
    modes = torch._C._get_dispatch_mode(key), torch._ops._get_dispatch_mode_pre_dispatch(key)
    return modes != (None, None)


def register(stage: Stage, passes: Passes | None = None) -> Callable[[Function], Function]:
    """Decorate the `attend` of a stage in Triton: torch's graphs hold it as operators.

    torch.compile, make_fx and torch.jit.trace take them. `passes` are those of a stage that trains.
    """

    def decorate(attend: Function) -> Function:
        return outside(attend, Operators(stage, attend, passes))

    return decorate


def untraced(function: Function) -> Function:
    """Decorate a function that computes outside torch: torch.compile calls it as it is.

    make_fx and torch.jit.trace would keep its answer as a constant: they get a ValueError.
    """
    return outside(function, None)


def outside(function: Function, traced: Operators | None) -> Function:
    """`function`; while torch traces, `traced` in its place, where that takes the arguments."""
    disabled: list[Function] = []  # torch.compiler.disable takes a second to import, once

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        compiling = torch.compiler.is_compiling()  # which can't look into `recording`
        recorded = not compiling and recording()
        tracing = compiling or recorded
        if tracing and traced is not None and traced.takes(*args, **options):
            return traced(*args, **options)
        if recorded:
            raise ValueError(
                f"{function.__name__}: make_fx or torch.jit.trace would keep its answer as a "
                "constant, since it computes outside torch: trace stage 3, or a stage in Triton"
            )
        if "torch._dynamo" not in sys.modules:
            return function(*args, **options)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **options)

    return cast(Function, call)
