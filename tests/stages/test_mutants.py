"""The checks bite: mistakes written into the shipped rungs, each of which must be caught.

A mutant is the shipped file with some text replaced by other text, each found exactly once. It is
killed when a check fails that the shipped rung passes, or when it raises. All tensors, the output
too, lie in a storage of NaN, so that a mutant that strays reads NaN and damages nothing but that.
"""

import warnings
from functools import lru_cache
from pathlib import Path

import pytest
from rung_checks import (
    assert_close,
    assert_exact,
    attend,
    device_of,
    gradient_rounding,
    gradients,
    hidden_keys,
    in_nan,
    most_keys,
    normal,
    options_of,
    rounding,
    true_gradients,
    truth,
)

import stages
from harness.accuracy import make_oracle
from harness.inputs import make_inputs
from harness.problem import Problem

# b, h, nq, nk, d and the strides of q, k, v: small, since rung 0 has to bear them; each rung takes
# as many of the keys as it is exact for
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


def battery(rung, device):
    """Raise where `rung` is wrong; every shipped rung passes."""
    for name in BATTERY:
        tensors, oracle = a_problem(name, device, most_keys(rung, 150))
        assert_exact(attend(rung, *tensors), oracle)
    # logits past exp's overflow in double, in which rungs 0 to 2 compute
    (q, k, v), _ = a_problem("peaky", device, most_keys(rung, 150))
    q = in_nan(8 * q)
    assert_close(attend(rung, q, k, v), truth(q, k, v), rounding(q, k, v))
    if rung.STAGE.options:
        for nq, nk, hk, causal, seqlens_k in MASKS:
            problem = Problem(
                "normal", 0, 2, 4, hk, nq, nk, 8, "float32", "ieee", causal, seqlens_k, device
            )
            q, k, v = (in_nan(x) for x in make_inputs(problem))
            o = attend(rung, q, k, v, **options_of(problem))
            assert_close(o, truth(q, k, v, hidden_keys(problem)), rounding(q, k, v))
    if rung.STAGE.gradients:
        tensors = [in_nan(x, (3, 1, 2, 0)) for x in normal((2, 3, 4, 7, 5), 0, device=device)]
        bounds = rounding(*tensors[:3]), *gradient_rounding(*tensors)
        answers = gradients(rung, *tensors), true_gradients(*tensors), bounds
        for got, want, bound in zip(*answers, strict=True):
            assert_close(got, want, bound)


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
    normalised_before_the_mask=(
        "torch.softmax(s.masked_fill(hidden, torch.finfo(s.dtype).min), dim=-1)",
        "torch.softmax(s, dim=-1)",
    ),
    K_not_transposed=("@ k.transpose(-2, -1)", "@ k.reshape(*k.shape[:2], k.shape[3], -1)"),
    the_scale_a_second_time=("(q * scale) @", "(q * scale * scale) @"),
    causal_from_the_top_left=("offs_m + Nk - Nq", "offs_m"),
    causal_without_the_diagonal=("offs_n > offs_m", "offs_n >= offs_m"),
    one_key_of_the_padding=("offs_n >= seqlens_k", "offs_n > seqlens_k"),
    one_length_for_all=("seqlens_k[:, None, None, None]", "seqlens_k.max()"),
    rows_that_see_nothing_see_everything=("p = p.masked_fill(hidden, 0.0)", "p = p"),
    causal_ignored=("    if causal:", "    if False:"),
    heads_grouped_the_other_way=(
        "k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)",
        "k = k.repeat(1, q.shape[1] // k.shape[1], 1, 1)",
    ),
    heads_of_v_grouped_the_other_way=(
        "v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)",
        "v = v.repeat(1, q.shape[1] // v.shape[1], 1, 1)",
    ),
)

DECODE_B, DECODE_H = "b = (tl.program_id(1) // H)", "h = (tl.program_id(1) % H)"
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
    stride_vb_assumed=("b * stride_vb", "b * H * Nk * d"),
    V_by_the_rows_of_K=("offs_n[:, None] * stride_vn", "offs_n[:, None] * stride_kn"),
    V_by_the_columns_of_K=("offs_d[None, :] * stride_vd", "offs_d[None, :] * stride_kd"),
    V_by_the_heads_of_K=("h * stride_vh", "h * stride_kh"),
    strides_of_K_and_V_mixed_up=(
        "*k.stride(), *v.stride()",
        "*v.stride(), *k.stride()",
    ),
    # which head
    batch_by_the_rest=(DECODE_B, DECODE_B.replace("//", "%")),
    head_by_the_quotient=(DECODE_H, DECODE_H.replace("%", "//")),
    first_head_for_all=(DECODE_H, DECODE_H.replace("%", "*0 %")),
    rows_of_the_first_block_for_all=("tl.program_id(0).to(tl.int64) * BLOCK_M", "0"),
)
TRITON["batch and head mixed up"] = (
    *TRITON["batch by the rest"],
    *TRITON["head by the quotient"],
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
    K_stays_at_the_first_tile=("        k_ptrs += BLOCK_N * stride_kn\n", ""),
    V_stays_at_the_first_tile=("        v_ptrs += BLOCK_N * stride_vn\n", ""),
    K_advances_as_if_contiguous=("k_ptrs += BLOCK_N * stride_kn", "k_ptrs += BLOCK_N * d"),
    V_advances_as_if_contiguous=("v_ptrs += BLOCK_N * stride_vn", "v_ptrs += BLOCK_N * d"),
    V_advances_like_K=("v_ptrs += BLOCK_N * stride_vn", "v_ptrs += BLOCK_N * stride_kn"),
)

MUTANTS = {
    0: SCALAR_AUTOGRAD,
    1: RAW_PYTHON,
    2: VALUE_GRAPH,
    3: THREE_GEMM,
    4: TRITON_LITE,
    5: TRITON_ONLINE,
}


def mutate(text, pairs):
    """`text` with each old text of `pairs`, which must be there once, replaced by the new one."""
    for old, new in pairs:
        assert text.count(old) == 1, f"{text.count(old)} x in the shipped file, expected 1: {old!r}"
        text = text.replace(old, new)
    return text


def load_mutant(number, name, folder):
    """The mutant `name` of rung `number`, written to `folder` and imported."""
    shipped = stages.by_number(number)
    text = mutate(Path(shipped.__file__).read_text(encoding="utf-8"), MUTANTS[number][name])
    words = "".join(x if x.isalnum() else "_" for x in name)
    path = folder / f"mutant_{number}_{words}.py"
    path.write_text(text, encoding="utf-8")
    return stages.load(path)


@pytest.mark.parametrize("number", MUTANTS)
def test_the_shipped_rung_lives(number):
    rung = stages.by_number(number)
    battery(rung, device_of(rung))


@pytest.mark.parametrize(
    ("number", "name"), [(number, name) for number, names in MUTANTS.items() for name in names]
)
def test_the_mutant_dies(number, name, tmp_path):
    device = device_of(stages.by_number(number))
    mutant = load_mutant(number, name, tmp_path)  # one that can't be imported was never alive
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of overflow, which is how some of them die
        try:
            battery(mutant, device)
        except Exception:
            return
    pytest.fail(f"a mutant of rung {number} survives: {name}")


@pytest.mark.parametrize(
    ("pair", "found"), [(("no such line", ""), 0), (("    scale = ", ""), 1), (("import", ""), 3)]
)
def test_a_substitution_must_match_once(pair, found):
    text = "import a\nimport b\nfrom c import d\ndef f():\n    scale = 5\n"
    assert text.count(pair[0]) == found
    if found == 1:
        assert mutate(text, [pair]) == text.replace(*pair)
        return
    with pytest.raises(AssertionError, match=f"^{found} x in the shipped file, expected 1"):
        mutate(text, [pair])


@pytest.mark.parametrize("number", MUTANTS)
def test_a_mutant_differs_from_what_is_shipped(number, tmp_path):
    text = Path(stages.by_number(number).__file__).read_text(encoding="utf-8")
    mutants = [mutate(text, pairs) for pairs in MUTANTS[number].values()]
    assert text not in mutants
    assert len(set(mutants)) == len(mutants)
