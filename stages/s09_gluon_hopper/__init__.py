"""Stage 9, Gluon on Hopper: loads, matrix products and softmax at the same time.

    one CTA stays on each multiprocessor (or three do) and takes tiles of query rows, one by one
    producer    1 warp: has the copy engine (TMA) bring tiles of Q, K and V
    consumers   1 to 3 warpgroups, 64 query rows each: products, softmax, the output

    time ->
    producer    K0 Q K1 V0 K2 V1 K3 V2 ...     as far ahead as the rings have free slots
    consumer 0     |S0=Q K0|    |S1=Q K1|O+=P0 V0|    |S2=Q K2|O+=P1 V1|    ...   matrix unit
                           | P0 |       |     P1      |       |     P2      |     softmax of S
    consumer 1  the same for the next 64 rows: its products run during consumer 0's softmax

    Q, K, V     rings of slots in shared memory (pipeline.py)
                full:  consumers wait until the copy engine has written a tile
                empty: the producer waits until every consumer's products have read it
    board       full:  consumers wait for the producer to say which tile is next
                empty: the producer waits until all have read that

The output is written over its queries and copied out from there; the slot is given back a tile
later. A consumer skips the KV tiles that none of its rows sees and walks the others from the last
one back, so that only the first needs a mask, or the first two, where its part of the diagonal
crosses the border between them.

The backward pass is divided among roles, too (backward.py; gradients.py
launches it): five products in one pass over the keys, where stage 7 has seven in two.

Cost: stage 6's FLOPs and bytes, d padded to 64 or 128 on the chip; in the backward pass 10 d FLOPs
per visible pair and head, and dQ's sums in float32. Copied once per call: tensors that the copy
engine can't describe (launch.py), and the output where d is no multiple of 8. float32
and d > 128 go to the kernels of stages 6 and 7.
What it bought: loads and softmax run during the products (docs/hopper.md). After FlashAttention-3,
Shah et al. 2024, https://arxiv.org/abs/2407.08608, sections 3.1 and 3.2.
Still hurts: one GPU is all it uses.
"""

import functools
from typing import NamedTuple

import torch

from stages.common import operators
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
from stages.common.inputs import autocast
from stages.common.kernels import LOG2_E
from stages.contract import Stage, transformed
from stages.s06_triton_flash2 import forward as flash2_forward
from stages.s07_triton_training import Attention
from stages.s09_gluon_hopper import gradients as hopper_gradients
from stages.s09_gluon_hopper.launch import (
    MOST_KEPT,
    Launch,
    checks,
    counter_of,
    described,
    multiprocessors,
    padded,
)
from stages.s09_gluon_hopper.pipeline import make_board, make_ring
from stages.s09_gluon_hopper.schedule import Problem

STAGE = Stage(
    number=9,
    name="gluon_hopper",
    title="Gluon on Hopper",
    idea="loads, products and softmax at the same time",
    still_hurts="one GPU is all it uses",
    needs=("triton", "gluon", "cuda"),
    only_major=9,
    devices=("cuda",),
    dtypes=("float16", "bfloat16", "float32"),
    options=("causal", "seqlens_k", "gqa"),
    gradients=True,
    files=("first.py", "schedule.py", "pipeline.py", "launch.py", "backward.py", "gradients.py"),
)

L2_BYTES = 32 << 20  # the most that K and V of the heads computed at the same time may take


@gluon.jit
def producer(q_desc, k_desc, v_desc, counter_ptr, q_rings, k_ring, v_ring, board, problem):
    """The one warp that loads. K runs one tile ahead of V, as the consumers do."""
    use = 0  # KV tiles so far: says slot and phase of the rings
    turn = 0  # query tiles so far
    tile = gl.program_id(0)
    while tile < problem.tiles:
        # asked for one tile early, while there is time; each CTA fetches once per tile, all
        # together `tiles` times, so that the last fetch can set the counter back
        fetched = gl.atomic_add(counter_ptr, 1)
        gl.store(counter_ptr, 0, mask=fetched == problem.tiles - 1)
        b, h, start_m = problem.place(tile)
        Nk_valid, steps = problem.keys(b, start_m)
        board.post((b, h, start_m, Nk_valid, steps), turn)
        h_k = h // problem.group
        start_n = problem.start(0, steps, Nk_valid)
        k_ring.fill(k_desc, [b, h_k, start_n, 0], use)
        for c in gl.static_range(problem.BLOCK_M // 64):
            q_rings[c].fill(q_desc, [b, h, start_m + 64 * c, 0], turn)
        for j in range(1, steps):
            earlier, start_n = start_n, problem.start(j, steps, Nk_valid)
            k_ring.fill(k_desc, [b, h_k, start_n, 0], use + j)
            v_ring.fill(v_desc, [b, h_k, earlier, 0], use + j - 1)
        v_ring.fill(v_desc, [b, h_k, start_n, 0], use + steps - 1)
        use += steps
        turn += 1
        tile = fetched + gl.num_programs(0)
    board.post((0, 0, 0, 0, 0), turn)  # no steps: there is no next one


@gluon.jit
def hide(s, limit, FIRST: gl.constexpr = False):
    """Scores (64, BLOCK_N), -inf from each row's `limit`-th column on; if FIRST, up to there.

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
    shown = gl.where(before, hidden, eights) if FIRST else gl.where(before, eights, hidden)
    return gl.convert_layout(gl.reshape(shown, [64, s.shape[1]]), s.type.layout)


@gluon.jit
def row_sums(p):
    """Sum p (64, BLOCK_N) -> (64, 8): what each thread holds of a row; 4 threads share one.

    Summing whole rows would exchange numbers between threads at every tile; this way they do so
    only once, at the end.
    """
    return gl.sum(gl.reshape(p, [64, p.shape[1] // 8, 8]), 1)


@gluon.jit
def across(l_i, seen):
    """The whole rows' sums (64,) of what `row_sums` left apart, laid out as `seen`."""
    return gl.convert_layout(gl.sum(l_i, 1), seen.type.layout)


@gluon.jit
def nan_where_large(l_i, m_i):
    """The row sums l_i, NaN where a multiply-add can't hold the row's scores, as in stage 6."""
    return gl.where(gl.abs(m_i) <= 67108864.0, l_i, float("nan"))


@gluon.constexpr_function
def slack(BLOCK_D):
    """By how much m_i may stay below the running max, in base 2: worth it up to d = 64."""
    return 8.0 if BLOCK_D == 64 else 0.0


@gluon.jit
def exponentiate(s, m_i, l_i, qk_scale, SLACK: gl.constexpr):
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
    sums = row_sums(p)  # (64, 8)
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
def hand_over(q_ring, turn):
    """Give back the slot of the previous query tile: its output has been copied out by now."""
    store_wait(0)
    q_ring.give_back(turn + 1, pred=turn > 0)  # of two slots, turn + 1 has that of turn - 1


@gluon.jit
def skip(k_ring, v_ring, use, last):
    """The first `last` KV tiles: no row of this consumer sees any of their keys."""
    for j in range(last):
        k_ring.take(use + j)
        k_ring.give_back(use + j)
        v_ring.take(use + j)
        v_ring.give_back(use + j)


@gluon.jit
def walk(
    p, acc, m_i, l_i, q, k_ring, v_ring, use, first, last, start_n, seen, qk_scale,
    MASKED: gl.constexpr,
):  # fmt: skip
    """The KV tiles `first` to `last`: S of each is begun before P V of the one before it, of p."""
    BLOCK_N: gl.constexpr = k_ring.tiles.shape[3]
    SLACK: gl.constexpr = slack(acc.shape[1])
    for j in range(first, last):
        s = scores(q, k_ring.take(use + j), seen)  # (64, BLOCK_N)
        acc = warpgroup_mma(p, v_ring.take(use + j - 1), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])  # the older of the two
        k_ring.give_back(use + j)
        if MASKED:
            s = hide(s, seen - (start_n - j * BLOCK_N))
        p_next, m_i, l_i, alpha = exponentiate(s, m_i, l_i, qk_scale, SLACK)
        acc = warpgroup_mma_wait(0, deps=[acc])
        v_ring.give_back(use + j - 1)
        acc = rescale_if_needed(acc, alpha) if SLACK > 0 else rescale(acc, alpha)
        p = as_operand(p_next, acc, q.dtype)
    return p, acc, m_i, l_i


@gluon.jit
def consumer(common, q_ring, c: gl.constexpr):
    """Warpgroup c: 64 query rows of each tile, from the scores to the output."""
    o_desc, lse_ptr, k_ring, v_ring, board, problem, qk_scale = common
    MASKED: gl.constexpr = problem.MASKED
    BLOCK_N: gl.constexpr = problem.BLOCK_N
    BLOCK_D: gl.constexpr = o_desc.block_shape[3]
    SLACK: gl.constexpr = slack(BLOCK_D)
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    Nq = problem.Nq
    use = 0  # KV tiles so far: says slot and phase of the rings
    turn = 0  # query tiles so far
    b, h, start_m, Nk_valid, steps = board.read(0)
    while steps > 0:
        start_n = (steps - 1) * BLOCK_N
        first_row = start_m + 64 * c
        rows = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, S))  # (64,)
        seen = problem.seen(rows, Nk_valid)  # (64,)
        skipped = problem.hidden(first_row, Nk_valid, steps)

        # running max of s * qk_scale: the lowest float32, where -inf - -inf would be NaN
        m_i = gl.full([64], -3.4028234663852886e38, gl.float32, gl.SliceLayout(1, S))
        l_i = row_sums(gl.zeros([64, BLOCK_N], gl.float32, S))  # (64, 8)
        acc = gl.zeros([64, BLOCK_D], gl.float32, A)
        skip(k_ring, v_ring, use, skipped)
        q = q_ring.take(turn)
        # The first products run in either case, whatever the sizes: where the first of two loops
        # with products may have no iteration, ptxas 12.8 omits what they share from the second
        s = scores(q, k_ring.take(use + skipped), seen)
        hand_over(q_ring, turn)
        s = warpgroup_mma_wait(0, deps=[s])
        k_ring.give_back(use + skipped)
        if MASKED > 0:
            from_n = problem.start(skipped, steps, Nk_valid)
            if problem.CAUSAL:
                s = hide(s, seen - from_n)
            earlier = start_n - skipped * BLOCK_N - from_n  # keys that the next tile has, too
            if problem.SHIFTED:  # noqa: SIM102 - known when compiling, and `and` would not be
                if earlier > 0:
                    s = hide(s, gl.zeros_like(seen) + earlier, True)
        p, m_i, l_i, _ = exponentiate(s, m_i, l_i, qk_scale, SLACK)
        p = as_operand(p, acc, o_desc.dtype)
        first = skipped + 1
        if MASKED == 2:
            second = gl.minimum(first + 1, steps)
            p, acc, m_i, l_i = walk(
                p, acc, m_i, l_i, q, k_ring, v_ring, use, first, second,
                start_n, seen, qk_scale, True,
            )  # fmt: skip
            first = second
        p, acc, m_i, l_i = walk(
            p, acc, m_i, l_i, q, k_ring, v_ring, use, first, steps,
            start_n, seen, qk_scale, False,
        )  # fmt: skip
        acc = warpgroup_mma(p, v_ring.take(use + steps - 1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        v_ring.give_back(use + steps - 1)

        l_i = nan_where_large(across(l_i, seen), m_i)
        if MASKED > 0:
            l_i = gl.where(seen > 0, l_i, 1.0)  # a row that sees no key: o = 0 / 1
        # the output takes the place of q, which is used up
        q_ring.take(turn).store(rescale(acc, 1.0 / l_i).to(o_desc.dtype))
        fence_async_shared()
        barrier()
        # the copy engine drops rows past Nq
        async_store(o_desc, [b, h, first_row, 0], q_ring.tiles.index(turn % 2))
        if problem.LSE:
            lse = gl.where(seen > 0, m_i + gl.log2(l_i), float("-inf"))  # in base 2, as m_i is
            head = (b * problem.H + h).to(gl.int64)
            gl.store(lse_ptr + head * Nq + rows, lse, mask=rows < Nq)

        use += steps
        turn += 1
        b, h, start_m, Nk_valid, steps = board.read(turn)
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
    """All roles' shared memory and barriers; then each warp goes its own way.

    Descriptors have blocks of (1, 1, rows, BLOCK_D). MASKED: 0 no KV tile needs a mask, 1 the first
    one that a consumer walks may, 2 the first two may.
    """
    problem = Problem(
        seqlens_ptr if HAS_SEQLENS else counter_ptr, H, group, Nq, Nk, blocks, heads, section,
        tiles, CAUSAL, HAS_SEQLENS, MASKED, LSE, 64 * CONSUMERS, BLOCK_N,
    )  # fmt: skip
    # the last number: of a ring's first named barrier. At d = 128 no other slot fits, and the third
    # one helps V more than it would help K
    k_ring = make_ring(k_desc, 2, CONSUMERS, 5)
    v_ring = make_ring(v_desc, 3, CONSUMERS, 7)
    board = make_board(CONSUMERS)
    q0 = make_ring(q_desc, 2, 1, 10)
    q1 = q0
    if CONSUMERS > 1:
        q1 = make_ring(q_desc, 2, 1, 12)
    q2 = q1
    if CONSUMERS > 2:
        q2 = make_ring(q_desc, 2, 1, 14)
    fence_async_shared()  # the copy engine arrives at these barriers
    barrier()
    common = (o_desc, lse_ptr, k_ring, v_ring, board, problem, qk_scale)
    load = (q_desc, k_desc, v_desc, counter_ptr, (q0, q1, q2), k_ring, v_ring, board, problem)
    first, second, third = (common, q0, 0), (common, q1, 1), (common, q2, 2)
    # the first has the kernel's own four warps; then warps and registers of the others
    C: gl.constexpr = CONSUMER_REGS
    P: gl.constexpr = PRODUCER_REGS
    if CONSUMERS == 1:
        gl.warp_specialize([(consumer, first), (producer, load)], [1], [P])
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [(consumer, first), (consumer, second), (producer, load)], [4, 1], [C, P]
        )
    else:
        gl.warp_specialize(
            [(consumer, first), (consumer, second), (consumer, third), (producer, load)],
            [4, 4, 1], [C, C, P],
        )  # fmt: skip
    # scratch memory may overlay what looks dead, such as a barrier that is no longer named
    q0.keep_alive()
    q1.keep_alive()
    q2.keep_alive()
    k_ring.keep_alive()
    v_ring.keep_alive()
    board.keep_alive()


class Config(NamedTuple):
    """How the roles share a multiprocessor: it has 64K registers and 227 KB of shared memory.

    In the order of the kernel's last arguments, but for the last two.
    """

    CONSUMERS: int = 2
    BLOCK_N: int = 128
    CONSUMER_REGS: int = 240
    PRODUCER_REGS: int = 24
    ctas: int = 1
    maxnreg: int | None = None


TWO_CONSUMERS = Config()
THREE_CONSUMERS = Config(CONSUMERS=3, CONSUMER_REGS=160, PRODUCER_REGS=32)
# three CTAs to a multiprocessor: one begins or ends a query tile while the others are amid theirs
THREE_CTAS = Config(CONSUMERS=1, BLOCK_N=64, CONSUMER_REGS=136, ctas=3, maxnreg=80)


def plan(d: int, causal: bool, Nk: int) -> Config:
    """Choose one of these for a problem: the best found on an H200.

    Three consumers' accumulators fit the registers up to d = 64. Where a causal mask leaves few
    keys, more of the time goes to the beginning and the end of a query tile.
    """
    if d > 64:
        return TWO_CONSUMERS
    return THREE_CTAS if causal and Nk <= 1024 else THREE_CONSUMERS


@functools.lru_cache(maxsize=MOST_KEPT)
def prepare(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    causal: bool,
    has_seqlens: bool,
    has_lse: bool,
    config: Config,
) -> tuple[Launch, int, int] | None:
    """Return a kind of problem's launch, BLOCK_N and BLOCK_D; None for what this file can't do."""
    B, H, Nq, d = q_shape
    Hk, Nk = k_shape[1:3]
    BLOCK_M, BLOCK_N = 64 * config.CONSUMERS, config.BLOCK_N
    blocks = -(-Nq // BLOCK_M)
    tiles = B * H * blocks
    # tiles and keys are counted in int32
    if dtype == torch.float32 or d > 128 or max(tiles * config.CONSUMERS, Nq, Nk) >= 1 << 30:
        return None
    # the blocks of a head are neighbours, and read the same K and V; under a causal mask those of
    # several heads, so that the longest of them come first
    section = min(H // Hk * (max(1, L2_BYTES // (4 * Nk * d)) if causal else 1), B * H)
    masked = int(causal or has_seqlens or Nk % BLOCK_N != 0)
    if causal and (Nk - Nq) % 64:
        masked = 2  # the diagonal of a consumer's 64 rows may cross the border of two KV tiles
    sizes = (H, H // Hk, Nq, Nk, blocks, B * H, section, tiles, d**-0.5 * LOG2_E)
    switches = (causal, has_seqlens, masked, has_lse, *config[:-2])
    grid = min(config.ctas * multiprocessors(device), tiles)
    options = {"num_warps": 4, "maxnreg": config.maxnreg}
    launch = Launch(attention_kernel, grid, sizes, switches, **options)
    return launch, BLOCK_N, 64 if d <= 64 else 128


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    seqlens_k: torch.Tensor | None,
    lse: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Compute the output for checked arguments; `lse` is filled if given.

    lse (B, H, Nq) float32 is in base 2, as stage 6's.
    """
    has_seqlens, has_lse = seqlens_k is not None, lse is not None
    config = config or plan(q.shape[3], causal, k.shape[2])
    found = prepare(q.shape, k.shape, q.dtype, q.device, causal, has_seqlens, has_lse, config)
    if found is None:
        return flash2_forward(q, k, v, causal, seqlens_k, lse=lse)
    launch, BLOCK_N, BLOCK_D = found
    q, q_desc = described(q, 64, BLOCK_D)
    k, k_desc = described(k, BLOCK_N, BLOCK_D)
    v, v_desc = described(v, BLOCK_N, BLOCK_D)
    o, o_desc = described(padded(q.shape, like=q), 64, BLOCK_D)
    if seqlens_k is not None:
        seqlens_k = seqlens_k.contiguous()  # the kernel takes no stride for it
    with torch.cuda.device_of(q):  # Triton launches on the current GPU
        launch(q_desc, k_desc, v_desc, o_desc, lse, seqlens_k, counter_of(q.device))
    return o.contiguous()


def forward_with_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    seqlens_k: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the output for checked arguments, and lse (B, H, Nq) float32 in base 2."""
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    return forward(q, k, v, causal, seqlens_k, lse=lse), lse


PASSES = operators.Passes(STAGE, forward_with_lse, hopper_gradients.backward)
check = checks(STAGE)


@operators.register(PASSES)
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
    that sees no key is 0, and so is its gradient. The last bits of q's gradient may differ from run
    to run, unless torch.use_deterministic_algorithms(True) asks for the same ones
    (gradients.py). Raises ValueError on input that breaks the contract
    (stages/contract.py), StageUnavailable where there is no such GPU or no Gluon, RuntimeError when
    it is differentiated twice.
    """
    q, k, v = autocast(q, k, v)
    check(q, k, v, causal, seqlens_k)
    wanted = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if wanted or any(map(transformed, (q, k, v))):
        return Attention.apply(PASSES, q, k, v, causal, seqlens_k)
    return forward(q, k, v, causal, seqlens_k)
