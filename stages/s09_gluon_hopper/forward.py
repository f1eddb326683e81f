"""The forward kernel of stage 9: a producer loads, consumers compute; __init__.py has the picture.

Read from the end: `attention_kernel` makes the pipelines and starts the roles. `consumer` computes
one work tile after another, each from its last KV tile back (`mainloop`). Only tiles that the
diagonal or the last valid key cuts need a mask, and these one or two come first. Under a causal
mask, tiles behind the diagonal of the whole work tile are never loaded; those behind a consumer's
own rows are loaded and waited for, not computed; all after the first two run without a mask. The
output is written over its queries in shared memory and copied out from there (`epilogue`), so their
slot is released one work tile later.

d, padded to D columns, goes in parts of BLOCK_D, of which the last may be narrower: 80 = 64 + 16,
96 = 64 + 32, 192 = 3 * 64, 256 = 2 * 128. Each part of a tile has a slot, that of K or V released
while the next part is multiplied. S is the sum of the parts' products, and the output has an
accumulator for each. Where a consumer's registers hold S or P beside those, not both, P V of a tile
comes before S of the next one (OVERLAP is False), and its softmax runs beside products of the other
consumers alone. Parts of Q take all its slots: the next ones are loaded when the output is out.
"""

from stages.common.gluon import (
    async_store,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .pipeline import make_pipeline
from .schedule import Problem, make_scheduler

K_EMPTY = gl.constexpr(5)  # the first named barrier of K's slots; then come V's, and Q's, up to 15
LOWEST = gl.constexpr(-3.4028234663852886e38)  # of float32; -inf - -inf would be NaN


@gluon.jit
def load_parts(pipe, desc, b, h, row, count, PARTS: gl.constexpr, FIRST: gl.constexpr = 0):
    """Load tile `count` of a pipeline, a head's rows from `row` on; each part of d has a slot.

    FIRST: the first part that is loaded.
    """
    for i in gl.static_range(FIRST, PARTS):
        column = i * desc.block_shape[3]
        pipe.producer_load(desc, [b, h, row, column], PARTS * count + i, i % pipe.TOGETHER > 0)


@gluon.jit
def producer(q_desc, k_desc, v_desc, counter_ptr, q_pipes, k_pipe, v_pipe, scheduler):
    """The one warp that loads, in the order of the products: with OVERLAP K is a tile before V."""
    problem = scheduler.problem
    PARTS: gl.constexpr = problem.PARTS
    kv_count = 0  # KV tiles so far
    q_count = 0  # work tiles so far
    tile = gl.program_id(0)
    while tile < scheduler.tiles:
        fetched = scheduler.fetch(counter_ptr)  # one work tile early, while there is time
        b, h, block = scheduler.place(tile, problem.H, problem.CAUSAL)  # the longest ones first
        start_m = block * problem.BLOCK_M
        Nk_valid = problem.valid_keys(b)
        n_tiles = problem.kv_tiles(start_m, Nk_valid)
        scheduler.publish((b, h, start_m, Nk_valid, n_tiles), q_count)
        h_k = h // problem.group
        start_n = problem.first_key(0, n_tiles, Nk_valid)
        load_parts(k_pipe, k_desc, b, h_k, start_n, kv_count, PARTS)
        for c in gl.static_range(problem.BLOCK_M // 64):
            load_parts(q_pipes[c], q_desc, b, h, start_m + 64 * c, q_count, PARTS)
        for j in range(1, n_tiles):
            before, start_n = start_n, problem.first_key(j, n_tiles, Nk_valid)
            if problem.OVERLAP:
                load_parts(k_pipe, k_desc, b, h_k, start_n, kv_count + j, PARTS)
            load_parts(v_pipe, v_desc, b, h_k, before, kv_count + j - 1, PARTS)
            if not problem.OVERLAP:
                load_parts(k_pipe, k_desc, b, h_k, start_n, kv_count + j, PARTS)
        load_parts(v_pipe, v_desc, b, h_k, start_n, kv_count + n_tiles - 1, PARTS)
        kv_count += n_tiles
        q_count += 1
        tile = fetched + gl.num_programs(0)
    scheduler.publish((0, 0, 0, 0, 0), q_count)  # no KV tiles: there is no next work tile


@gluon.jit
def mask(s, limit, BEFORE: gl.constexpr = False):
    """Scores (64, BLOCK_N), -inf from each row's `limit`-th column on; if BEFORE, before it.

    A thread holds the same 2 columns of every 8. Subtract those from its rows' limits once; then
    each group of 8 compares with its first column, a constant.
    """
    eights = gl.reshape(s, [64, s.shape[1] // 8, 8])
    L: gl.constexpr = eights.type.layout
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    limit = gl.convert_layout(limit, gl.SliceLayout(1, gl.SliceLayout(1, L)))
    limit_minus_column = limit[:, None] - column[None, :]  # (64, 8)
    first = 8 * gl.arange(0, s.shape[1] // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    inside = first[None, :, None] < limit_minus_column[:, None, :]
    hidden = float("-inf")
    shown = gl.where(inside, hidden, eights) if BEFORE else gl.where(inside, eights, hidden)
    return gl.convert_layout(gl.reshape(shown, [64, s.shape[1]]), s.type.layout)


@gluon.jit
def partial_row_sums(p):
    """Sum p (64, BLOCK_N) -> (64, 8): what each thread holds of a row; 4 threads share one.

    Summing whole rows would exchange numbers between threads at every tile; this way they do so
    only once, at the end (`whole_row_sums`).
    """
    return gl.sum(gl.reshape(p, [64, p.shape[1] // 8, 8]), 1)


@gluon.jit
def whole_row_sums(l_i, like):
    """Add up what the threads of a row have, (64, 8): the row sums (64,), laid out as `like`."""
    return gl.convert_layout(gl.sum(l_i, 1), like.type.layout)  # (64,)


@gluon.jit
def nan_where_large(l_i, m_i):
    """The row sums l_i, NaN where a multiply-add can't hold the row's scores, as in stage 6."""
    return gl.where(gl.abs(m_i) <= 67108864.0, l_i, float("nan"))


@gluon.constexpr_function
def slack(d):
    """By how much m_i may stay below the running max, in base 2; no gain was seen at d = 128."""
    return 0.0 if 64 < d <= 128 else 8.0


@gluon.jit
def online_softmax(s, m_i, l_i, qk_scale, SLACK: gl.constexpr):
    """One step of the online softmax, as in stage 6: p, m_i, l_i and acc's correction.

    m_i may stay below the running max, by SLACK at most: acc needs a correction less often, and p
    is at most 2^SLACK, far inside float16. l_i has the same m_i, so the division cancels it.
    """
    m_tile = gl.max(s, 1) * qk_scale  # (64,)
    m_new = gl.maximum(m_i, m_tile)
    if SLACK > 0:
        m_new = gl.where(m_new > m_i + SLACK, m_new, m_i)
    alpha = gl.exp2(m_i - m_new)  # (64,)
    p = gl.exp2(s * qk_scale - m_new[:, None])  # (64, BLOCK_N)
    sums = partial_row_sums(p)  # (64, 8)
    l_i = l_i * gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout))[:, None] + sums
    return p, m_new, l_i, alpha


@gluon.jit
def rescale(acc, alpha):
    return acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.constexpr_function
def skipping_multiply(n):
    """PTX that multiplies n of a thread's numbers by their rows' alpha.

    It jumps past that if alpha is 1 (0f3F800000) in the whole warp; Gluon has no other branch on a
    tensor. A thread's numbers are of two rows: 0 and 1 of one, 2 and 3 of the other, and so on.
    """
    alpha = [f"${2 * n + i}" for i in range(n)]
    lines = [
        ".reg .pred other;",
        f"setp.neu.f32 other, {alpha[0]}, 0f3F800000;",
        f"setp.neu.or.f32 other, {alpha[2]}, 0f3F800000, other;",
        "vote.sync.any.pred other, other, 0xffffffff;",
        *(f"mov.b32 ${i}, ${n + i};" for i in range(n)),
        "@!other bra.uni done;",
        *(f"mul.f32 ${i}, ${i}, {alpha[i]};" for i in range(n)),
        "done:",
    ]
    return "{ " + " ".join(lines) + " }"


@gluon.constexpr_function
def asm_constraints(n):
    return ",".join(["=f"] * n + ["f"] * 2 * n)


@gluon.jit
def rescale_if_needed(acc, alpha):
    """As `rescale`, but a warp all of whose rows have alpha = 1 multiplies nothing."""
    n: gl.constexpr = acc.shape[1] // 2
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))
    alpha, acc = gl.broadcast(alpha[:, None], acc)
    return gl.inline_asm_elementwise(
        skipping_multiply(n), asm_constraints(n), [acc, alpha], gl.float32, False, n
    )


@gluon.constexpr_function
def matrix_layout(n):
    """Where a consumer's registers hold a product (64, n)."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16])


@gluon.jit
def zeros(n: gl.constexpr):
    return gl.zeros([64, n], gl.float32, matrix_layout(n))


@gluon.jit
def first_columns(tile, n: gl.constexpr):
    """The first n columns of a tile in shared memory; the whole tile if it has no more."""
    return tile if n >= tile.shape[1] else tile.slice(0, n, 1)


@gluon.jit
def unknown_zero(count):
    """0, but ptxas can't know: else it keeps the addresses of all operands in registers."""
    return count >> 30


@gluon.jit
def queries(q_pipe, slot, problem):
    """The parts of Q from `slot` on: (64, BLOCK_D), the last one with what is left of D columns."""
    BLOCK_D: gl.constexpr = q_pipe.tiles.shape[4]
    return [
        first_columns(q_pipe.tile(slot + i), problem.D - i * BLOCK_D)
        for i in (0, 1, 2)[: problem.PARTS]
    ]


@gluon.jit
def start_scores(q, k_pipe, kv_count, S: gl.constexpr):
    """Start S = Q K^T, (64, BLOCK_N), the sum over the parts of d; `finish_scores` waits for it."""
    s = gl.full([64, k_pipe.tiles.shape[3]], 0.0, gl.float32, S)
    for i in gl.static_range(len(q)):
        zero = 0 if len(q) == 1 else unknown_zero(kv_count)
        k = first_columns(k_pipe.consumer_wait(len(q) * kv_count + i + zero), q[i].shape[1])
        s = warpgroup_mma(q[i], k.permute([1, 0]), s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def start_part(p, v, acc):
    return warpgroup_mma(p, first_columns(v, acc.shape[1]), acc, is_async=True)


@gluon.jit
def start_output(p, acc, v_pipe, kv_count):
    """Start acc += P V in each part of d; `finish_output` waits for it."""
    n: gl.constexpr = len(acc)
    return [start_part(p, v_pipe.consumer_wait(n * kv_count + i), acc[i]) for i in (0, 1, 2)[:n]]


@gluon.jit
def finish_product(x, newer: gl.constexpr, pipe, count):
    """Wait until only the `newer` products that were started last run; release what it read."""
    x = warpgroup_mma_wait(newer, deps=[x])
    pipe.consumer_release(count)
    return x


@gluon.jit
def finish_scores(s, m_i, k_pipe, kv_count, PARTS: gl.constexpr, newer: gl.constexpr):
    """Wait for S (64, BLOCK_N), after which `newer` products were started."""
    for i in gl.static_range(PARTS - 1):
        # S isn't done, but a part of K is read; a wait has to name some tensor
        finish_product(m_i, PARTS - 1 - i + newer, k_pipe, PARTS * kv_count + i)
    return finish_product(s, newer, k_pipe, PARTS * kv_count + PARTS - 1)


@gluon.jit
def finish_output(acc, v_pipe, kv_count):
    """Wait for acc, in each part of d."""
    n: gl.constexpr = len(acc)
    return [finish_product(acc[i], n - 1 - i, v_pipe, n * kv_count + i) for i in (0, 1, 2)[:n]]


@gluon.jit
def as_operand(p, acc, dtype: gl.constexpr):
    """P in the 16-bit dtype, in registers, as the left operand of P V: no number moves."""
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, acc.type.layout, 2))


@gluon.jit
def skip_parts(pipe, count, PARTS: gl.constexpr):
    for i in gl.static_range(PARTS):
        pipe.consumer_wait(PARTS * count + i)
        pipe.consumer_release(PARTS * count + i)


@gluon.jit
def skip_tiles(k_pipe, v_pipe, kv_count, number, PARTS: gl.constexpr):
    """Wait for and release the first `number` KV tiles: no row of this consumer sees their keys.

    Without the wait, it could arrive twice in one round of a slot's barrier.
    """
    for j in range(number):
        skip_parts(k_pipe, kv_count + j, PARTS)
        skip_parts(v_pipe, kv_count + j, PARTS)


@gluon.jit
def mainloop(
    p, acc, m_i, l_i, q, q_pipe, k_pipe, v_pipe, kv_count, first, end, start_n, visible,
    qk_scale, problem, MASKED: gl.constexpr,
):  # fmt: skip
    """KV tiles `first` to `end`; p (64, BLOCK_N) is that of the tile before `first`.

    Products of a warpgroup end in the order in which they began. With OVERLAP, S of a tile is
    started before P V of the tile before it, so that a wait for all but P V returns when S is done,
    and P V runs beside the softmax of S, as far as ptxas keeps that order (docs/log/hopper.md).
    """
    BLOCK_N: gl.constexpr = k_pipe.tiles.shape[3]
    PARTS: gl.constexpr = len(acc)
    OVERLAP: gl.constexpr = problem.OVERLAP
    SLACK: gl.constexpr = slack(problem.D)
    S: gl.constexpr = visible.type.layout.parent
    for j in range(first, end):
        if PARTS > 1:
            q = queries(q_pipe, unknown_zero(kv_count + j), problem)
        if not OVERLAP:
            acc = start_output(p, acc, v_pipe, kv_count + j - 1)
            acc = finish_output(acc, v_pipe, kv_count + j - 1)
        s = start_scores(q, k_pipe, kv_count + j, S)  # (64, BLOCK_N)
        if OVERLAP:
            acc = start_output(p, acc, v_pipe, kv_count + j - 1)
        s = finish_scores(s, m_i, k_pipe, kv_count + j, PARTS, PARTS if OVERLAP else 0)
        if MASKED:
            s = mask(s, visible - (start_n - j * BLOCK_N))
        p_next, m_i, l_i, alpha = online_softmax(s, m_i, l_i, qk_scale, SLACK)
        # alpha is tile j's: P V of j - 1 is added first
        if OVERLAP:
            acc = finish_output(acc, v_pipe, kv_count + j - 1)
        acc = [rescale_if_needed(x, alpha) if SLACK > 0 else rescale(x, alpha) for x in acc]
        p = as_operand(p_next, acc[0], q[0].dtype)
    return p, acc, m_i, l_i


@gluon.jit
def epilogue(acc, m_i, l_i, visible, rows, b, h, first_row, q_pipe, q_count, common):
    """Divide acc's parts by the row sums, and have them copied out; store lse (64,)."""
    o_desc, lse_ptr, _, _, scheduler, _ = common
    problem = scheduler.problem
    l_i = nan_where_large(whole_row_sums(l_i, visible), m_i)
    if problem.MASKED_TILES > 0:
        l_i = gl.where(visible > 0, l_i, 1.0)  # a row that sees no key: o = 0 / 1
    PARTS: gl.constexpr = len(acc)
    # the output takes the place of q, which is used up; the wait only names it, and returns at once
    for i in gl.static_range(PARTS):
        tile = first_columns(q_pipe.consumer_wait(PARTS * q_count + i), acc[i].shape[1])
        tile.store(rescale(acc[i], 1.0 / l_i).to(o_desc.dtype))
    fence_async_shared()
    barrier()  # among this consumer's four warps
    # the copy engine drops rows past Nq
    for i in gl.static_range(PARTS):
        column = i * o_desc.block_shape[3]
        tile = q_pipe.tiles.index((PARTS * q_count + i) % q_pipe.tiles.shape[0])
        async_store(o_desc, [b, h, first_row, column], tile)
    if problem.LSE:
        lse = gl.where(visible > 0, m_i + gl.log2(l_i), float("-inf"))  # in base 2, as m_i is
        head = (b * problem.H + h).to(gl.int64)
        gl.store(lse_ptr + head * problem.Nq + rows, lse, mask=rows < problem.Nq)


@gluon.jit
def consumer(common, q_pipe, c: gl.constexpr):
    """Warpgroup c: 64 query rows of each work tile, from the scores to the output."""
    o_desc, _lse_ptr, k_pipe, v_pipe, scheduler, qk_scale = common
    problem = scheduler.problem
    MASKED_TILES: gl.constexpr = problem.MASKED_TILES
    BLOCK_N: gl.constexpr = problem.BLOCK_N
    PARTS: gl.constexpr = problem.PARTS
    SLACK: gl.constexpr = slack(problem.D)
    S: gl.constexpr = matrix_layout(BLOCK_N)
    kv_count = 0  # KV tiles so far
    q_count = 0  # work tiles so far
    b, h, start_m, Nk_valid, n_tiles = scheduler.next_work_tile(0)
    while n_tiles > 0:
        start_n = (n_tiles - 1) * BLOCK_N
        first_row = start_m + 64 * c
        rows = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, S))  # (64,)
        visible = problem.visible_keys(rows, Nk_valid)  # (64,)
        skipped = problem.skipped_tiles(first_row, Nk_valid, n_tiles)

        m_i = gl.full([64], LOWEST, gl.float32, gl.SliceLayout(1, S))  # running max of s * qk_scale
        l_i = partial_row_sums(zeros(BLOCK_N))  # (64, 8)
        skip_tiles(k_pipe, v_pipe, kv_count, skipped, PARTS)
        for i in gl.static_range(PARTS):
            q_pipe.consumer_wait(PARTS * q_count + i)
        q = queries(q_pipe, q_count % 2 if PARTS == 1 else unknown_zero(kv_count), problem)
        acc = [zeros(x.shape[1]) for x in q]  # as wide as the parts of Q
        # runs whatever the sizes: ptxas 12.8 miscompiles an empty first loop (docs/hopper.md)
        s = start_scores(q, k_pipe, kv_count + skipped, S)
        if PARTS == 1:
            # the last work tile's output has been copied out: release its slot, the other one
            store_wait(0)
            q_pipe.consumer_release(q_count + 1, pred=q_count > 0)
        s = finish_scores(s, m_i, k_pipe, kv_count + skipped, PARTS, 0)
        if MASKED_TILES > 0:
            from_n = problem.first_key(skipped, n_tiles, Nk_valid)
            if problem.CAUSAL:
                s = mask(s, visible - from_n)
            # keys that the next tile has, too, or that lie before key 0
            overlap = start_n - skipped * BLOCK_N - from_n
            if problem.EDGE:  # noqa: SIM102 - known when compiling, and `and` would not be
                if overlap > 0:
                    s = mask(s, gl.zeros_like(visible) + overlap, BEFORE=True)
        p, m_i, l_i, _ = online_softmax(s, m_i, l_i, qk_scale, SLACK)
        p = as_operand(p, acc[0], o_desc.dtype)
        first = skipped + 1
        if MASKED_TILES == 2:
            second = gl.minimum(first + 1, n_tiles)
            p, acc, m_i, l_i = mainloop(
                p, acc, m_i, l_i, q, q_pipe, k_pipe, v_pipe, kv_count, first, second,
                start_n, visible, qk_scale, problem, True,
            )  # fmt: skip
            first = second
        p, acc, m_i, l_i = mainloop(
            p, acc, m_i, l_i, q, q_pipe, k_pipe, v_pipe, kv_count, first, n_tiles,
            start_n, visible, qk_scale, problem, False,
        )  # fmt: skip
        acc = start_output(p, acc, v_pipe, kv_count + n_tiles - 1)
        acc = finish_output(acc, v_pipe, kv_count + n_tiles - 1)
        epilogue(acc, m_i, l_i, visible, rows, b, h, first_row, q_pipe, q_count, common)
        if PARTS > 1:  # the next queries need all slots
            store_wait(0)
            q_pipe.consumer_release(0)  # all slots share a barrier
        kv_count += n_tiles
        q_count += 1
        b, h, start_m, Nk_valid, n_tiles = scheduler.next_work_tile(q_count)
    store_wait(0)


# else Triton builds again for sizes of 1 and for multiples of 16, to the same code
@gluon.jit(
    do_not_specialize=["H", "group", "Nq", "Nk", "blocks", "heads", "section", "tiles"],
    do_not_specialize_on_alignment=["lse_ptr", "seqlens_ptr", "counter_ptr"],
)
def attention_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, seqlens_ptr, counter_ptr,
    H, group, Nq, Nk, blocks, heads, section, tiles, qk_scale,
    CAUSAL: gl.constexpr, HAS_SEQLENS: gl.constexpr, MASKED_TILES: gl.constexpr, LSE: gl.constexpr,
    CONSUMERS: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr,
    OVERLAP: gl.constexpr, K_SLOTS: gl.constexpr, V_SLOTS: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """Make the pipelines in shared memory; then each warp goes its own way.

    Descriptors have blocks of (1, 1, rows, BLOCK_D). MASKED_TILES, LSE and D: as in Problem.
    """
    PARTS: gl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    problem = Problem(
        seqlens_ptr if HAS_SEQLENS else counter_ptr,  # the counter stands in, and isn't read
        H, group, Nq, Nk, CAUSAL, HAS_SEQLENS,
        # under a causal mask alone, the copy engine loads what is beyond the last key as zeros
        MASKED_TILES > 0 and (HAS_SEQLENS or not CAUSAL),
        MASKED_TILES, LSE, False, 64 * CONSUMERS, BLOCK_N, D, PARTS, OVERLAP,
    )  # fmt: skip
    k_pipe = make_pipeline(k_desc, K_SLOTS, CONSUMERS, K_EMPTY)
    v_pipe = make_pipeline(v_desc, V_SLOTS, CONSUMERS, K_EMPTY + K_SLOTS)
    Q_EMPTY: gl.constexpr = K_EMPTY + K_SLOTS + V_SLOTS
    scheduler = make_scheduler(problem, blocks, heads, section, tiles, CONSUMERS)
    # two work tiles, or the parts of one, which are released together
    Q_SLOTS: gl.constexpr = 2 if PARTS == 1 else PARTS
    RELEASES: gl.constexpr = Q_SLOTS // PARTS
    q0 = make_pipeline(q_desc, Q_SLOTS, 1, Q_EMPTY, PARTS)
    q1 = make_pipeline(q_desc, Q_SLOTS, 1, Q_EMPTY + RELEASES, PARTS) if CONSUMERS > 1 else q0
    q2 = make_pipeline(q_desc, Q_SLOTS, 1, Q_EMPTY + 2 * RELEASES, PARTS) if CONSUMERS > 2 else q1
    fence_async_shared()  # the copy engine arrives at these barriers
    barrier()  # among the kernel's own four warps, before any role begins
    common = (o_desc, lse_ptr, k_pipe, v_pipe, scheduler, qk_scale)
    load = (q_desc, k_desc, v_desc, counter_ptr, (q0, q1, q2), k_pipe, v_pipe, scheduler)
    first, second, third = (common, q0, 0), (common, q1, 1), (common, q2, 2)
    # the first role has the kernel's own warps and the registers left over; then come the others'
    left_out: gl.constexpr = 3 - CONSUMERS
    gl.warp_specialize(
        [(consumer, first), (consumer, second), (consumer, third)][:CONSUMERS] + [(producer, load)],  # noqa: RUF005
        [4, 4, 1][left_out:],
        [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS][left_out:],
    )
    q0.keep_alive()
    q1.keep_alive()
    q2.keep_alive()
    k_pipe.keep_alive()
    v_pipe.keep_alive()
    scheduler.keep_alive()
