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
    needs=("triton", "gluon", "cuda"),
    only_major=9,
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
    def take(self, use, pred=True):
        """Consumer: the tile (rows, BLOCK_D), as soon as the copy engine has written it."""
        slots: gl.constexpr = self.tiles.shape[0]
        rows: gl.constexpr = self.tiles.shape[3]
        columns: gl.constexpr = self.tiles.shape[4]
        slot = use % slots
        mbarrier.wait(self.full.index(slot), (use // slots) & 1, pred=pred)
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
        one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        slot = turn % 2
        mbarrier.wait(self.empty.index(slot), (turn // 2 + 1) & 1)
        for i in gl.static_range(len(numbers)):
            place = self.numbers.index(slot * len(numbers) + i)
            place.store(gl.full([1], numbers[i], gl.int32, one))
        barrier()
        mbarrier.arrive(self.full.index(slot))

    @gluon.jit
    def number(self, slot, i: gl.constexpr):
        one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
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
    GUARD: gl.constexpr  # a KV tile may have hidden keys whose values aren't numbers
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
        self.GUARD = gl.constexpr(CAUSAL or HAS_SEQLENS)
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
    def masked(self, start_m, Nk_valid, steps):
        """How many of a tile's KV tiles, from the last back, not all of its rows see whole."""
        full = Nk_valid
        if self.CAUSAL:
            full = gl.maximum(gl.minimum(full, start_m + self.Nk - self.Nq + 1), 0)
        return steps - gl.minimum(full // self.BLOCK_N, steps)


@aggregate
class Verdict:
    """What the inspector found in the masked KV tiles of a query tile: a ring of two.

    For each column the first key whose value is infinite or NaN: rows that see it get NaN.
    """

    first: gl.shared_memory_descriptor  # (2, BLOCK_D) int32
    found: gl.shared_memory_descriptor  # (2, 1) int32: whether there is any
    full: gl.shared_memory_descriptor  # (2, 1) mbarriers: consumers wait for the inspector
    empty: gl.shared_memory_descriptor  # (2, 1) mbarriers: the inspector waits for all consumers

    @gluon.constexpr_function
    def __init__(self, first, found, full, empty):
        self.first = first
        self.found = found
        self.full = full
        self.empty = empty

    @gluon.jit
    def apply(self, acc, seen, turn):
        one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        A: gl.constexpr = acc.type.layout
        slot = turn % 2
        mbarrier.wait(self.full.index(slot), (turn // 2) & 1)
        if gl.sum(self.found.index(slot).load(one), 0) != 0:
            first = self.first.index(slot).load(gl.SliceLayout(0, A))  # (BLOCK_D,)
            keys = gl.convert_layout(seen, gl.SliceLayout(1, A))  # (64,)
            acc = gl.where(first[None, :] < keys[:, None], float("nan"), acc)
        mbarrier.arrive(self.empty.index(slot))
        return acc

    @gluon.jit
    def keep_alive(self):
        self.full._keep_alive()
        self.empty._keep_alive()


@gluon.jit
def make_verdict(consumers: gl.constexpr, BLOCK_D: gl.constexpr):
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    first = gl.allocate_shared_memory(gl.int32, [2, BLOCK_D], plain)
    found = gl.allocate_shared_memory(gl.int32, [2, 1], plain)
    return Verdict(first, found, barriers(2, 1), barriers(2, consumers))


@gluon.jit
def has_other_than_numbers(v):
    """Whether any element of `v` (BLOCK_N, BLOCK_D), 16 bits each, is infinite or NaN.

    Two at a time: a carry out of an exponent of ones lands in the sign bit.
    """
    WORDS: gl.constexpr = 256 * gl.num_warps()  # at a time, for few registers, in whatever order
    L: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    one: gl.constexpr = 0x00800080 if v.dtype == gl.bfloat16 else 0x04000400
    parts: gl.constexpr = v.shape[0] * v.shape[1] // 2 // WORDS
    words = v._reinterpret(gl.int32, [parts, WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    carries = gl.full([WORDS], 0, gl.int32, L)
    for i in range(parts):
        carries |= (words.index(i).load(L) & 0x7FFF7FFF) + one
    carries = gl.reduce_or(carries, 0)
    return (carries & -0x7FFF8000) != 0  # 0x80008000


@gluon.jit
def take_out(v, start_n, first_smem, found):
    """Make 0 what isn't a number in `v`, and note the first such key of each column."""
    PART: gl.constexpr = 8  # keys and
    SIDE: gl.constexpr = 64  # columns at a time, for few registers
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    for side in gl.static_range(v.shape[1] // SIDE):
        first = gl.full([PART, SIDE], 0x7FFFFFFF, gl.int32, L)
        for i in gl.static_range(v.shape[0] // PART):
            part = v.slice(i * PART, PART, 0).slice(side * SIDE, SIDE, 1)
            values = part.load(L).to(gl.float32)  # (PART, SIDE)
            finite = gl.abs(values) < float("inf")
            keys = start_n + i * PART + gl.arange(0, PART, layout=gl.SliceLayout(1, L))
            first = gl.where(finite, first, gl.minimum(first, keys[:, None]))
            part.store(gl.where(finite, values, 0.0).to(v.dtype))
        first = gl.min(first, 0)  # (SIDE,)
        noted = first_smem.slice(side * SIDE, SIDE, 0)
        before = gl.where(found == 0, 0x7FFFFFFF, noted.load(gl.SliceLayout(0, L)))
        noted.store(gl.minimum(first, before))
    fence_async_shared()  # the matrix unit reads what threads wrote
    barrier()


@gluon.jit
def inspector(v_ring, clean, verdict, board, problem):
    """Two warps that look at V before the consumers do: 0 * NaN is NaN, and 0 * inf too.

    A value that some row may not see must not reach it, whatever it is. In KV tiles that all rows
    see whole there is nothing to do.
    """
    use = 0
    turn = 0
    _, _, start_m, Nk_valid, steps = board.read(0)
    while steps > 0:
        one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        masked = problem.masked(start_m, Nk_valid, steps)
        slot = turn % 2
        mbarrier.wait(verdict.empty.index(slot), (turn // 2 + 1) & 1)
        found = 0
        for j in range(steps):
            v = v_ring.take(use + j)
            if j < masked:  # noqa: SIM102 - `and` would look at every tile
                if has_other_than_numbers(v):
                    start_n = (steps - 1 - j) * problem.BLOCK_N
                    take_out(v, start_n, verdict.first.index(slot), found)
                    found = 1
            mbarrier.arrive(clean.index((use + j) % v_ring.tiles.shape[0]))
        verdict.found.index(slot).store(gl.full([1], found, gl.int32, one))
        barrier()
        mbarrier.arrive(verdict.full.index(slot))
        use += steps
        turn += 1
        _, _, start_m, Nk_valid, steps = board.read(turn)


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
def queries(q_ring, turn, S: gl.constexpr, Q_IN_REGISTERS: gl.constexpr, pred=True):
    """Q (64, BLOCK_D), where it is or read once per tile instead of once per product."""
    q = q_ring.take(turn, pred)
    if Q_IN_REGISTERS:
        return q.load(gl.DotOperandLayout(0, S, 2))
    else:  # noqa: RET505 - without it Gluon would compile both returns
        return q


@gluon.jit
def as_operand(p, acc, dtype: gl.constexpr):
    """P in the 16-bit dtype, in registers, as the left operand of P V: no number moves."""
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, acc.type.layout, 2))


@gluon.jit
def hand_over(q_ring, turn):
    """Give back the slot of the query tile before: its output has been copied out of it by now."""
    store_wait(0)
    q_ring.give_back(turn + 1, pred=turn > 0)  # of two slots, turn + 1 has that of turn - 1


@gluon.jit
def skip_hidden(k_ring, v_ring, use, last):
    """The first `last` KV tiles, of which no row of this consumer sees anything."""
    for j in range(last):
        k_ring.take(use + j)
        k_ring.give_back(use + j)
        v_ring.take(use + j)
        v_ring.give_back(use + j)


@gluon.jit
def walk_in_turn(
    acc, m_i, l_i, q, k_ring, v_ring, use, first, last, start_n, seen, qk_scale,
    MASKED: gl.constexpr,
):  # fmt: skip
    """The KV tiles `first` to `last`, each product waited for at once."""
    BLOCK_N: gl.constexpr = k_ring.tiles.shape[3]
    for j in range(first, last):
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
    return acc, m_i, l_i


@gluon.jit
def walk_overlapped(
    acc, m_i, l_i, q, q_ring, turn, k_ring, v_ring, use, first, last, start_n, seen, qk_scale,
    MASKED: gl.constexpr, FRESH: gl.constexpr,
):  # fmt: skip
    """The KV tiles `first` to `last`: S of one tile is begun before P V of the tile before.

    At least one tile; `MASKED` is for the first. `FRESH`: acc holds nothing yet.
    """
    BLOCK_N: gl.constexpr = k_ring.tiles.shape[3]
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
    return acc, m_i, l_i


@gluon.jit
def consumer(
    common, q_ring, c: gl.constexpr,
    MASKED: gl.constexpr, LSE: gl.constexpr, OVERLAP: gl.constexpr, Q_IN_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Warpgroup c: 64 query rows of each tile, from the scores to the output."""
    o_desc, lse_ptr, k_ring, v_ring, verdict, board, problem, qk_scale = common
    BLOCK_N: gl.constexpr = problem.BLOCK_N
    BLOCK_D: gl.constexpr = o_desc.block_shape[3]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    Nq, shift = problem.Nq, problem.Nk - problem.Nq
    use = 0  # KV tiles so far: says slot and phase of the rings
    turn = 0  # query tiles so far
    b, h, start_m, Nk_valid, steps = board.read(0)
    while steps > 0:
        start_n = (steps - 1) * BLOCK_N
        rows = start_m + 64 * c + gl.arange(0, 64, layout=gl.SliceLayout(1, S))  # (64,)
        seen = gl.full([64], 0, gl.int32, gl.SliceLayout(1, S)) + Nk_valid  # keys of each row
        some = Nk_valid  # keys that some row of this consumer sees
        if problem.CAUSAL:
            seen = gl.minimum(seen, rows + (shift + 1))
            some = gl.maximum(gl.minimum(some, start_m + 64 * c + 64 + shift), 0)
        masked = problem.masked(start_m, Nk_valid, steps)
        skipped = 0  # of these
        if MASKED == 2:
            skipped = gl.minimum(steps - gl.cdiv(some, BLOCK_N), gl.maximum(masked - 1, 0))

        # running max of s * qk_scale: the lowest float32, where -inf - -inf would be NaN
        m_i = gl.full([64], -3.4028234663852886e38, gl.float32, gl.SliceLayout(1, S))
        l_i = row_sums(gl.zeros([64, BLOCK_N], gl.float32, S))  # (64, 8)
        acc = gl.zeros([64, BLOCK_D], gl.float32, A)
        if MASKED == 2:
            skip_hidden(k_ring, v_ring, use, skipped)
        q = queries(q_ring, turn, S, Q_IN_REGISTERS)
        if OVERLAP:
            early = skipped
            if MASKED == 2:  # several tiles: all but the last of them by themselves
                early = gl.maximum(masked - 1, 0)
                acc, m_i, l_i = walk_in_turn(
                    acc, m_i, l_i, q, k_ring, v_ring, use, skipped, early,
                    start_n, seen, qk_scale, True,
                )  # fmt: skip
            acc, m_i, l_i = walk_overlapped(
                acc, m_i, l_i, q, q_ring, turn, k_ring, v_ring, use, early, steps,
                start_n, seen, qk_scale, MASKED > 0, MASKED < 2,
            )  # fmt: skip
        else:
            hand_over(q_ring, turn)
            if MASKED > 0:
                acc, m_i, l_i = walk_in_turn(
                    acc, m_i, l_i, q, k_ring, v_ring, use, skipped, masked,
                    start_n, seen, qk_scale, True,
                )  # fmt: skip
            else:
                masked = 0
            acc, m_i, l_i = walk_in_turn(
                acc, m_i, l_i, q, k_ring, v_ring, use, masked, steps,
                start_n, seen, qk_scale, False,
            )  # fmt: skip

        l_i = gl.convert_layout(gl.sum(l_i, 1), gl.SliceLayout(1, S))  # (64,)
        if MASKED > 0:
            l_i = gl.where(seen > 0, l_i, 1.0)  # a row that sees no key: o = 0 / 1
        if problem.GUARD:
            acc = verdict.apply(acc, seen, turn)
        # the output takes the place of q, which is used up
        q_ring.take(turn).store(rescale(acc, 1.0 / l_i).to(o_desc.dtype))
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


@gluon.jit
def consumer_chained(
    common, q_ring, c: gl.constexpr,
    MASKED: gl.constexpr, LSE: gl.constexpr, OVERLAP: gl.constexpr, Q_IN_REGISTERS: gl.constexpr,
):  # fmt: skip
    """As `consumer`, without hidden keys; a tile's first scores are begun in the one before."""
    o_desc, lse_ptr, k_ring, v_ring, o_smem, board, problem, qk_scale = common
    BLOCK_N: gl.constexpr = problem.BLOCK_N
    BLOCK_D: gl.constexpr = o_desc.block_shape[3]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    Nq = problem.Nq
    seen = gl.full([64], 0, gl.int32, gl.SliceLayout(1, S)) + problem.Nk
    lowest = gl.full([64], -3.4028234663852886e38, gl.float32, gl.SliceLayout(1, S))
    nothing = row_sums(gl.zeros([64, BLOCK_N], gl.float32, S))  # (64, 8)
    use = 0
    turn = 0
    b, h, start_m, _, steps = board.read(0)
    start_n = (steps - 1) * BLOCK_N  # the same for all
    q = queries(q_ring, 0, S, Q_IN_REGISTERS)
    s = scores(q, k_ring.take(0), seen)
    s = warpgroup_mma_wait(0, deps=[s])
    k_ring.give_back(0)
    if MASKED > 0:
        s = hide(s, start_n, seen)
    p, m_i, l_i, alpha = exponentiate(s, lowest, nothing, qk_scale)
    acc = gl.zeros([64, BLOCK_D], gl.float32, A)
    p = as_operand(p, acc, o_desc.dtype)
    while steps > 0:
        if not Q_IN_REGISTERS:
            q = q_ring.take(turn)
        for j in range(1, steps):
            s = scores(q, k_ring.take(use + j), seen)
            acc = warpgroup_mma(p, v_ring.take(use + j - 1), acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s])  # the older of the two
            k_ring.give_back(use + j)
            p_next, m_i, l_i, alpha = exponentiate(s, m_i, l_i, qk_scale)
            acc = warpgroup_mma_wait(0, deps=[acc])
            v_ring.give_back(use + j - 1)
            acc = rescale(acc, alpha)
            p = as_operand(p_next, acc, o_desc.dtype)
        q_ring.give_back(turn)
        use += steps
        turn += 1
        rows = start_m + 64 * c + gl.arange(0, 64, layout=gl.SliceLayout(1, S))  # (64,)
        head = b * problem.H + h
        o_coordinates = (b, h, start_m + 64 * c)
        b, h, start_m, _, steps = board.read(turn)
        more = steps > 0  # if not, the product is of what lies there, and nobody looks at it
        q = queries(q_ring, turn, S, Q_IN_REGISTERS, more)
        s = scores(q, k_ring.take(use, more), seen)
        acc = warpgroup_mma(p, v_ring.take(use - 1), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        k_ring.give_back(use, more)
        if MASKED > 0:
            s = hide(s, start_n, seen)
        p_next, m_next, l_next, alpha = exponentiate(s, lowest, nothing, qk_scale)
        acc = warpgroup_mma_wait(0, deps=[acc])
        v_ring.give_back(use - 1)
        l_i = gl.convert_layout(gl.sum(l_i, 1), gl.SliceLayout(1, S))  # (64,)
        store_wait(0)
        barrier()
        o_smem.index(c).reshape([64, BLOCK_D]).store(rescale(acc, 1.0 / l_i).to(o_desc.dtype))
        fence_async_shared()
        barrier()
        o_b, o_h, o_m = o_coordinates
        async_store(o_desc, [o_b, o_h, o_m, 0], o_smem.index(c))
        if LSE:
            lse = m_i + gl.log2(l_i)
            gl.store(lse_ptr + head.to(gl.int64) * Nq + rows, lse, mask=rows < Nq)
        acc = gl.zeros([64, BLOCK_D], gl.float32, A)
        p = as_operand(p_next, acc, o_desc.dtype)
        m_i = m_next
        l_i = l_next
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
    CHAINED: gl.constexpr,
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
    GUARD: gl.constexpr = CAUSAL or HAS_SEQLENS
    board = make_board(CONSUMERS + GUARD)
    verdict = make_verdict(CONSUMERS, v_desc.block_shape[3])
    clean = barriers(STAGES, 1)
    q0, q1 = make_ring(q_desc, 2, 1), make_ring(q_desc, 2, 1)
    seen_ring = v_ring  # as the consumers see it: full when the inspector says so
    if GUARD:
        seen_ring = Ring(v_ring.tiles, clean, v_ring.empty)
    common = (o_desc, lse_ptr, k_ring, seen_ring, verdict, board, problem, qk_scale)
    if CHAINED:
        o_shape: gl.constexpr = [CONSUMERS, 1, 1, 64, o_desc.block_shape[3]]
        o_smem = gl.allocate_shared_memory(o_desc.dtype, o_shape, o_desc.layout)
        chained = (o_desc, lse_ptr, k_ring, v_ring, o_smem, board, problem, qk_scale)
    loads = (q_desc, k_desc, v_desc, counter_ptr, k_ring, v_ring, board, problem)
    looks = (v_ring, clean, verdict, board, problem)
    if CONSUMERS == 2:
        fence_async_shared()  # the copy engine arrives at these barriers
        barrier()
        if GUARD:
            gl.warp_specialize(
                [
                    (consumer, (common, q0, 0, MASKED, LSE, OVERLAP, Q_IN_REGISTERS)),
                    (consumer, (common, q1, 1, MASKED, LSE, OVERLAP, Q_IN_REGISTERS)),
                    (producer, (loads, (q0, q1), DYNAMIC)),
                    (inspector, looks),
                ],
                [4, 1, 2],
                [CONSUMER_REGS, PRODUCER_REGS, PRODUCER_REGS],
            )
        elif CHAINED:
            gl.warp_specialize(
                [
                    (consumer_chained, (chained, q0, 0, MASKED, LSE, OVERLAP, Q_IN_REGISTERS)),
                    (consumer_chained, (chained, q1, 1, MASKED, LSE, OVERLAP, Q_IN_REGISTERS)),
                    (producer, (loads, (q0, q1), DYNAMIC)),
                ],
                [4, 1],
                [CONSUMER_REGS, PRODUCER_REGS],
            )
        else:
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
        if GUARD:
            gl.warp_specialize(
                [
                    (consumer, (common, q0, 0, MASKED, LSE, OVERLAP, Q_IN_REGISTERS)),
                    (consumer, (common, q1, 1, MASKED, LSE, OVERLAP, Q_IN_REGISTERS)),
                    (consumer, (common, q2, 2, MASKED, LSE, OVERLAP, Q_IN_REGISTERS)),
                    (producer, (loads, (q0, q1, q2), DYNAMIC)),
                    (inspector, looks),
                ],
                [4, 4, 1, 2],
                [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS, PRODUCER_REGS],
            )
        elif CHAINED:
            gl.warp_specialize(
                [
                    (consumer_chained, (chained, q0, 0, MASKED, LSE, OVERLAP, Q_IN_REGISTERS)),
                    (consumer_chained, (chained, q1, 1, MASKED, LSE, OVERLAP, Q_IN_REGISTERS)),
                    (consumer_chained, (chained, q2, 2, MASKED, LSE, OVERLAP, Q_IN_REGISTERS)),
                    (producer, (loads, (q0, q1, q2), DYNAMIC)),
                ],
                [4, 4, 1],
                [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS],
            )
        else:
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
    verdict.keep_alive()
    clean._keep_alive()


# how the roles share a multiprocessor: registers are 64K, shared memory is 227 KB
TWO_CONSUMERS = {
    "CONSUMERS": 2, "BLOCK_N": 128, "STAGES": 2, "OVERLAP": True, "CHAINED": False,
    "Q_IN_REGISTERS": False, "DYNAMIC": True, "CONSUMER_REGS": 240, "PRODUCER_REGS": 24, "ctas": 1,
}  # fmt: skip
THREE_CONSUMERS = TWO_CONSUMERS | {"CONSUMERS": 3, "CONSUMER_REGS": 160, "PRODUCER_REGS": 32}
# two CTAs to a multiprocessor: while one waits for its products, the other one has its softmax
TWO_CTAS = TWO_CONSUMERS | {
    "BLOCK_N": 64, "OVERLAP": False, "CONSUMER_REGS": 104, "ctas": 2, "maxnreg": 80,
}  # fmt: skip


def plan(d: int, causal: bool, Nk: int) -> dict[str, Any]:
    """Which of these a problem gets: the best of a trial on one H200 (docs/hopper.md)."""
    if d > 64:
        return TWO_CONSUMERS
    if causal:
        return TWO_CTAS if Nk < 8192 else THREE_CONSUMERS
    return TWO_CTAS if Nk < 2048 else THREE_CONSUMERS


class Address:
    """Stands in for a tensor in a descriptor that is kept: it keeps no memory alive."""

    def __init__(self, pointer: int, dtype: torch.dtype) -> None:
        self.pointer = pointer
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self.pointer


@functools.lru_cache(maxsize=4096)
def descriptor(
    pointer: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    rows: int,
    BLOCK_D: int,
) -> Any:
    """What the copy engine must know of a tensor (B, H, N, d), in blocks of (1, 1, rows, BLOCK_D).

    Kept, since to make one takes longer than to launch: 15 us.
    """
    pitch = -(-shape[3] // 8) * 8  # stands for strides of axes of size 1, which may be anything
    strides = (*(s if n > 1 else pitch for n, s in zip(shape[:3], strides, strict=False)), 1)
    layout = gl.NVMMASharedLayout(128, 16, rank=4)
    block = [1, 1, rows, BLOCK_D]
    return TensorDescriptor(Address(pointer, dtype), list(shape), list(strides), block, layout)


def describable(x: torch.Tensor) -> bool:
    """Whether the copy engine can read `x` (B, H, N, d), 16 bits each, where it is."""
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
    if x.shape[3] > 1 and strides.pop() != 1:
        return False
    in_steps = all(0 < stride < 1 << 39 and stride % 8 == 0 for stride in strides)
    return in_steps and x.data_ptr() % 16 == 0 and not x.is_neg()


def padded(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """An uninitialised tensor (B, H, N, d) whose rows are multiples of 16 bytes apart."""
    *outer, d = shape
    width = -(-d // 8) * 8
    return torch.empty((*outer, width), dtype=like.dtype, device=like.device)[..., :d]


def loadable(x: torch.Tensor) -> torch.Tensor:
    """`x` as the copy engine can read it, copied where it can't read `x` itself."""
    return x if describable(x) else padded(x.shape, x).copy_(x)


counters: dict[tuple[int, int], torch.Tensor] = {}


def counter_of(device: torch.device) -> torch.Tensor:
    """The tile counter (1,) int32, 0 between launches: one for each stream, since they overlap.

    A CUDA graph gets one of its own for each launch in it, zeroed in the graph.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = (device.index, torch.cuda.current_stream(device).cuda_stream)
    if key not in counters:
        counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return counters[key]


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    seqlens_k: torch.Tensor | None,
    lse: torch.Tensor | None = None,
    config: dict[str, Any] | None = None,
) -> torch.Tensor:
    """The output for arguments that have been checked; `lse` is filled if given.

    lse (B, H, Nq) float32 is in base 2, as stage 6's.
    """
    B, H, Nq, d = q.shape
    Hk, Nk = k.shape[1:3]
    config = dict(config or plan(d, causal, Nk))
    BLOCK_M, BLOCK_N = 64 * config["CONSUMERS"], config["BLOCK_N"]
    blocks = -(-Nq // BLOCK_M)
    tiles = B * H * blocks
    if q.dtype == torch.float32 or d > 128 or tiles >= 1 << 30:  # tiles are counted in int32
        return flash2_forward(q, k, v, causal, seqlens_k, lse=lse)
    group = H // Hk
    section = min(group * max(1, L2_BYTES // (4 * Nk * d)), B * H)
    if causal and (BLOCK_N % BLOCK_M or (Nk - Nq) % BLOCK_M):
        masked = 2  # the diagonal of a query tile crosses KV tiles' borders
    else:
        masked = int(causal or seqlens_k is not None or Nk % BLOCK_N != 0)
    if causal or seqlens_k is not None:
        config["CHAINED"] = False
    BLOCK_D = 64 if d <= 64 else 128
    with torch.cuda.device_of(q):  # Triton launches on the current GPU
        q, k, v = loadable(q), loadable(k), loadable(v)
        o = padded((B, H, Nq, d), like=q)
        blocked = [
            descriptor(x.data_ptr(), x.dtype, tuple(x.shape), x.stride(), rows, BLOCK_D)
            for x, rows in ((q, 64), (k, BLOCK_N), (v, BLOCK_N), (o, 64))
        ]
        if seqlens_k is not None:
            seqlens_k = seqlens_k.contiguous()  # the kernel takes no stride for it
        grid = min(config.pop("ctas") * multiprocessors(q.device), tiles)
        attention_kernel[(grid,)](
            *blocked, lse, seqlens_k, counter_of(q.device),
            H, group, Nq, Nk, blocks, B * H, section, tiles, d**-0.5 * LOG2_E,
            CAUSAL=causal, HAS_SEQLENS=seqlens_k is not None, MASKED=masked, LSE=lse is not None,
            num_warps=4, **config,
        )  # fmt: skip
    return o.contiguous()


class Attention(s07.Attention):
    """Stage 7's node of torch's graph, with this forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        seqlens_k: torch.Tensor | None,
    ) -> torch.Tensor:
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        o = forward(q, k, v, causal, seqlens_k, lse=lse)
        ctx.save_for_backward(q, k, v, o, lse, seqlens_k)
        ctx.causal = causal
        return o


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    seqlens_k: torch.Tensor | None = None,
) -> torch.Tensor:
    """Exact attention that trains, on a Hopper GPU.

    q (B, H, Nq, d), k and v (B, Hk, Nk, d) with Hk dividing H, float16, bfloat16 or float32;
    `seqlens_k` (B,) int32 -> (B, H, Nq, d) in q's dtype; under torch.autocast as stage 7. A row
    that sees no key is 0, and so is its gradient. Raises ValueError on input that breaks the
    contract (stages/contract.py), StageUnavailable where there is no such GPU or no Gluon,
    RuntimeError when it is differentiated twice.
    """
    if isinstance(q, torch.Tensor) and s07.autocasts(q.device.type):
        q, k, v = (s07.autocast(x) for x in (q, k, v))
    check_inputs(STAGE, q, k, v, causal=causal, seqlens_k=seqlens_k)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return Attention.apply(q, k, v, causal, seqlens_k)
    return forward(q, k, v, causal, seqlens_k)
