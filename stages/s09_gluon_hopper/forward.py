"""The forward kernel of stage 9: a producer loads, consumers compute; __init__.py has the picture.

Read from the end: `attention_kernel` makes the pipelines and starts the roles. `consumer` computes
a work tile after another: it skips the KV tiles that none of its rows sees, and computes the others
from the last one back (`mainloop`). So only the first of them needs a mask; or the first two, where
the diagonal of a consumer's rows crosses the border between them. The output is written over its
queries in shared memory and copied out from there (`epilogue`), so their slot is released one work
tile later.
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

# Numbers of named barriers. K's pipeline has 2 slots, V's 3; Q's 2 for each of up to 3 consumers.
K_EMPTY, V_EMPTY, Q_EMPTY = gl.constexpr(5), gl.constexpr(7), gl.constexpr(10)
LOWEST = gl.constexpr(-3.4028234663852886e38)  # of float32; -inf - -inf would be NaN


@gluon.jit
def producer(q_desc, k_desc, v_desc, counter_ptr, q_pipes, k_pipe, v_pipe, scheduler):
    """The one warp that loads. K runs one tile ahead of V, as the consumers do."""
    problem = scheduler.problem
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
        k_pipe.producer_load(k_desc, [b, h_k, start_n, 0], kv_count)
        for c in gl.static_range(problem.BLOCK_M // 64):
            q_pipes[c].producer_load(q_desc, [b, h, start_m + 64 * c, 0], q_count)
        for j in range(1, n_tiles):
            before, start_n = start_n, problem.first_key(j, n_tiles, Nk_valid)
            k_pipe.producer_load(k_desc, [b, h_k, start_n, 0], kv_count + j)
            v_pipe.producer_load(v_desc, [b, h_k, before, 0], kv_count + j - 1)
        v_pipe.producer_load(v_desc, [b, h_k, start_n, 0], kv_count + n_tiles - 1)
        kv_count += n_tiles
        q_count += 1
        tile = fetched + gl.num_programs(0)
    scheduler.publish((0, 0, 0, 0, 0), q_count)  # no KV tiles: there is no next work tile


@gluon.jit
def mask(s, limit, BEFORE: gl.constexpr = False):
    """Scores (64, BLOCK_N), -inf from each row's `limit`-th column on; if BEFORE, before it.

    Of every 8 columns a thread holds the same 2. They are taken from its rows' limits, once; then
    all that is left to compare with is the number of the 8, which is known when compiling.
    """
    eights = gl.reshape(s, [64, s.shape[1] // 8, 8])
    L: gl.constexpr = eights.type.layout
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    left = gl.convert_layout(limit, gl.SliceLayout(1, gl.SliceLayout(1, L)))
    left = left[:, None] - column[None, :]  # (64, 8)
    first = 8 * gl.arange(0, s.shape[1] // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))
    before = first[None, :, None] < left[:, None, :]
    hidden = float("-inf")
    shown = gl.where(before, hidden, eights) if BEFORE else gl.where(before, eights, hidden)
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
def slack(BLOCK_D):
    """By how much m_i may stay below the running max, in base 2: worth it up to d = 64."""
    return 8.0 if BLOCK_D == 64 else 0.0


@gluon.jit
def online_softmax(s, m_i, l_i, qk_scale, SLACK: gl.constexpr):
    """One step of the online softmax, as in stage 6: p, m_i, l_i and acc's correction.

    m_i may stay below the running max, by SLACK at most: then p is at most 2^SLACK, and acc needs
    a correction less often. The sum that divides the output in the end has the same m_i.
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
    """PTX for n of acc's numbers in a thread, and for each its row's alpha: multiply them.

    Or go past that, where alpha is 1 in all threads of the warp. A thread has numbers of two rows,
    in turn two of each. A branch on a tensor has no other form in Gluon.
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
def registers(n):
    return ",".join(["=f"] * n + ["f"] * 2 * n)


@gluon.jit
def rescale_if_needed(acc, alpha):
    """As `rescale`, but a warp all of whose rows have alpha = 1 multiplies nothing."""
    n: gl.constexpr = acc.shape[1] // 2
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))
    alpha, acc = gl.broadcast(alpha[:, None], acc)
    return gl.inline_asm_elementwise(
        skipping_multiply(n), registers(n), [acc, alpha], gl.float32, False, n
    )


@gluon.jit
def start_scores(q, k, S: gl.constexpr):
    """Start S = Q K^T, (64, BLOCK_N); the caller waits for it."""
    zeros = gl.full([64, k.shape[0]], 0.0, gl.float32, S)
    return warpgroup_mma(q, k.permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def as_operand(p, acc, dtype: gl.constexpr):
    """P in the 16-bit dtype, in registers, as the left operand of P V: no number moves."""
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, acc.type.layout, 2))


@gluon.jit
def skip_tiles(k_pipe, v_pipe, kv_count, number):
    """Release the first `number` KV tiles at once: no row of this consumer sees their keys."""
    for j in range(number):
        k_pipe.consumer_wait(kv_count + j)
        k_pipe.consumer_release(kv_count + j)
        v_pipe.consumer_wait(kv_count + j)
        v_pipe.consumer_release(kv_count + j)


@gluon.jit
def mainloop(
    p, acc, m_i, l_i, q, k_pipe, v_pipe, kv_count, first, end, start_n, visible, qk_scale,
    MASKED: gl.constexpr,
):  # fmt: skip
    """KV tiles `first` to `end`; p (64, BLOCK_N) is that of the tile before `first`.

    S of each tile is started before P V of the tile before it, so the matrix unit has work while
    this consumer computes the softmax.
    """
    BLOCK_N: gl.constexpr = k_pipe.tiles.shape[3]
    SLACK: gl.constexpr = slack(acc.shape[1])
    S: gl.constexpr = visible.type.layout.parent
    for j in range(first, end):
        s = start_scores(q, k_pipe.consumer_wait(kv_count + j), S)  # (64, BLOCK_N)
        acc = warpgroup_mma(p, v_pipe.consumer_wait(kv_count + j - 1), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])  # the older of the two
        k_pipe.consumer_release(kv_count + j)
        if MASKED:
            s = mask(s, visible - (start_n - j * BLOCK_N))
        p_next, m_i, l_i, alpha = online_softmax(s, m_i, l_i, qk_scale, SLACK)
        acc = warpgroup_mma_wait(0, deps=[acc])  # (64, BLOCK_D)
        v_pipe.consumer_release(kv_count + j - 1)
        acc = rescale_if_needed(acc, alpha) if SLACK > 0 else rescale(acc, alpha)
        p = as_operand(p_next, acc, q.dtype)
    return p, acc, m_i, l_i


@gluon.jit
def epilogue(acc, m_i, l_i, visible, rows, b, h, first_row, q_pipe, q_count, common):
    """Divide acc (64, BLOCK_D) by the row sums, and have it copied out; store lse (64,)."""
    o_desc, lse_ptr, _, _, scheduler, _ = common
    problem = scheduler.problem
    l_i = nan_where_large(whole_row_sums(l_i, visible), m_i)
    if problem.MASKED > 0:
        l_i = gl.where(visible > 0, l_i, 1.0)  # a row that sees no key: o = 0 / 1
    # the output takes the place of q, which is used up
    q_pipe.consumer_wait(q_count).store(rescale(acc, 1.0 / l_i).to(o_desc.dtype))
    fence_async_shared()
    barrier()
    # the copy engine drops rows past Nq
    async_store(o_desc, [b, h, first_row, 0], q_pipe.tiles.index(q_count % 2))
    if problem.LSE:
        lse = gl.where(visible > 0, m_i + gl.log2(l_i), float("-inf"))  # in base 2, as m_i is
        head = (b * problem.H + h).to(gl.int64)
        gl.store(lse_ptr + head * problem.Nq + rows, lse, mask=rows < problem.Nq)


@gluon.jit
def consumer(common, q_pipe, c: gl.constexpr):
    """Warpgroup c: 64 query rows of each work tile, from the scores to the output."""
    o_desc, _lse_ptr, k_pipe, v_pipe, scheduler, qk_scale = common
    problem = scheduler.problem
    MASKED: gl.constexpr = problem.MASKED
    BLOCK_N: gl.constexpr = problem.BLOCK_N
    BLOCK_D: gl.constexpr = o_desc.block_shape[3]
    SLACK: gl.constexpr = slack(BLOCK_D)
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
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
        l_i = partial_row_sums(gl.zeros([64, BLOCK_N], gl.float32, S))  # (64, 8)
        acc = gl.zeros([64, BLOCK_D], gl.float32, A)
        skip_tiles(k_pipe, v_pipe, kv_count, skipped)
        q = q_pipe.consumer_wait(q_count)  # (64, BLOCK_D)
        # The first products run in either case, whatever the sizes: where the first of two loops
        # with products may have no iteration, ptxas 12.8 omits what they share from the second
        s = start_scores(q, k_pipe.consumer_wait(kv_count + skipped), S)
        store_wait(0)  # the last work tile's output has been copied out: release its slot, which is
        q_pipe.consumer_release(q_count + 1, pred=q_count > 0)  # the other one of two
        s = warpgroup_mma_wait(0, deps=[s])
        k_pipe.consumer_release(kv_count + skipped)
        if MASKED > 0:
            from_n = problem.first_key(skipped, n_tiles, Nk_valid)
            if problem.CAUSAL:
                s = mask(s, visible - from_n)
            shared = start_n - skipped * BLOCK_N - from_n  # keys that the next tile has, too
            if problem.EDGE:  # noqa: SIM102 - known when compiling, and `and` would not be
                if shared > 0:
                    s = mask(s, gl.zeros_like(visible) + shared, BEFORE=True)
        p, m_i, l_i, _ = online_softmax(s, m_i, l_i, qk_scale, SLACK)
        p = as_operand(p, acc, o_desc.dtype)
        first = skipped + 1
        if MASKED == 2:
            second = gl.minimum(first + 1, n_tiles)
            p, acc, m_i, l_i = mainloop(
                p, acc, m_i, l_i, q, k_pipe, v_pipe, kv_count, first, second,
                start_n, visible, qk_scale, True,
            )  # fmt: skip
            first = second
        p, acc, m_i, l_i = mainloop(
            p, acc, m_i, l_i, q, k_pipe, v_pipe, kv_count, first, n_tiles,
            start_n, visible, qk_scale, False,
        )  # fmt: skip
        acc = warpgroup_mma(p, v_pipe.consumer_wait(kv_count + n_tiles - 1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        v_pipe.consumer_release(kv_count + n_tiles - 1)
        epilogue(acc, m_i, l_i, visible, rows, b, h, first_row, q_pipe, q_count, common)
        kv_count += n_tiles
        q_count += 1
        b, h, start_m, Nk_valid, n_tiles = scheduler.next_work_tile(q_count)
    store_wait(0)


# a build for sizes of 1 and one for multiples of 16 would be the same code
@gluon.jit(
    do_not_specialize=["H", "group", "Nq", "Nk", "blocks", "heads", "section", "tiles"],
    do_not_specialize_on_alignment=["lse_ptr", "seqlens_ptr", "counter_ptr"],
)
def attention_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, seqlens_ptr, counter_ptr,
    H, group, Nq, Nk, blocks, heads, section, tiles, qk_scale,
    CAUSAL: gl.constexpr, HAS_SEQLENS: gl.constexpr, MASKED: gl.constexpr, LSE: gl.constexpr,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """Make the pipelines in shared memory; then each warp goes its own way.

    Descriptors have blocks of (1, 1, rows, BLOCK_D). MASKED: how many of the KV tiles that a
    consumer computes may need a mask, 0, 1 or 2. LSE: whether lse is wanted.
    """
    problem = Problem(
        seqlens_ptr if HAS_SEQLENS else counter_ptr, H, group, Nq, Nk, CAUSAL, HAS_SEQLENS,
        # under a causal mask alone, the copy engine loads what is beyond the last key as zeros
        MASKED > 0 and (HAS_SEQLENS or not CAUSAL), MASKED, LSE, False, 64 * CONSUMERS, BLOCK_N,
    )  # fmt: skip
    # at d = 128 no other slot fits, and the third one helps V more than it would help K
    k_pipe = make_pipeline(k_desc, 2, CONSUMERS, K_EMPTY)
    v_pipe = make_pipeline(v_desc, 3, CONSUMERS, V_EMPTY)
    scheduler = make_scheduler(problem, blocks, heads, section, tiles, CONSUMERS)
    q0 = make_pipeline(q_desc, 2, 1, Q_EMPTY)
    q1 = make_pipeline(q_desc, 2, 1, Q_EMPTY + 2) if CONSUMERS > 1 else q0
    q2 = make_pipeline(q_desc, 2, 1, Q_EMPTY + 4) if CONSUMERS > 2 else q1
    fence_async_shared()  # the copy engine arrives at these barriers
    barrier()
    common = (o_desc, lse_ptr, k_pipe, v_pipe, scheduler, qk_scale)
    load = (q_desc, k_desc, v_desc, counter_ptr, (q0, q1, q2), k_pipe, v_pipe, scheduler)
    first, second, third = (common, q0, 0), (common, q1, 1), (common, q2, 2)
    # the first role has the kernel's own four warps; then warps and registers of the others
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
