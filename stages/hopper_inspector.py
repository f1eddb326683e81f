"""The role of stage 9 that keeps hidden values out: 0 * NaN is NaN, and 0 * inf too.

a masked tile of V   -- has_other_than_numbers? -->  no: go on (nearly always)
                                                     yes: `take_out`: 0 instead, noted in the
                                                     Verdict, so that rows that see it get NaN
"""

from stages.gluon_names import aggregate, barrier, fence_async_shared, gl, gluon, mbarrier
from stages.hopper_rings import barriers


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
    # at a time, in whatever order: as many as the role's registers hold
    WORDS: gl.constexpr = (512 if v.shape[1] == 128 else 256) * gl.num_warps()
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
