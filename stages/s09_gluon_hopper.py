"""Stage 9, Gluon on Hopper: loads, matrix products and softmax at the same time.

    one CTA per multiprocessor stays there (persistent) and takes tiles of query rows, one by one
    producer     1 warp, 24 registers: asks the copy engine (TMA) for tiles of Q, K and V
    consumers    2 or 3 warpgroups, each with 64 query rows: everything else

    time  ->
    producer     Q K0 K1 V0 K2 V1 K3 V2 ...     as far ahead as the rings have free slots
    consumer 0        [S0=QK0]  [S1=QK1][O+=P0V0]  [S2=QK2][O+=P1V1]   ...      matrix unit
                              P0                 P1                  P2 ...     softmax of S
    consumer 1           the same, on the 64 rows below; while one has its softmax, the other one
                         has the matrix unit

    ring of K tiles   slot 0 | slot 1     (V has one like it; Q has one slot for each consumer)
        full   (of each slot)  consumers wait: the copy engine has written all its bytes
        empty  (of each slot)  the producer waits: every consumer's products have read it
    board             slot 0 | slot 1     which query tile is next: posted by the producer, which
                                          counts with one atomic counter for the whole GPU

The walk goes from the last visible keys back to the first: only its first tile needs a mask (two or
three where the diagonal is not aligned with the tiles). Hidden keys are never seen, whatever they
hold: `guard_values`.

Cost: stage 6's FLOPs and bytes. Head dimensions are padded to 64 or 128 on the chip, not in memory.
A tensor that the copy engine can't describe (a last dimension that isn't contiguous, rows that
don't start at multiples of 16 bytes, a broadcast axis) is copied once, with its rows padded to a
multiple of 16 bytes. float32 and d > 128 go to stage 6's kernel; gradients are stage 7's.
What it bought: see docs/hopper.md.
(FlashAttention-3, Shah et al. 2024, https://arxiv.org/abs/2407.08608, sections 3.1 and 3.2.)
"""

import functools
from typing import Any

import torch

from stages import s07_triton_training as s07
from stages.contract import Stage, check_inputs
from stages.s06_triton_flash2 import LOG2_E
from stages.s06_triton_flash2 import forward as flash2_forward

try:
    from stages.gluon_names import (
        TensorDescriptor,
        aggregate,
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
except ImportError:  # the file imports all the same; attend says why it can't run
    from stages.machine import no_triton as gl
    from stages.machine import no_triton as gluon

    def aggregate(cls: Any) -> Any:
        return cls


STAGE = Stage(
    number=9,
    name="gluon_hopper",
    title="Gluon on Hopper",
    idea="a copy engine, specialised warps, asynchronous products",
    still_hurts="the backward pass is still stage 7's",
    needs=("triton", "cuda"),
    devices=("cuda",),
    dtypes=("float16", "bfloat16", "float32"),
    options=("causal", "seqlens_k", "gqa"),
    gradients=True,
)

L2_BYTES = 32 << 20  # of K and V that heads computed at the same time may have


@aggregate
class Ring:
    """Tiles in shared memory, slot after slot; use u of the ring is slot u % slots."""

    tiles: gl.shared_memory_descriptor  # (slots, 1, 1, rows, BLOCK_D)
    full: gl.shared_memory_descriptor  # (slots, 1) mbarriers: consumers wait for the copy engine
    empty: gl.shared_memory_descriptor  # (slots, 1) mbarriers: the producer waits for consumers

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty):
        self.tiles = tiles
        self.full = full
        self.empty = empty

    @gluon.jit
    def fill(self, desc, coordinates, use):
        """Producer: have a tile copied, as soon as every consumer has given back the slot."""
        slots: gl.constexpr = self.tiles.shape[0]
        slot = use % slots
        mbarrier.wait(self.empty.index(slot), (use // slots + 1) & 1)  # at once in the first round
        mbarrier.expect(self.full.index(slot), desc.block_type.nbytes)
        async_load(desc, coordinates, self.full.index(slot), self.tiles.index(slot))

    @gluon.jit
    def take(self, use):
        """Consumer: the tile (rows, BLOCK_D), as soon as the copy engine has written it."""
        slots: gl.constexpr = self.tiles.shape[0]
        rows: gl.constexpr = self.tiles.shape[3]
        columns: gl.constexpr = self.tiles.shape[4]
        slot = use % slots
        mbarrier.wait(self.full.index(slot), (use // slots) & 1)
        return self.tiles.index(slot).reshape([rows, columns])

    @gluon.jit
    def give_back(self, use, pred=True):
        """Consumer: this one is done with the tile."""
        slots: gl.constexpr = self.tiles.shape[0]
        mbarrier.arrive(self.empty.index(use % slots), pred=pred)

    @gluon.jit
    def keep_alive(self):
        self.full._keep_alive()
        self.empty._keep_alive()


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """`count` mbarriers, each of which opens at its `arrivals`-th arrival."""
    bars = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


@gluon.jit
def make_ring(desc, slots: gl.constexpr, consumers: gl.constexpr):
    shape: gl.constexpr = [slots, 1, 1, desc.block_shape[2], desc.block_shape[3]]
    tiles = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
    return Ring(tiles, barriers(slots, 1), barriers(slots, consumers))


@aggregate
class Board:
    """Where the producer posts what comes next: two places of five numbers each."""

    numbers: gl.shared_memory_descriptor  # (10, 1) int32
    full: gl.shared_memory_descriptor  # (2, 1) mbarriers: consumers wait for the producer
    empty: gl.shared_memory_descriptor  # (2, 1) mbarriers: the producer waits for all consumers

    @gluon.constexpr_function
    def __init__(self, numbers, full, empty):
        self.numbers = numbers
        self.full = full
        self.empty = empty

    @gluon.jit
    def post(self, numbers, turn):
        one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])  # the producer is one warp
        slot = turn % 2
        mbarrier.wait(self.empty.index(slot), (turn // 2 + 1) & 1)
        for i in gl.static_range(len(numbers)):
            place = self.numbers.index(slot * len(numbers) + i)
            place.store(gl.full([1], numbers[i], gl.int32, one))
        barrier()
        mbarrier.arrive(self.full.index(slot))

    @gluon.jit
    def number(self, slot, i: gl.constexpr):
        one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])  # a consumer is four warps
        return gl.sum(self.numbers.index(slot * (self.numbers.shape[0] // 2) + i).load(one), 0)

    @gluon.jit
    def read(self, turn):
        slot = turn % 2
        mbarrier.wait(self.full.index(slot), (turn // 2) & 1)
        b, h, start_m = self.number(slot, 0), self.number(slot, 1), self.number(slot, 2)
        Nk_valid, steps = self.number(slot, 3), self.number(slot, 4)
        mbarrier.arrive(self.empty.index(slot))
        return b, h, start_m, Nk_valid, steps

    @gluon.jit
    def keep_alive(self):
        self.full._keep_alive()
        self.empty._keep_alive()


@gluon.jit
def make_board(consumers: gl.constexpr):
    numbers = gl.allocate_shared_memory(gl.int32, [10, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Board(numbers, barriers(2, 1), barriers(2, consumers))


@aggregate
class Problem:
    """Sizes and switches: the same for all roles."""

    seqlens_ptr: gl.tensor
    H: gl.tensor
    group: gl.tensor  # query heads to a key head
    Nq: gl.tensor
    Nk: gl.tensor
    blocks: gl.tensor  # of BLOCK_M rows, to a head
    heads: gl.tensor  # of all batch entries together
    section: gl.tensor  # heads whose K and V fit the L2 cache together
    tiles: gl.tensor  # blocks * heads
    CAUSAL: gl.constexpr
    HAS_SEQLENS: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, seqlens_ptr, H, group, Nq, Nk, blocks, heads, section, tiles,
        CAUSAL, HAS_SEQLENS, BLOCK_M, BLOCK_N,
    ):  # fmt: skip
        self.seqlens_ptr = seqlens_ptr
        self.H = H
        self.group = group
        self.Nq = Nq
        self.Nk = Nk
        self.blocks = blocks
        self.heads = heads
        self.section = section
        self.tiles = tiles
        self.CAUSAL = gl.constexpr(CAUSAL)
        self.HAS_SEQLENS = gl.constexpr(HAS_SEQLENS)
        self.BLOCK_M = gl.constexpr(BLOCK_M)
        self.BLOCK_N = gl.constexpr(BLOCK_N)

    @gluon.jit
    def place(self, tile):
        """Batch entry, head and first row of a tile; its valid keys and how many KV tiles it walks.

        Section by section of heads, in each the blocks with the most keys first.
        """
        part = tile // (self.section * self.blocks)
        rest = tile - part * self.section * self.blocks
        width = gl.minimum(self.section, self.heads - part * self.section)
        block = rest // width
        head = part * self.section + rest - block * width
        if self.CAUSAL:
            block = self.blocks - 1 - block
        b = head // self.H
        h = head - b * self.H
        start_m = block * self.BLOCK_M
        Nk_valid = self.Nk
        if self.HAS_SEQLENS:
            Nk_valid = gl.minimum(gl.maximum(gl.load(self.seqlens_ptr + b), 0), self.Nk)
        end = Nk_valid
        if self.CAUSAL:
            end = gl.minimum(start_m + self.BLOCK_M, self.Nq) + self.Nk - self.Nq
            end = gl.maximum(gl.minimum(end, Nk_valid), 0)
        # at least one: rows that see no key are computed like any other, and come out as 0
        steps = gl.maximum(gl.cdiv(end, self.BLOCK_N), 1)
        return b, h, start_m, Nk_valid, steps


@gluon.jit
def producer(loads, q_rings, DYNAMIC: gl.constexpr):
    """The one warp that loads. K runs one tile ahead of V, as the consumers do."""
    q_desc, k_desc, v_desc, counter_ptr, k_ring, v_ring, board, problem = loads
    use = 0  # KV tiles so far: says slot and phase of the rings
    turn = 0  # query tiles so far
    tile = gl.program_id(0)
    while tile < problem.tiles:
        following = tile + gl.num_programs(0)
        if DYNAMIC:
            # asked for one tile early, while there is time; each CTA fetches once per tile, all
            # together `tiles` times, so that the last fetch can set the counter back
            fetched = gl.atomic_add(counter_ptr, 1)
            gl.store(counter_ptr, 0, mask=fetched == problem.tiles - 1)
            following = fetched + gl.num_programs(0)
        b, h, start_m, Nk_valid, steps = problem.place(tile)
        board.post((b, h, start_m, Nk_valid, steps), turn)
        h_k = h // problem.group
        start_n = (steps - 1) * problem.BLOCK_N
        k_ring.fill(k_desc, [b, h_k, start_n, 0], use)
        for c in gl.static_range(len(q_rings)):
            q_rings[c].fill(q_desc, [b, h, start_m + 64 * c, 0], turn)
        for j in range(1, steps):
            k_ring.fill(k_desc, [b, h_k, start_n - j * problem.BLOCK_N, 0], use + j)
            v_ring.fill(v_desc, [b, h_k, start_n - (j - 1) * problem.BLOCK_N, 0], use + j - 1)
        v_ring.fill(v_desc, [b, h_k, 0, 0], use + steps - 1)
        use += steps
        turn += 1
        tile = following
    board.post((0, 0, 0, 0, 0), turn)  # no steps: there is no next one


@gluon.jit
def hide(s, start_n, seen):
    """Scores (64, BLOCK_N) of the keys from start_n on, -inf from each row's `seen`-th key on."""
    cols = start_n + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
    return gl.where(cols[None, :] < seen[:, None], s, float("-inf"))


@gluon.jit
def row_sums(p):
    """p (64, BLOCK_N) -> (64, 8): what each thread holds of a row, added up; 4 threads share one.

    A sum of whole rows would exchange numbers between threads at every tile, this one does at the
    very end.
    """
    return gl.sum(gl.reshape(p, [64, p.shape[1] // 8, 8]), 1)


@gluon.jit
def exponentiate(s, m_i, l_i, qk_scale):
    """One step of the online softmax, as in stage 6: p, m_i, l_i and acc's correction."""
    m_new = gl.maximum(m_i, gl.max(s, 1) * qk_scale)  # (64,)
    alpha = gl.exp2(m_i - m_new)  # (64,)
    p = gl.exp2(s * qk_scale - m_new[:, None])  # (64, BLOCK_N)
    sums = row_sums(p)  # (64, 8)
    l_i = l_i * gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout))[:, None] + sums
    return p, m_new, l_i, alpha


@gluon.jit
def rescale(acc, alpha):
    return acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.jit
def scores(q, k, seen):
    """Start S = Q K^T, (64, BLOCK_N); the caller waits for it."""
    S: gl.constexpr = seen.type.layout.parent
    zeros = gl.full([64, k.shape[0]], 0.0, gl.float32, S)
    return warpgroup_mma(q, k.permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def as_operand(p, acc, dtype: gl.constexpr):
    """P in the 16-bit dtype, in registers, as the left operand of P V: no number moves."""
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, acc.type.layout, 2))


@gluon.jit
def has_other_than_numbers(v):
    """Whether any element of `v` (BLOCK_N, BLOCK_D), 16 bits each, is infinite or NaN.

    Two at a time: a carry out of an exponent of ones lands in the sign bit.
    """
    HALF: gl.constexpr = v.shape[1] // 2
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    one: gl.constexpr = 0x00800080 if v.dtype == gl.bfloat16 else 0x04000400
    pairs = v._reinterpret(gl.int32, [v.shape[0], HALF], gl.NVMMASharedLayout(128, 32, rank=2))
    carries = (pairs.load(L) & 0x7FFF7FFF) + one
    carries = gl.reduce_or(gl.reshape(carries, [v.shape[0] * HALF]), 0)
    return (carries & -0x7FFF8000) != 0  # 0x80008000


@gluon.jit
def guard_values(acc, v, start_n, seen, noted, alarms):
    """Keep what a row doesn't see in the tile `v` out of it: 0 * NaN is NaN, 0 * inf too.

    Where the tile has infinities or NaN, acc becomes NaN where the row sees one, and they become 0
    in the tile. All consumers do the same to the same tile, and find the same: so each waits
    (`noted`) until all have looked before it writes.
    """
    if has_other_than_numbers(v):
        L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        PART: gl.constexpr = 16  # keys at a time, for few registers
        none: gl.constexpr = 0x7FFFFFFF
        first = gl.full([PART, v.shape[1]], none, gl.int32, L)  # the first such key, by column
        for i in gl.static_range(v.shape[0] // PART):
            values = v.slice(i * PART, PART, 0).load(L).to(gl.float32)  # (PART, BLOCK_D)
            keys = start_n + i * PART + gl.arange(0, PART, layout=gl.SliceLayout(1, L))
            such = gl.where(gl.abs(values) < float("inf"), none, keys[:, None])
            first = gl.minimum(first, such)
        mbarrier.arrive(noted)
        mbarrier.wait(noted, alarms & 1)
        for i in gl.static_range(v.shape[0] // PART):
            values = v.slice(i * PART, PART, 0).load(L).to(gl.float32)
            values = gl.where(gl.abs(values) < float("inf"), values, 0.0)
            v.slice(i * PART, PART, 0).store(values.to(v.dtype))
        fence_async_shared()  # the matrix unit reads what threads wrote
        barrier()
        A: gl.constexpr = acc.type.layout
        first = gl.convert_layout(gl.min(first, 0), gl.SliceLayout(0, A))  # (BLOCK_D,)
        sees = first[None, :] < gl.convert_layout(seen, gl.SliceLayout(1, A))[:, None]
        acc = gl.where(sees, float("nan"), acc)
        alarms += 1
    return acc, alarms


@gluon.jit
def hand_over(q_ring, turn):
    """Give back the slot of the query tile before: its output has been copied out of it by now."""
    store_wait(0)
    q_ring.give_back(turn + 1, pred=turn > 0)  # of two slots, turn + 1 has that of turn - 1


@gluon.jit
def skip_hidden(
    alarms, acc, k_ring, v_ring, noted, use, last, start_n, seen, GUARD: gl.constexpr
):
    """The first `last` KV tiles, of which no row of this consumer sees anything."""
    BLOCK_N: gl.constexpr = k_ring.tiles.shape[3]
    for j in range(0, last):
        v = v_ring.take(use + j)
        if GUARD:
            acc, alarms = guard_values(acc, v, start_n - j * BLOCK_N, seen, noted, alarms)
        v_ring.give_back(use + j)
        k_ring.take(use + j)
        k_ring.give_back(use + j)
    return alarms


@gluon.jit
def walk_in_turn(
    acc, m_i, l_i, alarms, q, k_ring, v_ring, noted, use, first, last, start_n, seen, qk_scale,
    MASKED: gl.constexpr, GUARD: gl.constexpr,
):  # fmt: skip
    """The KV tiles `first` to `last`, each product waited for at once."""
    BLOCK_N: gl.constexpr = k_ring.tiles.shape[3]
    for j in range(first, last):
        if GUARD:
            v = v_ring.take(use + j)
            acc, alarms = guard_values(acc, v, start_n - j * BLOCK_N, seen, noted, alarms)
        s = scores(q, k_ring.take(use + j), seen)
        s = warpgroup_mma_wait(0, deps=[s])
        k_ring.give_back(use + j)
        if MASKED:
            s = hide(s, start_n - j * BLOCK_N, seen)
        p, m_i, l_i, alpha = exponentiate(s, m_i, l_i, qk_scale)
        acc = rescale(acc, alpha)
        p = as_operand(p, acc, q.dtype)
        acc = warpgroup_mma(p, v_ring.take(use + j), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        v_ring.give_back(use + j)
    return acc, m_i, l_i, alarms


@gluon.jit
def walk_overlapped(
    acc, m_i, l_i, alarms, q, q_ring, turn, k_ring, v_ring, noted, use, first, last, start_n, seen,
    qk_scale, MASKED: gl.constexpr, GUARD: gl.constexpr, FRESH: gl.constexpr,
):  # fmt: skip
    """The KV tiles `first` to `last`: S of one tile is begun before P V of the tile before.

    At least one tile; `MASKED` and `GUARD` are for the first. `FRESH`: acc holds nothing yet.
    """
    BLOCK_N: gl.constexpr = k_ring.tiles.shape[3]
    if GUARD:
        v = v_ring.take(use + first)
        acc, alarms = guard_values(acc, v, start_n - first * BLOCK_N, seen, noted, alarms)
    s = scores(q, k_ring.take(use + first), seen)
    hand_over(q_ring, turn)
    s = warpgroup_mma_wait(0, deps=[s])
    k_ring.give_back(use + first)
    if MASKED:
        s = hide(s, start_n - first * BLOCK_N, seen)
    p, m_i, l_i, alpha = exponentiate(s, m_i, l_i, qk_scale)
    if not FRESH:
        acc = rescale(acc, alpha)
    p = as_operand(p, acc, q.dtype)
    for j in range(first + 1, last):
        s = scores(q, k_ring.take(use + j), seen)
        acc = warpgroup_mma(p, v_ring.take(use + j - 1), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])  # the older of the two
        k_ring.give_back(use + j)
        p_next, m_i, l_i, alpha = exponentiate(s, m_i, l_i, qk_scale)
        acc = warpgroup_mma_wait(0, deps=[acc])
        v_ring.give_back(use + j - 1)
        acc = rescale(acc, alpha)
        p = as_operand(p_next, acc, q.dtype)
    acc = warpgroup_mma(p, v_ring.take(use + last - 1), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    v_ring.give_back(use + last - 1)
    return acc, m_i, l_i, alarms


@gluon.jit
def consumer(
    common, q_ring, c: gl.constexpr,
    MASKED: gl.constexpr, LSE: gl.constexpr, OVERLAP: gl.constexpr, Q_IN_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Warpgroup c: 64 query rows of each tile, from the scores to the output."""
    o_desc, lse_ptr, k_ring, v_ring, noted, board, problem, qk_scale = common
    BLOCK_N: gl.constexpr = problem.BLOCK_N
    BLOCK_D: gl.constexpr = o_desc.block_shape[3]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    # what hides single keys of a tile: its values may be NaN there. Keys past the last are zeros
    GUARD: gl.constexpr = problem.CAUSAL or problem.HAS_SEQLENS
    Nq, shift = problem.Nq, problem.Nk - problem.Nq
    use = 0  # KV tiles so far: says slot and phase of the rings
    turn = 0  # query tiles so far
    alarms = 0  # KV tiles with infinities or NaN so far
    b, h, start_m, Nk_valid, steps = board.read(0)
    while steps > 0:
        start_n = (steps - 1) * BLOCK_N
        rows = start_m + 64 * c + gl.arange(0, 64, layout=gl.SliceLayout(1, S))  # (64,)
        seen = gl.full([64], 0, gl.int32, gl.SliceLayout(1, S)) + Nk_valid  # keys of each row
        full, some = Nk_valid, Nk_valid  # keys that all rows of the tile see, some row here
        if problem.CAUSAL:
            seen = gl.minimum(seen, rows + (shift + 1))
            full = gl.maximum(gl.minimum(full, start_m + shift + 1), 0)
            some = gl.maximum(gl.minimum(some, start_m + 64 * c + 64 + shift), 0)
        # KV tiles, from the last back: with a mask, and of these without anything for these rows
        masked = steps - gl.minimum(full // BLOCK_N, steps)
        skipped = 0
        if MASKED == 2:
            skipped = gl.minimum(steps - gl.cdiv(some, BLOCK_N), gl.maximum(masked - 1, 0))

        # running max of s * qk_scale: the lowest float32, where -inf - -inf would be NaN
        m_i = gl.full([64], -3.4028234663852886e38, gl.float32, gl.SliceLayout(1, S))
        l_i = row_sums(gl.zeros([64, BLOCK_N], gl.float32, S))  # (64, 8)
        acc = gl.zeros([64, BLOCK_D], gl.float32, A)
        if MASKED == 2:
            alarms = skip_hidden(
                alarms, acc, k_ring, v_ring, noted, use, skipped, start_n, seen, GUARD
            )
        q_smem = q_ring.take(turn)
        q = q_smem
        if Q_IN_REGISTERS:  # once per tile out of shared memory, not once per product
            q = q_smem.load(gl.DotOperandLayout(0, S, 2))
        if OVERLAP:
            early = skipped
            if MASKED == 2:  # several tiles: all but the last of them by themselves
                early = gl.maximum(masked - 1, 0)
                acc, m_i, l_i, alarms = walk_in_turn(
                    acc, m_i, l_i, alarms, q, k_ring, v_ring, noted, use, skipped, early,
                    start_n, seen, qk_scale, True, GUARD,
                )  # fmt: skip
            acc, m_i, l_i, alarms = walk_overlapped(
                acc, m_i, l_i, alarms, q, q_ring, turn, k_ring, v_ring, noted, use, early, steps,
                start_n, seen, qk_scale, MASKED > 0, GUARD, MASKED < 2,
            )  # fmt: skip
        else:
            hand_over(q_ring, turn)
            if MASKED > 0:
                acc, m_i, l_i, alarms = walk_in_turn(
                    acc, m_i, l_i, alarms, q, k_ring, v_ring, noted, use, skipped, masked,
                    start_n, seen, qk_scale, True, GUARD,
                )  # fmt: skip
            else:
                masked = 0
            acc, m_i, l_i, alarms = walk_in_turn(
                acc, m_i, l_i, alarms, q, k_ring, v_ring, noted, use, masked, steps,
                start_n, seen, qk_scale, False, False,
            )  # fmt: skip

        l_i = gl.convert_layout(gl.sum(l_i, 1), gl.SliceLayout(1, S))  # (64,)
        if MASKED > 0:
            l_i = gl.where(seen > 0, l_i, 1.0)  # a row that sees no key: o = 0 / 1
        # the output takes the place of q, which is used up
        q_smem.store(rescale(acc, 1.0 / l_i).to(o_desc.dtype))
        fence_async_shared()
        barrier()
        o_coordinates = [b, h, start_m + 64 * c, 0]  # rows past Nq go nowhere
        async_store(o_desc, o_coordinates, q_ring.tiles.index(turn % 2))
        if LSE:
            lse = gl.where(seen > 0, m_i + gl.log2(l_i), float("-inf"))  # in base 2, as m_i is
            head = (b * problem.H + h).to(gl.int64)
            gl.store(lse_ptr + head * Nq + rows, lse, mask=rows < Nq)

        use += steps
        turn += 1
        b, h, start_m, Nk_valid, steps = board.read(turn)
    store_wait(0)


SIZES = ["H", "group", "Nq", "Nk", "blocks", "heads", "section", "tiles"]


# whatever the sizes are: a build for 1 and one for multiples of 16 would be the same code
@gluon.jit(
    do_not_specialize=SIZES,
    do_not_specialize_on_alignment=["lse_ptr", "seqlens_ptr", "counter_ptr"],
)
def attention_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, seqlens_ptr, counter_ptr,
    H, group, Nq, Nk, blocks, heads, section, tiles, qk_scale,
    CAUSAL: gl.constexpr, HAS_SEQLENS: gl.constexpr, MASKED: gl.constexpr, LSE: gl.constexpr,
    DYNAMIC: gl.constexpr, OVERLAP: gl.constexpr, Q_IN_REGISTERS: gl.constexpr,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """All roles' shared memory and barriers; then each warp goes its own way.

    Descriptors have blocks of (1, 1, rows, BLOCK_D). MASKED: 0 no KV tile needs a mask, 1 the first
    one of each query tile may, 2 several may.
    """
    problem = Problem(
        seqlens_ptr if HAS_SEQLENS else counter_ptr, H, group, Nq, Nk, blocks, heads, section,
        tiles, CAUSAL, HAS_SEQLENS, 64 * CONSUMERS, BLOCK_N,
    )  # fmt: skip
    k_ring = make_ring(k_desc, STAGES, CONSUMERS)
    v_ring = make_ring(v_desc, STAGES, CONSUMERS)
    board = make_board(CONSUMERS)
    noted = barriers(1, CONSUMERS)
    q0, q1 = make_ring(q_desc, 2, 1), make_ring(q_desc, 2, 1)
    common = (o_desc, lse_ptr, k_ring, v_ring, noted.index(0), board, problem, qk_scale)
    loads = (q_desc, k_desc, v_desc, counter_ptr, k_ring, v_ring, board, problem)
    if CONSUMERS == 2:
        fence_async_shared()  # the copy engine arrives at these barriers
        barrier()
        gl.warp_specialize(
            [
                (consumer, (common, q0, 0, MASKED, LSE, OVERLAP, Q_IN_REGISTERS)),
                (consumer, (common, q1, 1, MASKED, LSE, OVERLAP, Q_IN_REGISTERS)),
                (producer, (loads, (q0, q1), DYNAMIC)),
            ],
            [4, 1],
            [CONSUMER_REGS, PRODUCER_REGS],
        )
    else:
        q2 = make_ring(q_desc, 2, 1)
        fence_async_shared()
        barrier()
        gl.warp_specialize(
            [
                (consumer, (common, q0, 0, MASKED, LSE, OVERLAP, Q_IN_REGISTERS)),
                (consumer, (common, q1, 1, MASKED, LSE, OVERLAP, Q_IN_REGISTERS)),
                (consumer, (common, q2, 2, MASKED, LSE, OVERLAP, Q_IN_REGISTERS)),
                (producer, (loads, (q0, q1, q2), DYNAMIC)),
            ],
            [4, 4, 1],
            [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS],
        )
        q2.keep_alive()
    # scratch memory is laid over what looks dead, and a barrier does that nobody names any more
    q0.keep_alive()
    q1.keep_alive()
    k_ring.keep_alive()
    v_ring.keep_alive()
    board.keep_alive()
    noted._keep_alive()


def plan(d, causal, Nk):
    """The launch configuration (recipe's A, B, C)."""
    if d > 64:
        return A
    return C if causal else B


A = dict(Q_IN_REGISTERS=False, CONSUMERS=2, BLOCK_N=128, STAGES=2, OVERLAP=True, CONSUMER_REGS=240, PRODUCER_REGS=24, ctas=1, maxnreg=None, DYNAMIC=True)
B = dict(Q_IN_REGISTERS=False, CONSUMERS=3, BLOCK_N=128, STAGES=2, OVERLAP=True, CONSUMER_REGS=160, PRODUCER_REGS=32, ctas=1, maxnreg=None, DYNAMIC=True)
C = dict(Q_IN_REGISTERS=False, CONSUMERS=2, BLOCK_N=64, STAGES=2, OVERLAP=False, CONSUMER_REGS=104, PRODUCER_REGS=24, ctas=2, maxnreg=80, DYNAMIC=True)


def describable(x):
    return (
        x.stride(3) == 1
        and x.data_ptr() % 16 == 0
        and all(n == 1 or (0 < s and s % 8 == 0 and s * 2 < 1 << 40) for n, s in zip(x.shape[:3], x.stride()[:3]))
    )


def descriptor(x, rows, BLOCK_D):
    strides = [s if n > 1 else max(8, x.shape[3] + 7 & ~7) for n, s in zip(x.shape[:3], x.stride()[:3])]
    layout = gl.NVMMASharedLayout(128, 16, rank=4)
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, BLOCK_D], layout)


counters: dict = {}


def counter_for(device):
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = device.index, torch.cuda.current_stream(device).cuda_stream
    if key not in counters:
        counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return counters[key]


def forward(q, k, v, causal=False, seqlens_k=None, lse=None, config=None, o=None):
    B, H, Nq, d = q.shape
    Hk, Nk = k.shape[1:3]
    config = dict(config or plan(d, causal, Nk))
    BLOCK_D = 64 if d <= 64 else 128
    q, k, v = (aligned(x) for x in (q, k, v))
    width = d + 7 & ~7
    if o is None:
        o = torch.empty((B, H, Nq, width), dtype=q.dtype, device=q.device)[..., :d]
    BLOCK_M, BLOCK_N = 64 * config["CONSUMERS"], config["BLOCK_N"]
    group = H // Hk
    blocks = -(-Nq // BLOCK_M)
    tiles = B * H * blocks
    section = group * max(1, L2_BYTES // (4 * Nk * d))
    section = min(section, B * H)
    if causal and (BLOCK_N % BLOCK_M or (Nk - Nq) % BLOCK_M):
        masked = 2
    else:
        masked = int(causal or seqlens_k is not None or Nk % BLOCK_N != 0)
    ctas = config.pop("ctas")
    maxnreg = config.pop("maxnreg")
    more = {} if maxnreg is None else {"maxnreg": maxnreg}
    sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    grid = min(ctas * sms, tiles)
    counter = counter_for(q.device)
    with torch.cuda.device_of(q):
        attention_kernel[(grid,)](
            descriptor(q, 64, BLOCK_D), descriptor(k, BLOCK_N, BLOCK_D), descriptor(v, BLOCK_N, BLOCK_D), descriptor(o, 64, BLOCK_D),
            lse, seqlens_k, counter, H, group, Nq, Nk, blocks, B * H, section, tiles, d**-0.5 * LOG2_E,
            CAUSAL=causal, HAS_SEQLENS=seqlens_k is not None, MASKED=masked, LSE=lse is not None,
            num_warps=4, **config, **more,
        )
    return o


def aligned(x):
    x = x.resolve_neg()
    if describable(x):
        return x
    B, H, N, d = x.shape
    return torch.empty((B, H, N, d + 7 & ~7), dtype=x.dtype, device=x.device)[..., :d].copy_(x)
