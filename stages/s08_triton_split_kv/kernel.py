"""The kernels of stage 8: one computes a part of the keys, the other one merges the parts."""

from stages.common.kernels import round_to_tf32
from stages.common.no_triton import tl, triton
from stages.common.products import dot, is_finite


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
        kv_mask = (start_n + offs_n < last)[:, None] & in_d if MASKED else in_d
        # (BLOCK_N, BLOCK_D)
        k = tl.load(k_ptrs, mask=kv_mask, other=0.0) if MASKED or not EVEN_D else tl.load(k_ptrs)
        v = tl.load(v_ptrs, mask=kv_mask, other=0.0) if MASKED or not EVEN_D else tl.load(v_ptrs)
        s = dot(q, tl.trans(k), PRECISION)  # (BLOCK_M, BLOCK_N)
        if MASKED:
            s = tl.where((start_n + offs_n)[None, :] < seen[:, None], s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))  # (BLOCK_M,)
        alpha = tl.exp2((m_i - m_new) * qk_scale)  # (BLOCK_M,)
        p = tl.exp2((s - m_new[:, None]) * qk_scale)  # (BLOCK_M, BLOCK_N)
        l_i = l_i * alpha[:, None] + p if len(l_i.shape) == 2 else l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if PRECISION == "tf32":
            p = round_to_tf32(p)
        acc = dot(p.to(v.dtype), v, PRECISION, acc)  # (BLOCK_M, BLOCK_D)
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
    PAGE_SIZE: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr, REDO: tl.constexpr,
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
    Nk_valid = tl.minimum(tl.maximum(tl.load(seqlens_ptr + entry), 0), Nk) if HAS_SEQLENS else Nk
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
    if REDO:  # the second launch: what is finite stays as it is (stages/common/products.py)
        done = o_ptr + b * stride_ob + (offs_h * stride_oh)[:, None]
        done += (offs_m.to(tl.int64) * stride_om)[:, None] + offs_d[None, :] * stride_od
        if is_finite(done, q_mask):
            return
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
