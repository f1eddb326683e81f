"""Stage 6, Triton "Flash 2": tiles that no row sees are skipped, and few others need a mask.

    one program: BLOCK_M query rows of one head; heads share k and v where there are fewer of those
    |<- all of these rows see all of it ->|<- some see some ->|<- nobody sees it ->|
       [0, full): tiles without a mask       [full, end): masked   never loaded, only counted
    for each tile:
        s = q k^T                        (BLOCK_M, BLOCK_N), not scaled
        m_new = max(m_i, max s * qk_scale)            qk_scale = scale * log2(e), folded once
        p = 2^(s * qk_scale - m_new)     one multiply-add and one exp2 per score; in float32 (not
                                         TF32) q is scaled instead, and this a subtraction
        l_i, acc: corrected by alpha = 2^(m_i - m_new), as in stage 5
    o = acc / l_i                        0 where a row saw nothing
    lse = m_i + log2 l_i                 on request, in base 2: all that a backward pass needs of S

Besides, it takes what a model needs: lengths, fewer key heads than query heads, any strides and any
d (padded to a power of two), and the tile sizes that are the fastest here (stages/common/tuner.py).

Cost: 4 d FLOPs per visible pair and head, half of stage 5's under a causal mask; q and o cross the
bus once; extra memory: none (lse: 4 bytes per row, on request).
What it bought: masks that save time instead of costing it (FlashAttention-2, Dao 2023, sections
3.1 and 3.3), and one multiply-add and one exp2 per score.
Still hurts: forward only. Stage 7 goes back.
"""

import functools
import math

import torch
from torch import Tensor

from stages.common import operators, tuner
from stages.common.fit import FORWARD, H200, Card, card_of, fit_each
from stages.common.kernels import LOG2_E, loadable, round_to_tf32
from stages.common.launch import fast_launch
from stages.common.machine import launching
from stages.common.no_triton import tl, triton
from stages.common.products import dot, is_finite
from stages.contract import Stage, check_inputs, input_precision

STAGE = Stage(
    number=6,
    name="triton_flash2",
    title="Triton Flash 2",
    idea="tiles that no row sees are skipped, and few others need a mask",
    still_hurts="forward only",
    needs=("triton",),
    dtypes=("float16", "bfloat16", "float32"),
    options=("causal", "seqlens_k", "gqa"),
    worth_up_to={"cpu": 1024},
)


@triton.jit
def nan_where_large(l_i, m_i):
    """The row sums l_i, NaN where a multiply-add can't hold the row's scores: |m_i| > 2^26.

    It takes m_i, a rounded product, from an exact one: all p of a row are off by one factor, which
    the division by l_i cancels. Up to here that is 4 at most; it would grow to infinity, or to 0.
    """
    return tl.where(tl.abs(m_i) <= 67108864.0, l_i, float("nan"))


@triton.jit
def visit_tiles(
    acc, l_i, m_i, visited, q, k_ptr, v_ptr, stride_kn, stride_kd, stride_vn, stride_vd,
    start, end, rows, Nk_valid, shift, d, qk_scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The online softmax over the tiles of keys in [start, end), `MASKED` or seen whole."""
    offs_n = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    offs_d = tl.arange(0, BLOCK_D)  # (BLOCK_D,)
    in_d = offs_d[None, :] < d  # (1, BLOCK_D)
    # within a tile int32 is enough (`loadable`), and costs half of a pointer's registers
    k_offs = offs_n[:, None] * stride_kn + offs_d[None, :] * stride_kd  # (BLOCK_N, BLOCK_D)
    v_offs = offs_n[:, None] * stride_vn + offs_d[None, :] * stride_vd  # (BLOCK_N, BLOCK_D)
    k_ptr += tl.cast(start, tl.int64) * stride_kn
    v_ptr += tl.cast(start, tl.int64) * stride_vn
    # exercise tiles: q, pointers to k and v, acc, l_i, m_i -> these after [start, end)
    for start_n in range(start, end, BLOCK_N):
        k_ptrs = k_ptr + k_offs
        v_ptrs = v_ptr + v_offs
        valid = start_n + offs_n < Nk_valid  # (BLOCK_N,)
        # what lies beyond the valid keys is never read: it may be NaN, and 0 * NaN is NaN
        kv_mask = valid[:, None] & in_d if MASKED else in_d
        # (BLOCK_N, BLOCK_D)
        k = tl.load(k_ptrs, mask=kv_mask, other=0.0) if MASKED or not EVEN_D else tl.load(k_ptrs)
        v = tl.load(v_ptrs, mask=kv_mask, other=0.0) if MASKED or not EVEN_D else tl.load(v_ptrs)
        s = dot(q, tl.trans(k), PRECISION)  # (BLOCK_M, BLOCK_N)
        if MASKED:
            # step visible: keys that are valid; valid (BLOCK_N,) -> (1, BLOCK_N)
            visible = valid[None, :]
            if CAUSAL:
                # step causal: row i sees keys to i + shift; rows (BLOCK_M,) -> (BLOCK_M, BLOCK_N)
                visible = visible & (start_n + offs_n[None, :] <= rows[:, None] + shift)
            # step hidden: what a row may not see weighs nothing; s -> (BLOCK_M, BLOCK_N)
            s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1) * qk_scale)  # (BLOCK_M,)
        alpha = tl.exp2(m_i - m_new)  # (BLOCK_M,)
        p = tl.exp2(s * qk_scale - m_new[:, None])  # (BLOCK_M, BLOCK_N)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if PRECISION == "tf32":
            p = round_to_tf32(p)
        acc = dot(p.to(v.dtype), v, PRECISION, acc)  # (BLOCK_M, BLOCK_D)
        m_i = m_new
        visited += 1
        k_ptr += BLOCK_N * stride_kn
        v_ptr += BLOCK_N * stride_vn
    # end of tiles
    return acc, l_i, m_i, visited


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, seqlens_ptr, skipped_ptr,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_om, stride_od,
    group, Nq, Nk, d, qk_scale,
    CAUSAL: tl.constexpr, HAS_SEQLENS: tl.constexpr, LSE: tl.constexpr, COUNT: tl.constexpr,
    EVEN_D: tl.constexpr, PRECISION: tl.constexpr, REDO: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    block, blocks = tl.program_id(0), tl.num_programs(0)
    if CAUSAL:  # the longest first, so that the last to end is a short one
        block = blocks - 1 - block
    # int64: a pointer offset passes 2^31 in a large tensor, and int32 would wrap silently
    b, h = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    h_k = h // group  # grouped heads: each key head serves `group` query heads
    start_m = block * BLOCK_M
    rows = start_m + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    offs_m = rows.to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D).to(tl.int64)  # (BLOCK_D,), a power of two: d is zero-padded

    Nk_valid = tl.minimum(tl.maximum(tl.load(seqlens_ptr + b), 0), Nk) if HAS_SEQLENS else Nk
    shift = Nk - Nq  # row i sees keys up to i + shift
    # exercise bounds: the block's rows, shift, Nk_valid -> full and end, as in the header
    full, end = Nk_valid, Nk_valid
    if CAUSAL:  # the first row sees the fewest keys, the last one the most
        # step full: how many keys the block's first row sees, 0 to Nk_valid -> a number
        full = tl.minimum(tl.maximum(start_m + shift + 1, 0), Nk_valid)
        # step end: how many its last row sees, 0 to Nk_valid -> a number
        end = tl.minimum(tl.maximum(tl.minimum(start_m + BLOCK_M, Nq) + shift, 0), Nk_valid)
    # step whole: full in whole tiles -> a number
    full = full // BLOCK_N * BLOCK_N
    # end of bounds

    q_mask = (offs_m[:, None] < Nq) & (offs_d[None, :] < d)
    if REDO:  # the second launch: what is finite stays as it is (stages/common/products.py)
        done = o_ptr + b * stride_ob + h * stride_oh
        done += offs_m[:, None] * stride_om + offs_d[None, :] * stride_od
        if is_finite(done, q_mask):
            return
    q_ptrs = q_ptr + b * stride_qb + h * stride_qh
    q_ptrs += offs_m[:, None] * stride_qm + offs_d[None, :] * stride_qd
    q = tl.load(q_ptrs, mask=q_mask, other=0.0)  # (BLOCK_M, BLOCK_D)
    SCALED: tl.constexpr = q.dtype == tl.float32 and PRECISION != "tf32"
    if SCALED:  # then nothing is rounded between a score and its exponent
        q *= qk_scale
        qk_scale = 1.0
    k_ptr += b * stride_kb + h_k * stride_kh
    v_ptr += b * stride_vb + h_k * stride_vh

    # running max of s * qk_scale: the lowest float32, where -inf - -inf would be NaN
    m_i = tl.full((BLOCK_M,), -3.4028234663852886e38, dtype=tl.float32)
    l_i = tl.zeros((BLOCK_M,), dtype=tl.float32)  # running sum of 2^(s * qk_scale - m_i)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    visited = 0
    acc, l_i, m_i, visited = visit_tiles(
        acc, l_i, m_i, visited, q, k_ptr, v_ptr, stride_kn, stride_kd, stride_vn, stride_vd,
        0, full, rows, Nk_valid, shift, d, qk_scale,
        False, CAUSAL, EVEN_D, PRECISION, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    acc, l_i, m_i, visited = visit_tiles(
        acc, l_i, m_i, visited, q, k_ptr, v_ptr, stride_kn, stride_kd, stride_vn, stride_vd,
        full, end, rows, Nk_valid, shift, d, qk_scale,
        True, CAUSAL, EVEN_D, PRECISION, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    seen = tl.full((BLOCK_M,), 0, tl.int32) + Nk_valid  # how many keys each row sees
    if CAUSAL:
        seen = tl.minimum(rows + shift + 1, Nk_valid)
    if not SCALED:
        l_i = nan_where_large(l_i, m_i)
    l_i = tl.where(seen > 0, l_i, 1.0)  # a row that sees no key: o = 0 / 1
    acc = acc / l_i[:, None]
    o_ptrs = o_ptr + b * stride_ob + h * stride_oh
    o_ptrs += offs_m[:, None] * stride_om + offs_d[None, :] * stride_od
    tl.store(o_ptrs, acc.to(o_ptr.dtype.element_ty), mask=q_mask)
    head = b * tl.num_programs(1) + h
    if LSE:
        lse = tl.where(seen > 0, m_i + tl.log2(l_i), float("-inf"))  # in base 2, as m_i is
        tl.store(lse_ptr + head * Nq + offs_m, lse, mask=offs_m < Nq)
    if COUNT:
        skipped = tl.cdiv(Nk, BLOCK_N) - visited
        tl.store(skipped_ptr + head * blocks + block, skipped)


# BLOCK_M, BLOCK_N, num_warps, num_stages for a BLOCK_D of up to 64, of 128, of 256: the best of a
# search on one H200. 'ieee' runs on no matrix unit and its operands sit in registers: small tiles.
TILES: dict[str, tuple[list[tuple[int, int, int, int]], ...]] = {
    "half": (
        [(128, 64, 8, 3), (64, 64, 4, 3), (64, 128, 4, 3)],
        [(64, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2)],
        [(64, 64, 8, 2), (128, 64, 8, 2), (128, 32, 8, 2)],
    ),
    "tf32": (
        [(128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 4, 3)],
        [(64, 64, 8, 2), (64, 32, 4, 2), (128, 32, 8, 2)],
        [(16, 64, 4, 2), (32, 32, 4, 2)],
    ),
    "bf16x6": (
        [(128, 64, 4, 1), (128, 128, 8, 1), (64, 64, 4, 1)],
        [(128, 64, 8, 1), (64, 64, 4, 1)],
        [(32, 32, 4, 1), (64, 32, 8, 1)],
    ),
    "ieee": (
        [(32, 64, 8, 3), (32, 32, 4, 3)],
        [(32, 64, 8, 2), (32, 64, 16, 1)],
        [(16, 64, 16, 2), (16, 32, 8, 2)],
    ),
}


@functools.cache
def candidates(d: int, dtype: torch.dtype, precision: str, card: Card = H200) -> list[tuner.Config]:
    """Return launch configurations to try for a head dimension and a dtype, the safest first.

    BLOCK_M, BLOCK_N, BLOCK_D, num_warps and num_stages, smaller where `card` has no room for them
    (stages/common/fit.py). The first is what runs untuned (in the interpreter, or while a CUDA
    graph is captured): up to d = 128, without masks, all values find room in registers.
    """
    return fit_each(TILES, FORWARD, d, dtype, precision, card)


def launch_config(d: int, dtype: torch.dtype, precision: str, card: Card = H200) -> tuner.Config:
    """Return the configuration that runs untuned: the first of the candidates."""
    return candidates(d, dtype, precision, card)[0]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    seqlens_k: Tensor | None,
    lse: Tensor | None = None,
    skipped: Tensor | None = None,
    config: tuner.Config | None = None,
) -> Tensor:
    """Compute the output for checked arguments; `lse` and `skipped` are filled if given.

    lse (B, H, Nq) float32 is in base 2: log2 of each row's sum of exp(s).
    """
    B, H, Nq, d = q.shape
    Hk, Nk = k.shape[1:3]
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    precision, card = input_precision(q), card_of(q.device)
    q, k, v = loadable(q), loadable(k), loadable(v)
    if seqlens_k is not None:
        seqlens_k = seqlens_k.contiguous()  # the kernel takes no stride for it

    def launch(config: tuner.Config, precision: str = precision, redo: bool = False) -> None:
        grid = (-(-Nq // config["BLOCK_M"]), H, B)
        fast_launch(
            attention_kernel, grid, (q, k, v, o, lse, seqlens_k, skipped),
            (
                *q.stride(), *k.stride(), *v.stride(), *o.stride(),
                H // Hk, Nq, Nk, d, d**-0.5 * LOG2_E,
            ),
            CAUSAL=causal, HAS_SEQLENS=seqlens_k is not None,
            LSE=lse is not None, COUNT=skipped is not None and not redo,
            EVEN_D=d == config["BLOCK_D"], PRECISION=precision, REDO=redo, **config,
        )  # fmt: skip

    with launching(q):
        if config is None:
            config = tuner.choose(
                attention_kernel, candidates(d, q.dtype, precision, card), launch, q,
                kind=(precision, d, causal), sizes=(B * H, Nq, Nk),
            )  # fmt: skip
        launch(config)
        if precision == "bf16x6":
            launch(launch_config(d, q.dtype, "ieee", card), "ieee", redo=True)
    return o


@operators.register()
def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, seqlens_k: Tensor | None = None
) -> Tensor:
    """Exact attention under masks. Forward only.

    q (B, H, Nq, d), k and v (B, Hk, Nk, d) with Hk dividing H, float16, bfloat16 or float32;
    `seqlens_k` (B,) int32 -> (B, H, Nq, d) in q's dtype. A row that sees no key is 0. Keys that no
    row of a block sees are not read. Raises ValueError on input that breaks the contract
    (stages/contract.py), StageUnavailable where there is no Triton.
    """
    check_inputs(STAGE, q, k, v, causal=causal, seqlens_k=seqlens_k)
    return forward(q, k, v, causal, seqlens_k)


@operators.untraced
def attend_with_lse(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, seqlens_k: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return `attend`'s output, and lse (B, H, Nq) float32, the log of each row's sum of exp(s).

    s = scale q . k over the keys that the row sees; -inf where it sees none. Raises as `attend`.
    """
    check_inputs(STAGE, q, k, v, causal=causal, seqlens_k=seqlens_k)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    o = forward(q, k, v, causal, seqlens_k, lse=lse)
    return o, lse.mul_(math.log(2))


def skipped_blocks(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, seqlens_k: Tensor | None = None
) -> Tensor:
    """Return how many KV tiles each q block never visited, counted by the kernel as it runs.

    (B, H, ceil(Nq / BLOCK_M)) int32, of ceil(Nk / BLOCK_N) tiles each, in the untuned
    configuration (`launch_config`), so that the count is the same on all cards that have room for
    it. Raises as `attend` does.
    """
    check_inputs(STAGE, q, k, v, causal=causal, seqlens_k=seqlens_k)
    B, H, Nq, d = q.shape
    config = launch_config(d, q.dtype, input_precision(q), card_of(q.device))
    shape = (B, H, triton.cdiv(Nq, config["BLOCK_M"]))
    skipped = torch.empty(shape, dtype=torch.int32, device=q.device)
    forward(q, k, v, causal, seqlens_k, skipped=skipped, config=config)
    return skipped


def skip_ratio(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, seqlens_k: Tensor | None = None
) -> float:
    """Return the share of (q block, KV tile) pairs never visited, 0 to 1: `skipped_blocks`' mean.

    Raises as `attend` does.
    """
    skipped = skipped_blocks(q, k, v, causal=causal, seqlens_k=seqlens_k)
    config = launch_config(q.shape[3], q.dtype, input_precision(q), card_of(q.device))
    return skipped.double().mean().item() / triton.cdiv(k.shape[2], config["BLOCK_N"])
