"""Stage 9 at its smallest: one warp loads, two warpgroups compute; each waits for its slot only.

In stage 6 all warps of a program do the same: they have tiles loaded ahead (num_stages), multiply,
and compute the softmax. Here each warp has a role, and roles wait for each other at barriers.

    one CTA: a work tile, which is 128 query rows of one head. Time goes to the right, not to scale:

    producer    1 warp         |K0 V0|K1 V1|                       |K2 V2|             |K3 V3|
    consumer 0  rows 0 to 63         | S0 |   P0    | O0 | S1 |   P1    | O1 | S2 |   P2    |
    consumer 1  rows 64 to 127       .    | S0 |   P0    .    | O0 | S1 |   P1    | O1 | S2 |

    K0 V0: loads by the copy engine (TMA). S0 = Q K0^T, O0: O += P0 V0, products on the matrix unit.
    P0: softmax of S0, by the 4 warps of the consumer. Dots: it waits for the matrix unit

    K and V pass through a pipeline of 2 slots in shared memory, with a KV tile in each: tile j goes
    through slot j % 2. A slot has two barriers, which count arrivals:
    full     The producer arrives, by `expect`: this is the one arrival, and says how many bytes
             will come. The barrier is complete when the copy engine has also written them all.
             Consumers wait for that, then multiply.
    empty    Each consumer arrives when its last product has read the slot: it releases the slot.
             The producer waits for both, then loads tile j + 2 into it: it acquires the slot.

    A barrier of this sort, an mbarrier, holds one bit, its phase: 0 at first, and flipped each time
    the barrier is complete. mbarrier.wait(bar, x) returns once phase x is over. On a new barrier it
    does so at once for x = 1: so every slot is free in the first round. One bit is enough, since
    nobody can be a round ahead: a slot is filled again only after both consumers released it.

The copy engine reads zeros past a tensor's end and writes nothing there, so any Nq, and d up to 128
in multiples of 8, need no further code. Every tile hides scores past Nk; only the last has any.

Cost: 512 FLOPs per pair of query and key, on the matrix unit, whatever d, since tiles are 128 wide
(4 d in stage 6). From memory: q and o once; k and v once per work tile, nearly always from the L2
cache. Shared memory: 160 KB, so one CTA to a multiprocessor; registers: 240 for each thread of a
consumer, 24 for the producer's.
What it bought: loads run during everything else. Nothing orders the two consumers: while one has
its softmax, the matrix unit can serve the other (FlashAttention-3, Shah et al. 2024, section 3.1).
By itself it only equals stage 6, whose loads run ahead, too (docs/hopper.md).
Still hurts: within a consumer, products and softmax take turns; a row's sum crosses threads at each
tile; each CTA waits for its first loads, and nothing runs while it ends. forward.py mends that.
"""

import math

import torch

from stages.common.gluon import (
    TensorDescriptor,
    async_load,
    async_store,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from stages.common.machine import launching
from stages.common.operators import untraced
from stages.contract import Stage, check_inputs

STAGE = Stage(
    number=9,
    name="first",
    title="Hopper, first",
    idea="a warp that loads, warpgroups that compute, barriers between them",
    still_hurts="products and softmax take turns within a consumer",
    needs=("triton", "gluon", "cuda"),
    only_major=9,
    devices=("cuda",),
    dtypes=("float16", "bfloat16"),
)

MOST_D = 128


@gluon.jit
def acquire(empty, count, SLOTS: gl.constexpr):
    """Producer: wait until both have released tile `count`'s slot, which is free at first."""
    mbarrier.wait(empty.index(count % SLOTS), (count // SLOTS + 1) & 1)


@gluon.jit
def wait(full, count, SLOTS: gl.constexpr):
    """Consumer: wait until the copy engine has filled the slot."""
    mbarrier.wait(full.index(count % SLOTS), (count // SLOTS) & 1)


@gluon.jit
def release(empty, count, SLOTS: gl.constexpr):
    """Consumer: its four warps wait for each other, then one thread says that they are done."""
    mbarrier.arrive(empty.index(count % SLOTS))


@gluon.jit
def producer(descs, smem, bars, Nk):
    """One warp: start the copies of Q, then of K and V, tile by tile, as slots become free."""
    q_desc, k_desc, v_desc, _ = descs
    q_smem, k_smem, v_smem = smem
    q_full, full, empty = bars
    SLOTS: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    start_m, h, b = 128 * gl.program_id(0), gl.program_id(1), gl.program_id(2)
    mbarrier.expect(q_full.index(0), 2 * q_desc.block_type.nbytes)
    for c in gl.static_range(2):
        async_load(q_desc, [b, h, start_m + 64 * c, 0], q_full.index(0), q_smem.index(c))
    for j in range(gl.cdiv(Nk, BLOCK_N)):
        acquire(empty, j, SLOTS)
        slot = j % SLOTS
        mbarrier.expect(full.index(slot), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        async_load(k_desc, [b, h, j * BLOCK_N, 0], full.index(slot), k_smem.index(slot))
        async_load(v_desc, [b, h, j * BLOCK_N, 0], full.index(slot), v_smem.index(slot))


@gluon.jit
def consumer(descs, smem, bars, Nk, qk_scale, c: gl.constexpr):
    """Warpgroup c: 64 query rows, from their scores to their output."""
    o_desc = descs[3]
    q_smem, k_smem, v_smem = smem
    q_full, full, empty = bars
    SLOTS: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[3]
    BLOCK_D: gl.constexpr = k_smem.shape[4]
    # A layout says which thread holds which number. These are the matrix unit's: of version 3, for
    # Hopper, with 4 warps down and 1 across, each with one instruction's 16 rows, columns and depth
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])  # noqa: E741
    ROW: gl.constexpr = gl.SliceLayout(1, S)  # of a number per row; SliceLayout(0, S): per column
    columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S))  # (BLOCK_N,)

    m_i = gl.full([64], -3.4028234663852886e38, gl.float32, ROW)  # running max, not scaled
    l_i = gl.zeros([64], gl.float32, ROW)  # running sum
    acc = gl.zeros([64, BLOCK_D], gl.float32, O)
    mbarrier.wait(q_full.index(0), 0)
    q = q_smem.index(c).reshape([64, BLOCK_D])

    # mainloop
    for j in range(gl.cdiv(Nk, BLOCK_N)):
        wait(full, j, SLOTS)
        k = k_smem.index(j % SLOTS).reshape([BLOCK_N, BLOCK_D])
        v = v_smem.index(j % SLOTS).reshape([BLOCK_N, BLOCK_D])
        zeros = gl.zeros([64, BLOCK_N], gl.float32, S)
        s = warpgroup_mma(q, k.permute([1, 0]), zeros, use_acc=False, is_async=True)
        # wait until at most n of this warpgroup's products still run, here n = 0; they end in the
        # order in which they began. What stands in `deps` may be used only after that
        s = warpgroup_mma_wait(0, deps=[s])  # (64, BLOCK_N)
        s = gl.where(columns[None, :] < Nk - j * BLOCK_N, s, float("-inf"))

        m_new = gl.maximum(m_i, gl.max(s, 1))  # (64,)
        p = gl.exp2((s - m_new[:, None]) * qk_scale)  # (64, BLOCK_N)
        alpha = gl.exp2((m_i - m_new) * qk_scale)  # (64,)
        l_i = l_i * alpha + gl.sum(p, 1)  # (64,)
        m_i = m_new
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None]  # (64, BLOCK_D)

        # P stays in registers, 2 numbers in each: the left operand (0) of a product
        p = gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(0, O, 2))
        acc = warpgroup_mma(p, v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])  # (64, BLOCK_D)
        release(empty, j, SLOTS)

    # epilogue: O takes the place of this consumer's own queries, and is copied out from there
    o = acc / gl.convert_layout(l_i, gl.SliceLayout(1, O))[:, None]  # (64, BLOCK_D)
    q.store(o.to(q.dtype))
    fence_async_shared()  # what threads wrote, the copy engine sees only after this
    barrier()  # among the warps of the role that calls it: all four have written
    row = 128 * gl.program_id(0) + 64 * c
    async_store(o_desc, [gl.program_id(2), gl.program_id(1), row, 0], q_smem.index(c))
    store_wait(0)  # shared memory must stay until the copy engine has read it


@gluon.jit
def make_barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """`count` barriers in shared memory, whose phase ends at the `arrivals`-th arrival."""
    bars = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


@gluon.jit
def make_tiles(desc, count: gl.constexpr):
    """Room in shared memory for `count` blocks of a descriptor: (count, 1, 1, rows, BLOCK_D)."""
    shape: gl.constexpr = [count, 1, 1, desc.block_shape[2], desc.block_shape[3]]
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def attention_kernel(q_desc, k_desc, v_desc, o_desc, Nk, qk_scale, SLOTS: gl.constexpr):
    """A work tile; descriptors of (B, H, N, d), in blocks of (1, 1, rows, BLOCK_D)."""
    descs = q_desc, k_desc, v_desc, o_desc
    smem = make_tiles(q_desc, 2), make_tiles(k_desc, SLOTS), make_tiles(v_desc, SLOTS)
    # at q_full and full the producer arrives, at empty the two consumers
    bars = make_barriers(1, 1), make_barriers(SLOTS, 1), make_barriers(SLOTS, 2)
    fence_async_shared()  # the copy engine is to see the barriers
    barrier()  # among the kernel's own 4 warps: no role has begun
    # the first role has these warps, and the registers left over; then come the others'
    gl.warp_specialize(
        [
            (consumer, (descs, smem, bars, Nk, qk_scale, 0)),
            (consumer, (descs, smem, bars, Nk, qk_scale, 1)),
            (producer, (descs, smem, bars, Nk)),
        ],
        [4, 1],
        [240, 24],
    )
    for i in gl.static_range(3):
        bars[i]._keep_alive()  # else the compiler may take them for dead before the roles end


def describe(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """The copy engine's descriptor of a contiguous x (B, H, N, d), for blocks of `rows` rows."""
    _, H, N, d = x.shape
    # 16 bits a number, swizzled by 128 bytes: a column's numbers lie in different banks
    layout = gl.NVMMASharedLayout(128, 16, rank=4)
    strides = [H * N * d, N * d, d, 1]
    return TensorDescriptor(x, list(x.shape), strides, [1, 1, rows, MOST_D], layout)


def aligned(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy of it: contiguous, from an address that is a multiple of 16 bytes."""
    x = x.resolve_neg().contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute the output for checked arguments."""
    B, H, Nq, d = q.shape
    q, k, v = aligned(q), aligned(k), aligned(v)
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    descriptors = describe(q, 64), describe(k, 128), describe(v, 128), describe(o, 64)
    qk_scale = d**-0.5 * math.log2(math.e)  # exp(x) = 2^(x log2 e)
    with launching(q):
        grid = -(-Nq // 128), H, B
        attention_kernel[grid](*descriptors, k.shape[2], qk_scale, 2, num_warps=4)
    return o


@untraced
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Exact attention without a mask, on a Hopper GPU. Forward only.

    q (B, H, Nq, d), k and v (B, H, Nk, d), float16 or bfloat16, d a multiple of 8 up to 128 ->
    (B, H, Nq, d) in q's dtype. Raises ValueError on any other input, StageUnavailable where there
    is no such GPU or no Gluon.
    """
    check_inputs(STAGE, q, k, v)
    if q.shape[3] > MOST_D or q.shape[3] % 8:
        raise ValueError(f"q: got d = {q.shape[3]}, expected a multiple of 8, at most {MOST_D}")
    return forward(q, k, v)
