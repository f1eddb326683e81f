"""Stage 8, Triton split-KV: the keys are split over programs too, and the parts merged.

    one program: a block of packed rows of one key head, and one part of the keys
        packed row r = i * group + g is query i of head h_k * group + g: the `group` heads that
        share a key head share its tiles, so that one query row makes a block of `group` rows
    |<---- part 0 ---->|<---- part 1 ---->| ...    whole tiles of BLOCK_N keys, shared out evenly
    each part walks its tiles as in stage 6 and leaves m, l and acc, float32, acc not divided by l
        p = 2^((s - m_i) * qk_scale)     m_i isn't scaled: one product more per score, for which
                                         there is time while K and V are read
    a second kernel, one program per row, merges the parts in index order, as stage 5 merges tiles:
        m = max m_s                      -inf, and l_s = 0, where the row sees nothing
        w_s = 2^((m_s - m) * qk_scale)
        o = sum w_s acc_s / sum w_s l_s  0 where no part saw anything

`choose_splits` chooses the number of parts from the shape and the number of multiprocessors alone.
With one part, o is written at once and nothing is merged. The same kernel reads a paged cache of
keys and values (paged_cache.py), where a table says in which page each PAGE_SIZE keys lie.

Cost: stage 6's FLOPs; q, k, v and o cross the bus once, and d + 2 floats per row and part twice.
Extra memory: those parts, never more than k and v take.
What it bought: one query row reads the cache as fast as the memory can be read, whatever the
number of heads (split-KV: FlashDecoding, Dao et al. 2023; pages: PagedAttention, Kwon et al. 2023).
Still hurts: loads and math take turns. Stage 9 goes on.
"""

import functools
import math
from collections.abc import Hashable, Sequence

import torch

from stages.common.machine import launching
from stages.common.operators import untraced
from stages.contract import Stage, check_inputs, input_precision
from stages.s06_triton_flash2 import LOG2_E, loadable, round_to_tf32
from stages.s08_triton_split_kv.paged_cache import PagedCache

try:
    import triton
    import triton.language as tl
except ImportError:  # the file imports all the same; attend says why it can't run
    from stages.common.no_triton import no_triton as tl
    from stages.common.no_triton import no_triton as triton

STAGE = Stage(
    number=8,
    name="triton_split_kv",
    title="Triton split-KV",
    idea="split the keys too, merge the parts: decoding from a paged cache",
    still_hurts="loads and math take turns",
    needs=("triton",),
    dtypes=("float16", "bfloat16", "float32"),
    options=("causal", "seqlens_k", "gqa", "paged"),
    few_queries=True,
    worth_up_to={"cpu": 1024},
    files=("paged_cache.py",),
)


@triton.jit
def visit_tiles(
    acc, l_i, m_i, q, k_ptr, v_ptr, table_ptr,
    stride_kb, stride_kn, stride_kd, stride_vb, stride_vn, stride_vd,
    start, end, seen, last, d, qk_scale,
    MASKED: tl.constexpr, PAGE_SIZE: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The online softmax over the tiles of keys in [start, end), `MASKED` or seen whole.

    seen (BLOCK_M,) is how many keys each row sees, `last` the most of them.
    """
    offs_n = tl.arange(0, BLOCK_N)  # (BLOCK_N,)
    offs_d = tl.arange(0, BLOCK_D)  # (BLOCK_D,)
    in_d = offs_d[None, :] < d  # (1, BLOCK_D)
    # within a tile int32 is enough (`loadable`), and costs half of a pointer's registers; in a
    # cache K and V have the same strides, and a tile is whole pages or a part of one
    slots = offs_n % PAGE_SIZE if PAGE_SIZE else offs_n
    k_offs = slots[:, None] * stride_kn + offs_d[None, :] * stride_kd  # (BLOCK_N, BLOCK_D)
    v_offs = slots[:, None] * stride_vn + offs_d[None, :] * stride_vd  # (BLOCK_N, BLOCK_D)
    if PAGE_SIZE >= BLOCK_N:
        page = tl.load(table_ptr + start // PAGE_SIZE)
    elif PAGE_SIZE:
        table_ptrs = table_ptr + offs_n // PAGE_SIZE  # (BLOCK_N,)
        pages = tl.load(table_ptrs + start // PAGE_SIZE)  # (BLOCK_N,)
    for start_n in range(start, end, BLOCK_N):
        # the pages of a tile are looked up one tile ahead, so that no load waits for another
        if PAGE_SIZE == 0:
            k_ptrs = k_ptr + tl.cast(start_n, tl.int64) * stride_kn + k_offs
            v_ptrs = v_ptr + tl.cast(start_n, tl.int64) * stride_vn + v_offs
        elif PAGE_SIZE >= BLOCK_N:
            tile = page.to(tl.int64) * stride_kb + start_n % PAGE_SIZE * stride_kn
            k_ptrs = k_ptr + tile + k_offs
            v_ptrs = v_ptr + tile + k_offs
            page = tl.load(table_ptr + (start_n + BLOCK_N) // PAGE_SIZE)
        else:
            tile = (pages.to(tl.int64) * stride_kb)[:, None] + k_offs
            k_ptrs = k_ptr + tile
            v_ptrs = v_ptr + tile
            pages = tl.load(table_ptrs + (start_n + BLOCK_N) // PAGE_SIZE)
        # what no row sees is never read: it may be NaN, and 0 * NaN is NaN
        if MASKED:
            kv_mask = (start_n + offs_n < last)[:, None] & in_d
            k = tl.load(k_ptrs, mask=kv_mask, other=0.0)  # (BLOCK_N, BLOCK_D)
            v = tl.load(v_ptrs, mask=kv_mask, other=0.0)  # (BLOCK_N, BLOCK_D)
        elif EVEN_D:
            k = tl.load(k_ptrs)
            v = tl.load(v_ptrs)
        else:
            k = tl.load(k_ptrs, mask=in_d, other=0.0)
            v = tl.load(v_ptrs, mask=in_d, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (BLOCK_M, BLOCK_N)
        if MASKED:
            s = tl.where((start_n + offs_n)[None, :] < seen[:, None], s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))  # (BLOCK_M,)
        alpha = tl.exp2((m_i - m_new) * qk_scale)  # (BLOCK_M,)
        p = tl.exp2((s - m_new[:, None]) * qk_scale)  # (BLOCK_M, BLOCK_N)
        l_i = l_i * alpha[:, None] + p if len(l_i.shape) == 2 else l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if PRECISION == "tf32":
            p = round_to_tf32(p)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)  # (BLOCK_M, BLOCK_D)
        m_i = m_new
    return acc, l_i, m_i


@triton.jit(do_not_specialize=["group", "Nq", "Nk", "splits"])
def split_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, parts_ptr, stats_ptr, seqlens_ptr, table_ptr, rows_ptr,
    stride_qb, stride_qh, stride_qm, stride_qd,
    stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd,
    stride_ob, stride_oh, stride_om, stride_od,
    stride_table, group, Nq, Nk, d, qk_scale, splits,
    CAUSAL: tl.constexpr, HAS_SEQLENS: tl.constexpr, LSE: tl.constexpr, SPLIT: tl.constexpr,
    PAGE_SIZE: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    block, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    # int64: a pointer offset passes 2^31 in a large tensor, and int32 would wrap silently
    b, h_k = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1) * group
    offs_r = block * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,), packed rows
    in_rows = offs_r < Nq * group
    offs_m = offs_r // group  # the query of each
    offs_h = h_k * group + offs_r % group  # its head
    offs_d = tl.arange(0, BLOCK_D)  # (BLOCK_D,), a power of two: d is zero-padded

    entry = b
    if PAGE_SIZE:  # batch entry b is a sequence of the cache, with a row of its page table
        entry = tl.load(rows_ptr + b).to(tl.int64)
        table_ptr += entry * stride_table
    Nk_valid = Nk
    if HAS_SEQLENS:
        Nk_valid = tl.minimum(tl.maximum(tl.load(seqlens_ptr + entry), 0), Nk)
    full, last = Nk_valid, Nk_valid  # keys that all rows see, and that any row sees
    seen = tl.full((BLOCK_M,), 0, tl.int32) + Nk_valid
    if CAUSAL:
        shift = Nk - Nq  # row i sees keys up to i + shift
        if PAGE_SIZE:
            shift = Nk_valid - Nq
        seen = tl.minimum(tl.maximum(offs_m + shift + 1, 0), Nk_valid)
        first_m = block * BLOCK_M // group
        last_m = tl.minimum(block * BLOCK_M + BLOCK_M - 1, Nq * group - 1) // group
        full = tl.minimum(tl.maximum(first_m + shift + 1, 0), Nk_valid)
        last = tl.minimum(tl.maximum(last_m + shift + 1, 0), Nk_valid)
    full = full // BLOCK_N * BLOCK_N
    # whole tiles, shared out evenly; where there are more parts than tiles some stay empty
    tiles = tl.cdiv(last, BLOCK_N)
    start = (split * (tiles // splits) + tl.minimum(split, tiles % splits)) * BLOCK_N
    end = start + (tiles // splits + tl.where(split < tiles % splits, 1, 0)) * BLOCK_N

    q_mask = in_rows[:, None] & (offs_d[None, :] < d)
    q_ptrs = q_ptr + b * stride_qb + (offs_h * stride_qh)[:, None]
    q_ptrs += (offs_m.to(tl.int64) * stride_qm)[:, None] + offs_d[None, :].to(tl.int64) * stride_qd
    q = tl.load(q_ptrs, mask=q_mask, other=0.0)  # (BLOCK_M, BLOCK_D)
    k_ptr += h_k * stride_kh
    v_ptr += h_k * stride_vh
    if not PAGE_SIZE:
        k_ptr += b * stride_kb
        v_ptr += b * stride_vb

    # running max of s: the lowest float32, where -inf - -inf would be NaN
    m_i = tl.full((BLOCK_M,), -3.4028234663852886e38, dtype=tl.float32)
    l_i = tl.zeros((BLOCK_M,), dtype=tl.float32)  # running sum of 2^((s - m_i) * qk_scale)
    if BLOCK_M == 16:  # all warps share these rows: to sum over them at each tile makes them wait
        l_i = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)  # column by column, until the end
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    acc, l_i, m_i = visit_tiles(
        acc, l_i, m_i, q, k_ptr, v_ptr, table_ptr,
        stride_kb, stride_kn, stride_kd, stride_vb, stride_vn, stride_vd,
        start, tl.minimum(full, end), seen, last, d, qk_scale,
        False, PAGE_SIZE, EVEN_D, PRECISION, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    acc, l_i, m_i = visit_tiles(
        acc, l_i, m_i, q, k_ptr, v_ptr, table_ptr,
        stride_kb, stride_kn, stride_kd, stride_vb, stride_vn, stride_vd,
        tl.maximum(start, full), end, seen, last, d, qk_scale,
        True, PAGE_SIZE, EVEN_D, PRECISION, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    if BLOCK_M == 16:
        l_i = tl.sum(l_i, 1)
    m_i = tl.where(seen > 0, m_i, float("-inf"))  # tells the merge that a row sees no key
    row = (b * heads + offs_h) * Nq + offs_m  # (BLOCK_M,), of all query rows
    if SPLIT:
        part = row * splits + split
        part_ptrs = parts_ptr + (part * d)[:, None] + offs_d[None, :]
        tl.store(part_ptrs, acc, mask=q_mask)
        tl.store(stats_ptr + 2 * part, m_i, mask=in_rows)
        tl.store(stats_ptr + 2 * part + 1, l_i, mask=in_rows)
    else:
        l_i = tl.where(seen > 0, l_i, 1.0)  # a row that sees no key: o = 0 / 1, lse = -inf + 0
        acc = acc / l_i[:, None]
        o_ptrs = o_ptr + b * stride_ob + (offs_h * stride_oh)[:, None]
        o_ptrs += (offs_m.to(tl.int64) * stride_om)[:, None] + offs_d[None, :] * stride_od
        tl.store(o_ptrs, acc.to(o_ptr.dtype.element_ty), mask=q_mask)
        if LSE:
            tl.store(lse_ptr + row, m_i * qk_scale + tl.log2(l_i), mask=in_rows)


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(
    parts_ptr, stats_ptr, o_ptr, lse_ptr,
    stride_ob, stride_oh, stride_om, stride_od, d, qk_scale, splits,
    LSE: tl.constexpr, PDL: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    b, h, i = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(0)
    row = (b * tl.num_programs(1) + h) * tl.num_programs(0) + i
    offs_s = tl.arange(0, BLOCK_S)  # (BLOCK_S,)
    offs_d = tl.arange(0, BLOCK_D)  # (BLOCK_D,)
    in_d = offs_d < d
    stats_ptr += 2 * row * splits
    parts_ptr += row * splits * d
    if PDL:  # started before the first kernel had ended: its parts are there after this
        tl.extra.cuda.gdc_wait()

    m_i, l_i = float("-inf"), 0.0
    acc = tl.zeros((BLOCK_D,), dtype=tl.float32)
    # exercise merge: parts' m_s, l_s, acc_s -> m_i, l_i and acc (BLOCK_D,) of all keys
    for start_s in range(0, splits, BLOCK_S):
        s = start_s + offs_s
        m_s = tl.load(stats_ptr + 2 * s, mask=s < splits, other=float("-inf"))
        l_s = tl.load(stats_ptr + 2 * s + 1, mask=s < splits, other=0.0)
        acc_mask = (s < splits)[:, None] & in_d[None, :]
        acc_s = tl.load(parts_ptr + s[:, None] * d + offs_d[None, :], mask=acc_mask, other=0.0)
        # step m_new: the max so far; m_i, m_s (BLOCK_S,) -> a number
        m_new = tl.maximum(m_i, tl.max(m_s, 0))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        # step alpha: what the parts so far are worth under it; m_i, m_safe -> a number
        alpha = tl.exp2((m_i - m_safe) * qk_scale)
        # step w_s: what each of these parts is worth; m_s (BLOCK_S,), m_safe -> (BLOCK_S,)
        w_s = tl.exp2((m_s - m_safe) * qk_scale)  # (BLOCK_S,), 0 for a part that saw nothing
        # step l_i: the sum so far; l_i, alpha, w_s, l_s (BLOCK_S,) -> a number
        l_i = l_i * alpha + tl.sum(w_s * l_s, 0)
        # step acc: acc, alpha, w_s, acc_s (BLOCK_S, BLOCK_D) -> (BLOCK_D,)
        acc = acc * alpha + tl.sum(w_s[:, None] * acc_s, 0)
        # step m_i: the max that the next parts begin with
        m_i = m_new
    # end of merge

    l_i = tl.where(m_i == float("-inf"), 1.0, l_i)  # the row sees no key: o = 0 / 1, lse = -inf + 0
    o_ptrs = o_ptr + b * stride_ob + h * stride_oh + i.to(tl.int64) * stride_om + offs_d * stride_od
    tl.store(o_ptrs, (acc / l_i).to(o_ptr.dtype.element_ty), mask=in_d)
    if LSE:
        tl.store(lse_ptr + row, m_i * qk_scale + tl.log2(l_i))


# BLOCK_M -> two choices of (BLOCK_N, num_warps, num_stages), for a BLOCK_D of up to 64, of 128, of
# 256: where a multiprocessor has one program, which has to keep many bytes in flight by itself, and
# where it has several. The best of a search on one H200; the second choices fit 99 KB.
Tile = tuple[int, int, int]
TILES: dict[str, tuple[dict[int, tuple[Tile, Tile]], ...]] = {
    "half": (
        {
            16: ((128, 4, 4), (128, 4, 3)),
            32: ((128, 4, 3), (128, 4, 3)),
            64: ((128, 4, 3), (128, 4, 3)),
            128: ((64, 8, 3), (64, 8, 3)),
        },
        {
            16: ((128, 4, 3), (128, 4, 2)),
            32: ((128, 4, 3), (64, 4, 3)),
            64: ((64, 4, 4), (64, 4, 3)),
            128: ((64, 8, 4), (64, 8, 3)),
        },
        {16: ((64, 4, 2), (64, 4, 2)), 32: ((64, 4, 2), (64, 4, 2))},
    ),
    "tf32": (
        {16: ((64, 4, 2), (64, 4, 2)), 32: ((64, 4, 2), (64, 4, 2))},
        {16: ((64, 8, 2), (64, 8, 2))},
        {16: ((32, 4, 2), (32, 4, 2))},
    ),
    "ieee": (
        {16: ((64, 4, 2), (64, 4, 2))},
        {16: ((64, 8, 2), (64, 8, 2))},
        {16: ((32, 8, 2), (32, 8, 2))},
    ),
}
SHARED_OF_FIRST = 166_912  # bytes: what a program may have on sm_80, and the first choices fit
MOST_ROWS = 64  # of a block, where there are more than 128 in all


def launch_config(
    d: int, dtype: torch.dtype, precision: str, rows: int = 1, several: bool = False
) -> dict[str, int]:
    """BLOCK_M, BLOCK_N, BLOCK_D, num_warps and num_stages for `rows` packed rows of a key head.

    several  whether a multiprocessor has more than one program, or little shared memory
    """
    BLOCK_D = max(16, 1 << (d - 1).bit_length())  # tl.dot refuses an inner dimension under 16
    kind = "half" if dtype != torch.float32 else precision
    tiles = TILES[kind][0 if BLOCK_D <= 64 else 1 if BLOCK_D == 128 else 2]
    BLOCK_M = min((m for m in tiles if m >= rows), default=min(MOST_ROWS, max(tiles)))
    BLOCK_N, num_warps, num_stages = tiles[BLOCK_M][several]
    return {
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "BLOCK_D": BLOCK_D,
        "num_warps": num_warps,
        "num_stages": num_stages,
    }


# The cost model's constants. The unit is the time in which a multiprocessor gets a tile while all
# of them read. Fitted to 150 shapes on one H200, where its choices are 0.8% slower than the best.
ALONE = 0.55  # a tile's time where the memory is idle otherwise
WAVE = 8.0  # a wave of programs: to start, to fill the pipeline, to end
MERGE = 1.5  # the second kernel
PART = 0.02  # a part, to be merged


@functools.lru_cache(maxsize=4096)
def choose_splits(programs: int, tiles: int, sms: int, most: int) -> int:
    """Return the number of parts, 1 to `most`, that the cost model finds the cheapest.

    programs  how many there are without a split: the blocks of rows of all key heads
    tiles     of keys, the most that a row sees
    sms       the GPU's multiprocessors

    cost = tiles per part x (waves, or what is read at once) + waves x WAVE, and the merge's. A
    wave is one program for each multiprocessor. The choice uses no timing and no value of a tensor:
    the same shape gives the same bits on the same GPU.
    """

    def cost(splits: int) -> float:
        waves = -(-programs * splits // sms)
        each = -(-tiles // splits) * max(programs * splits / sms, ALONE * waves)
        return each + WAVE * waves + (MERGE + PART * splits if splits > 1 else 0.0)

    # beyond four programs per multiprocessor, more only cost time
    return min(range(1, max(1, min(tiles, most, -(-4 * sms // programs))) + 1), key=cost)


SMS_TO_INTERPRET = 132  # an H200's: in the interpreter the keys are split as they are there


def multiprocessors(device: torch.device) -> tuple[int, bool]:
    """Return how many there are, and whether the first choices of TILES fit their shared memory."""
    if device.type != "cuda":
        return SMS_TO_INTERPRET, True
    card = torch.cuda.get_device_properties(device)
    shared = getattr(card, "shared_memory_per_block_optin", 0)
    return card.multi_processor_count, shared >= SHARED_OF_FIRST


def plan(
    q: torch.Tensor,
    Hk: int,
    Nk: int,
    splits: int | None = None,
    config: dict[str, int] | None = None,
    paged: bool = False,
) -> tuple[int, dict[str, int]]:
    """Choose the parts' number and the launch configuration for q (B, H, Nq, d), Hk heads, Nk keys.

    `splits` and `config` are kept if given.
    """
    B, H, Nq, d = q.shape
    precision, rows = input_precision(q), Nq * H // Hk
    sms, roomy = multiprocessors(q.device)
    first = config or launch_config(d, q.dtype, precision, rows)
    programs = B * Hk * -(-rows // first["BLOCK_M"])
    if splits is None:
        tiles = max(1, -(-Nk // first["BLOCK_N"]))
        kv_bytes, part_bytes = 2 * B * Hk * Nk * d * q.element_size(), 4 * B * H * Nq * (d + 2)
        # finding the page of a short row takes as long as reading it: two programs hide it
        busy = 2 * sms if paged and d <= 64 else sms
        splits = choose_splits(programs, tiles, busy, kv_bytes // part_bytes)
    several = programs * splits > sms or not roomy
    return splits, config or launch_config(d, q.dtype, precision, rows, several)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    seqlens_k: torch.Tensor | None,
    lse: torch.Tensor | None = None,
    *,
    table: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    longest: int | None = None,
    splits: int | None = None,
    config: dict[str, int] | None = None,
) -> torch.Tensor:
    """Compute the output for checked arguments; `lse` is filled if given.

    lse      (B, H, Nq) float32, in base 2: log2 of each row's sum of exp(s)
    table    (sequences, pages) int32, where k and v are a cache's (pages, Hk, PAGE_SIZE, d);
             seqlens_k are then its sequences' lengths, and longest is the most of them
    rows     (B,) int32, the row of the table for each batch entry
    splits   how many parts, in place of the cost model's choice
    config   the launch configuration, in place of `launch_config`'s
    """
    B, H, Nq, d = q.shape
    Hk, Nk, page_size = k.shape[1], k.shape[2], 0
    if table is not None:
        page_size, Nk = Nk, table.shape[1] * Nk
    q, k, v = loadable(q), loadable(k), loadable(v)
    if seqlens_k is not None:
        seqlens_k = seqlens_k.contiguous()  # the kernel takes no stride for it
    keys = Nk if longest is None else longest
    splits, config = plan(q, Hk, keys, splits, config, paged=table is not None)
    o = torch.empty((B, H, Nq, d), dtype=q.dtype, device=q.device)
    parts = stats = None
    if splits > 1:  # a buffer for each call: one for all would be written by two streams at once
        parts = torch.empty((B, H, Nq, splits, d), dtype=torch.float32, device=q.device)
        stats = torch.empty((B, H, Nq, splits, 2), dtype=torch.float32, device=q.device)
    blocks = -(-Nq * (H // Hk) // config["BLOCK_M"])
    qk_scale = d**-0.5 * LOG2_E
    with launching(q):
        split_kernel[(blocks * splits, Hk, B)](
            q, k, v, o, lse, parts, stats, seqlens_k, table, rows,
            *q.stride(), *k.stride(), *v.stride(), *o.stride(),
            0 if table is None else table.stride(0), H // Hk, Nq, Nk, d, qk_scale, splits,
            CAUSAL=causal and Nq > 1, HAS_SEQLENS=seqlens_k is not None, LSE=lse is not None,
            SPLIT=splits > 1, PAGE_SIZE=page_size, EVEN_D=d == config["BLOCK_D"],
            PRECISION=input_precision(q), **config,
        )  # fmt: skip
        if splits > 1:
            # from Hopper on, a kernel may be launched while the one before it ends (1 us saved)
            early = q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) >= (9, 0)
            merge_kernel[(Nq, H, B)](
                parts, stats, o, lse, *o.stride(), d, qk_scale, splits,
                LSE=lse is not None, PDL=early, **merge_config(splits, d),
                **({"launch_pdl": True} if early else {}),
            )  # fmt: skip
    return o


def merge_config(splits: int, d: int) -> dict[str, int]:
    """The launch configuration of the merge: up to 16 parts at a time."""
    BLOCK_S, BLOCK_D = min(16, 1 << (splits - 1).bit_length()), max(16, 1 << (d - 1).bit_length())
    return {"BLOCK_S": BLOCK_S, "BLOCK_D": BLOCK_D, "num_warps": 1}


def launch_configs(d: int, dtype: torch.dtype, precision: str) -> dict[str, dict[str, int]]:
    """kernel -> the configuration for one row and many parts."""
    return {
        "split_kernel": launch_config(d, dtype, precision),
        "merge_kernel": merge_config(16, d) | {"num_stages": 1},
    }


def refuse_gradients(**tensors: torch.Tensor) -> None:
    """Raise ValueError where torch would want a gradient: the merge has no backward pass."""
    for name, x in tensors.items():
        if torch.is_grad_enabled() and isinstance(x, torch.Tensor) and x.requires_grad:
            raise ValueError(
                f"{name}: got requires_grad=True, expected none: stage {STAGE.number} is forward "
                "only; call it under torch.no_grad(), or train with stage 7"
            )


@untraced
def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    seqlens_k: torch.Tensor | None = None,
) -> torch.Tensor:
    """Exact attention, its keys split over programs. Forward only.

    q (B, H, Nq, d), k and v (B, Hk, Nk, d) with Hk dividing H, float16, bfloat16 or float32;
    `seqlens_k` (B,) int32 -> (B, H, Nq, d) in q's dtype. A row that sees no key is 0. Raises
    ValueError on input that breaks the contract (stages/contract.py) or asks for a gradient,
    StageUnavailable where there is no Triton.
    """
    check_inputs(STAGE, q, k, v, causal=causal, seqlens_k=seqlens_k)
    refuse_gradients(q=q, k=k, v=v)
    return forward(q, k, v, causal, seqlens_k)


@untraced
def attend_with_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    seqlens_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `attend`'s output, and lse (B, H, Nq) float32, the log of each row's sum of exp(s).

    s = scale q . k over the keys that the row sees; -inf where it sees none. Raises as `attend`.
    """
    check_inputs(STAGE, q, k, v, causal=causal, seqlens_k=seqlens_k)
    refuse_gradients(q=q, k=k, v=v)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    o = forward(q, k, v, causal, seqlens_k, lse)
    return o, lse.mul_(math.log(2))


@untraced
def attend_paged(
    q: torch.Tensor, cache: PagedCache, sequences: Sequence[Hashable], *, causal: bool = True
) -> torch.Tensor:
    """Attention of q's batch entries to `sequences` of a cache, one each.

    q (len(sequences), H, Nq, d) of the cache's dtype, on its device, H a multiple of its heads ->
    the same shape. A sequence's last Nq tokens are those of q: with `causal`, row i sees tokens up
    to i + length - Nq. A row that sees none is 0. Raises ValueError where an argument is wrong or
    a sequence unknown.

    It reads table and lengths as they are on the GPU when it runs: a CUDA graph of it sees what was
    appended since, if it was called once before with these sequences.
    """
    if not isinstance(cache, PagedCache):
        raise ValueError(f"cache: got {type(cache).__name__}, expected a PagedCache")
    rows, longest = cache.rows(sequences)
    cache.check_queries(q, len(sequences))
    one = cache.k[:1].expand(len(sequences), -1, -1, -1)  # the shape of a page for each entry
    check_inputs(STAGE, q, one, one, causal=causal)
    refuse_gradients(q=q)
    return forward(
        q, cache.k, cache.v, causal, cache.lengths, table=cache.table, rows=rows, longest=longest
    )
