"""The stages in Triton as operators of torch: torch.compile has them in its graph, without a break.

    ladder::s07_triton_training            (q, k, v, causal, seqlens_k) -> o
    ladder::s07_triton_training_forward    the same -> o and lse, where gradients are wanted
    ladder::s07_triton_training_backward   do, all these, and which are wanted -> dq, dk, dv

and the same for each stage; one that is forward only has just the first. They are used only
where torch makes a graph (`register`): an operator's call takes longer than a stage's own.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from stages.common.contract import Stage
from stages.common.inputs import autocast, check_inputs

Function = TypeVar("Function", bound=Callable[..., Any])
INPUTS = "Tensor q, Tensor k, Tensor v, bool causal, Tensor? seqlens_k"


class Passes(NamedTuple):
    """The passes of a stage as functions of tensors, which know nothing of torch's graph.

    forward   (q, k, v, causal, seqlens_k, lse) -> o; it fills lse
    backward  (q, k, v, o, lse, do, causal, seqlens_k, wanted) -> dq, dk, dv; None where not wanted

    Both take checked arguments. The node of torch's graph and the operators call them.
    """

    stage: Stage
    forward: Callable[..., Tensor]
    backward: Callable[..., tuple[Tensor | None, Tensor | None, Tensor | None]]

    def forward_with_lse(self, q: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
        """The output, and lse (B, H, Nq) float32 in base 2."""
        lse = torch.empty(*q.shape[:3], dtype=torch.float32, device=q.device)
        return self.forward(q, *inputs, lse=lse), lse


def attend_operator(name: str, attend: Callable[..., Tensor]) -> Any:
    """The operator `name`, which calls `attend`."""

    def run(q: Tensor, k: Tensor, v: Tensor, causal: bool, seqlens_k: Tensor | None) -> Tensor:
        options = {"causal": causal or None, "seqlens_k": seqlens_k}  # some stages take neither
        return attend(q, k, v, **{n: x for n, x in options.items() if x is not None})

    return operator(f"{name}({INPUTS}) -> Tensor", run, lambda q, *_: q.new_empty(q.shape))


def training_operator(name: str, passes: Passes) -> Any:
    """The operator `name`_forward; torch differentiates it by another one, `name`_backward."""

    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        q, k, v, causal, seqlens_k = inputs
        check_inputs(passes.stage, q, k, v, causal=causal, seqlens_k=seqlens_k)
        return passes.forward_with_lse(*inputs)

    def like_forward(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, ctx.causal, seqlens_k = inputs
        ctx.save_for_backward(q, k, v, seqlens_k, *output)

    def backward(do: Tensor, *kept: Any) -> tuple[Tensor, ...]:
        q, k, v, causal, seqlens_k, o, lse, wanted = kept
        found = passes.backward(q, k, v, o, lse, do, causal, seqlens_k, tuple(wanted))
        return tuple(q.new_empty(0) if x is None else x for x in found)  # no two the same one

    def like_backward(do: Tensor, *kept: Any) -> tuple[Tensor, ...]:
        wanted = zip(kept[:3], kept[-1], strict=True)
        return tuple(x.new_empty(x.shape if want else 0) for x, want in wanted)

    def differentiate(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, seqlens_k, o, lse = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:3])
        return *going_back(do, q, k, v, ctx.causal, seqlens_k, o, lse, wanted), None, None

    schema = f"{name}_backward(Tensor do, {INPUTS}, Tensor o, Tensor lse, bool[] wanted)"
    going_back = operator(f"{schema} -> (Tensor, Tensor, Tensor)", backward, like_backward)
    made = operator(f"{name}_forward({INPUTS}) -> (Tensor, Tensor)", forward, like_forward)
    made.register_autograd(differentiate, setup_context=keep)
    return made


def operator(schema: str, function: Callable[..., Any], like: Callable[..., Any]) -> Any:
    """A new operator of torch; `like` says what it gives: shapes, dtypes, device, contiguous."""
    name, bracket, rest = schema.partition("(")
    run = torch.no_grad()(function)
    made = torch.library.custom_op(name, run, mutates_args=(), schema=bracket + rest)
    made.register_fake(like)
    return made


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


def takes(
    trains: bool, q: Any = None, k: Any = None, v: Any = None, *more: Any, causal: Any = False,
    seqlens_k: Any = None, **others: Any,
) -> bool:  # fmt: skip
    """Whether there is an operator for these; else `attend` is called, which says why not."""
    tensors = isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    if more or others or not tensors or q.ndim != 4 or not isinstance(causal, bool):
        return False
    return trains or not wanted_of(q, k, v)


def register(passes: Passes | None = None) -> Callable[[Function], Function]:
    """Decorate the `attend` of a stage in Triton: torch's graphs hold it as operators.

    torch.compile, make_fx and torch.jit.trace take them. `passes` are those of a stage that trains.
    """

    def decorate(attend: Function) -> Function:
        name = "ladder::" + attend.__module__.rpartition(".")[2]
        plain = attend_operator(name, attend)
        training = training_operator(name, passes) if passes is not None else None

        def traced(
            q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False,
            seqlens_k: Tensor | None = None,
        ) -> Tensor:  # fmt: skip
            if training is not None:
                q, k, v = autocast(q, k, v)  # as such a stage's attend does
                if wanted_of(q, k, v):
                    return training(q, k, v, causal, seqlens_k)[0]
            return plain(q, k, v, causal, seqlens_k)

        return untraced(attend, traced, passes is not None)

    return decorate


def untraced(
    function: Function, traced: Callable[..., Any] | None = None, trains: bool = False
) -> Function:
    """Decorate a function that computes outside torch: torch.compile calls it as it is.

    make_fx and torch.jit.trace would keep its answer as a constant: they get a ValueError.
    Where `traced` takes the arguments, all three call that in its place.
    """
    disabled: list[Function] = []  # torch.compiler.disable takes a second to import, once

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        compiling = torch.compiler.is_compiling()  # which can't look into `recording`
        recorded = not compiling and recording()
        tracing = compiling or recorded
        if tracing and traced is not None and takes(trains, *args, **options):
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
