"""The backward pass of stage 9 for d above 128: dV in one kernel, dK and dQ in another.

Roles, masks, and the small kernels before and after are those of backward.py; one kernel is
launched twice, and goes through the query tiles once each time:

    dV (VALUES)     |S^T=K Q^T|   |dV+=P^T dO|                             matrix unit
                              | P |
    dK, dQ (KEYS)   |S^T=K Q^T|dP^T=V dO^T|    |dK+=dS^T Q|dQ=dS K|dK+=dS^T Q|
                              | P = 2^(S-lse)| dS | to the other  | dQ out

d goes in parts: three of 64 columns up to d = 192, two of 128 above. All parts of dK but the last
run while the consumers wait for each other; the last runs while dQ is added to its sums.

Why S is computed twice: dK and dV of 128 keys and d = 256 are 2 * 128 * 256 float32, all registers
of a multiprocessor; at d = 192 they are 192 of a thread's 240, which leaves too few for S and dP.
With 64 keys in one pass, as published kernels have it, Q and dO would move as often as in these two
passes together, the sums of dQ twice as often, and products would read more of shared memory. The
slower unit decides: 6,656 cycles there, 2,048 + 4,096 here. Below are, for 64 queries, 128 keys and
d = 256, cycles of a multiprocessor (2,048 multiply-adds of the matrix unit, 128 bytes of shared
memory) and KB to and from the L2:

                        matrix unit   shared memory   L2
    64 keys, one pass   5,120         6,656           256   2,688 + 128 for P and dS + 512, twice
    dV                  2,048         2,048           64    S 1,024, dV 512, Q and dO 512
    dK, dQ              4,096         3,968           128   S, dP 2,048, dK 512, dQ 768, dS 128,
                                                            Q and dO 512

At d = 192 registers are left to spare shared memory. The pass for dV has tiles of 128 queries, so
that K is read half as often; that for dK keeps two of K's three parts in registers.

Registers of a consumer's thread at d = 256, of 240: dV 128, S 32, P 16, lse 16; in the other pass
dK 128, S 32, dP 32, lse and -delta 32, and when S and dP are used up dQ 64. At d = 192: dV 96, S
64, P 32, lse 32; dK 96, K 32, S 32, dP 32, lse and -delta 32. Shared memory in KB, of 227:

    d            K   V   dS  tiles of Q and of dO
    192  dV      48          2 x 48, 48
         dK, dQ  48  48  48  2 x 24, 24
    256  dV      64          2 x 32, 2 x 32
         dK, dQ  64  64  16  1.5 x 32, 32    a part is loaded as soon as a slot is free

Up to 16 KB are used to exchange rows of dK and dV before they are stored, in the pass for dK at d =
192 only 8, half a part at a time; at d = 256 that pass has too little left.

Sums of dQ that wait for the copy engine take 16 KB for a part of 64 columns. At d = 192 dS has
three places, where two parts can wait when dS has been read: consumer 0's, which has two of three,
and no time to add them itself. What is left of dQ, and all of it at d = 256, threads add to global
memory from registers, 16 bytes each (after FlashAttention-3, which does so at d = 256). Measured:
with dS in one place, and the other two for one part of each consumer, the copy engine adds all of
dQ, but the consumers wait for each other once more, and it is slower. The pass for dV writes the
zeros that sums start from: memory has less to do there than in the kernel before it.

At d = 256 dS has one place, and no consumer writes to it before the other has read it for dQ: for S
it needs the second part of the next Q, which takes the place of the first part of this one, and
both consumers release that when their dQ is done.
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

from .backward import (
    DS_STORED,
    K_EMPTY,
    QUERIES_EMPTY,
    V_EMPTY,
    clear_hidden_keys,
    in_register_order,
    load_row,
    producer,
    put_dq,
    seen_by,
    store_gradient,
)
from .forward import load_parts, matrix_layout, unknown_zero, zeros
from .pipeline import Pipeline, make_pipeline, named_barrier
from .schedule import Problem, make_scheduler

# the number of a named barrier: consumer 1's dQ has read dS
DQ_DONE = gl.constexpr(14)


@aggregate
class KeyParts:
    """K or V: a pipeline with a slot for each part of d, all released together."""

    pipe: Pipeline

    @gluon.jit
    def producer_load(self, desc, coordinates, count):
        b, h, start_n, _ = coordinates
        load_parts(self.pipe, desc, b, h, start_n, count, self.pipe.TOGETHER)

    @gluon.jit
    def consumer_wait(self, count):
        for i in gl.static_range(self.pipe.TOGETHER):
            self.pipe.consumer_wait(self.pipe.TOGETHER * count + i)

    @gluon.jit
    def part(self, i: gl.constexpr, zero):
        """The i-th part of all 128 keys; zero: 0 that the compiler doesn't know (forward.py)."""
        return self.pipe.tile(i + zero)

    @gluon.jit
    def consumer_release(self, count):
        self.pipe.consumer_release(self.pipe.TOGETHER * count)


@aggregate
class QueryParts:
    """Tiles of Q and dO in parts, each in a slot; with the first part of Q its rows."""

    q: Pipeline  # tiles (slots, 1, 1, BLOCK_M, BLOCK_D)
    do: Pipeline
    rows: gl.shared_memory_descriptor  # (places, 1, 1, 2, BLOCK_M) float32: lse and -delta
    PARTS: gl.constexpr

    @gluon.jit
    def producer_load(self, q_desc, do_desc, rows_desc, b, h, start_m, count):
        """Load tile `count`; where parts are released one by one, those of Q but the first last.

        In the pass for dK they wait for the last tile's dQ.
        """
        PARTS: gl.constexpr = self.PARTS
        slot = (PARTS * count) % self.q.tiles.shape[0]
        self.q.producer_acquire(PARTS * count)
        full = self.q.full.index(slot)
        mbarrier.expect(full, q_desc.block_type.nbytes + rows_desc.block_type.nbytes)
        async_load(q_desc, [b, h, start_m, 0], full, self.q.tiles.index(slot))
        async_load(rows_desc, [b, h, 0, start_m], full, self.rows.index(slot // self.q.TOGETHER))
        if self.q.TOGETHER > 1:
            load_parts(self.q, q_desc, b, h, start_m, count, PARTS, 1)
        load_parts(self.do, do_desc, b, h, start_m, count, PARTS)
        if self.q.TOGETHER == 1:
            load_parts(self.q, q_desc, b, h, start_m, count, PARTS, 1)

    @gluon.jit
    def part(self, pipe, i: gl.constexpr, count, WAIT: gl.constexpr = False):
        """The i-th part of a tile of Q or dO, (BLOCK_M, BLOCK_D); if WAIT, as soon as it is there.

        Else it was waited for.
        """
        at = self.PARTS * count + i + unknown_zero(count)
        return pipe.consumer_wait(at) if WAIT else pipe.tile(at % pipe.tiles.shape[0])

    @gluon.jit
    def release(self, pipe, i: gl.constexpr, count):
        """Say that this consumer is done with the i-th part of a tile, as with those before it."""
        if (i + 1) % pipe.TOGETHER == 0:
            pipe.consumer_release(self.PARTS * count + i)

    @gluon.jit
    def row(self, count, which: gl.constexpr, S: gl.constexpr):
        """0: lse, 1: -delta of a tile whose first part of Q was waited for, (BLOCK_M,)."""
        return load_row(self.rows, self.PARTS // self.q.TOGETHER * count, which, S)


@gluon.jit
def start_scores(keys, held, queries, pipe, count, c: gl.constexpr, WAITED: gl.constexpr):
    """Start S^T = K Q^T or dP^T = V dO^T, (64, BLOCK_M), the sum over the parts of d.

    keys are K or V, held their first parts in registers; pipe is that of Q or dO. WAITED: how many
    of its parts were waited for.
    """
    s = zeros(pipe.tiles.shape[3])
    for i in gl.static_range(queries.PARTS):
        tile = queries.part(pipe, i, count, i >= WAITED)
        k = held[i] if i < len(held) else keys.part(i, unknown_zero(count)).slice(64 * c, 64, 0)
        s = warpgroup_mma(k, tile.permute([1, 0]), s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def release_parts(queries, pipe, count):
    for i in gl.static_range(queries.PARTS):
        queries.release(pipe, i, count)


@gluon.jit
def finish_part(x, i: gl.constexpr, queries, pipe, count):
    """Wait for the i-th part of a gradient, started in the order of parts; release what it read."""
    x = warpgroup_mma_wait(queries.PARTS - 1 - i, deps=[x])
    queries.release(pipe, i, count)
    return x


@gluon.jit
def reduce_add_parts(dq, ds_smem, sums_desc, tile, q_count):
    """Have the copy engine add consumer 0's parts of a tile of dQ, first and third, to the sums.

    dS has three places. One waits in that of the tile before, whose sums the copy engine has read;
    the other in this tile's, as soon as both consumers' dQ has read dS.
    """
    places = reinterpret(ds_smem, gl.float32, [3, 16, 256], sums_desc.layout)
    before, own = places.index((q_count + 2) % 3), places.index(q_count % 3)
    put_dq(dq[0], before)
    named_barrier("bar.sync", DQ_DONE, 256)
    put_dq(dq[1], own)
    fence_async_shared()
    barrier()  # among this consumer's four warps
    row = tile * 48  # a part has 16 rows of sums
    reduce_add(sums_desc, [row, 0], before)
    reduce_add(sums_desc, [row + 32, 0], own)


@gluon.jit
def add_dq(dq, sums_ptr, tile, part: gl.constexpr, PARTS: gl.constexpr):
    """Add one of PARTS parts of a tile of dQ to the sums in global memory, from registers."""
    held = in_register_order(dq)
    places = gl.arange(0, held.shape[0], layout=held.type.layout)
    start = tile.to(gl.int64) * (PARTS * held.shape[0]) + part * held.shape[0]
    gl.atomic_add(sums_ptr + start + places, held, sem="relaxed")


@gluon.jit
def values_mainloop(
    dv, q_count, common, held, head, start_n, Nk_valid, first, end, c: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Add to dV, a list of its parts (64, BLOCK_D), what the query tiles `first` to `end` give."""
    _, _, queries, k_parts, _, _, scheduler, sizes = common
    _, _, qk_scale, _ = sizes
    problem = scheduler.problem
    PARTS: gl.constexpr = queries.PARTS
    S: gl.constexpr = matrix_layout(problem.BLOCK_M)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, dv[0].type.layout, 2)
    keys = start_n + 64 * c + gl.arange(0, 64, layout=gl.SliceLayout(1, S))  # (64,)
    for i in range(first, end):
        queries.part(queries.q, 0, q_count, True)  # wait for it: its rows come with it
        lse = queries.row(q_count, 0, S)  # (BLOCK_M,)
        s = start_scores(k_parts, held, queries, queries.q, q_count, c, 1)
        s = warpgroup_mma_wait(0, deps=[s])
        release_parts(queries, queries.q, q_count)
        p = gl.exp2(s * qk_scale - lse[None, :])  # (64, BLOCK_M)
        if MASKED:
            p = gl.where(seen_by(i * problem.BLOCK_M, keys, Nk_valid, problem, S), p, 0.0)
        p_left = gl.convert_layout(p.to(queries.do.tiles.dtype), LEFT)
        dv = [
            warpgroup_mma(p_left, queries.part(queries.do, x, q_count, True), dv[x], is_async=True)
            for x in (0, 1, 2)[:PARTS]
        ]
        dv = [finish_part(dv[x], x, queries, queries.do, q_count) for x in (0, 1, 2)[:PARTS]]
        q_count += 1
    return dv, q_count


@gluon.jit
def keys_mainloop(
    dk, q_count, common, held, head, start_n, Nk_valid, first, end, c: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Add to dK as `values_mainloop` adds to dV, and parts c, c + 2, ... of dQ to its sums."""
    _, sums, queries, k_parts, v_parts, ds_smem, scheduler, sizes = common
    _, _, qk_scale, _ = sizes
    problem = scheduler.problem
    PARTS: gl.constexpr = queries.PARTS
    BLOCK_M: gl.constexpr = problem.BLOCK_M
    S: gl.constexpr = matrix_layout(BLOCK_M)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, dk[0].type.layout, 2)
    DQ_PARTS: gl.constexpr = (PARTS - c + 1) // 2
    COPIED: gl.constexpr = problem.DQ and PARTS == 3
    keys = start_n + 64 * c + gl.arange(0, 64, layout=gl.SliceLayout(1, S))  # (64,)
    for i in range(first, end):
        zero = unknown_zero(q_count)
        queries.part(queries.q, 0, q_count, True)  # wait for it: its rows come with it
        # once the products run, they keep shared memory busy
        lse, delta = queries.row(q_count, 0, S), queries.row(q_count, 1, S)  # (BLOCK_M,)
        s = start_scores(k_parts, held, queries, queries.q, q_count, c, 1)
        dp = start_scores(v_parts, (), queries, queries.do, q_count, c, 0)
        s = warpgroup_mma_wait(PARTS, deps=[s])  # all parts of dP still run
        p = gl.exp2(s * qk_scale - lse[None, :])  # (64, BLOCK_M)
        if MASKED:
            p = gl.where(seen_by(i * BLOCK_M, keys, Nk_valid, problem, S), p, 0.0)
        dp = warpgroup_mma_wait(0, deps=[dp])
        release_parts(queries, queries.do, q_count)
        ds = (p * (dp + delta[None, :])).to(queries.q.tiles.dtype)  # (64, BLOCK_M)
        ds_left = gl.convert_layout(ds, LEFT)
        if problem.DQ:
            ds_all = ds_smem.index(q_count % ds_smem.shape[0] + zero)  # (BLOCK_M, 128)
            ds_all.slice(64 * c, 64, 1).permute([1, 0]).store(ds)
        q = [queries.part(queries.q, x, q_count) for x in (0, 1, 2)[:PARTS]]
        # they run while the consumers wait for each other
        before = [warpgroup_mma(ds_left, q[x], dk[x], is_async=True) for x in (0, 1)[: PARTS - 1]]
        if problem.DQ:
            fence_async_shared()
            if COPIED and c == 0:
                # before they meet: behind that consumer 1, too, may write the next dS where the
                # copy engine reads the last tile's sums
                store_wait(0)
            named_barrier("bar.sync", DS_STORED, 256)
            dq_zero = zeros(queries.q.tiles.shape[4])
            dq = [
                warpgroup_mma(ds_all, k_parts.part(x, zero), dq_zero, use_acc=False, is_async=True)
                for x in (c, c + 2)[:DQ_PARTS]
            ]
        last = warpgroup_mma(ds_left, q[PARTS - 1], dk[PARTS - 1], is_async=True)
        if problem.DQ:
            done = warpgroup_mma_wait(1, deps=dq + before)
            before = [done[DQ_PARTS + x] for x in (0, 1)[: PARTS - 1]]
            for x in gl.static_range(PARTS - 1):
                queries.release(queries.q, x, q_count)  # after dQ: dS may have one place
            tile = head * gl.cdiv(problem.Nq, BLOCK_M) + i
            if COPIED and c == 0:
                reduce_add_parts(done[:2], ds_smem, sums[1], tile, q_count)
            else:
                if COPIED:
                    named_barrier("bar.arrive", DQ_DONE, 256)
                add_dq(done[0], sums[0], tile, c, PARTS)
        else:
            before = [
                finish_part(before[x], x, queries, queries.q, q_count) for x in (0, 1)[: PARTS - 1]
            ]
        dk = before + [finish_part(last, PARTS - 1, queries, queries.q, q_count)]  # noqa: RUF005
        q_count += 1
    return dk, q_count


@gluon.jit
def in_halves(x):
    """The left and the right half of the columns of x (64, n); no number moves."""
    return gl.split(gl.permute(gl.reshape(x, [64, 2, x.shape[1] // 2]), [0, 2, 1]))


@gluon.jit
def zero_sums(sums_ptr, head, start_n, c: gl.constexpr, problem):
    """Write zeros to a work tile's share of the sums of dQ, which the next pass adds to.

    head: the key head's number among all batch entries'. The sums of its query heads are shared out
    among its work tiles, 64 rows after 64.
    """
    tiles = problem.group * gl.cdiv(problem.Nq, 64)  # of 64 rows
    share = gl.cdiv(tiles, gl.cdiv(problem.Nk, problem.BLOCK_N))
    first = start_n // problem.BLOCK_N * share
    L: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    places = gl.arange(0, 4096, layout=L)
    for i in range(first + c, gl.minimum(first + share, tiles), 2):
        start = (head.to(gl.int64) * tiles + i) * (64 * problem.D)
        for part in gl.static_range(problem.D // 64):
            gl.store(sums_ptr + start + part * 4096 + places, gl.zeros([4096], gl.float32, L))


@gluon.jit
def consumer(common, c: gl.constexpr, VALUES: gl.constexpr):
    """Warpgroup c: 64 keys of each work tile, from scores to dV, or to dK and its parts of dQ."""
    gradient_ptr, sums, queries, k_parts, v_parts, _, scheduler, sizes = common
    d, Hk, _, scale = sizes
    problem = scheduler.problem
    mainloop: gl.constexpr = values_mainloop if VALUES else keys_mainloop
    PARTS: gl.constexpr = queries.PARTS
    BLOCK_D: gl.constexpr = k_parts.pipe.tiles.shape[4]
    LEFT: gl.constexpr = gl.DotOperandLayout(0, matrix_layout(problem.BLOCK_M), 2)
    # at d = 256 the pass for dK has no shared memory left to exchange rows in
    WHOLE_ROWS: gl.constexpr = VALUES or PARTS == 3
    HALVES: gl.constexpr = PARTS == 3 and not VALUES  # and at d = 192 for half of a part
    q_count = 0  # query tiles so far
    kv_count = 0  # work tiles so far
    b, h_k, start_n, Nk_valid, more = scheduler.next_work_tile(0)
    while more > 0:
        first, full, end = problem.query_tiles(start_n, Nk_valid)
        own = start_n + 64 * c  # its first key
        if VALUES and problem.DQ:
            zero_sums(sums[0], b * Hk + h_k, start_n, c, problem)
        k_parts.consumer_wait(kv_count)
        if not VALUES:
            v_parts.consumer_wait(kv_count)
            if problem.EDGE:
                if start_n + problem.BLOCK_N > Nk_valid:
                    for i in gl.static_range(PARTS):
                        clear_hidden_keys(k_parts.part(i, 0).slice(64 * c, 64, 0), own, Nk_valid)
                        clear_hidden_keys(v_parts.part(i, 0).slice(64 * c, 64, 0), own, Nk_valid)
                fence_async_shared()  # the matrix unit reads what threads wrote
                barrier()  # among this consumer's four warps
        # products that have K in registers read less of shared memory, which is the bottleneck
        HELD: gl.constexpr = 2 if PARTS == 3 and not VALUES else 0
        held = [k_parts.part(i, 0).slice(64 * c, 64, 0).load(LEFT) for i in (0, 1)[:HELD]]
        gradient = [zeros(n) for n in (BLOCK_D,) * PARTS]
        for g in range(problem.group):
            head = b * problem.H + h_k * problem.group + g
            if problem.CAUSAL or problem.EDGE:
                gradient, q_count = mainloop(
                    gradient, q_count, common, held, head, start_n, Nk_valid, first, full, c, True
                )
            gradient, q_count = mainloop(
                gradient, q_count, common, held, head, start_n, Nk_valid, full, end, c, False
            )
        k_parts.consumer_release(kv_count)
        if not VALUES:
            v_parts.consumer_release(kv_count)
        row = (b * Hk + h_k).to(gl.int64) * problem.Nk
        for i in gl.static_range(PARTS):
            x = gradient[i] if VALUES else gradient[i] * scale
            pieces = in_halves(x) if HALVES else (x,)
            for j in gl.static_range(len(pieces)):
                store_gradient(
                    gradient_ptr, pieces[j], row, own, Nk_valid, problem.Nk, d,
                    i * BLOCK_D + 32 * j, WHOLE_ROWS,
                )  # fmt: skip
        kv_count += 1
        b, h_k, start_n, Nk_valid, more = scheduler.next_work_tile(kv_count)
    if not VALUES and problem.DQ:
        store_wait(0)


# else Triton builds again for sizes of 1 and for multiples of 16, to the same code
@gluon.jit(
    do_not_specialize=["H", "Hk", "Nq", "Nk", "heads", "section", "tiles"],
    do_not_specialize_on_alignment=["seqlens_ptr", "counter_ptr"],
)
def two_pass_kernel(
    q_desc, k_desc, v_desc, do_desc, rows_desc, sums_ptr, sums_desc, gradient_ptr, seqlens_ptr,
    counter_ptr,
    H, Hk, Nq, Nk, d, heads, section, tiles, qk_scale, scale,
    CAUSAL: gl.constexpr, HAS_SEQLENS: gl.constexpr, EDGE: gl.constexpr, DQ: gl.constexpr,
    VALUES: gl.constexpr, PARTS: gl.constexpr, TOGETHER: gl.constexpr, Q_SLOTS: gl.constexpr,
    DO_SLOTS: gl.constexpr, CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """Compute dv and, if DQ, zero the sums of dq, if VALUES; else dk and, if DQ, add to those sums.

    dv or dk goes to gradient_ptr, the sums are at sums_ptr and, for the copy engine, in sums_desc.

    Descriptors have blocks of (1, 1, rows, BLOCK_D), K and V of 128 rows; rows_desc (1, 1, 2,
    BLOCK_M); sums_desc (16, 256). PARTS parts of BLOCK_D columns make up d and its padding.
    TOGETHER: how many slots of Q, and of dO, are released at once, 1 or PARTS. The gradient is
    contiguous. EDGE and DQ: as in Problem.
    """
    BLOCK_M: gl.constexpr = q_desc.block_shape[2]
    BLOCK_N: gl.constexpr = k_desc.block_shape[2]
    problem = Problem(
        seqlens_ptr if HAS_SEQLENS else counter_ptr,  # the counter stands in, and isn't read
        H, H // Hk, Nq, Nk, CAUSAL, HAS_SEQLENS, EDGE, 0, False, DQ, BLOCK_M, BLOCK_N,
        PARTS * q_desc.block_shape[3], PARTS, True,
    )  # fmt: skip
    # named barriers: one each for K and V, then those for Q and dO, up to 14; in the pass for dK
    # these end at 11, and DQ_DONE is 14
    k_pipe = make_pipeline(k_desc, PARTS, 2, K_EMPTY, PARTS)
    v_pipe = k_pipe if VALUES else make_pipeline(v_desc, PARTS, 2, V_EMPTY, PARTS)
    q_pipe = make_pipeline(q_desc, Q_SLOTS, 2, QUERIES_EMPTY, TOGETHER)
    RELEASES: gl.constexpr = Q_SLOTS // TOGETHER
    do_pipe = make_pipeline(do_desc, DO_SLOTS, 2, QUERIES_EMPTY + RELEASES, TOGETHER)
    rows = gl.allocate_shared_memory(gl.float32, [RELEASES, 1, 1, 2, BLOCK_M], rows_desc.layout)
    queries = QueryParts(q_pipe, do_pipe, rows, PARTS)
    k_parts, v_parts = KeyParts(k_pipe), KeyParts(v_pipe)
    scheduler = make_scheduler(problem, gl.cdiv(Nk, BLOCK_N), heads, section, tiles, 2)
    ds_smem = rows  # stands in, and isn't read
    if DQ and not VALUES:
        swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        DS_PLACES: gl.constexpr = 3 if PARTS == 3 else 1
        ds_smem = gl.allocate_shared_memory(q_desc.dtype, [DS_PLACES, BLOCK_M, 128], swizzled)
    fence_async_shared()  # the copy engine arrives at these barriers
    barrier()  # among the kernel's own four warps, before any role begins
    common = (
        gradient_ptr, (sums_ptr, sums_desc), queries, k_parts, v_parts, ds_smem, scheduler,
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
