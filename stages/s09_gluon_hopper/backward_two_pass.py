"""The backward pass of stage 9 for d above 128: dV in one kernel, dK and dQ in another.

Roles, masks, and the small kernels before and after are those of backward.py; one kernel is
launched twice, and goes through the query tiles once each time:

    for VALUES  |S^T=K Q^T|   |dV+=P^T dO|                             matrix unit
                          | P |
    else        |S^T=K Q^T|dP^T=V dO^T|    |dK+=dS^T Q|dQ=dS K|dK+=dS^T Q|
                          | P = 2^(S-lse)| dS | to the other  | dQ out

Why S is computed twice: dK and dV of 128 keys and d = 256 are 2 * 128 * 256 float32, all registers
of a multiprocessor. With 64 keys in one pass, as published kernels have it, Q, dO and the sums of
dQ would move twice as often. For 64 queries, 128 keys and d = 256, in cycles of a multiprocessor
(2,048 multiply-adds of the matrix unit, 128 bytes of shared memory) and in KB to and from the L2:

                        matrix unit   shared memory   L2
    64 keys, one pass   5,120         6,656           256   2,688 + 128 for P and dS + 512, twice
    for VALUES          2,048         2,048           64    S 1,024, dV 512, Q and dO 512
    else                4,096         3,968           128   S, dP 2,048, dK 512, dQ 768, dS 128, 512

Registers of a consumer's thread, of 240: dV 128, S 32, P 16, lse 16; else dK 128, S 32, dP 32, lse
and -delta 32, and when S and dP are used up dQ 64. Shared memory, of 227 KB: K 64, and in slots of
16 KB, for 64 rows and 128 columns, 4 of Q and 4 of dO; else K 64, V 64, dS 16, 3 of Q and 2 of dO.

Nothing is left where sums of dQ could wait for the copy engine: threads add them to global memory
from registers, 16 bytes each (after FlashAttention-3, which does so at d = 256).
dS has one place: no consumer writes to it before the other has read it for dQ. For S it needs the
second part of the next Q, which takes the place of the first part of this one, and both consumers
release that when their dQ is done.
"""

from stages.common.gluon import (
    aggregate,
    async_load,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .backward import (
    DS_STORED,
    K_EMPTY,
    clear_hidden_keys,
    in_register_order,
    load_row,
    producer,
    seen_by,
    store_gradient,
)
from .forward import first_columns, load_parts, matrix_layout, unknown_zero, zeros
from .pipeline import Pipeline, make_pipeline, named_barrier
from .schedule import Problem, make_scheduler

# K_EMPTY is K's first named barrier; then come V's, and those of Q and dO, up to 14
V_EMPTY = gl.constexpr(K_EMPTY + 2)


@aggregate
class KeyParts:
    """K or V: a pipeline with a slot for each part of d, 128 columns and SECOND_D."""

    pipe: Pipeline
    SECOND_D: gl.constexpr

    @gluon.jit
    def producer_load(self, desc, coordinates, count):
        load_parts(self.pipe, desc, coordinates[0], coordinates[1], coordinates[2], count, 2)

    @gluon.jit
    def consumer_wait(self, count):
        for i in gl.static_range(2):
            self.pipe.consumer_wait(2 * count + i)

    @gluon.jit
    def part(self, i: gl.constexpr, zero):
        """The i-th part of all 128 keys; zero: 0 that the compiler doesn't know (forward.py)."""
        tile = self.pipe.tile(i + zero)
        return first_columns(tile, self.SECOND_D if i else tile.shape[1])

    @gluon.jit
    def consumer_release(self, count):
        for i in gl.static_range(2):
            self.pipe.consumer_release(2 * count + i)


@aggregate
class QueryParts:
    """Tiles of Q and dO in two parts, each in a slot; with the first part of Q its rows."""

    q: Pipeline  # tiles (slots, 1, 1, BLOCK_M, 128)
    do: Pipeline
    rows: gl.shared_memory_descriptor  # (slots of Q, 1, 1, 2, BLOCK_M) float32: lse and -delta
    SECOND_D: gl.constexpr

    @gluon.jit
    def producer_load(self, q_desc, do_desc, rows_desc, b, h, start_m, count):
        """Load tile `count`, in the order in which slots become free: the second part of Q last."""
        FIRST_D: gl.constexpr = q_desc.block_shape[3]
        slot = (2 * count) % self.rows.shape[0]
        self.q.producer_acquire(2 * count)
        full = self.q.full.index(slot)
        mbarrier.expect(full, q_desc.block_type.nbytes + rows_desc.block_type.nbytes)
        async_load(q_desc, [b, h, start_m, 0], full, self.q.tiles.index(slot))
        async_load(rows_desc, [b, h, 0, start_m], full, self.rows.index(slot))
        load_parts(self.do, do_desc, b, h, start_m, count, 2)
        self.q.producer_load(q_desc, [b, h, start_m, FIRST_D], 2 * count + 1)

    @gluon.jit
    def consumer_wait(self, pipe, i: gl.constexpr, count):
        """The i-th part of a tile, (BLOCK_M, 128 or SECOND_D), as soon as it is there."""
        tile = pipe.consumer_wait(2 * count + i + unknown_zero(count))
        return first_columns(tile, self.SECOND_D if i else tile.shape[1])

    @gluon.jit
    def row(self, count, which: gl.constexpr, S: gl.constexpr):
        """0: lse, 1: -delta of a tile whose first part of Q was waited for, (BLOCK_M,)."""
        return load_row(self.rows, 2 * count, which, S)


@gluon.jit
def start_scores(s, keys, i: gl.constexpr, queries, zero, c: gl.constexpr):
    """Start S^T = K Q^T or dP^T = V dO^T, (64, BLOCK_M), of the first part of d, or add the second.

    keys are K or V, queries the i-th part of a tile of Q or dO.
    """
    k = keys.part(i, zero).slice(64 * c, 64, 0)
    return warpgroup_mma(k, queries.permute([1, 0]), s, use_acc=i > 0, is_async=True)


@gluon.jit
def add_dq(dq, sums_ptr, tile, c: gl.constexpr):
    """Add a consumer's part of a tile of dQ to the sums in global memory, 64 x 256 a tile."""
    held = in_register_order(dq)
    places = gl.arange(0, held.shape[0], layout=held.type.layout)
    start = tile.to(gl.int64) * (64 * 256) + c * (64 * 128)
    gl.atomic_add(sums_ptr + start + places, held, sem="relaxed")


@gluon.jit
def values_mainloop(
    dv, q_count, common, head, start_n, Nk_valid, first, end, c: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Add to dV, (64, 128) and (64, SECOND_D), what the query tiles `first` to `end` give."""
    _, _, queries, k_parts, _, _, scheduler, sizes = common
    _, _, qk_scale, _ = sizes
    problem = scheduler.problem
    S: gl.constexpr = matrix_layout(problem.BLOCK_M)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, dv[0].type.layout, 2)
    keys = start_n + 64 * c + gl.arange(0, 64, layout=gl.SliceLayout(1, S))  # (64,)
    s_zero = zeros(problem.BLOCK_M)
    for i in range(first, end):
        zero = unknown_zero(q_count)
        q0 = queries.consumer_wait(queries.q, 0, q_count)
        lse = queries.row(q_count, 0, S)  # (BLOCK_M,)
        s = start_scores(s_zero, k_parts, 0, q0, zero, c)
        q1 = queries.consumer_wait(queries.q, 1, q_count)
        s = start_scores(s, k_parts, 1, q1, zero, c)
        s = warpgroup_mma_wait(0, deps=[s])
        queries.q.consumer_release(2 * q_count)
        queries.q.consumer_release(2 * q_count + 1)
        p = gl.exp2(s * qk_scale - lse[None, :])  # (64, BLOCK_M)
        if MASKED:
            p = gl.where(seen_by(i * problem.BLOCK_M, keys, Nk_valid, problem, S), p, 0.0)
        p_left = gl.convert_layout(p.to(queries.do.tiles.dtype), LEFT)
        do0 = queries.consumer_wait(queries.do, 0, q_count)
        dv0 = warpgroup_mma(p_left, do0, dv[0], is_async=True)
        do1 = queries.consumer_wait(queries.do, 1, q_count)
        dv1 = warpgroup_mma(p_left, do1, dv[1], is_async=True)
        dv0 = warpgroup_mma_wait(1, deps=[dv0])
        queries.do.consumer_release(2 * q_count)
        dv1 = warpgroup_mma_wait(0, deps=[dv1])
        queries.do.consumer_release(2 * q_count + 1)
        dv = [dv0, dv1]
        q_count += 1
    return dv, q_count


@gluon.jit
def keys_mainloop(
    dk, q_count, common, head, start_n, Nk_valid, first, end, c: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Add to dK, as `values_mainloop` to dV, and to the sums of dQ its columns of part c."""
    _, sums_ptr, queries, k_parts, v_parts, ds_smem, scheduler, sizes = common
    _, _, qk_scale, _ = sizes
    problem = scheduler.problem
    BLOCK_M: gl.constexpr = problem.BLOCK_M
    S: gl.constexpr = matrix_layout(BLOCK_M)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, dk[0].type.layout, 2)
    keys = start_n + 64 * c + gl.arange(0, 64, layout=gl.SliceLayout(1, S))  # (64,)
    s_zero = zeros(BLOCK_M)
    for i in range(first, end):
        zero = unknown_zero(q_count)
        q0 = queries.consumer_wait(queries.q, 0, q_count)
        # once the products run, they keep shared memory busy
        lse, delta = queries.row(q_count, 0, S), queries.row(q_count, 1, S)  # (BLOCK_M,)
        s = start_scores(s_zero, k_parts, 0, q0, zero, c)
        q1 = queries.consumer_wait(queries.q, 1, q_count)
        s = start_scores(s, k_parts, 1, q1, zero, c)
        do0 = queries.consumer_wait(queries.do, 0, q_count)
        dp = start_scores(s_zero, v_parts, 0, do0, zero, c)
        do1 = queries.consumer_wait(queries.do, 1, q_count)
        dp = start_scores(dp, v_parts, 1, do1, zero, c)
        s = warpgroup_mma_wait(2, deps=[s])  # both parts of dP still run
        p = gl.exp2(s * qk_scale - lse[None, :])  # (64, BLOCK_M)
        if MASKED:
            p = gl.where(seen_by(i * BLOCK_M, keys, Nk_valid, problem, S), p, 0.0)
        dp = warpgroup_mma_wait(0, deps=[dp])
        queries.do.consumer_release(2 * q_count)
        queries.do.consumer_release(2 * q_count + 1)
        ds = (p * (dp + delta[None, :])).to(queries.q.tiles.dtype)  # (64, BLOCK_M)
        ds_left = gl.convert_layout(ds, LEFT)
        if problem.DQ:
            ds_all = ds_smem.index(zero)  # (BLOCK_M, 128), as dQ reads it
            ds_all.slice(64 * c, 64, 1).permute([1, 0]).store(ds)
            # it runs while the consumers wait for each other
            dk0 = warpgroup_mma(ds_left, q0, dk[0], is_async=True)
            fence_async_shared()
            named_barrier("bar.sync", DS_STORED, 256)
            k_columns = k_parts.part(c, zero)  # (128, 128), or of the second part (128, SECOND_D)
            dq_zero = zeros(k_columns.shape[1])
            dq = warpgroup_mma(ds_all, k_columns, dq_zero, use_acc=False, is_async=True)
            dk1 = warpgroup_mma(ds_left, q1, dk[1], is_async=True)
            dk0, dq = warpgroup_mma_wait(1, deps=[dk0, dq])
        else:
            dk0 = warpgroup_mma(ds_left, q0, dk[0], is_async=True)
            dk1 = warpgroup_mma(ds_left, q1, dk[1], is_async=True)
            dk0 = warpgroup_mma_wait(1, deps=[dk0])
        queries.q.consumer_release(2 * q_count)  # not before dQ is done: dS has one place
        if problem.DQ:
            add_dq(dq, sums_ptr, head * gl.cdiv(problem.Nq, BLOCK_M) + i, c)
        dk1 = warpgroup_mma_wait(0, deps=[dk1])
        queries.q.consumer_release(2 * q_count + 1)
        dk = [dk0, dk1]
        q_count += 1
    return dk, q_count


@gluon.jit
def consumer(common, c: gl.constexpr, VALUES: gl.constexpr):
    """Warpgroup c: 64 keys of each work tile, from the scores to dV, or to dK and part c of dQ."""
    gradient_ptr, _, _, k_parts, v_parts, _, scheduler, sizes = common
    d, Hk, _, scale = sizes
    problem = scheduler.problem
    mainloop: gl.constexpr = values_mainloop if VALUES else keys_mainloop
    FIRST_D: gl.constexpr = k_parts.pipe.tiles.shape[4]
    q_count = 0  # query tiles so far
    kv_count = 0  # work tiles so far
    b, h_k, start_n, Nk_valid, more = scheduler.next_work_tile(0)
    while more > 0:
        first, full, end = problem.query_tiles(start_n, Nk_valid)
        own = start_n + 64 * c  # its first key
        k_parts.consumer_wait(kv_count)
        if not VALUES:
            v_parts.consumer_wait(kv_count)
            if problem.EDGE:
                if start_n + problem.BLOCK_N > Nk_valid:
                    for i in gl.static_range(2):
                        clear_hidden_keys(k_parts.part(i, 0).slice(64 * c, 64, 0), own, Nk_valid)
                        clear_hidden_keys(v_parts.part(i, 0).slice(64 * c, 64, 0), own, Nk_valid)
                fence_async_shared()  # the matrix unit reads what threads wrote
                barrier()  # among this consumer's four warps
        gradient = [zeros(FIRST_D), zeros(k_parts.SECOND_D)]
        for g in range(problem.group):
            head = b * problem.H + h_k * problem.group + g
            if problem.CAUSAL or problem.EDGE:
                gradient, q_count = mainloop(
                    gradient, q_count, common, head, start_n, Nk_valid, first, full, c, True
                )
            gradient, q_count = mainloop(
                gradient, q_count, common, head, start_n, Nk_valid, full, end, c, False
            )
        k_parts.consumer_release(kv_count)
        if not VALUES:
            v_parts.consumer_release(kv_count)
        row = (b * Hk + h_k).to(gl.int64) * problem.Nk
        for i in gl.static_range(2):
            x = gradient[i] if VALUES else gradient[i] * scale
            # as products leave it: shared memory has no room to put whole rows together
            store_gradient(
                gradient_ptr, x, row, own, Nk_valid, problem.Nk, d, matrix_layout(x.shape[1]),
                i * FIRST_D,
            )  # fmt: skip
        kv_count += 1
        b, h_k, start_n, Nk_valid, more = scheduler.next_work_tile(kv_count)


# else Triton builds again for sizes of 1 and for multiples of 16, to the same code
@gluon.jit(
    do_not_specialize=["H", "Hk", "Nq", "Nk", "heads", "section", "tiles"],
    do_not_specialize_on_alignment=["seqlens_ptr", "counter_ptr"],
)
def two_pass_kernel(
    q_desc, k_desc, v_desc, do_desc, rows_desc, sums_ptr, gradient_ptr, seqlens_ptr, counter_ptr,
    H, Hk, Nq, Nk, d, heads, section, tiles, qk_scale, scale,
    CAUSAL: gl.constexpr, HAS_SEQLENS: gl.constexpr, EDGE: gl.constexpr, DQ: gl.constexpr,
    VALUES: gl.constexpr, SECOND_D: gl.constexpr, Q_SLOTS: gl.constexpr, DO_SLOTS: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """Compute dv if VALUES, else dk and, if DQ, the sums of dq, in gradient_ptr and sums_ptr.

    Descriptors have blocks of (1, 1, rows, 128), K and V of 128 rows; rows_desc (1, 1, 2, BLOCK_M).
    The gradient is contiguous. EDGE and DQ: as in Problem.
    """
    BLOCK_M: gl.constexpr = q_desc.block_shape[2]
    BLOCK_N: gl.constexpr = k_desc.block_shape[2]
    problem = Problem(
        seqlens_ptr if HAS_SEQLENS else counter_ptr,  # the counter stands in, and isn't read
        H, H // Hk, Nq, Nk, CAUSAL, HAS_SEQLENS, EDGE, 0, False, DQ, BLOCK_M, BLOCK_N, 0, 0, True,
    )  # fmt: skip
    k_pipe = make_pipeline(k_desc, 2, 2, K_EMPTY)
    v_pipe = k_pipe if VALUES else make_pipeline(v_desc, 2, 2, V_EMPTY)
    Q_EMPTY: gl.constexpr = V_EMPTY if VALUES else V_EMPTY + 2
    q_pipe = make_pipeline(q_desc, Q_SLOTS, 2, Q_EMPTY)
    do_pipe = make_pipeline(do_desc, DO_SLOTS, 2, Q_EMPTY + Q_SLOTS)
    rows = gl.allocate_shared_memory(gl.float32, [Q_SLOTS, 1, 1, 2, BLOCK_M], rows_desc.layout)
    queries = QueryParts(q_pipe, do_pipe, rows, SECOND_D)
    k_parts, v_parts = KeyParts(k_pipe, SECOND_D), KeyParts(v_pipe, SECOND_D)
    scheduler = make_scheduler(problem, gl.cdiv(Nk, BLOCK_N), heads, section, tiles, 2)
    ds_smem = rows  # stands in, and isn't read
    if DQ:
        swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        ds_smem = gl.allocate_shared_memory(q_desc.dtype, [1, BLOCK_M, 128], swizzled)
    fence_async_shared()  # the copy engine arrives at these barriers
    barrier()  # among the kernel's own four warps, before any role begins
    common = (
        gradient_ptr, sums_ptr, queries, k_parts, v_parts, ds_smem, scheduler,
        (d, Hk, qk_scale, scale),
    )  # fmt: skip
    keys: gl.constexpr = 1 if VALUES else 2
    load = (
        q_desc, do_desc, rows_desc, (k_desc, v_desc)[:keys], counter_ptr, queries,
        (k_parts, v_parts)[:keys], scheduler, Hk,
    )  # fmt: skip
    # the first role has the kernel's own warps and the registers left over; then come the others'
    gl.warp_specialize(
        [(consumer, (common, 0, VALUES)), (consumer, (common, 1, VALUES)), (producer, load)],
        [4, 1], [CONSUMER_REGS, PRODUCER_REGS],
    )  # fmt: skip
    q_pipe.keep_alive()
    do_pipe.keep_alive()
    k_pipe.keep_alive()
    v_pipe.keep_alive()
    scheduler.keep_alive()
