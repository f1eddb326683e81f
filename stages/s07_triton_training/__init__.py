"""Stage 7, Triton training: the backward pass by recomputation. It trains.

Nothing N x N is kept for the backward pass: only o and lse, and P is made again with lse.

    p = 2^(s * qk_scale - lse)           s = q k^T again, tile by tile; lse in base 2, from stage 6
    delta = rowsum(o * do)               (Nq,), once: the softmax's share of each row's gradient
    dv = p^T do
    dp = do v^T
    ds = p * (dp - delta)
    dq = scale ds k
    dk = scale ds^T q

    kernel A: a program per BLOCK_N keys of one key head; walks the q tiles that see them;  dk, dv
    kernel B: a program per BLOCK_M rows of one head; walks the KV tiles that they see;     dq

Each gradient is summed by one program in one order: no atomics, the same bits at every run of a
launch configuration. The price: s and dp are computed twice, 7 matrix products instead of 5.

Cost: 10 d FLOPs per visible pair and head are counted (14 d done), the forward pass has 4 d;
memory: lse twice and delta, 4 bytes per row each, beside o and the gradients themselves.
What it bought: training in O(N) memory (FlashAttention, Dao et al. 2022, algorithm 4; two kernels
as FlashAttention-2 splits the work, Dao 2023, section 3.2).
Read on in kernels.py, then come back for the two passes and the node of torch's graph.
Still hurts: with few query rows, or one head, most of the GPU is idle. Stage 8 goes on.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stages.common import operators, tuner
from stages.common.fit import card_of
from stages.common.inputs import autocast
from stages.common.kernels import LOG2_E, loadable
from stages.common.launch import fast_launch
from stages.common.machine import launching
from stages.contract import (
    FirstDerivative,
    Stage,
    check_inputs,
    dual,
    input_precision,
    transformed,
)
from stages.s06_triton_flash2 import forward as flash2_forward
from stages.s06_triton_flash2 import skip_ratio as skip_ratio  # its forward pass is stage 6's

from .kernels import TILES as TILES
from .kernels import candidates, delta_kernel, dk_dv_kernel, dq_kernel
from .kernels import launch_configs as launch_configs

STAGE = Stage(
    number=7,
    name="triton_training",
    title="Triton training",
    idea="backward by recomputation: it trains",
    still_hurts="with few query rows, or one head, most of the GPU is idle",
    needs=("triton",),
    dtypes=("float16", "bfloat16", "float32"),
    options=("causal", "seqlens_k", "gqa"),
    gradients=True,
    worth_up_to={"cpu": 512},
    files=("kernels.py",),
)


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # dq, dk, dv


def launch(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool,
    seqlens_k: Tensor | None, wanted: tuple[bool, bool, bool], wide: bool = False,
) -> Gradients:  # fmt: skip
    """Launch the kernels: dq, dk, dv. Where one of dk and dv is wanted, both are computed.

    wide  whether they are left in float32, as stage 10 adds them up, not in the inputs' dtype
    """
    q, k, v, o, do = (loadable(x) for x in (q, k, v, o, do))
    lse = lse.resolve_neg().contiguous()  # the kernels take no stride for it
    B, H, Nq, d = q.shape
    Hk, Nk = k.shape[1:3]
    scale = d**-0.5
    precision, card = input_precision(q), card_of(q.device)
    kind = precision, d, causal
    delta, checked = torch.empty_like(lse), torch.empty_like(lse)
    for_keys = candidates("dk_dv_kernel", d, q.dtype, precision, card)
    for_rows = candidates("dq_kernel", d, q.dtype, precision, card)
    BLOCK_D = for_rows[0]["BLOCK_D"]
    fast_launch(
        delta_kernel, (-(-Nq // 64), H, B), (o, do, lse, delta, checked),
        (*o.stride(), *do.stride(), Nq, d), BLOCK_M=64, BLOCK_D=BLOCK_D,
    )  # fmt: skip
    lse = checked
    dtype = torch.float32 if wide else q.dtype
    empty_like = functools.partial(
        torch.empty_like, dtype=dtype, memory_format=torch.contiguous_format
    )
    dq = dk = dv = None
    if wanted[1] or wanted[2]:
        dk, dv = empty_like(k), empty_like(v)

        def launch_keys(
            config: tuner.Config, precision: str = precision, redo: bool = False
        ) -> None:
            grid = (-(-Nk // config["BLOCK_N"]), Hk, B)
            fast_launch(
                dk_dv_kernel, grid, (q, k, v, do, lse, delta, dk, dv, seqlens_k),
                (
                    *q.stride(), *k.stride(), *v.stride(), *do.stride(), *dk.stride(), *dv.stride(),
                    H // Hk, Nq, Nk, d, scale, scale * LOG2_E,
                ),
                CAUSAL=causal, HAS_SEQLENS=seqlens_k is not None,
                EVEN_M=Nq % config["BLOCK_M"] == 0, EVEN_D=d == BLOCK_D,
                PRECISION=precision, REDO=redo, **config,
            )  # fmt: skip

        # its grid is of key heads, each with the queries of all heads that share it
        sizes = B * Hk, H // Hk * Nq, Nk
        launch_keys(tuner.choose(dk_dv_kernel, for_keys, launch_keys, q, kind, sizes))
        if precision == "bf16x6":
            config = candidates("dk_dv_kernel", d, q.dtype, "ieee", card)[0]
            launch_keys(config, "ieee", redo=True)
    if wanted[0]:
        dq = empty_like(q)

        def launch_rows(
            config: tuner.Config, precision: str = precision, redo: bool = False
        ) -> None:
            grid = (-(-Nq // config["BLOCK_M"]), H, B)
            fast_launch(
                dq_kernel, grid, (q, k, v, do, lse, delta, dq, seqlens_k),
                (
                    *q.stride(), *k.stride(), *v.stride(), *do.stride(), *dq.stride(),
                    H // Hk, Nq, Nk, d, scale, scale * LOG2_E,
                ),
                CAUSAL=causal, HAS_SEQLENS=seqlens_k is not None, EVEN_D=d == BLOCK_D,
                PRECISION=precision, REDO=redo, **config,
            )  # fmt: skip

        sizes = B * H, Nq, Nk
        launch_rows(tuner.choose(dq_kernel, for_rows, launch_rows, q, kind, sizes))
        if precision == "bf16x6":
            config = candidates("dq_kernel", d, q.dtype, "ieee", card)[0]
            launch_rows(config, "ieee", redo=True)
    return dq, dk if wanted[1] else None, dv if wanted[2] else None


def backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool,
    seqlens_k: Tensor | None, wanted: tuple[bool, bool, bool] = (True, True, True),
    launch: Callable[..., Gradients] = launch,
) -> Gradients:  # fmt: skip
    """Compute dq, dk, dv from do (B, H, Nq, d) and the forward pass; None where not `wanted`.

    lse (B, H, Nq) float32 in base 2, as stage 6's `forward` fills it. Stage 9 has another `launch`.
    """
    Nq, Nk = q.shape[2], k.shape[2]
    if do.stride(-1) != 1:  # such as the expanded gradient of a sum: one number for all
        do = do.contiguous()
    if causal and Nq > Nk:  # the first rows see no key: nothing counts there, not even a NaN in do
        blind = Nq - Nk
        q, o, do = (x[:, :, blind:] for x in (q, o, do))
        lse = lse[:, :, blind:]
        dq, dk, dv = backward(q, k, v, o, lse, do, causal, seqlens_k, wanted, launch)
        return dq if dq is None else torch.nn.functional.pad(dq, (0, 0, blind, 0)), dk, dv
    if seqlens_k is not None:
        seqlens_k = seqlens_k.contiguous()  # no kernel takes a stride for it
    with launching(do):
        return launch(q, k, v, o, lse, do, causal, seqlens_k, wanted)


PASSES = operators.Passes(STAGE, flash2_forward, backward)


class Attention(torch.autograd.Function):
    """Attention as a node of torch's graph: it keeps q, k, v, o and lse, and nothing N x N."""

    @staticmethod
    def forward(ctx: Any, passes: operators.Passes, *inputs: Any) -> Tensor:
        q, k, v, causal, seqlens_k = inputs
        o, lse = passes.forward_with_lse(q, k, v, causal, seqlens_k)
        ctx.save_for_backward(q, k, v, o, lse, seqlens_k)
        ctx.passes, ctx.causal = passes, causal
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        q, k, v, o, lse, seqlens_k = ctx.saved_tensors
        tensors = q, k, v, o, lse, do
        options = ctx.causal, seqlens_k, ctx.needs_input_grad[1:4]
        passes = ctx.passes

        def run(*tensors: Tensor) -> Any:
            return passes.backward(*tensors, *options)

        # torch.func was refused when these were saved, and a tangent if forward mode wasn't off
        if torch.is_grad_enabled() or transformed(do) or dual(*tensors):
            gradients = FirstDerivative.apply(passes.stage, run, *tensors)
        else:  # nothing will go back through it
            gradients = run(*tensors)
        return None, *gradients, None, None


@operators.register(PASSES)
def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, seqlens_k: Tensor | None = None
) -> Tensor:
    """Exact attention that trains: out.backward() fills q.grad, k.grad and v.grad.

    q (B, H, Nq, d), k and v (B, Hk, Nk, d) with Hk dividing H, float16, bfloat16 or float32;
    `seqlens_k` (B,) int32 -> (B, H, Nq, d) in q's dtype; under torch.autocast, as for torch's own
    attention, q, k, v and the output are of autocast's dtype, gradients of the inputs' own. A row
    that sees no key is 0, and so is its gradient. Raises ValueError on input that breaks the
    contract (stages/contract.py), StageUnavailable where there is no Triton, RuntimeError when it
    is differentiated twice.
    """
    q, k, v = autocast(q, k, v)
    check_inputs(STAGE, q, k, v, causal=causal, seqlens_k=seqlens_k)
    if operators.wanted_of(q, k, v) or transformed(q, k, v):
        return Attention.apply(PASSES, q, k, v, causal, seqlens_k)
    return flash2_forward(q, k, v, causal, seqlens_k)
