"""Stage 4, Triton "Lite": the three kernels fused into one, with softmax inside each tile.

    one program: BLOCK_M query rows of one head
    q  stays on the chip
    for each tile of 64 keys:
        s = q k^T * scale        (BLOCK_M, 64), never leaves the chip
        p = softmax(s)           over these 64 keys alone  <-- the mistake
        acc += p v
    o = acc

Cost: 4 B H Nq Nk d FLOPs; q and o cross the bus once, k and v once per q block (mostly from L2);
extra memory: none.
What it bought: S and P never leave the chip, so memory is O(N) and one launch does it all.
Still hurts: every tile's weights sum to 1, so T tiles' weights sum to T. It is right only while
one tile holds all the keys (Nk <= 64): fast and wrong above, on purpose. Stage 5 mends it.
"""

import torch

from stages.common import operators
from stages.common.fit import FORWARD, H200, Card, card_of, fit_each
from stages.common.inputs import unavailable
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
    number=4,
    name="triton_lite",
    title="Triton Lite",
    idea="fuse: S and P never leave the chip",
    still_hurts="softmax per tile: wrong for N > 64, on purpose",
    needs=("triton",),
    dtypes=("float16", "bfloat16", "float32"),
    exact_up_to=64,
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
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)

    # exercise tiles: q (BLOCK_M, BLOCK_D), pointers to k and v -> acc (BLOCK_M, BLOCK_D)
    for start_n in range(0, Nk, BLOCK_N):
        in_range = start_n + offs_n < Nk  # (BLOCK_N,)
        kv_mask = in_range[:, None] & (offs_d[None, :] < d)
        k = tl.load(k_ptrs, mask=kv_mask, other=0.0)  # (BLOCK_N, BLOCK_D)
        v = tl.load(v_ptrs, mask=kv_mask, other=0.0)  # (BLOCK_N, BLOCK_D)
        # step s: scaled scores; q (BLOCK_M, BLOCK_D), k (BLOCK_N, BLOCK_D) -> (BLOCK_M, BLOCK_N)
        s = dot(q, tl.trans(k), PRECISION) * scale  # (BLOCK_M, BLOCK_N)
        # step tail: keys past the last weigh nothing; s, in_range -> (BLOCK_M, BLOCK_N)
        s = tl.where(in_range[None, :], s, float("-inf"))
        # step p: exponentials under the max, none above 1; s -> (BLOCK_M, BLOCK_N)
        p = tl.exp(s - tl.max(s, 1)[:, None])  # (BLOCK_M, BLOCK_N)
        # step weights: each row divided by its sum; p -> (BLOCK_M, BLOCK_N)
        p = p / tl.sum(p, 1)[:, None]
        # step acc: this tile's share of the output; p, v (BLOCK_N, BLOCK_D) -> (BLOCK_M, BLOCK_D)
        acc += dot(p.to(v.dtype), v, PRECISION)  # (BLOCK_M, BLOCK_D)
        k_ptrs += BLOCK_N * stride_kn
        v_ptrs += BLOCK_N * stride_vn
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
    """Attention with softmax per 64-key tile: exact for Nk <= 64, wrong above. Forward only.

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
        if config["BLOCK_N"] < Nk <= BLOCK_N:  # it would be wrong where it is said to be exact
            raise unavailable(STAGE, f"this GPU has no room for a tile of {Nk} keys at d = {d}")
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
