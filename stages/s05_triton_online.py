"""Stage 5, Triton "Online": the running max, the running sum and the correction. Exact.

    one program: BLOCK_M query rows of one head
    q  stays on the chip; m_i = lowest, l_i = 0, acc = 0
    for each tile of 64 keys:
        s = q k^T * scale                (BLOCK_M, BLOCK_N), never leaves the chip
        m_new = max(m_i, max s)
        alpha = exp(m_i - m_new)         what the past is worth under the new max
        p = exp(s - m_new)
        l_i = l_i * alpha + sum p
        acc = acc * alpha + p v
    o = acc / l_i

Cost: 4 B H Nq Nk d FLOPs; q and o cross the bus once, k and v once per q block (mostly from L2);
extra memory: none.
What it bought: exact for any N, nine lines away from stage 4 (Milakov & Gimelshein 2018, algorithm
3; FlashAttention, Dao et al. 2022, algorithm 1, dividing once at the end as FlashAttention-2 does).
Still hurts: every tile is visited with the tail's mask on, causal and padding masks are
unsupported, and one head alone fills few multiprocessors. Stage 6 goes on.
"""

import torch

from stages.common import operators
from stages.common.fit import FORWARD, H200, Card, card_of, fit_each
from stages.common.machine import launching

# at a first reading take `dot` for tl.dot and pass over REDO, a second launch: both are about
# float32 on a GPU, which the walkthrough explains at stage 5
from stages.common.products import dot, is_finite
from stages.contract import Stage, check_inputs, input_precision

try:
    import triton
    import triton.language as tl
except ImportError:  # the file imports all the same; attend says why it can't run
    from stages.common.no_triton import no_triton as tl
    from stages.common.no_triton import no_triton as triton

STAGE = Stage(
    number=5,
    name="triton_online",
    title="Triton Online",
    idea="running max, running sum, correction: exact",
    still_hurts="every tile is visited, masks unsupported",
    needs=("triton",),
    dtypes=("float16", "bfloat16", "float32"),
    worth_up_to={"cpu": 1024},
)

BLOCK_N = 64  # keys per tile


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_om, stride_od,
    Nq, Nk, d, scale,
    PRECISION: tl.constexpr, REDO: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # int64: a pointer offset passes 2^31 in a large tensor, and int32 would wrap silently
    b, h = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    offs_n = tl.arange(0, BLOCK_N).to(tl.int64)  # (BLOCK_N,)
    offs_d = tl.arange(0, BLOCK_D).to(tl.int64)  # (BLOCK_D,), a power of two: d is zero-padded
    q_ptr += b * stride_qb + h * stride_qh
    k_ptr += b * stride_kb + h * stride_kh
    v_ptr += b * stride_vb + h * stride_vh
    o_ptr += b * stride_ob + h * stride_oh

    q_mask = (offs_m[:, None] < Nq) & (offs_d[None, :] < d)
    if REDO:  # the second launch: what is finite stays as it is (stages/common/products.py)
        done = o_ptr + offs_m[:, None] * stride_om + offs_d[None, :] * stride_od
        if is_finite(done, q_mask):
            return
    q_ptrs = q_ptr + offs_m[:, None] * stride_qm + offs_d[None, :] * stride_qd
    q = tl.load(q_ptrs, mask=q_mask, other=0.0)  # (BLOCK_M, BLOCK_D)
    k_ptrs = k_ptr + offs_n[:, None] * stride_kn + offs_d[None, :] * stride_kd  # (BLOCK_N, BLOCK_D)
    v_ptrs = v_ptr + offs_n[:, None] * stride_vn + offs_d[None, :] * stride_vd  # (BLOCK_N, BLOCK_D)
    m_i = tl.full((BLOCK_M,), -3.4028234663852886e38, dtype=tl.float32)  # -inf - -inf is NaN
    l_i = tl.zeros((BLOCK_M,), dtype=tl.float32)  # running sum of exp(s - m_i)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)

    # exercise tiles: q, pointers to k and v -> acc (BLOCK_M, BLOCK_D), divided by the row sums
    for start_n in range(0, Nk, BLOCK_N):
        in_range = start_n + offs_n < Nk  # (BLOCK_N,)
        kv_mask = in_range[:, None] & (offs_d[None, :] < d)
        k = tl.load(k_ptrs, mask=kv_mask, other=0.0)  # (BLOCK_N, BLOCK_D)
        v = tl.load(v_ptrs, mask=kv_mask, other=0.0)  # (BLOCK_N, BLOCK_D)
        # step s: scaled scores; q (BLOCK_M, BLOCK_D), k (BLOCK_N, BLOCK_D) -> (BLOCK_M, BLOCK_N)
        s = dot(q, tl.trans(k), PRECISION) * scale  # (BLOCK_M, BLOCK_N)
        # step tail: keys past the last weigh nothing; s, in_range -> (BLOCK_M, BLOCK_N)
        s = tl.where(in_range[None, :], s, float("-inf"))
        # step m_new: each row's max so far; m_i (BLOCK_M,), s (BLOCK_M, BLOCK_N) -> (BLOCK_M,)
        m_new = tl.maximum(m_i, tl.max(s, 1))  # (BLOCK_M,)
        # step alpha: what the past is worth under the new max; m_i, m_new -> (BLOCK_M,)
        alpha = tl.exp(m_i - m_new)  # (BLOCK_M,), 0 at the first tile
        # step p: exponentials under the max, none above 1; s -> (BLOCK_M, BLOCK_N)
        p = tl.exp(s - m_new[:, None])  # (BLOCK_M, BLOCK_N)
        # step l_i: the sum so far, the past under the new max; l_i, alpha, p -> (BLOCK_M,)
        l_i = l_i * alpha + tl.sum(p, 1)
        # step past: acc under the new max; acc (BLOCK_M, BLOCK_D), alpha (BLOCK_M,)
        acc = acc * alpha[:, None]
        # step acc: this tile's share of the output; p, v (BLOCK_N, BLOCK_D) -> (BLOCK_M, BLOCK_D)
        acc += dot(p.to(v.dtype), v, PRECISION)  # (BLOCK_M, BLOCK_D)
        # step m_i: the max that the next tile begins with; m_new -> (BLOCK_M,)
        m_i = m_new
        k_ptrs += BLOCK_N * stride_kn
        v_ptrs += BLOCK_N * stride_vn

    # step o: the output; acc (BLOCK_M, BLOCK_D), l_i (BLOCK_M,) -> (BLOCK_M, BLOCK_D)
    acc = acc / l_i[:, None]
    # end of tiles
    o_ptrs = o_ptr + offs_m[:, None] * stride_om + offs_d[None, :] * stride_od
    tl.store(o_ptrs, acc.to(o_ptr.dtype.element_ty), mask=q_mask)


# BLOCK_M, BLOCK_N, num_warps, num_stages for a BLOCK_D of up to 64, of 128, of 256: measured on one
# H200 among a few dozen. 'half' is for 16 bits, the others for float32 (stages/common/products.py).
# 'ieee' runs on no matrix unit and its operands sit in registers, so its tiles are small.
TILES = {
    "half": ([(128, BLOCK_N, 8, 3)], [(64, BLOCK_N, 4, 3)], [(64, BLOCK_N, 8, 2)]),
    "tf32": ([(128, BLOCK_N, 8, 3)], [(64, BLOCK_N, 8, 2)], [(16, BLOCK_N, 4, 2)]),
    "bf16x6": ([(128, BLOCK_N, 4, 1)], [(128, BLOCK_N, 8, 1)], [(32, BLOCK_N, 8, 1)]),
    "ieee": ([(32, BLOCK_N, 8, 3)], [(32, BLOCK_N, 16, 2)], [(16, BLOCK_N, 16, 2)]),
}


def launch_config(d: int, dtype: torch.dtype, precision: str, card: Card = H200) -> dict[str, int]:
    """BLOCK_M, BLOCK_N, BLOCK_D, num_warps and num_stages for a head dimension and a dtype.

    Smaller ones where the card has no room for them (stages/common/fit.py). From sm_80 on, up to
    d = 128, nothing spills in 16 bits and in TF32 (tests/stages/test_cubins.py).
    """
    return fit_each(TILES, FORWARD, d, dtype, precision, card)[0]


@operators.register()
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Exact attention by the online softmax. Forward only.

    q (B, H, Nq, d), k and v (B, H, Nk, d), float16, bfloat16 or float32 -> (B, H, Nq, d).
    Raises ValueError on input that breaks the contract (stages/contract.py), StageUnavailable
    where it can't run.
    """
    check_inputs(STAGE, q, k, v)
    B, H, Nq, d = q.shape
    Nk = k.shape[2]
    # the kernel reads raw storage, which holds the negative of a tensor from conj().imag
    q, k, v = (x.resolve_neg() for x in (q, k, v))
    # it steps from tile to tile in int32: rows too far apart for that are copied
    k, v = (x if x.stride(2) * BLOCK_N < 1 << 31 else x.contiguous() for x in (k, v))
    o = torch.empty((B, H, Nq, d), dtype=q.dtype, device=q.device)
    precision = input_precision(q)

    def launch(precision: str, redo: bool) -> None:
        config = launch_config(d, q.dtype, precision, card_of(q.device))
        grid = (triton.cdiv(Nq, config["BLOCK_M"]), H, B)
        attention_kernel[grid](
            q, k, v, o, *q.stride(), *k.stride(), *v.stride(), *o.stride(),
            Nq, Nk, d, d**-0.5, PRECISION=precision, REDO=redo, **config,
        )  # fmt: skip

    with launching(q):
        launch(precision, redo=False)
        if precision == "bf16x6":  # what came out infinite or NaN, once more
            launch("ieee", redo=True)
    return o
