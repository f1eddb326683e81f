"""Stage 9, Gluon on Hopper."""

import math

import torch

from stages.contract import Stage
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

LOG2_E = math.log2(math.e)


@aggregate
class Ring:
    """Tiles in shared memory that the producer fills and consumers empty, slot after slot."""

    tiles: gl.shared_memory_descriptor  # (slots, 1, 1, rows, BLOCK_D)
    full: gl.shared_memory_descriptor  # a slot's data has come: the consumers wait
    empty: gl.shared_memory_descriptor  # a slot's data is used up: the producer waits

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty):
        self.tiles = tiles
        self.full = full
        self.empty = empty

    @gluon.jit
    def fill(self, desc, coordinates, use):
        slots: gl.constexpr = self.tiles.shape[0]
        slot = use % slots
        mbarrier.wait(self.empty.index(slot), (use // slots + 1) & 1)
        mbarrier.expect(self.full.index(slot), desc.block_type.nbytes)
        async_load(desc, coordinates, self.full.index(slot), self.tiles.index(slot))

    @gluon.jit
    def take(self, use):
        slots: gl.constexpr = self.tiles.shape[0]
        rows: gl.constexpr = self.tiles.shape[3]
        columns: gl.constexpr = self.tiles.shape[4]
        slot = use % slots
        mbarrier.wait(self.full.index(slot), (use // slots) & 1)
        return self.tiles.index(slot).reshape([rows, columns])

    @gluon.jit
    def give_back(self, use):
        slots: gl.constexpr = self.tiles.shape[0]
        mbarrier.arrive(self.empty.index(use % slots))

    @gluon.jit
    def keep_alive(self):
        self.full._keep_alive()
        self.empty._keep_alive()


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


@gluon.jit
def ring(desc, slots: gl.constexpr, consumers: gl.constexpr):
    shape: gl.constexpr = [slots, 1, 1, desc.block_shape[2], desc.block_shape[3]]
    tiles = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
    return Ring(tiles, barriers(slots, 1), barriers(slots, consumers))


@aggregate
class Board:
    """Where the producer posts which tile comes next: a ring of two numbers."""

    numbers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, numbers, full, empty):
        self.numbers = numbers
        self.full = full
        self.empty = empty

    @gluon.jit
    def post(self, number, turn):
        slot = turn % 2
        mbarrier.wait(self.empty.index(slot), (turn // 2 + 1) & 1)
        one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        self.numbers.index(slot).store(gl.full([1], number, gl.int32, one))
        barrier()
        mbarrier.arrive(self.full.index(slot))

    @gluon.jit
    def read(self, turn):
        slot = turn % 2
        mbarrier.wait(self.full.index(slot), (turn // 2) & 1)
        one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        number = gl.sum(self.numbers.index(slot).load(one), 0)
        mbarrier.arrive(self.empty.index(slot))
        return number

    @gluon.jit
    def keep_alive(self):
        self.full._keep_alive()
        self.empty._keep_alive()


@gluon.jit
def board(consumers: gl.constexpr):
    numbers = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Board(numbers, barriers(2, 1), barriers(2, consumers))


@aggregate
class Problem:
    """Sizes and switches, the same for all roles."""

    seqlens_ptr: gl.tensor
    H: gl.tensor
    group: gl.tensor
    Nq: gl.tensor
    Nk: gl.tensor
    blocks: gl.tensor
    heads: gl.tensor
    section: gl.tensor
    tiles: gl.tensor
    CAUSAL: gl.constexpr
    HAS_SEQLENS: gl.constexpr
    MASKED: gl.constexpr
    DYNAMIC: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, seqlens_ptr, H, group, Nq, Nk, blocks, heads, section, tiles,
        CAUSAL, HAS_SEQLENS, MASKED, DYNAMIC, BLOCK_M, BLOCK_N,
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
        self.MASKED = gl.constexpr(MASKED)
        self.DYNAMIC = gl.constexpr(DYNAMIC)
        self.BLOCK_M = gl.constexpr(BLOCK_M)
        self.BLOCK_N = gl.constexpr(BLOCK_N)

    @gluon.jit
    def place(self, tile):
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
        # at least one, so that rows that see no key are computed like any other, and come out as 0
        steps = gl.maximum(gl.cdiv(end, self.BLOCK_N), 1)
        return b, h, start_m, Nk_valid, steps


@gluon.jit
def producer(q_desc, k_desc, v_desc, counter_ptr, q_rings, k_ring, v_ring, tile_board, problem):
    use = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < problem.tiles:
        following = tile + gl.num_programs(0)
        if problem.DYNAMIC:
            fetched = gl.atomic_add(counter_ptr, 1)
            gl.store(counter_ptr, 0, mask=fetched == problem.tiles - 1)
            following = fetched + gl.num_programs(0)
            tile_board.post(following, turn)
        b, h, start_m, Nk_valid, steps = problem.place(tile)
        h_k = h // problem.group
        for c in gl.static_range(len(q_rings)):
            q_rings[c].fill(q_desc, [b, h, start_m + 64 * c, 0], turn)
        k_ring.fill(k_desc, [b, h_k, (steps - 1) * problem.BLOCK_N, 0], use)
        for j in range(1, steps):
            k_ring.fill(k_desc, [b, h_k, (steps - 1 - j) * problem.BLOCK_N, 0], use + j)
            v_ring.fill(v_desc, [b, h_k, (steps - j) * problem.BLOCK_N, 0], use + j - 1)
        v_ring.fill(v_desc, [b, h_k, 0, 0], use + steps - 1)
        use += steps
        turn += 1
        tile = following


@gluon.jit
def hide(s, start_n, limit, BLOCK_N: gl.constexpr):
    cols = start_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, s.type.layout))
    return gl.where(cols[None, :] < limit[:, None], s, float("-inf"))


@gluon.jit
def row_sums(p, BLOCK_N: gl.constexpr):
    return gl.sum(gl.reshape(p, [64, BLOCK_N // 8, 8]), 1)


@gluon.jit
def exponentiate(s, m_i, l_i, qk_scale, MASKED: gl.constexpr, BLOCK_N: gl.constexpr):
    m_new = gl.maximum(m_i, gl.max(s, 1) * qk_scale)
    m_safe = m_new
    if MASKED:
        m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = gl.exp2(m_i - m_safe)
    p = gl.exp2(s * qk_scale - m_safe[:, None])
    sums = row_sums(p, BLOCK_N)
    l_i = l_i * gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout))[:, None] + sums
    return p, m_new, l_i, alpha


@gluon.jit
def rescale(acc, alpha):
    return acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]


@gluon.jit
def walk_overlapped(
    p, acc, m_i, l_i, q, k_ring, v_ring, use, first, last, steps, limit, qk_scale,
    MASKED: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    S: gl.constexpr = limit.type.layout.parent
    zeros = gl.zeros([64, BLOCK_N], gl.float32, S)
    for j in range(first, last):
        k = k_ring.take(use + j)
        s = warpgroup_mma(q, k.permute([1, 0]), zeros, use_acc=False, is_async=True)
        v = v_ring.take(use + j - 1)
        acc = warpgroup_mma(p, v, acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        k_ring.give_back(use + j)
        if MASKED:
            s = hide(s, (steps - 1 - j) * BLOCK_N, limit, BLOCK_N)
        p_next, m_i, l_i, alpha = exponentiate(s, m_i, l_i, qk_scale, MASKED, BLOCK_N)
        acc = warpgroup_mma_wait(0, deps=[acc])
        v_ring.give_back(use + j - 1)
        acc = rescale(acc, alpha)
        p = gl.convert_layout(p_next.to(q.dtype), p.type.layout)
    return p, acc, m_i, l_i


@gluon.jit
def walk_in_turn(
    acc, m_i, l_i, q, k_ring, v_ring, use, first, last, steps, limit, qk_scale,
    MASKED: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    S: gl.constexpr = limit.type.layout.parent
    zeros = gl.zeros([64, BLOCK_N], gl.float32, S)
    for j in range(first, last):
        k = k_ring.take(use + j)
        s = warpgroup_mma(q, k.permute([1, 0]), zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        k_ring.give_back(use + j)
        if MASKED:
            s = hide(s, (steps - 1 - j) * BLOCK_N, limit, BLOCK_N)
        p, m_i, l_i, alpha = exponentiate(s, m_i, l_i, qk_scale, MASKED, BLOCK_N)
        acc = rescale(acc, alpha)
        p = gl.convert_layout(p.to(q.dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
        v = v_ring.take(use + j)
        acc = warpgroup_mma(p, v, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        v_ring.give_back(use + j)
    return acc, m_i, l_i


@gluon.jit
def clear_hidden_values(v, start_n, Nk_valid, BLOCK_N: gl.constexpr):
    """Zero the rows of `v` from Nk_valid on."""
    ROWS: gl.constexpr = 32
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for i in gl.static_range(BLOCK_N // ROWS):
        part = v.slice(i * ROWS, ROWS, 0)
        keys = start_n + i * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
        values = part.load(L)
        part.store(gl.where((keys < Nk_valid)[:, None], values, 0.0).to(v.dtype))
    fence_async_shared()
    barrier()


@gluon.jit
def consumer(
    o_desc, lse_ptr, q_ring, k_ring, v_ring, o_smem, tile_board, problem, qk_scale,
    c: gl.constexpr, LSE: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = problem.BLOCK_N
    BLOCK_D: gl.constexpr = o_desc.block_shape[3]
    MASKED: gl.constexpr = problem.MASKED
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    dtype: gl.constexpr = o_desc.dtype
    Nq, shift = problem.Nq, problem.Nk - problem.Nq
    use = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < problem.tiles:
        b, h, start_m, Nk_valid, steps = problem.place(tile)
        start_m += 64 * c
        rows = start_m + gl.arange(0, 64, layout=gl.SliceLayout(1, S))
        limit = gl.full([64], 0, gl.int32, gl.SliceLayout(1, S)) + Nk_valid
        full = Nk_valid
        if problem.CAUSAL:
            limit = gl.minimum(limit, rows + (shift + 1))
            full = gl.maximum(gl.minimum(full, start_m + shift + 1), 0)
        masked = steps - gl.minimum(full // BLOCK_N, steps)
        m_i = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, S))
        zeros = gl.zeros([64, BLOCK_N], gl.float32, S)
        l_i = row_sums(zeros, BLOCK_N)
        acc = gl.zeros([64, BLOCK_D], gl.float32, A)
        if problem.HAS_SEQLENS:
            if steps * BLOCK_N > Nk_valid:
                v = v_ring.take(use)
                clear_hidden_values(v, (steps - 1) * BLOCK_N, Nk_valid, BLOCK_N)
        q = q_ring.take(turn)
        if OVERLAP:
            k = k_ring.take(use)
            s = warpgroup_mma(q, k.permute([1, 0]), zeros, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            k_ring.give_back(use)
            if MASKED > 0:
                s = hide(s, (steps - 1) * BLOCK_N, limit, BLOCK_N)
            p, m_i, l_i, alpha = exponentiate(s, m_i, l_i, qk_scale, MASKED > 0, BLOCK_N)
            p = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, A, 2))
            start = 1
            if MASKED > 1:
                p, acc, m_i, l_i = walk_overlapped(
                    p, acc, m_i, l_i, q, k_ring, v_ring, use, 1, masked, steps, limit, qk_scale,
                    True, BLOCK_N,
                )  # fmt: skip
                start = gl.maximum(masked, 1)
            p, acc, m_i, l_i = walk_overlapped(
                p, acc, m_i, l_i, q, k_ring, v_ring, use, start, steps, steps, limit, qk_scale,
                False, BLOCK_N,
            )  # fmt: skip
            q_ring.give_back(turn)
            v = v_ring.take(use + steps - 1)
            acc = warpgroup_mma(p, v, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            v_ring.give_back(use + steps - 1)
        else:
            start = 0
            if MASKED > 0:
                acc, m_i, l_i = walk_in_turn(
                    acc, m_i, l_i, q, k_ring, v_ring, use, 0, masked, steps, limit, qk_scale,
                    True, BLOCK_N,
                )  # fmt: skip
                start = masked
            acc, m_i, l_i = walk_in_turn(
                acc, m_i, l_i, q, k_ring, v_ring, use, start, steps, steps, limit, qk_scale,
                False, BLOCK_N,
            )  # fmt: skip
            q_ring.give_back(turn)
        l_i = gl.convert_layout(gl.sum(l_i, 1), gl.SliceLayout(1, S))
        l_o = gl.convert_layout(l_i, gl.SliceLayout(1, A))
        o = acc / gl.where(l_o == 0.0, 1.0, l_o)[:, None]
        if MASKED > 0:
            o = gl.where((l_o == 0.0)[:, None], 0.0, o)
        store_wait(0)
        barrier()
        o_smem.index(c).reshape([64, BLOCK_D]).store(o.to(dtype))
        fence_async_shared()
        barrier()
        async_store(o_desc, [b, h, start_m, 0], o_smem.index(c))
        if LSE:
            lse = m_i + gl.log2(gl.where(l_i == 0.0, 1.0, l_i))
            head = (b * problem.H + h).to(gl.int64)
            gl.store(lse_ptr + head * Nq + rows, lse, mask=rows < Nq)
        if problem.DYNAMIC:
            tile = tile_board.read(turn)
        else:
            tile += gl.num_programs(0)
        use += steps
        turn += 1
    store_wait(0)


# sizes as they come: a build for each that is 1 or a multiple of 16 would be the same code
@gluon.jit(
    do_not_specialize=["H", "group", "Nq", "Nk", "blocks", "heads", "section", "tiles"],
    do_not_specialize_on_alignment=["lse_ptr", "seqlens_ptr", "counter_ptr"],
)
def attention_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, seqlens_ptr, counter_ptr,
    H, group, Nq, Nk, blocks, heads, section, tiles, qk_scale,
    CAUSAL: gl.constexpr, HAS_SEQLENS: gl.constexpr, MASKED: gl.constexpr, LSE: gl.constexpr,
    DYNAMIC: gl.constexpr, OVERLAP: gl.constexpr,
    CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    problem = Problem(
        seqlens_ptr if HAS_SEQLENS else counter_ptr, H, group, Nq, Nk, blocks, heads, section, tiles,
        CAUSAL, HAS_SEQLENS, MASKED, DYNAMIC, 64 * CONSUMERS, BLOCK_N,
    )  # fmt: skip
    k_ring = ring(k_desc, STAGES, CONSUMERS)
    v_ring = ring(v_desc, STAGES, CONSUMERS)
    tile_board = board(CONSUMERS)
    o_shape: gl.constexpr = [CONSUMERS, 1, 1, 64, o_desc.block_shape[3]]
    o_smem = gl.allocate_shared_memory(o_desc.dtype, o_shape, o_desc.layout)
    q0, q1 = ring(q_desc, 1, 1), ring(q_desc, 1, 1)
    if CONSUMERS == 2:
        fence_async_shared()
        barrier()
        gl.warp_specialize(
            [
                (consumer, (o_desc, lse_ptr, q0, k_ring, v_ring, o_smem, tile_board, problem, qk_scale, 0, LSE, OVERLAP)),
                (consumer, (o_desc, lse_ptr, q1, k_ring, v_ring, o_smem, tile_board, problem, qk_scale, 1, LSE, OVERLAP)),
                (producer, (q_desc, k_desc, v_desc, counter_ptr, (q0, q1), k_ring, v_ring, tile_board, problem)),
            ],
            [4, 1],
            [CONSUMER_REGS, PRODUCER_REGS],
        )
    else:
        q2 = ring(q_desc, 1, 1)
        fence_async_shared()
        barrier()
        gl.warp_specialize(
            [
                (consumer, (o_desc, lse_ptr, q0, k_ring, v_ring, o_smem, tile_board, problem, qk_scale, 0, LSE, OVERLAP)),
                (consumer, (o_desc, lse_ptr, q1, k_ring, v_ring, o_smem, tile_board, problem, qk_scale, 1, LSE, OVERLAP)),
                (consumer, (o_desc, lse_ptr, q2, k_ring, v_ring, o_smem, tile_board, problem, qk_scale, 2, LSE, OVERLAP)),
                (producer, (q_desc, k_desc, v_desc, counter_ptr, (q0, q1, q2), k_ring, v_ring, tile_board, problem)),
            ],
            [4, 4, 1],
            [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS],
        )
        q2.keep_alive()
    q0.keep_alive()
    q1.keep_alive()
    k_ring.keep_alive()
    v_ring.keep_alive()
    tile_board.keep_alive()


L2_BYTES = 32 << 20


def plan(d, causal, Nk):
    """The launch configuration (recipe's A, B, C)."""
    if d > 64:
        return A
    return C if causal else B


A = dict(CONSUMERS=2, BLOCK_N=128, STAGES=2, OVERLAP=True, CONSUMER_REGS=240, PRODUCER_REGS=24, ctas=1, maxnreg=None, DYNAMIC=True)
B = dict(CONSUMERS=3, BLOCK_N=128, STAGES=2, OVERLAP=True, CONSUMER_REGS=160, PRODUCER_REGS=32, ctas=1, maxnreg=None, DYNAMIC=True)
C = dict(CONSUMERS=2, BLOCK_N=64, STAGES=2, OVERLAP=False, CONSUMER_REGS=104, PRODUCER_REGS=24, ctas=2, maxnreg=80, DYNAMIC=True)


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
    if causal and ((Nk - Nq) % BLOCK_N or BLOCK_N != BLOCK_M) or seqlens_k is not None:
        masked = 2
    elif causal or Nk % BLOCK_N:
        masked = 1
    else:
        masked = 0
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
