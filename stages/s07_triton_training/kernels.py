"""The kernels of stage 7: delta, then A, which computes dk and dv, and B, which computes dq.

Read `walk_q_tiles` first: the five products of a tile. `walk_kv_tiles` has three of them again.
"""

import functools

import torch

from stages.common.fit import DK_DV, DQ, H200, Card, fit_each
from stages.common.kernels import round_to_tf32
from stages.common.no_triton import tl, triton
from stages.common.products import dot, is_finite


@triton.jit
def delta_kernel(
    o_ptr, do_ptr, lse_ptr, delta_ptr, checked_ptr,
    stride_ob, stride_oh, stride_om, stride_od,
    stride_dob, stride_doh, stride_dom, stride_dod,
    Nq, d,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(o * do), (B, H, Nq) float32: sum_j p_ij dp_ij, without p or dp.

    And lse as the other two kernels read it: NaN where no digit of p would be left.
    """
    b, h = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    offs_d = tl.arange(0, BLOCK_D).to(tl.int64)  # (BLOCK_D,)
    mask = (offs_m[:, None] < Nq) & (offs_d[None, :] < d)
    o_ptrs = o_ptr + b * stride_ob + h * stride_oh
    o_ptrs += offs_m[:, None] * stride_om + offs_d[None, :] * stride_od
    do_ptrs = do_ptr + b * stride_dob + h * stride_doh
    do_ptrs += offs_m[:, None] * stride_dom + offs_d[None, :] * stride_dod
    o = tl.load(o_ptrs, mask=mask, other=0.0).to(tl.float32)  # (BLOCK_M, BLOCK_D)
    do = tl.load(do_ptrs, mask=mask, other=0.0).to(tl.float32)  # (BLOCK_M, BLOCK_D)
    row = (b * tl.num_programs(1) + h) * Nq
    # exercise delta: o and do (BLOCK_M, BLOCK_D) -> rowsum(o * do), stored at row + offs_m
    # step store: o, do (BLOCK_M, BLOCK_D) -> (BLOCK_M,), for rows below Nq alone
    tl.store(delta_ptr + row + offs_m, tl.sum(o * do, 1), mask=offs_m < Nq)
    # end of delta
    # p = 2^(s * qk_scale - lse) is off by as much as lse is rounded: from 2^24 on by a factor of 2
    lse = tl.load(lse_ptr + row + offs_m, mask=offs_m < Nq, other=0.0)  # (BLOCK_M,)
    lse = tl.where(tl.abs(lse) < 16777216.0, lse, float("nan"))
    tl.store(checked_ptr + row + offs_m, lse, mask=offs_m < Nq)


@triton.jit
def walk_q_tiles(
    dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, stride_qm, stride_qd, stride_dom, stride_dod,
    start, end, keys, Nq, shift, d, qk_scale,
    MASKED: tl.constexpr, EVEN_M: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add to dk and dv what the query rows in [start, end) give; `MASKED`: under the diagonal."""
    offs_m = tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    offs_d = tl.arange(0, BLOCK_D)  # (BLOCK_D,)
    in_d = offs_d[None, :] < d  # (1, BLOCK_D)
    q_offs = offs_m[:, None] * stride_qm + offs_d[None, :] * stride_qd  # (BLOCK_M, BLOCK_D)
    do_offs = offs_m[:, None] * stride_dom + offs_d[None, :] * stride_dod  # (BLOCK_M, BLOCK_D)
    q_ptr += tl.cast(start, tl.int64) * stride_qm
    do_ptr += tl.cast(start, tl.int64) * stride_dom
    lse_ptr += start
    delta_ptr += start
    # exercise keys: k, v (BLOCK_N, BLOCK_D), pointers to q, do, lse, delta -> dk, dv
    for start_m in range(start, end, BLOCK_M):
        q_ptrs = q_ptr + q_offs
        do_ptrs = do_ptr + do_offs
        in_range = start_m + offs_m < Nq  # (BLOCK_M,)
        # rows past the last are read as zeros: do = delta = 0 makes what they give 0
        q_mask = in_range[:, None] & in_d
        # (BLOCK_M, BLOCK_D)
        q = tl.load(q_ptrs) if EVEN_M and EVEN_D else tl.load(q_ptrs, mask=q_mask, other=0.0)
        do = tl.load(do_ptrs) if EVEN_M and EVEN_D else tl.load(do_ptrs, mask=q_mask, other=0.0)
        # (BLOCK_M,)
        lse_ptrs, delta_ptrs = lse_ptr + offs_m, delta_ptr + offs_m
        lse = tl.load(lse_ptrs) if EVEN_M else tl.load(lse_ptrs, mask=in_range, other=0.0)
        delta = tl.load(delta_ptrs) if EVEN_M else tl.load(delta_ptrs, mask=in_range, other=0.0)
        # all transposed, keys down and queries across: p and ds are then left operands as they are
        s = dot(k, tl.trans(q), PRECISION)  # (BLOCK_N, BLOCK_M)
        # dp - delta: a product is a sum, and this one starts from -delta
        dp_less_delta = tl.broadcast_to(-delta[None, :], s.shape)
        dp_less_delta = dot(v, tl.trans(do), PRECISION, dp_less_delta)
        # step p: P again; s (BLOCK_N, BLOCK_M), lse (BLOCK_M,) -> (BLOCK_N, BLOCK_M)
        p = tl.exp2(s * qk_scale - lse[None, :])
        if MASKED:
            visible = keys[:, None] <= start_m + offs_m[None, :] + shift
            p = tl.where(visible, p, 0.0)
        p_dv = p
        if PRECISION == "tf32":
            p_dv = round_to_tf32(p)
        # step dv: p^T do added; p_dv (BLOCK_N, BLOCK_M), do (BLOCK_M, BLOCK_D) -> like v
        dv = dot(p_dv.to(do.dtype), do, PRECISION, dv)  # (BLOCK_N, BLOCK_D)
        # step ds: p (dp - delta); both (BLOCK_N, BLOCK_M) -> (BLOCK_N, BLOCK_M)
        ds = p * dp_less_delta
        # step dk: ds^T q added; ds (BLOCK_N, BLOCK_M), q (BLOCK_M, BLOCK_D) -> like k
        dk = dot(ds.to(q.dtype), q, PRECISION, dk)  # (BLOCK_N, BLOCK_D)
        q_ptr += BLOCK_M * stride_qm
        do_ptr += BLOCK_M * stride_dom
        lse_ptr += BLOCK_M
        delta_ptr += BLOCK_M
    # end of keys
    return dk, dv


@triton.jit
def dk_dv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, seqlens_ptr,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_dob, stride_doh, stride_dom, stride_dod,
    stride_dkb, stride_dkh, stride_dkn, stride_dkd,
    stride_dvb, stride_dvh, stride_dvn, stride_dvd,
    group, Nq, Nk, d, scale, qk_scale,
    CAUSAL: tl.constexpr, HAS_SEQLENS: tl.constexpr, EVEN_M: tl.constexpr, EVEN_D: tl.constexpr,
    PRECISION: tl.constexpr, REDO: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Kernel A: dk and dv of BLOCK_N keys of one key head, over all query heads that share it."""
    # int64: a pointer offset passes 2^31 in a large tensor, and int32 would wrap silently
    b, h_k = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    start_n = tl.program_id(0) * BLOCK_N  # under a causal mask the first has the most to do
    keys = start_n + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    offs_n = keys.to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D).to(tl.int64)  # (BLOCK_D,)

    Nk_valid = tl.minimum(tl.maximum(tl.load(seqlens_ptr + b), 0), Nk) if HAS_SEQLENS else Nk
    shift = Nk - Nq  # row i sees keys up to i + shift
    first, full = 0, 0  # rows from `first` on see some of these keys, from `full` on all of them
    if CAUSAL:
        first = tl.minimum(tl.maximum(start_n - shift, 0), Nq) // BLOCK_M * BLOCK_M
        full = tl.maximum(start_n + BLOCK_N - 1 - shift, 0)
        full = tl.minimum(tl.cdiv(full, BLOCK_M) * BLOCK_M, tl.cdiv(Nq, BLOCK_M) * BLOCK_M)
    end = tl.where(start_n < Nk_valid, Nq, 0)  # keys past the valid ones: nothing to do

    if REDO:  # the second launch: what is finite stays as it is (stages/common/products.py)
        in_k = (offs_n[:, None] < Nk) & (offs_d[None, :] < d)
        dk_done = dk_ptr + b * stride_dkb + h_k * stride_dkh
        dk_done += offs_n[:, None] * stride_dkn + offs_d[None, :] * stride_dkd
        dv_done = dv_ptr + b * stride_dvb + h_k * stride_dvh
        dv_done += offs_n[:, None] * stride_dvn + offs_d[None, :] * stride_dvd
        if is_finite(dk_done, in_k) & is_finite(dv_done, in_k):
            return
    kv_mask = (offs_n[:, None] < Nk_valid) & (offs_d[None, :] < d)
    k_ptrs = k_ptr + b * stride_kb + h_k * stride_kh
    k_ptrs += offs_n[:, None] * stride_kn + offs_d[None, :] * stride_kd
    k = tl.load(k_ptrs, mask=kv_mask, other=0.0)  # (BLOCK_N, BLOCK_D)
    v_ptrs = v_ptr + b * stride_vb + h_k * stride_vh
    v_ptrs += offs_n[:, None] * stride_vn + offs_d[None, :] * stride_vd
    v = tl.load(v_ptrs, mask=kv_mask, other=0.0)  # (BLOCK_N, BLOCK_D)
    dk = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)

    for g in range(group):
        h = h_k * group + g
        row = (b * tl.num_programs(1) * group + h) * Nq
        q_head = q_ptr + b * stride_qb + h * stride_qh
        do_head = do_ptr + b * stride_dob + h * stride_doh
        if CAUSAL:
            dk, dv = walk_q_tiles(
                dk, dv, k, v, q_head, do_head, lse_ptr + row, delta_ptr + row,
                stride_qm, stride_qd, stride_dom, stride_dod, first, tl.minimum(full, end),
                keys, Nq, shift, d, qk_scale,
                True, EVEN_M, EVEN_D, PRECISION, BLOCK_M, BLOCK_D,
            )  # fmt: skip
        dk, dv = walk_q_tiles(
            dk, dv, k, v, q_head, do_head, lse_ptr + row, delta_ptr + row,
            stride_qm, stride_qd, stride_dom, stride_dod, full, end,
            keys, Nq, shift, d, qk_scale,
            False, EVEN_M, EVEN_D, PRECISION, BLOCK_M, BLOCK_D,
        )  # fmt: skip

    # the rows of keys past the valid ones were computed with k = v = 0, whatever that gave
    valid = offs_n[:, None] < Nk_valid
    dk = tl.where(valid, dk * scale, 0.0)
    dv = tl.where(valid, dv, 0.0)
    out_mask = (offs_n[:, None] < Nk) & (offs_d[None, :] < d)
    dk_ptrs = dk_ptr + b * stride_dkb + h_k * stride_dkh
    dk_ptrs += offs_n[:, None] * stride_dkn + offs_d[None, :] * stride_dkd
    tl.store(dk_ptrs, dk.to(dk_ptr.dtype.element_ty), mask=out_mask)
    dv_ptrs = dv_ptr + b * stride_dvb + h_k * stride_dvh
    dv_ptrs += offs_n[:, None] * stride_dvn + offs_d[None, :] * stride_dvd
    tl.store(dv_ptrs, dv.to(dv_ptr.dtype.element_ty), mask=out_mask)


@triton.jit
def walk_kv_tiles(
    dq, q, do, lse, delta, k_ptr, v_ptr, stride_kn, stride_kd, stride_vn, stride_vd,
    start, end, rows, Nk_valid, shift, d, qk_scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add to dq what the keys in [start, end) give; `MASKED` or seen whole, as in stage 6."""
    offs_n = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    offs_d = tl.arange(0, BLOCK_D)  # (BLOCK_D,)
    in_d = offs_d[None, :] < d  # (1, BLOCK_D)
    k_offs = offs_n[:, None] * stride_kn + offs_d[None, :] * stride_kd  # (BLOCK_N, BLOCK_D)
    v_offs = offs_n[:, None] * stride_vn + offs_d[None, :] * stride_vd  # (BLOCK_N, BLOCK_D)
    k_ptr += tl.cast(start, tl.int64) * stride_kn
    v_ptr += tl.cast(start, tl.int64) * stride_vn
    # exercise rows: q, do, lse, delta, pointers to k and v -> dq (BLOCK_M, BLOCK_D)
    for start_n in range(start, end, BLOCK_N):
        k_ptrs = k_ptr + k_offs
        v_ptrs = v_ptr + v_offs
        valid = start_n + offs_n < Nk_valid  # (BLOCK_N,)
        kv_mask = valid[:, None] & in_d if MASKED else in_d
        # (BLOCK_N, BLOCK_D)
        k = tl.load(k_ptrs, mask=kv_mask, other=0.0) if MASKED or not EVEN_D else tl.load(k_ptrs)
        v = tl.load(v_ptrs, mask=kv_mask, other=0.0) if MASKED or not EVEN_D else tl.load(v_ptrs)
        s = dot(q, tl.trans(k), PRECISION)  # (BLOCK_M, BLOCK_N)
        p = tl.exp2(s * qk_scale - lse[:, None])
        dp = dot(do, tl.trans(v), PRECISION)  # (BLOCK_M, BLOCK_N)
        if MASKED:
            visible = valid[None, :]
            if CAUSAL:
                visible = visible & (start_n + offs_n[None, :] <= rows[:, None] + shift)
            p = tl.where(visible, p, 0.0)
        # step ds_row: p (dp - delta); p, dp (BLOCK_M, BLOCK_N), delta (BLOCK_M,)
        ds = p * (dp - delta[:, None])
        # step dq: ds k added; ds (BLOCK_M, BLOCK_N), k (BLOCK_N, BLOCK_D) -> like q
        dq = dot(ds.to(k.dtype), k, PRECISION, dq)  # (BLOCK_M, BLOCK_D)
        k_ptr += BLOCK_N * stride_kn
        v_ptr += BLOCK_N * stride_vn
    # end of rows
    return dq


@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, seqlens_ptr,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_dob, stride_doh, stride_dom, stride_dod,
    stride_dqb, stride_dqh, stride_dqm, stride_dqd,
    group, Nq, Nk, d, scale, qk_scale,
    CAUSAL: tl.constexpr, HAS_SEQLENS: tl.constexpr, EVEN_D: tl.constexpr,
    PRECISION: tl.constexpr, REDO: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Kernel B: dq of BLOCK_M rows of one head; the walk is stage 6's."""
    block = tl.program_id(0)
    if CAUSAL:  # the longest first
        block = tl.num_programs(0) - 1 - block
    b, h = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    h_k = h // group
    start_m = block * BLOCK_M
    rows = start_m + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    offs_m = rows.to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D).to(tl.int64)  # (BLOCK_D,)

    Nk_valid = tl.minimum(tl.maximum(tl.load(seqlens_ptr + b), 0), Nk) if HAS_SEQLENS else Nk
    shift = Nk - Nq
    full, end = Nk_valid, Nk_valid
    if CAUSAL:
        full = tl.minimum(tl.maximum(start_m + shift + 1, 0), Nk_valid)
        end = tl.minimum(tl.maximum(tl.minimum(start_m + BLOCK_M, Nq) + shift, 0), Nk_valid)
    full = full // BLOCK_N * BLOCK_N

    q_mask = (offs_m[:, None] < Nq) & (offs_d[None, :] < d)
    if REDO:  # the second launch: what is finite stays as it is (stages/common/products.py)
        done = dq_ptr + b * stride_dqb + h * stride_dqh
        done += offs_m[:, None] * stride_dqm + offs_d[None, :] * stride_dqd
        if is_finite(done, q_mask):
            return
    q_ptrs = q_ptr + b * stride_qb + h * stride_qh
    q_ptrs += offs_m[:, None] * stride_qm + offs_d[None, :] * stride_qd
    q = tl.load(q_ptrs, mask=q_mask, other=0.0)  # (BLOCK_M, BLOCK_D)
    do_ptrs = do_ptr + b * stride_dob + h * stride_doh
    do_ptrs += offs_m[:, None] * stride_dom + offs_d[None, :] * stride_dod
    do = tl.load(do_ptrs, mask=q_mask, other=0.0)  # (BLOCK_M, BLOCK_D)
    row = (b * tl.num_programs(1) + h) * Nq
    lse = tl.load(lse_ptr + row + offs_m, mask=offs_m < Nq, other=0.0)  # (BLOCK_M,)
    delta = tl.load(delta_ptr + row + offs_m, mask=offs_m < Nq, other=0.0)  # (BLOCK_M,)
    k_ptr += b * stride_kb + h_k * stride_kh
    v_ptr += b * stride_vb + h_k * stride_vh

    dq = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    dq = walk_kv_tiles(
        dq, q, do, lse, delta, k_ptr, v_ptr, stride_kn, stride_kd, stride_vn, stride_vd,
        0, full, rows, Nk_valid, shift, d, qk_scale,
        False, CAUSAL, EVEN_D, PRECISION, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    dq = walk_kv_tiles(
        dq, q, do, lse, delta, k_ptr, v_ptr, stride_kn, stride_kd, stride_vn, stride_vd,
        full, end, rows, Nk_valid, shift, d, qk_scale,
        True, CAUSAL, EVEN_D, PRECISION, BLOCK_N, BLOCK_D,
    )  # fmt: skip

    dq_ptrs = dq_ptr + b * stride_dqb + h * stride_dqh
    dq_ptrs += offs_m[:, None] * stride_dqm + offs_d[None, :] * stride_dqd
    tl.store(dq_ptrs, (dq * scale).to(dq_ptr.dtype.element_ty), mask=q_mask)


# BLOCK_M, BLOCK_N, num_warps, num_stages for a BLOCK_D of up to 64, of 128, of 256: the best of a
# search on one H200. Kernel A keeps BLOCK_N keys and walks tiles of BLOCK_M rows, kernel B the
# other way round.
TILES: dict[str, dict[str, tuple[list[tuple[int, int, int, int]], ...]]] = {
    "dk_dv_kernel": {
        "half": (
            [(64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 8, 3)],
            [(32, 64, 4, 3), (64, 64, 4, 2), (64, 128, 8, 3)],
            [(32, 64, 8, 1), (32, 64, 8, 2), (64, 64, 8, 1)],
        ),
        "tf32": ([(32, 32, 8, 2), (32, 64, 4, 2)], [(32, 32, 8, 1)], [(16, 16, 8, 1)]),
        "bf16x6": (
            [(64, 128, 8, 1), (64, 64, 4, 1)],
            [(32, 128, 8, 1), (16, 64, 4, 1)],
            [(16, 32, 8, 1)],
        ),
        "ieee": ([(32, 32, 8, 2), (32, 32, 4, 2)], [(16, 32, 8, 1)], [(16, 16, 8, 1)]),
    },
    "dq_kernel": {
        "half": (
            [(64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 8, 3)],
            [(64, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 2)],
            [(64, 32, 8, 1), (64, 32, 8, 2), (64, 64, 8, 1)],
        ),
        "tf32": ([(64, 32, 4, 2), (32, 32, 4, 2)], [(32, 32, 8, 1)], [(16, 16, 8, 1)]),
        "bf16x6": (
            [(128, 64, 8, 1), (64, 64, 4, 1)],
            [(128, 32, 8, 1), (64, 32, 4, 1)],
            [(32, 32, 8, 1)],
        ),
        "ieee": ([(32, 32, 8, 2), (32, 32, 4, 2)], [(32, 16, 8, 1)], [(16, 16, 8, 1)]),
    },
}


WALKS = {"dk_dv_kernel": DK_DV, "dq_kernel": DQ}


@functools.cache
def candidates(
    kernel: str, d: int, dtype: torch.dtype, precision: str, card: Card = H200
) -> list[dict[str, int]]:
    """Return launch configurations to try for one of the two kernels, the safest first."""
    return fit_each(TILES[kernel], WALKS[kernel], d, dtype, precision, card)


def launch_configs(
    d: int, dtype: torch.dtype, precision: str, card: Card = H200
) -> dict[str, dict[str, int]]:
    """kernel -> the configuration that runs untuned: the first of its candidates."""
    return {kernel: candidates(kernel, d, dtype, precision, card)[0] for kernel in TILES}
