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
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from stages.common.inputs import check_inputs

Function = TypeVar("Function", bound=Callable[..., Any])
INPUTS = "Tensor q, Tensor k, Tensor v, bool causal, Tensor? seqlens_k"


class Operators:
    """The operators of a stage, made from its `attend` and, where it has one, its `Attention`."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        self.attend = attend
        self.name = "ladder::" + attend.__module__.rpartition(".")[2]
        self.module = attend.__globals__  # what it defines below `attend` isn't there yet
        self.plain = operator(f"{self.name}({INPUTS}) -> Tensor", self.run, like_plain)
        self.training: Any = None
        if "Attention" in self.module:
            schema = f"{self.name}_forward({INPUTS}) -> (Tensor, Tensor)"
            self.training = operator(schema, self.forward, like_forward)
            schema = (
                f"{self.name}_backward(Tensor do, {INPUTS}, Tensor o, Tensor lse, bool[] wanted)"
            )
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
        check_inputs(self.module["STAGE"], q, k, v, causal=causal, seqlens_k=seqlens_k)
        kept = SimpleNamespace()
        kept.save_for_backward = lambda *tensors: vars(kept).update(lse=tensors[4])
        return self.module["Attention"].forward(kept, q, k, v, causal, seqlens_k), kept.lse

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, seqlens_k: Tensor | None,
        o: Tensor, lse: Tensor, wanted: Sequence[bool],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        kept = SimpleNamespace(
            saved_tensors=(q, k, v, o, lse, seqlens_k), causal=causal,
            needs_input_grad=(*wanted, False, False),
        )  # fmt: skip
        dq, dk, dv, *_ = self.module["Attention"].backward(kept, do)
        none = q.new_empty(0), q.new_empty(0), q.new_empty(0)  # two may not be the same one
        dq, dk, dv = (n if x is None else x for x, n in zip((dq, dk, dv), none, strict=True))
        return dq, dk, dv

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
        if torch.is_autocast_enabled(q.device.type):  # as such a stage's attend does
            dtype = torch.get_autocast_dtype(q.device.type)
            q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
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


def untraced(function: Function) -> Function:
    """`function`, which torch.compile takes as one operator of its graph, or leaves out of it.

    An operator is made of the `attend` of a stage in Triton (Operators); make_fx and
    torch.jit.trace take it, too. Anything else is called as it is by torch.compile, and refused by
    those two, which would keep its answer as a constant: ValueError. (torch.compiler.disable takes
    a second to import, if nobody has yet.)
    """
    disabled: list[Function] = []
    traced = None
    built_in = function.__module__.startswith("stages.s")
    if (
        built_in
        and function.__name__ == "attend"
        and "triton" in function.__globals__["STAGE"].needs
    ):
        traced = Operators(function)

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
