"""The backward pass of stage 9 on the host: three kernels in turn.

prepare    delta = rowsum(o * do), as in stage 7, beside lse; zeros in dQ's sums
backward   dk and dv; dQ's sums in float32 (backward.py)
finish     dq of them, scaled, in its dtype
"""

from typing import Any

import torch

from stages import s07_triton_training as s07
from stages.common.gluon import TensorDescriptor, gl
from stages.common.kernels import LOG2_E
from stages.common.machine import launching
from stages.s09_gluon_hopper.backward import backward_kernel
from stages.s09_gluon_hopper.launch import counter_of, described, multiprocessors

try:
    import triton
    import triton.language as tl
except ImportError:  # the file imports all the same
    from stages.common.no_triton import no_triton as tl
    from stages.common.no_triton import no_triton as triton


@triton.jit
def prepare_kernel(
    o_ptr, do_ptr, lse_ptr, rows_ptr, sums_ptr,
    stride_ob, stride_oh, stride_om, stride_od,
    stride_dob, stride_doh, stride_dom, stride_dod,
    stride_lb, stride_lh, stride_lm,
    Nq, Nq_padded, d,
    ZERO: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Fill rows (B, H, 2, Nq_padded) float32 with lse and -delta, and dQ's sums with zeros.

    A row that sees no key, or is none, gets lse = +inf: whatever its scores, p = 2^-inf = 0. An lse
    so large that no digit of p would be left becomes NaN, as in stage 7.
    """
    b, h = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    offs_d = tl.arange(0, BLOCK_D).to(tl.int64)  # (BLOCK_D,)
    in_range = offs_m < Nq
    mask = in_range[:, None] & (offs_d[None, :] < d)
    o_ptrs = o_ptr + b * stride_ob + h * stride_oh
    o_ptrs += offs_m[:, None] * stride_om + offs_d[None, :] * stride_od
    do_ptrs = do_ptr + b * stride_dob + h * stride_doh
    do_ptrs += offs_m[:, None] * stride_dom + offs_d[None, :] * stride_dod
    o = tl.load(o_ptrs, mask=mask, other=0.0).to(tl.float32)  # (BLOCK_M, BLOCK_D)
    do = tl.load(do_ptrs, mask=mask, other=0.0).to(tl.float32)  # (BLOCK_M, BLOCK_D)
    lse_ptr += b * stride_lb + h * stride_lh
    lse = tl.load(lse_ptr + offs_m * stride_lm, mask=in_range, other=float("-inf"))
    good = tl.where(tl.abs(lse) < 16777216.0, lse, float("nan"))
    lse = tl.where(lse == float("-inf"), float("inf"), good)
    head = b * tl.num_programs(1) + h
    rows_ptr += head * 2 * Nq_padded
    tl.store(rows_ptr + offs_m, lse)
    tl.store(rows_ptr + Nq_padded + offs_m, -tl.sum(o * do, 1))
    if ZERO:
        sums = sums_ptr + (head * Nq_padded + offs_m[:, None]) * BLOCK_D + offs_d[None, :]
        tl.store(sums, tl.zeros((BLOCK_M, BLOCK_D), tl.float32))


@triton.jit
def finish_kernel(
    sums_ptr, rows_ptr, dq_ptr, stride_dqb, stride_dqh, stride_dqm, stride_dqd,
    Nq, Nq_padded, d, scale,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dq from its float32 sums (B, H, Nq_padded, BLOCK_D): scaled, in dq's dtype, rows in order.

    The sums of BLOCK_M rows are in the order in which the consumers hold them (`as_held`).
    """
    b, h = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    start_m = tl.program_id(0).to(tl.int64) * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    offs_d = tl.arange(0, BLOCK_D)  # (BLOCK_D,)
    head = b * tl.num_programs(1) + h
    sums = sums_ptr + (head * Nq_padded + start_m) * BLOCK_D
    flat = tl.load(sums + tl.arange(0, BLOCK_M * BLOCK_D))
    # consumer, warp, 8 columns, row of 8, 2 columns, row's half, column
    held = tl.reshape(flat, (2, 4, 8, 8, 4, 2, 2))
    if BLOCK_D == 128:  # 64 rows: the consumer says which columns
        held = tl.permute(held, (1, 5, 3, 0, 2, 4, 6))
    else:  # 128 rows: it says which rows
        held = tl.permute(held, (0, 1, 5, 3, 2, 4, 6))
    dq = tl.reshape(held, (BLOCK_M, BLOCK_D))
    lse = tl.load(rows_ptr + head * 2 * Nq_padded + offs_m)
    dq = tl.where(lse[:, None] == float("inf"), 0.0, dq * scale)
    dq_ptr += b * stride_dqb + h * stride_dqh
    dq_ptrs = dq_ptr + offs_m[:, None] * stride_dqm + offs_d[None, :].to(tl.int64) * stride_dqd
    mask = (offs_m[:, None] < Nq) & (offs_d[None, :] < d)
    tl.store(dq_ptrs, dq.to(dq_ptr.dtype.element_ty), mask=mask)


# For heads of up to 64 and of up to 128 numbers. BLOCK_M: queries of a tile. L2_BYTES: of Q, dO and
# dQ's sums that heads computed at the same time may have. DQ: whether dQ is wanted.
CONFIGS: dict[int, dict[str, Any]] = {
    BLOCK_D: {
        "BLOCK_M": BLOCK_M, "L2_BYTES": 32 << 20, "STAGES": 2, "DQ": True, "CONSUMER_REGS": 240,
        "PRODUCER_REGS": 24,
    }
    for BLOCK_D, BLOCK_M in ((64, 128), (128, 64))
}  # fmt: skip
BLOCK_N = 128


def float32_descriptor(x: torch.Tensor, block: list[int]) -> Any:
    layout = gl.NVMMASharedLayout(0, 32, rank=x.dim())
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    causal: bool,
    seqlens_k: torch.Tensor | None,
    config: dict[str, Any],
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Launch the three kernels; dq (None without DQ), dk and dv, all contiguous."""
    config = dict(config)
    B, H, Nq, d = q.shape
    Hk, Nk = k.shape[1:3]
    BLOCK_M, L2_BYTES, DQ = config.pop("BLOCK_M"), config.pop("L2_BYTES"), config["DQ"]
    BLOCK_D = 64 if d <= 64 else 128
    scale = d**-0.5
    blocks = triton.cdiv(Nq, BLOCK_M)
    padded_rows = blocks * BLOCK_M
    rows = torch.empty((B, H, 2, padded_rows), dtype=torch.float32, device=q.device)
    summed = (B, H, padded_rows, BLOCK_D) if DQ else (1, 1, 64, 64)
    sums = torch.empty(summed, dtype=torch.float32, device=q.device)
    dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    # copies where need be; the names keep them until all is launched, as descriptors don't
    q, q_desc = described(q, BLOCK_M, BLOCK_D)
    do, do_desc = described(do, BLOCK_M, BLOCK_D)
    k, k_desc = described(k, BLOCK_N, BLOCK_D)
    v, v_desc = described(v, BLOCK_N, BLOCK_D)
    rows_desc = float32_descriptor(rows, [1, 1, 2, BLOCK_M])
    sums_desc = float32_descriptor(sums.view(-1, 256), [16, 256])
    if seqlens_k is not None:
        seqlens_k = seqlens_k.contiguous()  # the kernel takes no stride for it
    prepare_kernel[(blocks, H, B)](
        o, do, lse, rows, sums, *o.stride(), *do.stride(), *lse.stride(), Nq, padded_rows, d,
        ZERO=DQ, BLOCK_M=BLOCK_M, BLOCK_D=BLOCK_D,
    )  # fmt: skip
    section = min(max(1, L2_BYTES // (8 * H // Hk * Nq * d)), B * Hk)
    units = B * Hk * triton.cdiv(Nk, BLOCK_N)
    backward_kernel[(min(multiprocessors(q.device), units),)](
        q_desc, k_desc, v_desc, do_desc, rows_desc, sums_desc, dk, dv, seqlens_k,
        counter_of(q.device), H, Hk, Nq, Nk, d, B * Hk, section, units, scale * LOG2_E, scale,
        CAUSAL=causal, HAS_SEQLENS=seqlens_k is not None,
        EDGE=seqlens_k is not None or Nk % BLOCK_N != 0, num_warps=4, **config,
    )  # fmt: skip
    if not DQ:
        return None, dk, dv
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    finish_kernel[(blocks, H, B)](
        sums, rows, dq, *dq.stride(), Nq, padded_rows, d, scale, BLOCK_M=BLOCK_M, BLOCK_D=BLOCK_D
    )
    return dq, dk, dv


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    causal: bool,
    seqlens_k: torch.Tensor | None,
    wanted: tuple[bool, bool, bool] = (True, True, True),
    config: dict[str, Any] | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """dq, dk, dv from what the forward pass left and do (B, H, Nq, d); None where not `wanted`.

    lse (B, H, Nq) float32 in base 2. float32 and d > 128 go to stage 7's kernels, and so does all
    where only dq is wanted. dq is added up in whatever order CTAs come by: its last bits may differ
    from run to run, those of dk and dv don't. Under torch.use_deterministic_algorithms(True) dq is
    stage 7's, too, and has the same bits at every run.
    """
    d, Nk = q.shape[3], k.shape[2]
    if do.stride(-1) != 1:  # such as the expanded gradient of a sum: one number for all
        do = do.contiguous()
    keys = wanted[1] or wanted[2]
    # keys are counted in int32
    if q.dtype == torch.float32 or d > 128 or Nk >= 1 << 30 or not keys:
        lse = lse.contiguous()  # stage 7's kernels take no stride for it
        return s07.backward(q, k, v, o, lse, do, causal, seqlens_k, wanted)
    blind = q.shape[2] - Nk if causal else 0
    if blind > 0:  # the first rows see no key: nothing counts there, not even a NaN in do
        q, o, lse, do = (x[:, :, blind:] for x in (q, o, lse, do))
        dq, dk, dv = backward(q, k, v, o, lse, do, causal, seqlens_k, wanted, config)
        return dq if dq is None else torch.nn.functional.pad(dq, (0, 0, blind, 0)), dk, dv
    config = config or CONFIGS[64 if d <= 64 else 128]
    again = wanted[0] and torch.are_deterministic_algorithms_enabled()
    config = config | {"DQ": wanted[0] and not again}
    with launching(do):
        dq, dk, dv = launch(q, k, v, o, lse, do, causal, seqlens_k, config)
    if again:
        dq = backward(q, k, v, o, lse, do, causal, seqlens_k, (True, False, False))[0]
    return dq, dk if wanted[1] else None, dv if wanted[2] else None
