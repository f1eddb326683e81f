"""The backward pass of stage 9 in one pass over the keys: five products, all asynchronous.

    one CTA stays on each multiprocessor and takes tiles of 128 keys, one by one; each tile walks
    the query tiles that see it
    producer    1 warp: has the copy engine bring K and V, then tiles of Q, dO, lse and delta
    consumers   2 warpgroups, 64 keys each; everything transposed: keys down, queries across

    a query tile, time ->
    consumer 0  |S=K Q|dP=V dO|    |dV+=P dO|  |dQ=dS K|dK+=dS Q|        matrix unit
                      |  P=2^S    |   dS    |          | dQ out
    consumer 1  the same for the 64 keys after: its products run while consumer 0 computes

    tiles   full:  consumers wait until the copy engine has written Q and its rows, or dO
            empty: the producer waits until both consumers' products have read them
    K, V    rings of one slot (pipeline.py): the next ones come while dK and dV go out
    board   which tile of keys is next, as in stage 9
    dS      each consumer writes 64 keys of it and reads all 128, so they wait for each other before
            dQ; two slots, so that nobody writes what the other one still reads. Each has made 0
            what is hidden of its 64 keys of K by then, too, which dQ reads
    sums    one slot each: the consumer waits until the copy engine has read the last sum from it

P^T and dS^T are left operands of dV and dK as registers hold them. dQ is a sum over keys, and most
of those are other CTAs': the copy engine adds it to float32 in global memory. That traffic decides:
each consumer adds a half of dQ over all 128 keys, which is half as much as if each added all of dQ
over its own 64. In whatever order CTAs come by: dQ's last bits are left open.
"""

from stages.common.gluon import (
    aggregate,
    async_load,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reduce_add,
    reinterpret,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from stages.s09_gluon_hopper.pipeline import Empties, barriers, make_board, make_ring, named_barrier
from stages.s09_gluon_hopper.schedule import by_section, valid_keys


@aggregate
class Problem:
    """Sizes and switches: the same for all roles."""

    seqlens_ptr: gl.tensor
    H: gl.tensor
    Hk: gl.tensor
    Nq: gl.tensor
    Nk: gl.tensor
    heads: gl.tensor  # key heads of all batch entries together
    section: gl.tensor  # key heads whose queries, dO and dQ fit the L2 cache together
    units: gl.tensor  # tiles of 128 keys of all heads
    CAUSAL: gl.constexpr
    HAS_SEQLENS: gl.constexpr
    EDGE: gl.constexpr
    DQ: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_D: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, seqlens_ptr, H, Hk, Nq, Nk, heads, section, units,
        CAUSAL, HAS_SEQLENS, EDGE, DQ, BLOCK_M, BLOCK_D,
    ):  # fmt: skip
        self.seqlens_ptr = seqlens_ptr
        self.H = H
        self.Hk = Hk
        self.Nq = Nq
        self.Nk = Nk
        self.heads = heads
        self.section = section
        self.units = units
        self.CAUSAL = gl.constexpr(CAUSAL)
        self.HAS_SEQLENS = gl.constexpr(HAS_SEQLENS)
        self.EDGE = gl.constexpr(EDGE)
        self.DQ = gl.constexpr(DQ)
        self.BLOCK_M = gl.constexpr(BLOCK_M)
        self.BLOCK_D = gl.constexpr(BLOCK_D)

    @gluon.jit
    def place(self, unit):
        """Batch entry, key head, first key and number of valid keys of a tile of keys.

        Section by section of heads, in each the keys that most rows see first.
        """
        head, block = by_section(unit, self.section, self.heads, gl.cdiv(self.Nk, 128))
        b = head // self.Hk
        return b, head - b * self.Hk, block * 128, valid_keys(self, b)

    @gluon.jit
    def span(self, start_n, Nk_valid):
        """The query tiles that see a tile of keys: from the first, from one on without a mask, to
        the end."""
        shift = self.Nk - self.Nq  # row i sees keys up to i + shift
        first = 0
        end = gl.cdiv(self.Nq, self.BLOCK_M)
        if self.CAUSAL:
            first = gl.maximum(start_n - shift, 0) // self.BLOCK_M
        if self.HAS_SEQLENS:
            end = gl.where(start_n < Nk_valid, end, first)
        full = first
        if self.CAUSAL:
            full = gl.cdiv(gl.maximum(start_n + 127 - shift, 0), self.BLOCK_M)
        if self.EDGE:
            full = gl.where(start_n + 128 > Nk_valid, end, full)
        if self.CAUSAL or self.EDGE:
            # one at least: where the first of two loops with products may have no turn, ptxas 12.8
            # leaves what they share out of the second
            full = gl.minimum(gl.maximum(full, first + 1), end)
        return first, full, end


@aggregate
class QueryTiles:
    """A ring in shared memory: of each use a tile of Q with its lse and -delta, and one of dO."""

    q: gl.shared_memory_descriptor  # (slots, 1, 1, BLOCK_M, BLOCK_D)
    do: gl.shared_memory_descriptor  # (slots, 1, 1, BLOCK_M, BLOCK_D)
    rows: gl.shared_memory_descriptor  # (slots, 1, 1, 2, BLOCK_M) float32
    q_full: gl.shared_memory_descriptor  # (slots, 1) mbarriers: consumers wait for the copy engine
    do_full: gl.shared_memory_descriptor
    empty: Empties  # the producer waits for both consumers

    @gluon.constexpr_function
    def __init__(self, q, do, rows, q_full, do_full, empty):
        self.q = q
        self.do = do
        self.rows = rows
        self.q_full = q_full
        self.do_full = do_full
        self.empty = empty

    @gluon.jit
    def fill(self, q_desc, do_desc, rows_desc, b, h, start_m, use):
        slots: gl.constexpr = self.q.shape[0]
        slot = use % slots
        self.empty.wait(use)
        full = self.q_full.index(slot)
        mbarrier.expect(full, q_desc.block_type.nbytes + rows_desc.block_type.nbytes)
        async_load(q_desc, [b, h, start_m, 0], full, self.q.index(slot))
        async_load(rows_desc, [b, h, 0, start_m], full, self.rows.index(slot))
        full = self.do_full.index(slot)
        mbarrier.expect(full, do_desc.block_type.nbytes)
        async_load(do_desc, [b, h, start_m, 0], full, self.do.index(slot))

    @gluon.jit
    def take(self, use):
        """The tiles (BLOCK_M, BLOCK_D) of Q and dO, as soon as they are there."""
        slots: gl.constexpr = self.q.shape[0]
        shape: gl.constexpr = [self.q.shape[3], self.q.shape[4]]
        slot = use % slots
        mbarrier.wait(self.q_full.index(slot), (use // slots) & 1)
        mbarrier.wait(self.do_full.index(slot), (use // slots) & 1)
        return self.q.index(slot).reshape(shape), self.do.index(slot).reshape(shape)

    @gluon.jit
    def row(self, use, which: gl.constexpr, S: gl.constexpr):
        """0: lse, 1: -delta of a taken tile, (BLOCK_M,)."""
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        slots: gl.constexpr = self.rows.shape[0]
        rows = reinterpret(self.rows, gl.float32, [2 * slots, self.rows.shape[4]], plain)
        return rows.index(2 * (use % slots) + which).load(gl.SliceLayout(0, S))

    @gluon.jit
    def give_back(self, use):
        self.empty.arrive(use)

    @gluon.jit
    def keep_alive(self):
        self.q_full._keep_alive()
        self.do_full._keep_alive()


@gluon.jit
def make_query_tiles(q_desc, rows_desc, slots: gl.constexpr):
    BLOCK_M: gl.constexpr = q_desc.block_shape[2]
    shape: gl.constexpr = [slots, 1, 1, BLOCK_M, q_desc.block_shape[3]]
    q = gl.allocate_shared_memory(q_desc.dtype, shape, q_desc.layout)
    do = gl.allocate_shared_memory(q_desc.dtype, shape, q_desc.layout)
    rows = gl.allocate_shared_memory(gl.float32, [slots, 1, 1, 2, BLOCK_M], rows_desc.layout)
    return QueryTiles(q, do, rows, barriers(slots, 1), barriers(slots, 1), Empties(7, slots, 2))


@gluon.jit
def producer(
    q_desc, do_desc, rows_desc, k_desc, v_desc, counter_ptr, tiles, k_ring, v_ring, board, problem
):
    """The one warp that loads."""
    group = problem.H // problem.Hk
    use = 0  # query tiles so far: says slot and phase of their ring
    turn = 0  # tiles of keys so far
    unit = gl.program_id(0)
    while unit < problem.units:
        # asked for one tile early, and set back by the last, as in stage 9
        fetched = gl.atomic_add(counter_ptr, 1)
        gl.store(counter_ptr, 0, mask=fetched == problem.units - 1)
        b, h_k, start_n, Nk_valid = problem.place(unit)
        board.post((b, h_k, start_n, Nk_valid, 1), turn)
        k_ring.fill(k_desc, [b, h_k, start_n, 0], turn)
        v_ring.fill(v_desc, [b, h_k, start_n, 0], turn)
        first, _, end = problem.span(start_n, Nk_valid)
        for g in range(group):
            for i in range(first, end):
                start_m = i * problem.BLOCK_M
                tiles.fill(q_desc, do_desc, rows_desc, b, h_k * group + g, start_m, use)
                use += 1
        turn += 1
        unit = fetched + gl.num_programs(0)
    board.post((0, 0, 0, 0, 0), turn)  # there is no next one


@gluon.jit
def as_held(dq):
    """dq (64, 64) as a vector (4096,) in the order in which a warp's threads hold it.

    No number moves: 4 that follow one another are one thread's, 128 one warp's, so that they are
    added in memory 16 bytes a thread and 512 a warp.
    """
    parts = gl.reshape(dq, [4, 2, 8, 8, 4, 2])  # warp, half, row of 8; 8 columns, 2 columns, one
    parts = gl.permute(parts, [0, 3, 2, 4, 1, 5])
    return gl.reshape(parts, [4096])


@gluon.jit
def add(dq, place, sums_desc, tile, c: gl.constexpr):
    """Have the copy engine add a consumer's half of a tile of dQ to the sums in global memory."""
    held = as_held(dq)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    reinterpret(place, gl.float32, [4096], plain).store(held)
    fence_async_shared()
    barrier()
    reduce_add(sums_desc, [(2 * tile + c) * 16, 0], place)


@gluon.jit
def walk(
    dk, dv, use, common, k_all, v_all, head, start_n, Nk_valid, first, last, c: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Add what the query tiles `first` to `last` of a head give; `use` counts all heads' tiles."""
    _, _, tiles, _, _, ds_smem, ds_full, sums, sums_desc, _, problem, sizes = common
    _, qk_scale, _ = sizes
    BLOCK_M: gl.constexpr = problem.BLOCK_M
    dtype: gl.constexpr = tiles.q.dtype
    A: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    Q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    k, v = k_all.slice(64 * c, 64, 0), v_all.slice(64 * c, 64, 0)
    keys = start_n + 64 * c + gl.arange(0, 64, layout=gl.SliceLayout(1, S))  # (64,)
    s_zero = gl.zeros([64, BLOCK_M], gl.float32, S)
    dq_zero = gl.zeros([64, 64], gl.float32, Q)
    for i in range(first, last):
        q, do = tiles.take(use)
        s = warpgroup_mma(k, q.permute([1, 0]), s_zero, use_acc=False, is_async=True)
        dp = warpgroup_mma(v, do.permute([1, 0]), s_zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])  # the older of the two
        p = gl.exp2(s * qk_scale - tiles.row(use, 0, S)[None, :])  # (64, BLOCK_M)
        if MASKED:
            seen = (keys < Nk_valid)[:, None]
            if problem.CAUSAL:
                cols = i * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, S))
                seen = seen & (keys[:, None] <= cols[None, :] + (problem.Nk - problem.Nq))
            p = gl.where(seen, p, 0.0)
        dv = warpgroup_mma(gl.convert_layout(p.to(dtype), A), do, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp])
        ds = (p * (dp + tiles.row(use, 1, S)[None, :])).to(dtype)  # (64, BLOCK_M)
        if problem.DQ:
            ds_all = ds_smem.index(use % 2)  # (128, BLOCK_M)
            ds_all.slice(64 * c, 64, 0).store(ds)
            fence_async_shared()
            store_wait(0)  # who asked for the last sum waits until it was read, others for him:
            if problem.BLOCK_D == 128:
                named_barrier("bar.sync", 15, 256)
            else:  # measured: slower at 128, faster at 64
                mbarrier.arrive(ds_full.index(use % 2))
                mbarrier.wait(ds_full.index(use % 2), (use // 2) & 1)
            if problem.BLOCK_D == 128:  # this consumer's half of dQ: of its columns
                ds_rows, k_columns = ds_all.permute([1, 0]), k_all.slice(64 * c, 64, 1)
            else:  # or of its rows
                ds_rows, k_columns = ds_all.slice(64 * c, 64, 1).permute([1, 0]), k_all
            tile = head * gl.cdiv(problem.Nq, BLOCK_M) + i
            dq = warpgroup_mma(ds_rows, k_columns, dq_zero, use_acc=False, is_async=True)
            dk = warpgroup_mma(gl.convert_layout(ds, A), q, dk, is_async=True)
            dv, dq = warpgroup_mma_wait(1, deps=[dv, dq])
            add(dq, sums.index(c), sums_desc, tile, c)
            dk = warpgroup_mma_wait(0, deps=[dk])
        else:
            dk = warpgroup_mma(gl.convert_layout(ds, A), q, dk, is_async=True)
            dv, dk = warpgroup_mma_wait(0, deps=[dv, dk])
        tiles.give_back(use)
        use += 1
    return dk, dv, use


@gluon.jit
def hide_keys(tile, start_n, Nk_valid):
    """Make a consumer's 64 keys of K or V 0 from the Nk_valid-th on: 0 * NaN is NaN."""
    columns: gl.constexpr = tile.shape[1] // 8
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // columns, columns], [4, 1], [1, 0])
    keys = start_n + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    tile.store(gl.where((keys < Nk_valid)[:, None], tile.load(L), 0.0))


@gluon.jit
def put(ptr, x, row, start_n, Nk_valid, Nk, d):
    """Write a consumer's 64 keys of dK or dV; 0 for keys that are hidden."""
    columns: gl.constexpr = x.shape[1] // 8
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // columns, columns], [4, 1], [1, 0])
    x = gl.convert_layout(x.to(ptr.dtype.element_ty), L)
    keys = start_n + gl.arange(0, 64, layout=gl.SliceLayout(1, L))[:, None]
    cols = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, L))[None, :]
    x = gl.where(keys < Nk_valid, x, 0.0)
    gl.store(ptr + (row + keys) * d + cols, x, mask=(keys < Nk) & (cols < d))


@gluon.jit
def consumer(common, c: gl.constexpr):
    """Warpgroup c: 64 keys of each tile, from the scores to dK and dV, and its half of dQ."""
    dk_ptr, dv_ptr, _, k_ring, v_ring, _, _, _, _, board, problem, sizes = common
    d, _, scale = sizes
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, problem.BLOCK_D, 16])
    group = problem.H // problem.Hk
    use = 0  # query tiles so far: says slot and phase of their ring
    turn = 0  # tiles of keys so far
    b, h_k, start_n, Nk_valid, more = board.read(0)
    while more > 0:
        first, full, end = problem.span(start_n, Nk_valid)
        own = start_n + 64 * c  # its first key
        k_all, v_all = k_ring.take(turn), v_ring.take(turn)  # (128, BLOCK_D)
        if problem.EDGE:
            if start_n + 128 > Nk_valid:
                hide_keys(k_all.slice(64 * c, 64, 0), own, Nk_valid)
                hide_keys(v_all.slice(64 * c, 64, 0), own, Nk_valid)
            fence_async_shared()  # the matrix unit reads what threads wrote
            barrier()
        dk = gl.zeros([64, problem.BLOCK_D], gl.float32, A)
        dv = gl.zeros([64, problem.BLOCK_D], gl.float32, A)
        for g in range(group):
            head = b * problem.H + h_k * group + g
            if problem.CAUSAL or problem.EDGE:
                dk, dv, use = walk(
                    dk, dv, use, common, k_all, v_all, head, start_n, Nk_valid, first, full, c, True
                )
            dk, dv, use = walk(
                dk, dv, use, common, k_all, v_all, head, start_n, Nk_valid, full, end, c, False
            )
        k_ring.give_back(turn)
        v_ring.give_back(turn)
        row = (b * problem.Hk + h_k).to(gl.int64) * problem.Nk
        put(dk_ptr, dk * scale, row, own, Nk_valid, problem.Nk, d)
        put(dv_ptr, dv, row, own, Nk_valid, problem.Nk, d)
        turn += 1
        b, h_k, start_n, Nk_valid, more = board.read(turn)
    if problem.DQ:
        store_wait(0)


# a build for sizes of 1 and one for multiples of 16 would be the same code
@gluon.jit(
    do_not_specialize=["H", "Hk", "Nq", "Nk", "heads", "section", "units"],
    do_not_specialize_on_alignment=["seqlens_ptr", "counter_ptr"],
)
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, rows_desc, sums_desc, dk_ptr, dv_ptr, seqlens_ptr, counter_ptr,
    H, Hk, Nq, Nk, d, heads, section, units, qk_scale, scale,
    CAUSAL: gl.constexpr, HAS_SEQLENS: gl.constexpr, EDGE: gl.constexpr, DQ: gl.constexpr,
    STAGES: gl.constexpr, CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """All roles' shared memory and barriers; then each warp goes its own way.

    Descriptors have blocks of (1, 1, rows, BLOCK_D), K and V of 128 rows; rows_desc (1, 1, 2,
    BLOCK_M). dk and dv are contiguous. EDGE: a tile may have keys that are none, or hidden ones.
    DQ: whether dQ is wanted.
    """
    BLOCK_M: gl.constexpr = q_desc.block_shape[2]
    problem = Problem(
        seqlens_ptr if HAS_SEQLENS else counter_ptr, H, Hk, Nq, Nk, heads, section, units,
        CAUSAL, HAS_SEQLENS, EDGE, DQ, BLOCK_M, q_desc.block_shape[3],
    )  # fmt: skip
    tiles = make_query_tiles(q_desc, rows_desc, STAGES)
    k_ring, v_ring = make_ring(k_desc, 1, 2, 5), make_ring(v_desc, 1, 2, 6)
    board = make_board(2)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ds_smem = gl.allocate_shared_memory(q_desc.dtype, [2, 128, BLOCK_M], swizzled)
    sums = gl.allocate_shared_memory(gl.float32, [2, 16, 256], sums_desc.layout)
    ds_full = barriers(2, 2)  # at d = 64 each consumer waits for the other's dS
    fence_async_shared()  # the copy engine arrives at these barriers
    barrier()
    common = (
        dk_ptr, dv_ptr, tiles, k_ring, v_ring, ds_smem, ds_full, sums, sums_desc, board,
        problem, (d, qk_scale, scale),
    )  # fmt: skip
    load = (
        q_desc, do_desc, rows_desc, k_desc, v_desc, counter_ptr, tiles, k_ring, v_ring, board,
        problem,
    )  # fmt: skip
    # the first has the kernel's own four warps; then warps and registers of the others
    gl.warp_specialize(
        [(consumer, (common, 0)), (consumer, (common, 1)), (producer, load)],
        [4, 1], [CONSUMER_REGS, PRODUCER_REGS],
    )  # fmt: skip
    # scratch memory is laid over what looks dead, and a barrier does that nobody names any more
    tiles.keep_alive()
    k_ring.keep_alive()
    v_ring.keep_alive()
    board.keep_alive()
    ds_full._keep_alive()
