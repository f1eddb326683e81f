"""The backward pass of stage 9: three kernels; up to d = 128 the second has all five products.

preprocess    lse and -delta of each row, delta = rowsum(o * do) as in stage 7; up to d = 128 zeros
              in dQ's sums
backward      dk and dv; dQ's sums in float32, one pass over the keys
postprocess   dq from its sums: scaled, in its dtype

    one CTA stays on each multiprocessor and takes work tiles of 128 keys, one by one; for each it
    goes through the query tiles that see these keys
    producer    1 warp: has the copy engine bring K and V, then tiles of Q, dO, lse and delta
    consumers   2 warpgroups, 64 keys each; everything transposed: keys down, queries across

    a query tile, time ->
    consumer 0  |S^T=K Q^T|dP^T=V dO^T|      |dV+=P^T dO|dQ=dS K|dK+=dS^T Q|     matrix unit
                          |P = 2^(S-lse)| dS | to the other     | dQ out
    consumer 1  the same for the next 64 keys, a little later: it starts S and dP behind consumer 0,
                so that its products run while that one computes P, and the other way round

    K, V    pipelines of one slot (pipeline.py): the next tiles come while dK and dV go out
    Q, dO   two slots; consumers wait at two full barriers of each, for Q with its rows, and for dO
    dS      each consumer writes 64 keys of it and reads all 128, so they wait for each other before
            dQ; two slots, so that no consumer writes what the other one still reads. The same wait
            covers K: dQ reads all 128 keys, of which each consumer has cleared its own hidden ones
    sums    one slot for each consumer, which waits until the copy engine has read its last sum

P^T and dS^T are left operands of dV and dK as registers hold them. dQ is a sum over keys, and most
of those are other CTAs': the copy engine adds it to float32 in global memory. That traffic decides:
each consumer adds a half of dQ over all 128 keys, which is half as much as if each added all of dQ
over its own 64. CTAs add in no fixed order, so the last bits of dQ differ from run to run.

For d from 65 to 96, tiles are 128 columns wide, but only the first D = 80 or 96 of them are
multiplied, in two parts: 64 + 16 or 64 + 32. Consumer 0's share of dQ is the first part, consumer
1's the second. Neither waits for the other to start S and dP.
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
from stages.common.no_triton import tl, triton

from .forward import matrix_layout, unknown_zero, zeros
from .pipeline import Pipeline, make_mbarriers, make_pipeline, named_barrier
from .schedule import Problem, make_scheduler

# Numbers of named barriers. K's and V's pipelines have one slot, that of queries two.
K_EMPTY, V_EMPTY, QUERIES_EMPTY = gl.constexpr(5), gl.constexpr(6), gl.constexpr(7)
S_STARTED = gl.constexpr(9)  # consumer 0 has started S and dP of a tile: it's consumer 1's turn
DS_STORED = gl.constexpr(15)  # both consumers have written their part of dS


@aggregate
class QueryPipeline:
    """Two pipelines in step, of which `q` has the empty barriers; with a tile of Q its rows."""

    q: Pipeline  # tiles (slots, 1, 1, BLOCK_M, BLOCK_D)
    do: Pipeline
    rows: gl.shared_memory_descriptor  # (slots, 1, 1, 2, BLOCK_M) float32: lse and -delta

    @gluon.jit
    def producer_load(self, q_desc, do_desc, rows_desc, b, h, start_m, count):
        slot = count % self.rows.shape[0]
        self.q.producer_acquire(count)
        full = self.q.full.index(slot)
        mbarrier.expect(full, q_desc.block_type.nbytes + rows_desc.block_type.nbytes)
        async_load(q_desc, [b, h, start_m, 0], full, self.q.tiles.index(slot))
        async_load(rows_desc, [b, h, 0, start_m], full, self.rows.index(slot))
        full = self.do.full.index(slot)
        mbarrier.expect(full, do_desc.block_type.nbytes)
        async_load(do_desc, [b, h, start_m, 0], full, self.do.tiles.index(slot))

    @gluon.jit
    def consumer_wait(self, count):
        """The tiles (BLOCK_M, BLOCK_D) of Q and dO, as soon as both are there."""
        slots: gl.constexpr = self.rows.shape[0]
        shape: gl.constexpr = [self.q.tiles.shape[3], self.q.tiles.shape[4]]
        slot = count % slots
        mbarrier.wait(self.q.full.index(slot), (count // slots) & 1)
        mbarrier.wait(self.do.full.index(slot), (count // slots) & 1)
        return self.q.tiles.index(slot).reshape(shape), self.do.tiles.index(slot).reshape(shape)

    @gluon.jit
    def row(self, count, which: gl.constexpr, S: gl.constexpr):
        """0: lse, 1: -delta of a tile that was waited for, (BLOCK_M,)."""
        return load_row(self.rows, count, which, S)


@gluon.jit
def load_row(rows, count, which: gl.constexpr, S: gl.constexpr):
    """0: lse, 1: -delta from slot count % slots of `rows` (slots, 1, 1, 2, BLOCK_M)."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    slots: gl.constexpr = rows.shape[0]
    rows = reinterpret(rows, gl.float32, [2 * slots, rows.shape[4]], plain)
    return rows.index(2 * (count % slots) + which).load(gl.SliceLayout(0, S))


@gluon.jit
def producer(q_desc, do_desc, rows_desc, key_descs, counter_ptr, queries, key_pipes, scheduler, Hk):
    """The one warp that loads; key_descs and key_pipes are K's and, if it is needed, V's."""
    problem = scheduler.problem
    # A CTA that takes the next work tile before a long one keeps it from idle CTAs. Measured: at
    # d = 64 what is left to compute at the end takes less time than to fetch.
    LATE: gl.constexpr = problem.D > 64
    q_count = 0  # query tiles so far
    kv_count = 0  # work tiles so far
    tile = gl.program_id(0)
    while tile < scheduler.tiles:
        if not LATE:
            fetched = scheduler.fetch(counter_ptr)
        b, h_k, block = scheduler.place(tile, Hk, False)  # those that most rows see first
        start_n = block * problem.BLOCK_N
        Nk_valid = problem.valid_keys(b)
        scheduler.publish((b, h_k, start_n, Nk_valid, 1), kv_count)
        for x in gl.static_range(len(key_pipes)):
            key_pipes[x].producer_load(key_descs[x], [b, h_k, start_n, 0], kv_count)
        first, _, end = problem.query_tiles(start_n, Nk_valid)
        for g in range(problem.group):
            for i in range(first, end):
                start_m = i * problem.BLOCK_M
                h = h_k * problem.group + g
                queries.producer_load(q_desc, do_desc, rows_desc, b, h, start_m, q_count)
                q_count += 1
        if LATE:
            fetched = scheduler.fetch(counter_ptr)
        kv_count += 1
        tile = fetched + gl.num_programs(0)
    scheduler.publish((0, 0, 0, 0, 0), kv_count)  # there is no next work tile


@gluon.jit
def in_register_order(dq):
    """dq (64, n) as a vector, each 64 columns in the order in which a warp's threads hold them.

    n: 16, 32 or a multiple of 64

    No number moves: 4 that follow one another are one thread's, 128 one warp's, so that a thread
    stores 16 bytes at once. `postprocess_kernel` puts the sums of these vectors in order.
    """
    n: gl.constexpr = dq.shape[1]
    # warp, half, row of 8; 64 columns (or all, if fewer), 8 columns, 2 columns, one
    parts = gl.reshape(dq, [4, 2, 8, n // 64, 8, 4, 2] if n >= 64 else [4, 2, 8, 1, n // 8, 4, 2])
    parts = gl.permute(parts, [3, 0, 4, 2, 5, 1, 6])
    return gl.reshape(parts, [64 * n])


@gluon.jit
def put_dq(dq, place):
    """Store dq (64, n), n up to 64, in shared memory (16, 256), for the copy engine to add it."""
    held = in_register_order(dq)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    reinterpret(place, gl.float32, [4096], plain).slice(0, held.shape[0], 0).store(held)


@gluon.jit
def reduce_add_dq(dq, place, sums_desc, row):
    """Have the copy engine add a consumer's half of a tile of dQ to the sums from `row` on.

    A row has 256 of them. place (16, 256): shared memory of this consumer
    """
    put_dq(dq, place)
    fence_async_shared()
    barrier()  # among this consumer's four warps
    rows: gl.constexpr = sums_desc.block_shape[0]
    for x in gl.static_range(64 * dq.shape[1] // (256 * rows)):
        reduce_add(sums_desc, [row + x * rows, 0], place.slice(x * rows, rows, 0))


@gluon.jit
def seen_by(start_m, keys, Nk_valid, problem, S: gl.constexpr):
    """Which of `keys` (64,) the queries from start_m on see: (64, BLOCK_M), or (64, 1) if all."""
    seen = (keys < Nk_valid)[:, None]
    if problem.CAUSAL:
        # The first column that sees a key, so that one comparison for each number is left. Of keys
        # that don't count it lies past all columns: start_m + Nk - Nq is from -BLOCK_M to 2^30.
        keys = gl.where(keys < Nk_valid, keys, (1 << 30) + problem.BLOCK_M)
        first = keys - (start_m + (problem.Nk - problem.Nq))
        cols = gl.arange(0, problem.BLOCK_M, layout=gl.SliceLayout(0, S))
        seen = first[:, None] <= cols[None, :]
    return seen


@gluon.constexpr_function
def part_width(i, D, BLOCK_D):
    """How many columns the i-th part of a tile has: all, or the first 64, or what is left of D."""
    if D == BLOCK_D:
        return D
    return 64 if i == 0 else D - 64


@gluon.jit
def columns(tile, i: gl.constexpr, D: gl.constexpr):
    """The i-th part of a tile's columns."""
    n: gl.constexpr = part_width(i, D, tile.shape[1])
    return tile if n == tile.shape[1] else tile.slice(64 * i, n, 1)


@gluon.jit
def start_scores(keys, tile, start, ADD: gl.constexpr, problem):
    """Start S^T = K Q^T or dP^T = V dO^T, (64, BLOCK_M), the sum over the parts.

    keys   64 of K or V, (64, BLOCK_D)
    tile   of Q or dO, (BLOCK_M, BLOCK_D)
    start  what it begins as if ADD, else zeros
    """
    s = start
    for i in gl.static_range(problem.PARTS):
        left, right = columns(keys, i, problem.D), columns(tile, i, problem.D).permute([1, 0])
        s = warpgroup_mma(left, right, s, use_acc=ADD or i > 0, is_async=True)
    return s


@gluon.jit
def start_gradient(left, tile, gradient, problem):
    """Start dV += P^T dO or dK += dS^T Q in each part.

    left      P^T or dS^T, in registers
    tile      of dO or Q, (BLOCK_M, BLOCK_D)
    gradient  its parts, 64 keys of each
    """
    return [
        warpgroup_mma(left, columns(tile, i, problem.D), gradient[i], is_async=True)
        for i in (0, 1)[: problem.PARTS]
    ]


@gluon.jit
def mainloop(
    dk, dv, q_count, common, head, start_n, Nk_valid, first, end, c: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Add what the query tiles `first` to `end` of a head give; q_count counts all heads' tiles.

    dk, dv: lists of their parts, 64 keys of each
    """
    _, _, queries, k_pipe, v_pipe, ds_smem, ds_full, sums, sums_desc, scheduler, sizes = common
    _, _, qk_scale, _ = sizes
    problem = scheduler.problem
    BLOCK_M: gl.constexpr = problem.BLOCK_M
    BLOCK_D: gl.constexpr = k_pipe.tiles.shape[4]
    dtype: gl.constexpr = queries.q.tiles.dtype
    D: gl.constexpr = problem.D
    PARTS: gl.constexpr = problem.PARTS
    DQ_D: gl.constexpr = 64 if BLOCK_D == 64 or c == 0 else D - 64  # columns of its half of dQ
    LEFT: gl.constexpr = gl.DotOperandLayout(0, dv[0].type.layout, 2)  # operand of dV and dK
    S: gl.constexpr = matrix_layout(BLOCK_M)
    keys = start_n + 64 * c + gl.arange(0, 64, layout=gl.SliceLayout(1, S))  # (64,)
    # Whether dP begins as -delta. Measured: that's faster at d = 128 under a causal mask, where it
    # leaves registers free, slower without one.
    FROM_DELTA: gl.constexpr = BLOCK_D == 128 and problem.CAUSAL
    IN_ORDER: gl.constexpr = problem.DQ and PARTS == 1
    s_zero = zeros(BLOCK_M)
    dq_zero = zeros(DQ_D)
    for i in range(first, end):
        # K and V are in slot 0, but the compiler can't know, nor compute their addresses before the
        # loop, where they would occupy some 20 registers.
        zero = unknown_zero(q_count)
        k_all, v_all = k_pipe.tile(zero), v_pipe.tile(zero)  # (128, BLOCK_D)
        k, v = k_all.slice(64 * c, 64, 0), v_all.slice(64 * c, 64, 0)  # (64, BLOCK_D)
        q, do = queries.consumer_wait(q_count)  # (BLOCK_M, BLOCK_D)
        if BLOCK_D == 128:  # once the products run, they keep shared memory busy
            lse, delta = queries.row(q_count, 0, S), queries.row(q_count, 1, S)  # (BLOCK_M,)
        # The consumers meet in each tile. If they also started together, both would compute P at
        # the same time, and the matrix unit would have nothing to do. Measured: at d = 80 and 96
        # it's faster without.
        if IN_ORDER and c == 1:
            named_barrier("bar.sync", S_STARTED, 256)
        s = start_scores(k, q, s_zero, False, problem)
        dp_start = s_zero
        if FROM_DELTA:
            dp_start = s_zero + delta[None, :]
        dp = start_scores(v, do, dp_start, FROM_DELTA, problem)
        if IN_ORDER and c == 0:
            named_barrier("bar.arrive", S_STARTED, 256)
        s = warpgroup_mma_wait(PARTS, deps=[s])  # all parts of dP still run
        if BLOCK_D == 64:  # for BLOCK_M = 128 rows registers are too few
            lse = queries.row(q_count, 0, S)
        p = gl.exp2(s * qk_scale - lse[None, :])  # (64, BLOCK_M)
        if MASKED:
            p = gl.where(seen_by(i * BLOCK_M, keys, Nk_valid, problem, S), p, 0.0)
        p_left = gl.convert_layout(p.to(dtype), LEFT)
        dp = warpgroup_mma_wait(0, deps=[dp])
        if BLOCK_D == 64:
            delta = queries.row(q_count, 1, S)
        if not FROM_DELTA:
            dp = dp + delta[None, :]
        ds = (p * dp).to(dtype)  # (64, BLOCK_M)
        if problem.DQ:
            ds_all = ds_smem.index(q_count % 2)  # (BLOCK_M, 128), as dQ reads it
            ds_all.slice(64 * c, 64, 1).permute([1, 0]).store(ds)
            # it runs while the consumers wait for each other
            dv = start_gradient(p_left, do, dv, problem)
            fence_async_shared()
            # the warp that started the last reduce-add waits until the copy engine has read it,
            # and the other warps wait for that warp at the barrier
            store_wait(0)
            # measured: an mbarrier is slower than the named barrier at d = 128, faster at 64
            if BLOCK_D == 128:  # this consumer's half of dQ: of its columns
                named_barrier("bar.sync", DS_STORED, 256)
                ds_rows, k_columns = ds_all, k_all.slice(64 * c, DQ_D, 1)
            else:  # or of its rows
                mbarrier.arrive(ds_full.index(q_count % 2))
                mbarrier.wait(ds_full.index(q_count % 2), (q_count // 2) & 1)
                ds_rows, k_columns = ds_all.slice(64 * c, 64, 0), k_all
            tile = head * gl.cdiv(problem.Nq, BLOCK_M) + i
            dq = warpgroup_mma(ds_rows, k_columns, dq_zero, use_acc=False, is_async=True)
            dk = start_gradient(gl.convert_layout(ds, LEFT), q, dk, problem)
            done = warpgroup_mma_wait(PARTS, deps=dv + [dq])  # noqa: RUF005
            dv = [done[x] for x in (0, 1)[:PARTS]]
            row = tile * (BLOCK_M * D // 256) + 16 * c  # a half of 64 x 64 takes 16 rows of sums
            reduce_add_dq(done[PARTS], sums.index(c), sums_desc, row)
            dk = [warpgroup_mma_wait(PARTS - 1 - x, deps=[dk[x]]) for x in (0, 1)[:PARTS]]
        else:
            dv = start_gradient(p_left, do, dv, problem)
            dk = start_gradient(gl.convert_layout(ds, LEFT), q, dk, problem)
            done = warpgroup_mma_wait(0, deps=dv + dk)
            dv, dk = [done[x] for x in (0, 1)[:PARTS]], [done[PARTS + x] for x in (0, 1)[:PARTS]]
        queries.q.consumer_release(q_count)
        q_count += 1
    return dk, dv, q_count


@gluon.constexpr_function
def whole_rows(n):
    """A layout of (64, n) numbers: a thread has 8 in a row, a warp whole rows."""
    return gl.BlockedLayout([1, 8], [32 // (n // 8), n // 8], [4, 1], [1, 0])


@gluon.jit
def clear_hidden_keys(tile, start_n, Nk_valid):
    """Make a consumer's 64 keys of K or V 0 from the Nk_valid-th on: 0 * NaN is NaN."""
    L: gl.constexpr = whole_rows(tile.shape[1])
    keys = start_n + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    tile.store(gl.where((keys < Nk_valid)[:, None], tile.load(L), 0.0))


@gluon.jit
def store_gradient(
    ptr, x, row, start_n, Nk_valid, Nk, d, FIRST_D: gl.constexpr, WHOLE_ROWS: gl.constexpr
):
    """Write 64 keys of dK or dV, columns from FIRST_D on; 0 for hidden keys.

    WHOLE_ROWS: exchanged through shared memory first, so that a warp stores whole rows; else stored
    from where the product left them
    """
    L: gl.constexpr = whole_rows(x.shape[1]) if WHOLE_ROWS else x.type.layout
    x = gl.convert_layout(x.to(ptr.dtype.element_ty), L)
    keys = start_n + gl.arange(0, 64, layout=gl.SliceLayout(1, L))[:, None]
    cols = gl.arange(FIRST_D, FIRST_D + x.shape[1], layout=gl.SliceLayout(0, L))[None, :]
    x = gl.where(keys < Nk_valid, x, 0.0)
    gl.store(ptr + (row + keys) * d + cols, x, mask=(keys < Nk) & (cols < d))


@gluon.jit
def consumer(common, c: gl.constexpr):
    """Warpgroup c: 64 keys of each work tile, from the scores to dK and dV, and its half of dQ."""
    dk_ptr, dv_ptr, _, k_pipe, v_pipe, _, _, _, _, scheduler, sizes = common
    d, Hk, _, scale = sizes
    problem = scheduler.problem
    BLOCK_D: gl.constexpr = k_pipe.tiles.shape[4]
    PARTS: gl.constexpr = problem.PARTS
    q_count = 0  # query tiles so far
    kv_count = 0  # work tiles so far
    b, h_k, start_n, Nk_valid, more = scheduler.next_work_tile(0)
    while more > 0:
        first, full, end = problem.query_tiles(start_n, Nk_valid)
        own = start_n + 64 * c  # its first key
        # each (128, BLOCK_D)
        k_all, v_all = k_pipe.consumer_wait(kv_count), v_pipe.consumer_wait(kv_count)
        if problem.EDGE:
            if start_n + problem.BLOCK_N > Nk_valid:
                clear_hidden_keys(k_all.slice(64 * c, 64, 0), own, Nk_valid)
                clear_hidden_keys(v_all.slice(64 * c, 64, 0), own, Nk_valid)
            fence_async_shared()  # the matrix unit reads what threads wrote
            barrier()  # among this consumer's four warps
        dk = [zeros(part_width(i, problem.D, BLOCK_D)) for i in (0, 1)[:PARTS]]
        dv = [zeros(part_width(i, problem.D, BLOCK_D)) for i in (0, 1)[:PARTS]]
        for g in range(problem.group):
            head = b * problem.H + h_k * problem.group + g
            if problem.CAUSAL or problem.EDGE:
                dk, dv, q_count = mainloop(
                    dk, dv, q_count, common, head, start_n, Nk_valid, first, full, c, True
                )
            dk, dv, q_count = mainloop(
                dk, dv, q_count, common, head, start_n, Nk_valid, full, end, c, False
            )
        k_pipe.consumer_release(kv_count)
        v_pipe.consumer_release(kv_count)
        row = (b * Hk + h_k).to(gl.int64) * problem.Nk
        for i in gl.static_range(PARTS):
            store_gradient(dk_ptr, dk[i] * scale, row, own, Nk_valid, problem.Nk, d, 64 * i, True)
            store_gradient(dv_ptr, dv[i], row, own, Nk_valid, problem.Nk, d, 64 * i, True)
        kv_count += 1
        b, h_k, start_n, Nk_valid, more = scheduler.next_work_tile(kv_count)
    if problem.DQ:
        store_wait(0)


# else Triton builds again for sizes of 1 and for multiples of 16, to the same code
@gluon.jit(
    do_not_specialize=["H", "Hk", "Nq", "Nk", "heads", "section", "tiles"],
    do_not_specialize_on_alignment=["seqlens_ptr", "counter_ptr"],
)
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, rows_desc, sums_desc, dk_ptr, dv_ptr, seqlens_ptr, counter_ptr,
    H, Hk, Nq, Nk, d, heads, section, tiles, qk_scale, scale,
    CAUSAL: gl.constexpr, HAS_SEQLENS: gl.constexpr, EDGE: gl.constexpr, DQ: gl.constexpr,
    D: gl.constexpr, SLOTS: gl.constexpr, CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """Make the pipelines in shared memory; then each warp goes its own way.

    Descriptors have blocks of (1, 1, rows, BLOCK_D), K and V of 128 rows; rows_desc (1, 1, 2,
    BLOCK_M); sums_desc (n, 256), one or more of which are a consumer's share of a tile of dQ. D:
    columns computed, BLOCK_D, or 80 or 96 of 128. dk and dv are contiguous. EDGE and DQ: as in
    Problem.
    """
    BLOCK_M: gl.constexpr = q_desc.block_shape[2]
    BLOCK_N: gl.constexpr = k_desc.block_shape[2]
    BLOCK_D: gl.constexpr = q_desc.block_shape[3]
    PARTS: gl.constexpr = 1 if BLOCK_D == D else 2
    problem = Problem(
        seqlens_ptr if HAS_SEQLENS else counter_ptr,  # the counter stands in, and isn't read
        H, H // Hk, Nq, Nk, CAUSAL, HAS_SEQLENS, EDGE, 0, False, DQ, BLOCK_M, BLOCK_N, D,
        PARTS, True,
    )  # fmt: skip
    q_pipe = make_pipeline(q_desc, SLOTS, 2, QUERIES_EMPTY)
    do_pipe = make_pipeline(do_desc, SLOTS, 2, QUERIES_EMPTY)
    rows = gl.allocate_shared_memory(gl.float32, [SLOTS, 1, 1, 2, BLOCK_M], rows_desc.layout)
    queries = QueryPipeline(q_pipe, do_pipe, rows)
    k_pipe = make_pipeline(k_desc, 1, 2, K_EMPTY)
    v_pipe = make_pipeline(v_desc, 1, 2, V_EMPTY)
    scheduler = make_scheduler(problem, gl.cdiv(Nk, BLOCK_N), heads, section, tiles, 2)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ds_smem = gl.allocate_shared_memory(q_desc.dtype, [2, BLOCK_M, 128], swizzled)
    sums = gl.allocate_shared_memory(gl.float32, [2, 16, 256], sums_desc.layout)
    ds_full = make_mbarriers(2, 2)  # at d = 64 each consumer waits for the other's dS
    fence_async_shared()  # the copy engine arrives at these barriers
    barrier()  # among the kernel's own four warps, before any role begins
    common = (
        dk_ptr, dv_ptr, queries, k_pipe, v_pipe, ds_smem, ds_full, sums, sums_desc, scheduler,
        (d, Hk, qk_scale, scale),
    )  # fmt: skip
    load = (
        q_desc, do_desc, rows_desc, (k_desc, v_desc), counter_ptr, queries, (k_pipe, v_pipe),
        scheduler, Hk,
    )  # fmt: skip
    # the first role has the kernel's own warps and the registers left over; then come the others'
    gl.warp_specialize(
        [(consumer, (common, 0)), (consumer, (common, 1)), (producer, load)],
        [4, 1], [CONSUMER_REGS, PRODUCER_REGS],
    )  # fmt: skip
    q_pipe.keep_alive()
    do_pipe.keep_alive()
    k_pipe.keep_alive()
    v_pipe.keep_alive()
    scheduler.keep_alive()
    ds_full._keep_alive()


@triton.jit
def from_the_last():
    """The grid's coordinates of a program, int64, so that programs begin with the last ones.

    The main kernel begins with the first heads and ends with the last. So it begins with what the
    kernel before it wrote last, and the kernel after it with what it added last: that is in the L2.
    """
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    x, y, z = tl.num_programs(0) - 1 - x, tl.num_programs(1) - 1 - y, tl.num_programs(2) - 1 - z
    return x.to(tl.int64), y.to(tl.int64), z.to(tl.int64)


@triton.jit
def preprocess_kernel(
    o_ptr, do_ptr, lse_ptr, rows_ptr, sums_ptr,
    stride_ob, stride_oh, stride_om, stride_od,
    stride_dob, stride_doh, stride_dom, stride_dod,
    stride_lb, stride_lh, stride_lm,
    Nq, Nq_padded, d,
    ZERO: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Fill rows (B, H, 2, Nq_padded) float32 with lse and -delta; if ZERO, dQ's sums with zeros.

    A row that sees no key, or is none, gets lse = +inf: whatever its scores, p = 2^-inf = 0. An lse
    so large that no digit of p would be left becomes NaN, as in stage 7.
    """
    block, h, b = from_the_last()
    offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
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
    lse = tl.where(lse == float("-inf"), float("inf"), good)  # (BLOCK_M,)
    head = b * tl.num_programs(1) + h
    rows_ptr += head * 2 * Nq_padded
    tl.store(rows_ptr + offs_m, lse)
    tl.store(rows_ptr + Nq_padded + offs_m, -tl.sum(o * do, 1))
    if ZERO:
        sums = sums_ptr + (head * Nq_padded + offs_m[:, None]) * D + offs_d[None, :]
        tl.store(sums, tl.zeros((BLOCK_M, BLOCK_D), tl.float32), mask=offs_d[None, :] < D)


@triton.jit
def write_dq(
    sums_ptr, rows_ptr, dq_ptr, stride_dqm, stride_dqd, offs_m, Nq, d, scale,
    FIRST_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_D columns of BLOCK_M rows of dq, from FIRST_D on."""
    offs_d = FIRST_D + tl.arange(0, BLOCK_D)  # (BLOCK_D,)
    flat = tl.load(sums_ptr + BLOCK_M * FIRST_D + tl.arange(0, BLOCK_M * BLOCK_D))
    # 64 columns, 64 rows, warp, 8 columns (of all, if fewer), row of 8, 2 columns, half, column
    shape: tl.constexpr = max(BLOCK_D // 64, 1), BLOCK_M // 64, 4, min(BLOCK_D, 64) // 8, 8, 4, 2, 2
    dq = tl.permute(tl.reshape(flat, shape), (1, 2, 6, 4, 0, 3, 5, 7))
    dq = tl.reshape(dq, (BLOCK_M, BLOCK_D))
    lse = tl.load(rows_ptr + offs_m)
    dq = tl.where(lse[:, None] == float("inf"), 0.0, dq * scale)
    dq_ptrs = dq_ptr + offs_m[:, None] * stride_dqm + offs_d[None, :].to(tl.int64) * stride_dqd
    mask = (offs_m[:, None] < Nq) & (offs_d[None, :] < d)
    tl.store(dq_ptrs, dq.to(dq_ptr.dtype.element_ty), mask=mask)


@triton.jit
def postprocess_kernel(
    sums_ptr, rows_ptr, dq_ptr, stride_dqb, stride_dqh, stride_dqm, stride_dqd,
    Nq, Nq_padded, d, scale,
    BLOCK_M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """dq from its float32 sums (B, H, Nq_padded, D): scaled, in dq's dtype, rows in order.

    Of BLOCK_M rows the sums of 64 columns come after those of the 64 before, each in the order in
    which consumers hold them (`in_register_order`). If D is no power of two, they are written 64
    columns at a time, and then what is left of D.
    """
    block, h, b = from_the_last()
    start_m = block * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    head = b * tl.num_programs(1) + h
    sums_ptr += (head * Nq_padded + start_m) * D
    rows_ptr += head * 2 * Nq_padded
    dq_ptr += b * stride_dqb + h * stride_dqh
    BLOCK_D: tl.constexpr = D if D & (D - 1) == 0 else 64
    for first in tl.static_range(0, D, BLOCK_D):
        write_dq(
            sums_ptr, rows_ptr, dq_ptr, stride_dqm, stride_dqd, offs_m, Nq, d, scale,
            first, BLOCK_M, min(BLOCK_D, D - first),
        )  # fmt: skip
