"""The checks bite: mistakes written into the shipped stages, each of which must be caught.

A mutant is the shipped file with some text replaced by other text, each found exactly once. It is
killed when a check fails that the shipped stage passes, or when it raises. All tensors, the output
too, lie in a storage of NaN, so that a mutant that strays reads NaN and damages nothing but that.

`make test` has the first mutant of each line; those that change a line once more are slow.
"""

import math
import operator
import warnings
from functools import lru_cache
from itertools import takewhile

import pytest
import test_hidden
import test_magnitudes
import torch
from masked_problems import in_tiles, masks, skipped_by_definition
from stage_checks import (
    assert_close,
    assert_exact,
    attend,
    device_of,
    gradient_rounding,
    gradients,
    guarded_outputs,
    hidden_keys,
    in_nan,
    lse_rounding,
    most_keys,
    normal,
    options_of,
    rounding,
    true_gradients,
    true_lse,
    truth,
)

import stages
from harness.measures.oracle import make_oracle
from harness.problems.inputs import make_inputs
from harness.problems.problem import Problem
from harness.records.code import files_of

# b, h, nq, nk, d and the strides of q, k, v: small, since stage 0 has to bear them; each stage
# takes as many of the keys as it is exact for
DENSE = ((0, 1, 2, 3), (1, 1, 1, 1))
STRIDED = ((2, 0, 3, 1), (1, 2, 2, 1)), ((0, 3, 1, 2), (1, 1, 3, 2)), ((3, 2, 1, 0), (2, 1, 1, 3))
BATTERY = {
    "square tiles": ("normal", (1, 1, 3, 64, 64), (DENSE,) * 3),
    "heads": ("normal", (3, 2, 5, 70, 8), (DENSE,) * 3),  # 3 and 2: a mixed-up head stays in range
    "peaky": ("peaky", (1, 1, 7, 150, 16), (DENSE,) * 3),
    "ragged and strided": ("normal", (2, 1, 33, 65, 5), STRIDED),
    "a few keys": ("normal", (1, 2, 2, 3, 40), STRIDED),
}
# nq, nk, hk, causal, seqlens_k; two batch entries, four heads
MASKS = [
    (5, 9, 2, True, None),
    (9, 5, 4, True, None),
    (5, 9, 1, False, (9, 4)),
    (3, 7, 2, False, (0, 7)),
]
# b, h, hk, nq, nk, d, causal, seqlens_k, and the tile, for the stages that walk tiles under masks.
# Tiles begin and end one key or row before and after what a mask lets be seen, and right there.
# LOW is the one with logits so low that exp(-lse) overflows: no masked key may be taken for a 0.
# Those of the fewest tiles come first: what kills most mutants should take the least time.
TILED = [
    (1, 1, 1, 70, 5, 8, False, None, (64, 16)),  # delta's own tiles have 64 rows
    (2, 1, 1, 17, 33, 8, True, (0, 20), (32, 16)),
    (1, 1, 1, 33, 50, 8, True, None, (16, 16)),
    (1, 1, 1, 33, 47, 16, True, None, (16, 16)),
    (1, 4, 2, 40, 9, 16, True, None, (16, 16)),
    (2, 2, 1, 32, 40, 8, False, (33, 16), (16, 16)),
]
LOW = 1
# of q, k, v and dO; a dO whose columns aren't neighbours is copied before the kernels see it
GRADIENT_LAYOUTS = *STRIDED, ((2, 0, 1, 3), (1, 1, 2, 1))


@lru_cache
def a_tiled_problem(index):
    """The tensors of TILED[index], NaN beyond the lengths; options, mask; the truth and bounds."""
    b, h, hk, nq, nk, d, causal, seqlens_k, _ = TILED[index]
    problem = Problem("normal", 0, b, h, hk, nq, nk, d, "float32", "ieee", causal, seqlens_k, "cpu")
    options, hidden = masks(problem)
    q, k, v, dO = normal((b, h, nq, nk, d), 0)
    k, v = k[:, :hk], v[:, :hk]
    if index == LOW:
        q, k = q + 8, k - 8
    o, *grads = true_gradients(q, k, v, dO, hidden)
    bounds = rounding(q, k, v), *gradient_rounding(q, k, v, dO, hidden)
    want = {"o": o, "lse": true_lse(q, k, hidden), "gradients": grads}
    allowed = {"o": bounds[0], "lse": lse_rounding(q, k), "gradients": bounds[1:]}
    k, v = (x.clone() for x in (k, v))
    for x in (k, v):
        for entry, length in enumerate(seqlens_k or ()):
            x[entry, :, length:] = math.nan
    laid = [in_nan(x, *layout) for x, layout in zip((q, k, v, dO), GRADIENT_LAYOUTS, strict=True)]
    return laid, options, hidden, want, allowed


def tiled_battery(stage):
    """Raise where a stage that walks tiles under masks is wrong, in tiles as small as they get."""
    for index, (*_, tile) in enumerate(TILED):
        (q, k, v, dO), options, hidden, want, allowed = a_tiled_problem(index)
        with in_tiles(tile, stage):
            if stage.STAGE.gradients:
                o, *grads = gradients(stage, q, k, v, dO, **options)
                for got, grad, bound in zip(
                    grads, want["gradients"], allowed["gradients"], strict=True
                ):
                    assert_close(got, grad, bound)
            else:
                with guarded_outputs():
                    o, lse = stage.attend_with_lse(q, k, v, **options)
                    skipped = stage.skipped_blocks(q, k, v, **options)
                seen = want["lse"].isfinite()
                assert torch.equal(lse.isfinite(), seen)
                assert_close(lse[seen], want["lse"][seen], allowed["lse"])
                assert torch.equal(skipped, skipped_by_definition(hidden, q.shape[1], tile))
            assert_close(o, want["o"], allowed["o"])


# b, h (with one key head), nq, nk, causal, parts and the tile, for a stage that splits the keys:
# parts past what is merged at once, blocks that begin within a group, blocks of more rows
PARTS = [
    (1, 1, 2, 280, False, 18, (16, 16)),
    (2, 2, 20, 40, True, 1, (16, 16)),
    (1, 3, 7, 100, False, 2, (32, 16)),
    (1, 2, 2, 40, True, 3, (16, 16)),
]


def a_tile(M, N):
    """A launch configuration of BLOCK_M x BLOCK_N, for d up to 16."""
    return {"BLOCK_M": M, "BLOCK_N": N, "BLOCK_D": 16, "num_warps": 4, "num_stages": 2}


def split_battery(stage):
    """Raise where a stage that splits the keys is wrong, in small tiles, one part and several."""
    for b, h, nq, nk, causal, splits, size in PARTS:
        q, k, v, _ = (in_nan(x) for x in normal((b, h, nq, nk, 8), 0))
        k, v = in_nan(k[:, :1], *STRIDED[1]), in_nan(v[:, :1], *STRIDED[2])
        k[:, :, -16:] *= 3  # the largest scores come last, so that what was before is rescaled
        with guarded_outputs():
            o = stage.forward(q, k, v, causal, None, splits=splits, config=a_tile(*size))
        hidden = torch.arange(nk) > torch.arange(nq)[:, None] + (nk - nq if causal else nk)
        assert_close(o, truth(q, k, v, hidden[None, None]), rounding(q, k, v))
    for index, (*_, size) in enumerate(TILED):
        (q, k, v, _), options, _, want, allowed = a_tiled_problem(index)
        causal, seqlens_k = options.get("causal", False), options.get("seqlens_k")
        seen = want["lse"].isfinite()
        # a row that sees no key is another matter in each number of parts
        for splits in ((2, 1, 5)[index % 3],) if seen.all() else (1, 2, 5):
            lse = torch.empty(q.shape[:3])
            with guarded_outputs():
                o = stage.forward(
                    q, k, v, causal, seqlens_k, lse, splits=splits, config=a_tile(*size)
                )
            lse = lse * math.log(2)
            assert torch.equal(lse.isfinite(), seen)
            assert_close(lse[seen], want["lse"][seen], allowed["lse"])
            assert_close(o, want["o"], allowed["o"])
    paged_battery(stage)


def paged_battery(stage):
    """Raise where a stage is wrong that reads from a cache of pages, in tiles of several, or parts.

    The pages are in no order, with NaN in whatever no sequence holds.
    """
    check_pages(stage, 16, 32, True)
    check_pages(stage, 32, 16, False)


def check_pages(stage, page_size, N, causal):
    """Raise where it's wrong in pages of `page_size` and tiles of N keys, in two parts."""
    q, k, v, _ = normal((2, 4, 2, 70, 8), 0)
    k, v, lengths = k[:, :2], v[:, :2], (70, 33)
    cache = stage.PagedCache(12, page_size, 2, 8, torch.float32, "cpu")
    cache.free_pages = [(5 * page + 2) % 12 for page in range(12)]
    cache.k.fill_(math.nan), cache.v.fill_(math.nan)
    cache.append("a row that is not asked for", k[0, :, :0], v[0, :, :0])
    for b in (1, 0):
        cache.append(b, k[b, :, : lengths[b]], v[b, :, : lengths[b]])
    rows, longest = cache.rows([0, 1])
    with guarded_outputs():
        o = stage.forward(
            q, cache.k, cache.v, causal, cache.lengths, table=cache.table, rows=rows,
            longest=longest, splits=2, config=a_tile(16, N),
        )  # fmt: skip
    for b, length in enumerate(lengths):
        late = length - 2 if causal else length
        hidden = torch.arange(length) > torch.arange(2)[:, None] + late
        one, key, value = q[b : b + 1], k[b : b + 1, :, :length], v[b : b + 1, :, :length]
        want = truth(one, key, value, hidden[None, None])
        assert_close(o[b : b + 1], want, rounding(one, key, value))
    assert_close(stage.attend_paged(q, cache, [0, 1], causal=causal), o, 2 * rounding(q, k, v))


@lru_cache
def a_problem(name, device, most):
    """The tensors of a problem of BATTERY, at most `most` keys of it, and its oracle."""
    inputs, (b, h, nq, nk, d), layouts = BATTERY[name]
    problem = Problem(
        inputs, 0, b, h, h, nq, min(nk, most), d, "float32", "ieee", False, None, device
    )
    tensors = make_inputs(problem)
    laid = [in_nan(x, *layout) for x, layout in zip(tensors, layouts, strict=True)]
    return laid, make_oracle(problem)


def battery(stage, device):
    """Raise where `stage` is wrong; every shipped stage passes."""
    if hasattr(stage, "candidates"):
        tiled_battery(stage)
        half_battery(stage)
    if hasattr(stage, "attend_paged"):
        split_battery(stage)
    if stage.STAGE.gradients:
        q, k, v, dO = normal((2, 3, 4, 7, 5), 0, device=device)
        # and logits so low that exp(-lse) overflows: nobody may take it for a key that isn't there
        for tensors in ((q, k, v, dO), (q + 8, k - 8, v, dO)):
            tensors = [in_nan(x, *at) for x, at in zip(tensors, GRADIENT_LAYOUTS, strict=True)]
            bounds = rounding(*tensors[:3]), *gradient_rounding(*tensors)
            answers = gradients(stage, *tensors), true_gradients(*tensors), bounds
            for got, want, bound in zip(*answers, strict=True):
                assert_close(got, want, bound)
    for name in BATTERY:
        tensors, oracle = a_problem(name, device, most_keys(stage, 150))
        assert_exact(attend(stage, *tensors), oracle)
    # logits past exp's overflow in double, in which stages 0 to 2 compute
    (q, k, v), _ = a_problem("peaky", device, most_keys(stage, 150))
    q = in_nan(8 * q)
    assert_close(attend(stage, q, k, v), truth(q, k, v), rounding(q, k, v))
    if stage.STAGE.options:
        for nq, nk, hk, causal, seqlens_k in MASKS:
            problem = Problem(
                "normal", 0, 2, 4, hk, nq, nk, 8, "float32", "ieee", causal, seqlens_k, device
            )
            q, k, v = (in_nan(x) for x in make_inputs(problem))
            o = attend(stage, q, k, v, **options_of(problem))
            assert_close(o, truth(q, k, v, hidden_keys(problem)), rounding(q, k, v))
    if stage.STAGE.exact_up_to is None:
        test_hidden.test_a_tile_of_overflowing_scores_counts_for_nothing(stage)
    if {"causal", "seqlens_k"} <= {*stage.STAGE.options}:
        hidden_battery(stage)


def hidden_battery(stage):
    """Raise where a stage with masks is spoilt by what a row doesn't see, or hides what it sees."""
    for case in range(len(test_hidden.HIDING)):
        test_hidden.test_what_is_hidden_may_hold_anything(stage, case, "nan")
    test_hidden.test_a_row_that_sees_minus_infinity_only_is_nan_under_a_mask(stage, "float32")


def half_battery(stage):
    """Raise where a stage is wrong in float16, or with scores of any size."""
    q, k, v, _ = normal((1, 2, 33, 47, 16), 0, torch.float16)
    with in_tiles((16, 16), stage):
        o = attend(stage, in_nan(q), in_nan(k), in_nan(v), causal=True)
    hidden = torch.arange(47) > torch.arange(33)[:, None] + 14
    assert_close(o, truth(q, k, v, hidden[None, None]), rounding(q, k, v))
    for dtype in ("float16", "float32"):
        test_magnitudes.test_scores_of_any_size(stage, dtype)
    if stage.STAGE.gradients:
        test_magnitudes.test_gradients_of_large_scores_are_refused(stage, "float32")


# name of the mutant: (old, new), ...
Mutants = dict[str, tuple[tuple[str, str], ...]]


def replaced(**mutants: tuple[str, str]) -> Mutants:
    """Mutants of one substitution each, named in words_with_underscores."""
    return {name.replace("_", " "): (pair,) for name, pair in mutants.items()}


def wrong_scales(text: str, right: str, d: str) -> Mutants:
    wrong = {"upside down": f"{d} ** 0.5", "without its root": f"1 / {d}", "forgotten": "1.0"}
    wrong["of one dimension more"] = f"({d} + 1) ** -0.5"
    return {f"scale {name}": ((text, text.replace(right, new)),) for name, new in wrong.items()}


PYTHON_SCALE = wrong_scales("scale = q.shape[-1] ** -0.5", "q.shape[-1] ** -0.5", d="q.shape[-1]")

SCALAR_AUTOGRAD = PYTHON_SCALE | replaced(
    no_max=("m_i = max(x.data for x in s)", "m_i = 0.0"),
    the_first_score_for_the_max=("m_i = max(x.data for x in s)", "m_i = s[0].data"),
    not_normalised=("zip(p, v_column)) * l_inv for", "zip(p, v_column)) for"),
    normalised_by_a_part=("total(p).reciprocal()", "total(p[: len(p) // 2 + 1]).reciprocal()"),
    the_last_key_forgotten=("* scale for k_row in k]", "* scale for k_row in k[:-1]]"),
    V_not_transposed=("v_columns = list(zip(*v, strict=True))", "v_columns = v"),
    k_and_v_mixed_up=("zip(q_heads, k_heads, v_heads)", "zip(q_heads, v_heads, k_heads)"),
    derivatives_of_a_product_mixed_up=("(other.data, self.data)", "(self.data, other.data)"),
    derivative_of_a_scaling=("(self,), (other,))", "(self,), (1.0,))"),
    derivative_of_exp=("Value(e, (self,), (e,))", "Value(e, (self,), (1.0,))"),
    derivative_of_a_reciprocal=("(-r * r,)", "(r * r,)"),
    a_later_gradient_overwrites=("parent.grad += local_grad", "parent.grad = local_grad"),
    backward_goes_forward=("for node in reversed(order)", "for node in order"),
    dO_is_taken_for_ones=("dO.flatten().tolist()", "[1.0] * dO.numel()"),
    dk_and_dv_mixed_up=("return dq, dk, dv", "return dq, dv, dk"),
)

RAW_PYTHON = PYTHON_SCALE | replaced(
    no_max=("m_i = max(s)", "m_i = 0.0"),
    the_first_score_for_the_max=("m_i = max(s)", "m_i = s[0]"),
    not_normalised=("zip(p, v_column)) / l_i for", "zip(p, v_column)) for"),
    normalised_by_the_largest=("l_i = sum(p)", "l_i = max(p)"),
    the_last_key_forgotten=("* scale for k_row in k]", "* scale for k_row in k[:-1]]"),
    V_not_transposed=("v_columns = list(zip(*v, strict=True))", "v_columns = v"),
    k_and_v_mixed_up=("zip(q_heads, k_heads, v_heads)", "zip(q_heads, v_heads, k_heads)"),
    one_batch_entry_for_all=("k.tolist(), v.tolist()", "k[:1].expand_as(k).tolist(), v.tolist()"),
)

VALUE_GRAPH = PYTHON_SCALE | replaced(
    k_and_v_mixed_up=("for x in (q, k, v)), scale", "for x in (q, v, k)), scale"),
    dO_is_taken_for_ones=(
        "dO.to(torch.float64).numpy(force=True)",
        "torch.ones_like(dO, dtype=torch.float64).numpy(force=True)",
    ),
    dq_last=("for x in grads)", "for x in [*grads[1:], grads[0]])"),
    dk_and_dv_mixed_up=("for x in grads)", "for x in [grads[0], grads[2], grads[1]])"),
)

SOFTMAX = "p = torch.softmax(s, dim=-1)"
THREE_GEMM = PYTHON_SCALE | replaced(
    no_max=(SOFTMAX, "p = s.exp() / s.exp().sum(-1, keepdim=True)"),
    not_normalised=(SOFTMAX, "p = (s - s.amax(-1, keepdim=True)).exp()"),
    softmax_over_the_queries=(SOFTMAX, "p = torch.softmax(s, dim=-2)"),
    softmax_over_the_heads=(SOFTMAX, "p = torch.softmax(s, dim=1)"),
    not_masked=("s.masked_fill_(hidden, -math.inf)", "pass"),
    masked_with_the_lowest_number=("hidden, -math.inf)", "hidden, torch.finfo(s.dtype).min)"),
    rows_that_see_nothing_masked_too=("hidden & ~blind", "hidden"),
    blind_q_not_taken_out=("q, k, v = q.masked_fill(blind, 0.0)", "q, k, v = q"),
    unseen_keys_not_taken_out=("k.masked_fill(unseen, 0.0)", "k"),
    unseen_values_not_taken_out=("v.masked_fill(unseen, 0.0)", "v"),
    unseen_by_the_first_row=("hidden[..., -1:, :]", "hidden[..., :1, :]"),
    blind_to_the_last_key=("hidden[..., :1]", "hidden[..., -1:]"),
    blind_rows_of_lengths_alone=(
        "seqlens_k is not None or (causal and q.shape[2] > k.shape[2])",
        "seqlens_k is not None",
    ),
    K_not_transposed=("@ k.transpose(-2, -1)", "@ k.reshape(*k.shape[:2], k.shape[3], -1)"),
    the_scale_a_second_time=("(q * scale) @", "(q * scale * scale) @"),
    causal_from_the_top_left=("offs_m + (Nk - Nq)", "offs_m"),
    causal_without_the_diagonal=("offs_n > offs_m", "offs_n >= offs_m"),
    one_key_of_the_padding=("offs_n >= seqlens_k", "offs_n > seqlens_k"),
    one_length_for_all=("seqlens_k[:, None, None, None]", "seqlens_k.max()"),
    rows_that_see_nothing_see_everything=("else o.masked_fill(blind, 0.0)", "else o"),
    causal_ignored=("    if causal:\n        hidden", "    if False:\n        hidden"),
    heads_grouped_the_other_way=(
        "k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)",
        "k = k.repeat(1, q.shape[1] // k.shape[1], 1, 1)",
    ),
    heads_of_v_grouped_the_other_way=(
        "v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)",
        "v = v.repeat(1, q.shape[1] // v.shape[1], 1, 1)",
    ),
)

BATCH, HEAD = "tl.program_id(2).to(tl.int64)", "tl.program_id(1).to(tl.int64)"
DECODE = f"b, h = {BATCH}, {HEAD}"
LOAD_Q = "q = tl.load(q_ptrs, mask=q_mask, other=0.0)"
LOAD_K = "k = tl.load(k_ptrs, mask=kv_mask, other=0.0)"
LOAD_V = "v = tl.load(v_ptrs, mask=kv_mask, other=0.0)"
MASK_S = 's = tl.where(in_range[None, :], s, float("-inf"))'
MASK_KV = "kv_mask = in_range[:, None] & (offs_d[None, :] < d)"
TRITON = wrong_scales("d**-0.5, PRECISION", "d**-0.5", d="d") | replaced(
    scale_of_the_padded_dimension=("d**-0.5, PRECISION", "config['BLOCK_D']**-0.5, PRECISION"),
    scale_not_applied=("input_precision=PRECISION) * scale", "input_precision=PRECISION)"),
    K_not_transposed=("tl.trans(k)", "k"),
    # the ragged tail
    tail_unmasked=(MASK_S, "s = s"),
    tail_counts_as_0=(MASK_S, MASK_S.replace('float("-inf")', "0.0")),
    tail_one_key_too_long=("start_n + offs_n < Nk", "start_n + offs_n <= Nk"),
    tail_one_key_too_short=("start_n + offs_n < Nk", "start_n + offs_n < Nk - 1"),
    tail_dropped=("range(0, Nk, BLOCK_N)", "range(0, Nk - BLOCK_N + 1, BLOCK_N)"),
    K_loaded_unmasked=(LOAD_K, "k = tl.load(k_ptrs)"),
    V_loaded_unmasked=(LOAD_V, "v = tl.load(v_ptrs)"),
    Q_loaded_unmasked=(LOAD_Q, "q = tl.load(q_ptrs)"),
    no_mask_on_the_dimension=(MASK_KV, "kv_mask = in_range[:, None]"),
    no_mask_on_the_keys=(MASK_KV, "kv_mask = offs_d[None, :] < d"),
    no_mask_on_the_queries=("(offs_m[:, None] < Nq) & (offs_d", "(offs_d"),
    rows_of_the_last_block_not_done=("triton.cdiv(Nq, config", "Nq // (config"),
    O_stored_unmasked=(", mask=q_mask)\n", ")\n"),
    # a stride assumed
    contiguous_Q_assumed=("offs_m[:, None] * stride_qm", "offs_m[:, None] * d"),
    contiguous_K_assumed=("offs_n[:, None] * stride_kn", "offs_n[:, None] * d"),
    contiguous_V_assumed=("offs_n[:, None] * stride_vn", "offs_n[:, None] * d"),
    stride_qd_assumed=("offs_d[None, :] * stride_qd", "offs_d[None, :]"),
    stride_kd_assumed=("offs_d[None, :] * stride_kd", "offs_d[None, :]"),
    stride_vd_assumed=("offs_d[None, :] * stride_vd", "offs_d[None, :]"),
    stride_qh_assumed=("h * stride_qh", "h * Nq * d"),
    stride_kh_assumed=("h * stride_kh", "h * Nk * d"),
    stride_vb_assumed=("b * stride_vb", "b * tl.num_programs(1) * Nk * d"),
    V_by_the_rows_of_K=("offs_n[:, None] * stride_vn", "offs_n[:, None] * stride_kn"),
    V_by_the_columns_of_K=("offs_d[None, :] * stride_vd", "offs_d[None, :] * stride_kd"),
    V_by_the_heads_of_K=("h * stride_vh", "h * stride_kh"),
    strides_of_K_and_V_mixed_up=(
        "*k.stride(), *v.stride()",
        "*v.stride(), *k.stride()",
    ),
    # which head
    batch_by_the_head=(DECODE, f"b, h = {HEAD}, {HEAD}"),
    head_by_the_batch=(DECODE, f"b, h = {BATCH}, {BATCH}"),
    batch_and_head_mixed_up=(DECODE, f"b, h = {HEAD}, {BATCH}"),
    first_head_for_all=(DECODE, f"b, h = {BATCH}, {HEAD} * 0"),
    first_batch_entry_for_all=(DECODE, f"b, h = {BATCH} * 0, {HEAD}"),
    rows_of_the_first_block_for_all=("tl.program_id(0).to(tl.int64) * BLOCK_M", "0"),
)

TRITON_LITE = TRITON | replaced(
    no_max=("tl.exp(s - tl.max(s, 1)[:, None])", "tl.exp(s)"),
    not_normalised=("p = p / tl.sum(p, 1)[:, None]", "p = p"),
    max_over_the_queries=("tl.max(s, 1)[:, None]", "tl.max(s, 0)[None, :]"),
    normalised_over_the_queries=("tl.sum(p, 1)[:, None]", "tl.sum(p, 0)[None, :]"),
)

RESCALE_ACC, RESCALE_L = "acc = acc * alpha[:, None]", "l_i = l_i * alpha + tl.sum(p, 1)"
NEW_MAX, ALPHA = "m_new = tl.maximum(m_i, tl.max(s, 1))", "alpha = tl.exp(m_i - m_new)"
TRITON_ONLINE = TRITON | replaced(
    no_rescale_of_acc=(RESCALE_ACC, "acc = acc"),
    no_rescale_of_l=(RESCALE_L, "l_i = l_i + tl.sum(p, 1)"),
    l_of_the_last_tile=(RESCALE_L, "l_i = tl.sum(p, 1)"),
    l_rescaled_after_the_sum=(RESCALE_L, "l_i = (l_i + tl.sum(p, 1)) * alpha"),
    no_max=(NEW_MAX, "m_new = tl.zeros((BLOCK_M,), dtype=tl.float32)"),
    max_of_the_tile_alone=(NEW_MAX, "m_new = tl.max(s, 1)"),
    max_of_the_first_tile=("m_i = m_new", "m_i = tl.maximum(m_i, -1e30)"),
    max_not_kept=("        m_i = m_new\n", ""),
    alpha_inverted=(ALPHA, "alpha = tl.exp(m_new - m_i)"),
    alpha_squared=(ALPHA, "alpha = tl.exp(2 * (m_i - m_new))"),
    alpha_of_the_block=(ALPHA, "alpha = tl.exp(tl.max(m_i, 0) - m_new)"),
    p_under_the_old_max=("tl.exp(s - m_new[:, None])", "tl.exp(s - m_i[:, None])"),
    no_division=("acc = acc / l_i[:, None]", "acc = acc"),
    divided_by_every_tile=(
        "        m_i = m_new\n",
        "        m_i = m_new\n        acc /= l_i[:, None]\n",
    ),
    max_from_minus_infinity=("(BLOCK_M,), -3.4028234663852886e38", '(BLOCK_M,), float("-inf")'),
    K_stays_at_the_first_tile=("        k_ptrs += BLOCK_N * stride_kn\n", ""),
    V_stays_at_the_first_tile=("        v_ptrs += BLOCK_N * stride_vn\n", ""),
    K_advances_as_if_contiguous=("k_ptrs += BLOCK_N * stride_kn", "k_ptrs += BLOCK_N * d"),
    V_advances_as_if_contiguous=("v_ptrs += BLOCK_N * stride_vn", "v_ptrs += BLOCK_N * d"),
    V_advances_like_K=("v_ptrs += BLOCK_N * stride_vn", "v_ptrs += BLOCK_N * stride_kn"),
)

# those of stage 5 that are written alike in stage 6
OF_STAGE_5 = (
    "K not transposed", "K loaded unmasked",
    "V loaded unmasked", "Q loaded unmasked", "no mask on the queries", "O stored unmasked",
    "contiguous Q assumed", "contiguous K assumed", "contiguous V assumed", "stride qd assumed",
    "stride kd assumed", "stride vd assumed", "stride qh assumed", "stride vb assumed",
    "V by the rows of K", "V by the columns of K", "strides of K and V mixed up",
    "batch by the head", "head by the batch", "first head for all", "batch and head mixed up",
    "first batch entry for all",
    "no rescale of acc", "no rescale of l", "l of the last tile", "l rescaled after the sum",
    "max not kept", "no division", "divided by every tile",
)  # fmt: skip
NEW_MAX_2 = "m_new = tl.maximum(m_i, tl.max(s, 1) * qk_scale)"
ALPHA_2, P_2 = "alpha = tl.exp2(m_i - m_new)", "p = tl.exp2(s * qk_scale - m_new[:, None])"
LOWEST, MINUS_INF = "(BLOCK_M,), -3.4028234663852886e38", '(BLOCK_M,), float("-inf")'
DIAGONAL = "(start_n + offs_n[None, :] <= rows[:, None] + shift)"
LENGTH = "tl.load(seqlens_ptr + b), 0)"
FULL, ROUNDED = "tl.maximum(start_m + shift + 1, 0)", "full = full // BLOCK_N * BLOCK_N"
END = "tl.minimum(start_m + BLOCK_M, Nq) + shift, 0)"
LSE = "m_i + tl.log2(l_i)"
NEXT_K, NEXT_V = "k_ptr += BLOCK_N * stride_kn", "v_ptr += BLOCK_N * stride_vn"
TO_K, TO_V = (f"    {x}_ptr += tl.cast(start, tl.int64) * stride_{x}n\n" for x in "kv")
FLASH_2 = (
    {name: TRITON_ONLINE[name] for name in OF_STAGE_5}
    | wrong_scales("d**-0.5 * LOG2_E", "d**-0.5", d="d")
    | replaced(
        log2_of_e_forgotten=("d**-0.5 * LOG2_E", "d**-0.5"),
        tail_one_key_too_long=("start_n + offs_n < Nk_valid", "start_n + offs_n <= Nk_valid"),
        tail_one_key_too_short=("start_n + offs_n < Nk_valid", "start_n + offs_n < Nk_valid - 1"),
        no_max=(NEW_MAX_2, "m_new = tl.zeros_like(m_i)"),
        max_of_the_tile_alone=(NEW_MAX_2, "m_new = tl.max(s, 1) * qk_scale"),
        max_not_scaled=("tl.max(s, 1) * qk_scale", "tl.max(s, 1)"),
        scores_not_scaled=("tl.exp2(s * qk_scale - m_new", "tl.exp2(s - m_new"),
        exp_for_exp2=("p = tl.exp2(", "p = tl.exp("),
        alpha_by_exp=("alpha = tl.exp2(", "alpha = tl.exp("),
        alpha_inverted=(ALPHA_2, "alpha = tl.exp2(m_new - m_i)"),
        alpha_of_the_block=(ALPHA_2, "alpha = tl.exp2(tl.max(m_i, 0) - m_new)"),
        p_under_the_old_max=(P_2, "p = tl.exp2(s * qk_scale - m_i[:, None])"),
        max_from_minus_infinity=(LOWEST, MINUS_INF),
        # scores: in float32 q is scaled, in 16 bits each score is, and some are too large
        float32_scaled_twice=("        qk_scale = 1.0\n", ""),
        float32_never_scaled=("        q *= qk_scale\n", ""),
        large_scores_not_refused=(
            "        l_i = nan_where_large(l_i, m_i)\n",
            "        l_i = l_i\n",
        ),
        large_negative_scores_not_refused=("tl.abs(m_i) <= 67108864.0", "m_i <= 67108864.0"),
        float32_refused=("    if not SCALED:", "    if True:"),
        no_guard_for_rows_that_see_nothing=("tl.where(seen > 0, l_i, 1.0)", "l_i"),
        minus_infinity_only_taken_for_nothing_seen=(
            "tl.where(seen > 0, l_i, 1.0)",
            "tl.where(l_i == 0.0, 1.0, l_i)",
        ),
        seen_from_the_top_left=(
            "tl.minimum(rows + shift + 1, Nk_valid)",
            "tl.minimum(rows + 1, Nk_valid)",
        ),
        # masks
        mask_not_applied=('s = tl.where(visible, s, float("-inf"))', "s = s"),
        masked_counts_as_0=("tl.where(visible, s, float", "tl.where(visible, s, 0.0 * float"),
        masked_is_0=('s = tl.where(visible, s, float("-inf"))', "s = tl.where(visible, s, 0.0)"),
        tail_unmasked=("visible = valid[None, :]", "visible = offs_n[None, :] >= 0"),
        no_mask_on_the_dimension=("valid[:, None] & in_d", "valid[:, None]"),
        no_mask_on_the_keys=("valid[:, None] & in_d", "in_d"),
        causal_without_the_lengths=("visible & (start_n", "(start_n"),
        causal_ignored_in_the_tile=("            if CAUSAL:", "            if False:"),
        causal_without_the_diagonal=(DIAGONAL, DIAGONAL.replace("<=", "<")),
        causal_one_key_too_far=(DIAGONAL, DIAGONAL.replace("shift", "shift + 1")),
        causal_from_the_top_left=("shift = Nk - Nq", "shift = 0"),
        causal_from_the_top_left_in_the_tile=(DIAGONAL, DIAGONAL.replace(" + shift", "")),
        causal_shifted_the_other_way=("shift = Nk - Nq", "shift = Nq - Nk"),
        one_key_of_the_padding=(LENGTH, LENGTH.replace("+ b)", "+ b) + 1")),
        the_last_key_forgotten=(LENGTH, LENGTH.replace("+ b)", "+ b) - 1")),
        one_length_for_all=(LENGTH, LENGTH.replace(" + b", "")),
        lengths_ignored=("    if HAS_SEQLENS:", "    if False:"),
        # which tiles
        first_masked_tile_as_a_full_one=(ROUNDED, "full = tl.cdiv(full, BLOCK_N) * BLOCK_N"),
        full_one_key_too_far=(FULL, FULL.replace("+ 1", "+ 2")),
        full_up_to_the_last_row=(FULL, FULL.replace("start_m", "start_m + BLOCK_M")),
        full_not_rounded=(ROUNDED, "full = full"),
        end_one_key_short=(END, END.replace("shift", "shift - 1")),
        end_at_the_first_row=(END, END.replace("tl.minimum(start_m + BLOCK_M, Nq)", "start_m")),
        end_one_tile_short=(END, END.replace("shift", "shift - BLOCK_N")),
        end_one_tile_late=(END, END.replace("shift", "shift + BLOCK_N")),
        no_early_exit=(f"end = tl.minimum(tl.maximum({END}, Nk_valid)", "end = Nk_valid"),
        full_tiles_twice=("        full, end, rows", "        0, end, rows"),
        K_not_moved_to_the_masked_tiles=(TO_K, ""),
        V_not_moved_to_the_masked_tiles=(TO_V, ""),
        K_stays_at_the_first_tile=(f"        {NEXT_K}\n", ""),
        V_stays_at_the_first_tile=(f"        {NEXT_V}\n", ""),
        K_advances_as_if_contiguous=(NEXT_K, NEXT_K.replace("stride_kn", "d")),
        V_advances_as_if_contiguous=(NEXT_V, NEXT_V.replace("stride_vn", "d")),
        V_advances_like_K=(NEXT_V, NEXT_V.replace("stride_vn", "stride_kn")),
        masked_tiles_without_a_mask=("\n        True, CAUSAL", "\n        False, CAUSAL"),
        blocks_reversed_past_the_end=("blocks - 1 - block", "blocks - block"),
        rows_of_the_last_block_not_done=("grid = (triton.cdiv(Nq, config", "grid = (Nq // (config"),
        d_always_even=('EVEN_D=d == config["BLOCK_D"]', "EVEN_D=True"),
        # which head
        heads_grouped_the_other_way=("h_k = h // group", "h_k = h % (H // group)"),
        heads_not_grouped=("h_k = h // group", "h_k = h"),
        first_key_head_for_all=("h_k = h // group", "h_k = h * 0"),
        V_by_the_heads_of_K=("h_k * stride_vh", "h_k * stride_kh"),
        V_by_the_query_heads=("h_k * stride_vh", "h * stride_vh"),
        # what else it writes
        lse_without_the_sum=(LSE, LSE.replace(" + tl.log2(l_i)", "")),
        lse_without_the_max=(LSE, LSE.replace("m_i + ", "")),
        lse_in_base_e=(LSE, f"({LSE}) * 0.6931471805599453"),
        lse_given_out_in_base_2=("lse.mul_(math.log(2))", "lse"),
        lse_of_the_sum_in_base_e=(LSE, LSE.replace("log2", "log")),
        lse_of_another_head=("lse_ptr + head * Nq", "lse_ptr + h * Nq"),
        lse_stored_unmasked=("offs_m, lse, mask=offs_m < Nq)", "offs_m, lse)"),
        tiles_counted_twice=("visited += 1", "visited += 2"),
        tail_not_counted=("tl.cdiv(Nk, BLOCK_N) - visited", "Nk // BLOCK_N - visited"),
        counts_in_the_order_of_the_launch=("* blocks + block,", "* blocks + tl.program_id(0),"),
    )
)

FROM_A, DS_B = "tl.broadcast_to(-delta[None, :]", "ds = p * (dp - delta[:, None])"
DIAGONAL_A = "visible = keys[:, None] <= start_m + offs_m[None, :] + shift"
FIRST, FULL_A = "tl.maximum(start_n - shift, 0)", "tl.maximum(start_n + BLOCK_N - 1 - shift, 0)"
LENGTH_A = f"{LENGTH}, Nk)\n    shift = Nk - Nq  #"
LENGTH_B = f"{LENGTH}, Nk)\n    shift = Nk - Nq\n"
LAUNCH_A = "*dv.stride(),\n                H // Hk, Nq, Nk, d, scale, scale * LOG2_E,"
LAUNCH_B = "*dq.stride(),\n                H // Hk, Nq, Nk, d, scale, scale * LOG2_E,"
HEADS = "    for g in range(group):\n"
AGAIN = "        d{0} = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)\n"
DELTA_HEAD = (
    "h * stride_doh\n"
    "    do_ptrs += offs_m[:, None] * stride_dom + offs_d[None, :] * stride_dod\n"
    "    o ="
)
Q_OFFS = "q_offs = offs_m[:, None] * stride_qm + offs_d[None, :] * stride_qd"
K_OFFS, V_OFFS = (f"offs_n[:, None] * stride_{x}n + offs_d[None, :] * stride_{x}d  #" for x in "kv")
DO_OFFS = "do_offs = offs_m[:, None] * stride_dom"
NEXT_Q, NEXT_DO = "q_ptr += BLOCK_M * stride_qm", "do_ptr += BLOCK_M * stride_dom"
KEYS_A = "(offs_n[:, None] < Nk) & (offs"
STRIDES_A = "*k.stride(), *v.stride(), *do.stride(), *dk"
STRIDES_B = "*k.stride(), *v.stride(), *do.stride(), *dq"
KV, VK, DO_, O_ = "*k.stride(), *v", "*v.stride(), *k", "*do", "*o"
WALKED = "tl.where(start_n < Nk_valid, Nq, 0)"
FULL_TILES_A = "stride_dod, full, end,"
GRADS = "return dq, dk if wanted[1] else None, dv if wanted[2] else None"
TRAINING = wrong_scales("    scale = d**-0.5\n", "d**-0.5", d="d") | replaced(
    # delta
    delta_forgotten_in_A=(FROM_A, FROM_A.replace("-", "0.0 * ")),
    delta_forgotten_in_B=(DS_B, "ds = p * dp"),
    delta_added_in_A=(FROM_A, FROM_A.replace("-", "")),
    delta_added_in_B=(DS_B, DS_B.replace("-", "+")),
    delta_of_o_alone=("tl.sum(o * do, 1)", "tl.sum(o, 1)"),
    delta_of_dO_by_the_strides_of_o=("*o.stride(), *do.stride()", "*o.stride(), *o.stride()"),
    delta_without_the_last_row=("1), mask=offs_m < Nq)", "1), mask=offs_m < Nq - 1)"),
    delta_of_the_first_block=(
        "offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange",
        "offs_m = tl.arange",
    ),
    delta_of_one_head_for_all=(DELTA_HEAD, DELTA_HEAD.replace("h *", "0 *")),
    # scales and units
    dk_without_scale=("dk * scale, 0.0)", "dk, 0.0)"),
    dk_scaled_twice=("dk * scale, 0.0)", "dk * scale * scale, 0.0)"),
    dv_scaled=("tl.where(valid, dv, 0.0)", "tl.where(valid, dv * scale, 0.0)"),
    dq_of_the_blind_rows_at_the_end=("(0, 0, blind, 0)", "(0, 0, 0, blind)"),
    one_row_more_is_blind=("blind = Nq - Nk", "blind = Nq - Nk + 1"),
    lse_of_the_blind_rows=("lse[:, :, blind:]", "lse[:, :, : Nq - blind]"),
    dq_without_scale=("(dq * scale)", "dq"),
    dq_scaled_twice=("(dq * scale)", "(dq * scale * scale)"),
    log2_of_e_forgotten_in_A=(LAUNCH_A, LAUNCH_A.replace(" * LOG2_E", "")),
    log2_of_e_forgotten_in_B=(LAUNCH_B, LAUNCH_B.replace(" * LOG2_E", "")),
    lse_in_base_e_in_A=("- lse[None, :]", "- 0.6931471805599453 * lse[None, :]"),
    lse_in_base_e_in_B=("- lse[:, None]", "- 0.6931471805599453 * lse[:, None]"),
    lse_forgotten_in_A=("s * qk_scale - lse[None, :]", "s * qk_scale"),
    lse_forgotten_in_B=("s * qk_scale - lse[:, None]", "s * qk_scale"),
    # products
    dp_of_k_in_A=("= tl.dot(v, tl.trans(do)", "= tl.dot(k, tl.trans(do)"),
    dp_of_k_in_B=("dp = tl.dot(do, tl.trans(v)", "dp = tl.dot(do, tl.trans(k)"),
    dp_of_q_in_A=("= tl.dot(v, tl.trans(do)", "= tl.dot(v, tl.trans(q)"),
    dp_of_q_in_B=("dp = tl.dot(do, tl.trans(v)", "dp = tl.dot(q, tl.trans(v)"),
    p_transposed_in_A=("tl.dot(p_dv.to(do.dtype), do", "tl.dot(tl.trans(p_dv).to(do.dtype), do"),
    ds_transposed_in_A=("tl.dot(ds.to(q.dtype), q", "tl.dot(tl.trans(ds).to(q.dtype), q"),
    ds_transposed_in_B=("tl.dot(ds.to(k.dtype), k", "tl.dot(tl.trans(ds).to(k.dtype), k"),
    dk_of_p=("tl.dot(ds.to(q.dtype), q", "tl.dot(p.to(q.dtype), q"),
    dq_of_p=("tl.dot(ds.to(k.dtype), k", "tl.dot(p.to(k.dtype), k"),
    dk_of_dO=("tl.dot(ds.to(q.dtype), q", "tl.dot(ds.to(q.dtype), do"),
    dq_of_v=("tl.dot(ds.to(k.dtype), k", "tl.dot(ds.to(k.dtype), v"),
    dv_of_the_last_tile=(" do, dv, input_precision", " do, input_precision"),
    dk_of_the_last_tile=(" q, dk, input_precision", " q, input_precision"),
    dq_of_the_last_tile=(" k, dq, input_precision", " k, input_precision"),
    dk_and_dv_mixed_up=(GRADS, "return dq, dv, dk"),
    # heads that share one
    only_the_first_of_a_group=(HEADS, HEADS.replace("group", "1")),
    dk_of_the_last_of_a_group=(HEADS, HEADS + AGAIN.format("k")),
    dv_of_the_last_of_a_group=(HEADS, HEADS + AGAIN.format("v")),
    heads_grouped_the_other_way_in_A=("h = h_k * group + g", "h = h_k + g * Hk"),
    heads_grouped_the_other_way_in_B=("h_k = h // group", "h_k = h % (H // group)"),
    first_key_head_for_all_in_B=("h_k = h // group", "h_k = h * 0"),
    rows_of_another_head=("num_programs(1) * group + h) * Nq", "num_programs(1) + h) * Nq"),
    batch_and_head_mixed_up_in_A=(f"h_k = {BATCH}, {HEAD}", f"h_k = {HEAD}, {BATCH}"),
    # which tiles A walks
    first_row_late=(FIRST, FIRST.replace("shift", "shift + 1")),
    first_tile_late=("Nq) // BLOCK_M * BLOCK_M", "Nq) // BLOCK_M * BLOCK_M + BLOCK_M"),
    first_from_the_top_left=(FIRST, FIRST.replace(" - shift", "")),
    full_one_row_early=(FULL_A, FULL_A.replace("- 1", "- 2")),
    full_one_tile_early=("tl.cdiv(full, BLOCK_M) * BLOCK_M, ", "full // BLOCK_M * BLOCK_M, "),
    full_from_the_first_row_on=(FULL_A, "first"),
    walk_one_row_short=(WALKED, WALKED.replace("Nq", "Nq - 1")),
    walk_ends_with_the_masked_tiles=(FULL_TILES_A, FULL_TILES_A.replace("full", "end")),
    masked_tiles_twice=(FULL_TILES_A, FULL_TILES_A.replace("full", "first")),
    masked_tiles_without_a_mask=("True, EVEN_M, EVEN_D", "False, EVEN_M, EVEN_D"),
    q_not_moved_to_the_first_tile=("    q_ptr += tl.cast(start, tl.int64) * stride_qm\n", ""),
    dO_not_moved_to_the_first_tile=("    do_ptr += tl.cast(start, tl.int64) * stride_dom\n", ""),
    lse_not_moved_to_the_first_tile=("    lse_ptr += start\n", ""),
    delta_not_moved_to_the_first_tile=("    delta_ptr += start\n", ""),
    q_stays_at_the_first_tile=(f"        {NEXT_Q}\n", ""),
    dO_stays_at_the_first_tile=(f"        {NEXT_DO}\n", ""),
    lse_stays_at_the_first_tile=("        lse_ptr += BLOCK_M\n", ""),
    delta_stays_at_the_first_tile=("        delta_ptr += BLOCK_M\n", ""),
    n_always_even=('EVEN_M=Nq % config["BLOCK_M"] == 0', "EVEN_M=True"),
    d_always_even_in_A=("== 0, EVEN_D=d == BLOCK_D", "== 0, EVEN_D=True"),
    d_always_even_in_B=("not None, EVEN_D=d == BLOCK_D", "not None, EVEN_D=True"),
    # masks
    causal_without_the_diagonal_in_A=(DIAGONAL_A, DIAGONAL_A.replace("<=", "<")),
    causal_one_key_too_far_in_A=(DIAGONAL_A, DIAGONAL_A.replace("shift", "shift + 1")),
    causal_from_the_top_left_in_A=(DIAGONAL_A, DIAGONAL_A.replace(" + shift", "")),
    not_masked_in_A=(DIAGONAL_A, "visible = keys[:, None] >= 0"),
    causal_without_the_diagonal_in_B=(DIAGONAL, DIAGONAL.replace("<=", "<")),
    causal_one_key_too_far_in_B=(DIAGONAL, DIAGONAL.replace("shift", "shift + 1")),
    not_masked_in_B=(
        "            p = tl.where(visible, p, 0.0)\n        # step ds_row",
        "        # step ds_row",
    ),
    hidden_p_not_masked_in_B=(
        "            p = tl.where(visible, p, 0.0)\n        # step ds_row",
        "            p = tl.where(visible, 1.0, 0.0) * p\n        # step ds_row",
    ),
    gradients_of_large_scores_not_refused=(
        'lse = tl.where(tl.abs(lse) < 16777216.0, lse, float("nan"))',
        "lse = lse",
    ),
    causal_without_the_lengths_in_B=("visible & (start_n", "(start_n"),
    causal_from_the_top_left_in_B=(DIAGONAL, DIAGONAL.replace(" + shift", "")),
    tail_unmasked_in_B=("visible = valid[None, :]", "visible = offs_n[None, :] >= 0"),
    no_mask_on_the_keys_in_B=("valid[:, None] & in_d", "in_d"),
    one_key_of_the_padding_in_A=(LENGTH_A, LENGTH_A.replace("+ b)", "+ b) + 1")),
    the_last_key_forgotten_in_A=(LENGTH_A, LENGTH_A.replace("+ b)", "+ b) - 1")),
    one_length_for_all_in_A=(LENGTH_A, LENGTH_A.replace(" + b", "")),
    one_key_of_the_padding_in_B=(LENGTH_B, LENGTH_B.replace("+ b)", "+ b) + 1")),
    the_last_key_forgotten_in_B=(LENGTH_B, LENGTH_B.replace("+ b)", "+ b) - 1")),
    one_length_for_all_in_B=(LENGTH_B, LENGTH_B.replace(" + b", "")),
    dk_of_the_padding_not_0=("tl.where(valid, dk * scale, 0.0)", "dk * scale"),
    dv_of_the_padding_not_0=("tl.where(valid, dv, 0.0)", "dv"),
    dk_and_dv_stored_up_to_the_lengths=(KEYS_A, KEYS_A.replace("Nk)", "Nk_valid)")),
    # which tiles B walks
    first_masked_tile_as_a_full_one_in_B=(ROUNDED, "full = tl.cdiv(full, BLOCK_N) * BLOCK_N"),
    full_one_key_too_far_in_B=(FULL, FULL.replace("+ 1", "+ 2")),
    end_one_key_short_in_B=(END, END.replace("shift", "shift - 1")),
    end_one_tile_short_in_B=(END, END.replace("shift", "shift - BLOCK_N")),
    K_not_moved_to_the_masked_tiles=(TO_K, ""),
    V_not_moved_to_the_masked_tiles=(TO_V, ""),
    masked_tiles_without_a_mask_in_B=("        True, CAUSAL", "        False, CAUSAL"),
    # strides
    dO_by_the_strides_of_o_in_A=(STRIDES_A, STRIDES_A.replace(DO_, O_)),
    dO_by_the_strides_of_o_in_B=(STRIDES_B, STRIDES_B.replace(DO_, O_)),
    dq_by_the_strides_of_q=("*do.stride(), *dq.stride()", "*do.stride(), *q.stride()"),
    dk_by_the_strides_of_k=("*do.stride(), *dk.stride()", "*do.stride(), *k.stride()"),
    strides_of_K_and_V_mixed_up_in_A=(STRIDES_A, STRIDES_A.replace(KV, VK)),
    strides_of_K_and_V_mixed_up_in_B=(STRIDES_B, STRIDES_B.replace(KV, VK)),
    contiguous_Q_assumed_in_A=(Q_OFFS, Q_OFFS.replace("stride_qm", "d")),
    contiguous_dO_assumed_in_A=(DO_OFFS, DO_OFFS.replace("stride_dom", "d")),
    contiguous_K_assumed_in_B=(K_OFFS, K_OFFS.replace("stride_kn", "d")),
    contiguous_V_assumed_in_B=(V_OFFS, V_OFFS.replace("stride_vn", "d")),
    stride_qd_assumed_in_A=(Q_OFFS, Q_OFFS.replace(" * stride_qd", "")),
    stride_kd_assumed_in_B=(K_OFFS, K_OFFS.replace(" * stride_kd", "")),
    stride_vd_assumed_in_B=(V_OFFS, V_OFFS.replace(" * stride_vd", "")),
    Q_advances_as_if_contiguous=(NEXT_Q, NEXT_Q.replace("stride_qm", "d")),
    dO_advances_as_if_contiguous=(NEXT_DO, NEXT_DO.replace("stride_dom", "d")),
    K_advances_as_if_contiguous=(NEXT_K, NEXT_K.replace("stride_kn", "d")),
    V_advances_as_if_contiguous=(NEXT_V, NEXT_V.replace("stride_vn", "d")),
    rows_of_the_last_block_not_done=("(triton.cdiv(Nq, config", "(Nq // (config"),
    keys_of_the_last_block_not_done=("(triton.cdiv(Nk, config", "(Nk // (config"),
)

SHIFT_PAGED, SEEN = "shift = Nk_valid - Nq", "(start_n + offs_n)[None, :] < seen[:, None]"
FIRST_M, LAST_M = "tl.maximum(first_m + shift + 1, 0)", "tl.maximum(last_m + shift + 1, 0)"
PACKED = "last_m = tl.minimum(block * BLOCK_M + BLOCK_M - 1, Nq * group - 1) // group"
PART_START = "start = (split * (tiles // splits) + tl.minimum(split, tiles % splits)) * BLOCK_N"
PART_END = "end = start + (tiles // splits + tl.where(split < tiles % splits, 1, 0)) * BLOCK_N"
MERGED_L, MERGED_ACC = "l_i = l_i * alpha + tl.sum(w_s * l_s, 0)", "tl.sum(w_s[:, None] * acc_s, 0)"
L_16 = "l_i = l_i * alpha[:, None] + p if"
PAGE_OF_TILE, PAGES_OF_TILE = "tl.load(table_ptr + start //", "tl.load(table_ptrs + start //"
AHEAD = "(start_n + BLOCK_N) // PAGE_SIZE)"
SPLIT_KV = wrong_scales("d**-0.5 * LOG2_E", "d**-0.5", d="d") | replaced(
    # the merge
    merge_without_the_rescale_of_acc=("acc = acc * alpha + tl.sum(w_s", "acc = acc + tl.sum(w_s"),
    merge_without_the_rescale_of_l=(MERGED_L, MERGED_L.replace(" * alpha", "")),
    merge_without_weights=("tl.exp2((m_s - m_safe)", "tl.exp2((m_s - m_s)"),
    merge_by_the_unscaled_max=("(m_s - m_safe) * qk_scale", "(m_s - m_safe)"),
    merge_rescaled_by_the_unscaled_max=("(m_i - m_safe) * qk_scale", "(m_i - m_safe)"),
    parts_summed_unweighted=(MERGED_ACC, "tl.sum(acc_s, 0)"),
    sums_merged_unweighted=(MERGED_L, MERGED_L.replace("w_s * ", "")),
    merge_by_the_first_max=("tl.maximum(m_i, tl.max(m_s, 0))", "tl.maximum(m_i, tl.min(m_s, 0))"),
    merged_parts_averaged=("(acc / l_i).to", "(acc / splits).to"),
    an_empty_part_counted=("mask=s < splits, other=0.0)", "mask=s < splits, other=1.0) + 1.0"),
    an_empty_part_s_max_is_0=(
        "tl.store(stats_ptr + 2 * part, m_i,",
        "tl.store(stats_ptr + 2 * part, tl.maximum(m_i, 0.0),",
    ),
    the_last_part_forgotten=("range(0, splits, BLOCK_S)", "range(0, splits - 1, BLOCK_S * 16)"),
    m_and_l_mixed_up=("2 * part + 1, l_i", "2 * part + 1, m_i"),
    parts_of_another_row=("parts_ptr += row * splits * d", "parts_ptr += i * splits * d"),
    stats_of_another_row=("stats_ptr += 2 * row * splits", "stats_ptr += 2 * i * splits"),
    parts_divided_by_l=("tl.store(part_ptrs, acc,", "tl.store(part_ptrs, acc / l_i[:, None],"),
    lse_of_the_merge_without_the_sum=(
        "row, m_i * qk_scale + tl.log2(l_i))\n",
        "row, m_i * qk_scale)\n",
    ),
    lse_without_the_max=("row, m_i * qk_scale + tl.log2(l_i), mask", "row, tl.log2(l_i), mask"),
    lse_of_the_unscaled_max=(
        "row, m_i * qk_scale + tl.log2(l_i), mask",
        "row, m_i + tl.log2(l_i), mask",
    ),
    no_key_divides_by_0=('l_i = tl.where(m_i == float("-inf"), 1.0, l_i)', "l_i = l_i"),
    minus_infinity_only_taken_for_nothing_seen=(
        'tl.where(m_i == float("-inf"), 1.0, l_i)',
        "tl.where(l_i == 0.0, 1.0, l_i)",
    ),
    max_from_minus_infinity=(LOWEST, MINUS_INF),
    no_key_divides_by_0_in_one_part=(
        "l_i = tl.where(seen > 0, l_i, 1.0)",
        "l_i = l_i",
    ),
    # which part has which tiles
    parts_overlap=(PART_END, PART_END.replace("1, 0)", "1, 1)")),
    a_part_one_tile_short=(PART_END, PART_END.replace("1, 0)", "0, 0)")),
    parts_begin_together=(
        PART_START,
        PART_START.replace(" + tl.minimum(split, tiles % splits)", ""),
    ),
    every_part_has_all=(PART_START, "start = 0"),
    block_and_part_mixed_up=(
        "tl.program_id(0) // splits, tl.program_id(0) % splits",
        "tl.program_id(0) % splits, tl.program_id(0) // splits",
    ),
    masked_tiles_left_to_another=("tl.maximum(start, full), end", "tl.maximum(start, full), full"),
    full_tiles_past_the_part=("start, tl.minimum(full, end)", "start, full"),
    full_tiles_twice=("tl.maximum(start, full), end", "start, end"),
    # packed rows
    group_index_off_by_one=("offs_m = offs_r // group ", "offs_m = (offs_r + 1) // group "),
    causal_by_the_packed_row=(
        "seen = tl.minimum(tl.maximum(offs_m + shift",
        "seen = tl.minimum(tl.maximum(offs_r + shift",
    ),
    heads_packed_the_other_way=("h_k * group + offs_r % group", "h_k * group + offs_r // Nq"),
    heads_grouped_the_other_way=(
        "h_k * group + offs_r % group",
        "h_k + offs_r % group * tl.num_programs(1)",
    ),
    first_row_of_a_block_unpacked=(
        "first_m = block * BLOCK_M // group",
        "first_m = block * BLOCK_M",
    ),
    last_row_of_a_block_unpacked=(
        PACKED,
        PACKED.replace("- 1) // group", "- 1)").replace(
            "- 1, Nq", "- 1) // group * group + 0 * (Nq"
        ),
    ),
    rows_of_the_first_block_for_all=("offs_r = block * BLOCK_M +", "offs_r ="),
    rows_of_the_last_block_not_done=(
        "blocks = -(-Nq * (H // Hk) //",
        "blocks = (Nq * (H // Hk) //",
    ),
    rows_past_the_last_stored=("in_rows = offs_r < Nq * group", "in_rows = offs_r <= Nq * group"),
    # masks
    causal_without_the_diagonal=(
        "offs_m + shift + 1, 0), Nk_valid)",
        "offs_m + shift, 0), Nk_valid)",
    ),
    causal_one_key_too_far=(
        "offs_m + shift + 1, 0), Nk_valid)",
        "offs_m + shift + 2, 0), Nk_valid)",
    ),
    causal_from_the_top_left=("shift = Nk - Nq ", "shift = 0 "),
    full_tiles_one_key_too_far=(FIRST_M, FIRST_M.replace("+ 1", "+ 2")),
    last_key_of_a_block_forgotten=(LAST_M, LAST_M.replace(" + 1", "")),
    tail_unmasked=(SEEN, "(start_n + offs_n)[None, :] < last + 0 * seen[:, None] + BLOCK_N"),
    no_mask_on_the_keys=("(start_n + offs_n < last)[:, None] & in_d", "in_d"),
    one_key_of_the_padding=(
        "tl.load(seqlens_ptr + entry), 0)",
        "tl.load(seqlens_ptr + entry) + 1, 0)",
    ),
    one_length_for_all=("tl.load(seqlens_ptr + entry)", "tl.load(seqlens_ptr)"),
    first_masked_tile_as_a_full_one=(
        "full = full // BLOCK_N * BLOCK_N",
        "full = tl.cdiv(full, BLOCK_N) * BLOCK_N",
    ),
    # the walk
    l_of_the_last_tile=(L_16, "l_i = p if"),
    l_without_the_rescale=(L_16, "l_i = l_i + p if"),
    l_of_more_rows_without_the_rescale=(
        "else l_i * alpha + tl.sum(p, 1)",
        "else l_i + tl.sum(p, 1)",
    ),
    no_rescale_of_acc=("acc = acc * alpha[:, None]\n", "acc = acc\n"),
    max_not_kept=("        m_i = m_new\n    return", "    return"),
    wrong_max=(
        "tl.maximum(m_i, tl.max(s, 1))",
        "tl.maximum(m_i, tl.min(s, 1))",
    ),
    V_by_the_heads_of_K=("v_ptr += h_k * stride_vh", "v_ptr += h_k * stride_kh"),
    V_by_the_batch_of_K=("v_ptr += b * stride_vb", "v_ptr += b * stride_kb"),
    # pages
    page_table_off_by_one=(PAGES_OF_TILE, "tl.load(table_ptrs + 1 + start //"),
    page_table_off_by_one_in_large_pages=(PAGE_OF_TILE, "tl.load(table_ptr + 1 + start //"),
    the_pages_of_the_last_tile_again=(
        "pages = tl.load(table_ptrs + " + AHEAD,
        "pages = tl.load(table_ptrs + start_n // PAGE_SIZE)",
    ),
    the_page_of_the_last_tile_again=(
        "page = tl.load(table_ptr + " + AHEAD,
        "page = tl.load(table_ptr + start_n // PAGE_SIZE)",
    ),
    the_last_page_unmasked=("\n        True, PAGE", "\n        PAGE_SIZE == 0, PAGE"),
    first_page_for_a_tile=(
        "table_ptrs = table_ptr + offs_n // PAGE_SIZE",
        "table_ptrs = table_ptr + offs_n * 0",
    ),
    slots_not_within_a_page=("slots = offs_n % PAGE_SIZE if", "slots = offs_n if"),
    slot_of_a_tile_forgotten=("start_n % PAGE_SIZE * stride_kn", "0 * stride_kn"),
    pages_of_the_first_sequence=(
        "table_ptr += entry * stride_table",
        "table_ptr += 0 * stride_table",
    ),
    a_sequence_s_row_by_its_place=("entry = tl.load(rows_ptr + b).to(tl.int64)", "entry = b"),
    causal_by_the_capacity=(SHIFT_PAGED, "shift = Nk - Nq"),
    # the call
    strides_of_K_and_V_mixed_up=("*k.stride(), *v.stride(), *o", "*v.stride(), *k.stride(), *o"),
    d_always_even=('EVEN_D=d == config["BLOCK_D"]', "EVEN_D=True"),
    causal_ignored_for_two_rows=("CAUSAL=causal and Nq > 1", "CAUSAL=causal and Nq > 2"),
)

MUTANTS = {
    0: SCALAR_AUTOGRAD,
    1: RAW_PYTHON,
    2: VALUE_GRAPH,
    3: THREE_GEMM,
    4: TRITON_LITE,
    5: TRITON_ONLINE,
    6: FLASH_2,
    7: TRAINING,
    8: SPLIT_KV,
}


# what kills some mutants, where the battery comes to it late
PAGED = """page table off by one; page table off by one in large pages; first page for a tile;
    the pages of the last tile again; the page of the last tile again; the last page unmasked;
    slots not within a page; slot of a tile forgotten; pages of the first sequence;
    a sequence s row by its place; causal by the capacity"""
HIDDEN = """minus infinity only taken for nothing seen; unseen keys not taken out;
    unseen values not taken out; unseen by the first row; blind q not taken out"""
CHECKS = (PAGED, paged_battery), (HIDDEN, hidden_battery)
FIRST = {" ".join(name.split()): check for names, check in CHECKS for name in names.split(";")}


BETWEEN = "\f\n"  # which no file has


def mutate(text, pairs):
    """`text` with each old text of `pairs`, which must be there once, replaced by the new one."""
    for old, new in pairs:
        assert text.count(old) == 1, f"{text.count(old)} x in the shipped file, expected 1: {old!r}"
        text = text.replace(old, new)
    return text


def python_files(number):
    """The files of stage `number` that are in Python."""
    return [path for path in files_of(number) if path.suffix == ".py"]


def shipped(number):
    """The texts of stage `number`'s files in Python, with BETWEEN between them."""
    return BETWEEN.join(path.read_text(encoding="utf-8") for path in python_files(number))


def lines_changed(text, pairs):
    """The line of `text` in which each of `pairs` makes its first change."""
    for old, new in pairs:
        same = len([*takewhile(bool, map(operator.eq, old, new))])
        yield text.count("\n", 0, text.find(old) + same)


def every_mutant():
    """(number, name) of each, slow where the mutants before it have changed all its lines."""
    for number, mutants in MUTANTS.items():
        text, changed = shipped(number), set()
        for name, pairs in mutants.items():
            new = {*lines_changed(text, pairs)} - changed
            yield pytest.param(number, name, marks=() if new else pytest.mark.slow)
            changed |= new


def load_mutant(number, name, folder):
    """The mutant `name` of stage `number`, written to `folder` and imported."""
    words = "".join(x if x.isalnum() else "_" for x in name)
    return load_changed(number, MUTANTS[number][name], folder / f"mutant_{number}_{words}")


def load_changed(number, pairs, path):
    """Stage `number` with each old text of `pairs` replaced, as the file or folder `path`."""
    text, files = mutate(shipped(number), pairs), python_files(number)
    path = path if len(files) > 1 else path.with_suffix(".py")
    places = [path] if len(files) == 1 else [path / file.name for file in files]
    for place, each in zip(places, text.split(BETWEEN), strict=True):
        place.parent.mkdir(exist_ok=True)
        place.write_text(each, encoding="utf-8")
    return stages.load(path)


@pytest.mark.slow
@pytest.mark.parametrize("number", MUTANTS)
def test_the_shipped_stage_lives(number):
    stage = stages.by_number(number)
    battery(stage, device_of(stage))


@pytest.mark.parametrize(("number", "name"), [*every_mutant()])
def test_the_mutant_dies(number, name, tmp_path):
    device = device_of(stages.by_number(number))
    mutant = load_mutant(number, name, tmp_path)  # one that can't be imported was never alive
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of overflow, which is how some of them die
        try:
            FIRST.get(name, str)(mutant)
            battery(mutant, device)
        except Exception:
            return
    pytest.fail(f"a mutant of stage {number} survives: {name}")


@pytest.mark.parametrize("number", MUTANTS)
def test_a_mutant_differs_from_what_is_shipped(number, tmp_path):
    text = shipped(number)
    mutants = [mutate(text, pairs) for pairs in MUTANTS[number].values()]
    assert text not in mutants
    assert len(set(mutants)) == len(mutants)
