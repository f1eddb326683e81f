"""Stage 7: gradients under every mask against float64; a node of torch's graph like any other."""

import math
import sys

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from masked_problems import FAR, TILES, far_away, in_tiles, layouts, masks, problems, tensors
from stage_checks import (
    assert_close,
    gradient_rounding,
    gradients,
    guarded_outputs,
    in_nan,
    lse_rounding,
    normal,
    rounding,
    true_gradients,
    true_lse,
)

import stages
from stages import s06_triton_flash2
from stages import s07_triton_training as stage
from stages.common.kernels import LARGEST_TILE
from stages.common.machine import has_module

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" and not has_module("triton"), reason="no triton for this machine"
)

NAMES = ("o", "dq", "dk", "dv")

many = settings(
    max_examples=24, deadline=None, derandomize=True, database=None, phases=[Phase.generate]
)
some = settings(many, max_examples=15)


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32)


def check(got, want, bounds):
    for name, x, y, bound in zip(NAMES, got, want, bounds, strict=True):
        assert_close(x, y, bound, name)


def leaves(shape=(2, 2, 5, 9, 8), dtype=torch.float32, heads=None, seed=0):
    """q, k, v that require grad, k and v of `heads` heads, and a dO."""
    q, k, v, dO = normal(shape, seed, dtype)
    k, v = (x[:, :heads].clone() for x in (k, v))
    return *(x.requires_grad_() for x in (q, k, v)), dO


# ---- masks


@pytest.mark.slow
@many
@given(problem=problems, tile=st.sampled_from(TILES), laid=st.tuples(*[layouts] * 4))
def test_masks_against_float64(problem, tile, laid):
    q, k, v, dO = tensors(problem, laid)
    options, hidden = masks(problem)
    with in_tiles(tile):
        got = gradients(stage, q, k, v, dO, **options)
    assert {x.dtype for x in got} == {q.dtype}
    check(got, true_gradients(q, k, v, dO, hidden), bounds(q, k, v, dO, hidden))
    o, dq, dk, dv = got
    blind = hidden.all(-1, keepdim=True)  # (b, 1, nq, 1): rows that see no key
    unseen = hidden.all(2)[..., None]  # (b, 1, nk, 1): keys that no row sees
    for x, none in ((o, blind), (dq, blind), (dk, unseen), (dv, unseen)):
        assert (x.masked_select(none) == 0).all()


def bounds(q, k, v, dO, hidden=None):
    return rounding(q, k, v), *gradient_rounding(q, k, v, dO, hidden)


@pytest.mark.parametrize("causal", [False, True])
def test_no_row_sees_a_key(causal):
    q, k, v, dO = normal((2, 2, 40, 70, 8), 0)
    got = gradients(stage, q, k, v, dO, causal=causal, seqlens_k=lengths(0, 0))
    assert all((x == 0).all() for x in got)


@pytest.mark.parametrize("causal", [False, True])
def test_as_stage_3_in_float64_whose_gradients_are_gradchecked(causal):
    q, k, v, dO = normal((2, 4, 40, 37, 16), 0)
    k, v = k[:, :2], v[:, :2]
    options = {"causal": causal, "seqlens_k": lengths(37, 20)}
    got = gradients(stage, q, k, v, dO, **options)
    wide = (x.double() for x in (q, k, v, dO))
    check(got, gradients(stages.by_number(3), *wide, **options), bounds(q, k, v, dO))


def test_lengths_of_any_stride():
    q, k, v, dO = normal((3, 1, 5, 9, 8), 0)
    apart = torch.full((6,), 9, dtype=torch.int32)
    apart[::2] = lengths(2, 5, 0)
    for seqlens_k in (apart[::2], lengths(4).expand(3)):
        got = gradients(stage, q, k, v, dO, seqlens_k=seqlens_k)
        want = gradients(stage, q, k, v, dO, seqlens_k=seqlens_k.clone())
        assert all(map(torch.equal, got, want))


@some
@given(problem=problems, tile=st.sampled_from(TILES))
def test_nan_beyond_the_lengths_changes_no_bit(problem, tile):
    if problem.seqlens_k is None:
        return
    q, k, v, dO = (x.clone() for x in tensors(problem))
    options, _ = masks(problem)
    answers = []
    for number in (0.0, math.nan):
        for x in (k, v):
            for b, length in enumerate(problem.seqlens_k):
                x[b, :, length:] = number
        with in_tiles(tile):
            answers.append(gradients(stage, q, k, v, dO, **options))
    assert all(map(torch.equal, *answers))
    assert all(x.isfinite().all() for x in answers[1])


def test_nan_that_a_block_skips_changes_no_bit_of_its_gradients():
    """Under a causal mask: the last keys, for the first rows; and rows that see no key at all."""
    q, k, v, dO = normal((1, 2, 48, 48, 8), 0)
    answers = []
    for number in (0.0, math.nan):
        k[:, :, 32:] = v[:, :, 32:] = number
        with in_tiles((16, 16)):
            answers.append(gradients(stage, q, k, v, dO, causal=True))
    for zeros, poisoned in zip(*(x[:2] for x in answers), strict=True):  # o and dq
        assert torch.equal(zeros[:, :, :32], poisoned[:, :, :32])
        assert poisoned[:, :, :32].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("keys", [1, 16, 20, 47])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_a_row_that_sees_no_key_has_changes_no_bit(keys, number):
    """Its dO may well be NaN: the norm of its output, which is 0, has no gradient there."""
    q, k, v, dO = normal((1, 2, 48, keys, 8), 0)
    answers = []
    for there in (0.0, number):
        q[:, :, : 48 - keys] = dO[:, :, : 48 - keys] = there
        with in_tiles((16, 16)):
            answers.append(gradients(stage, q, k, v, dO, causal=True))
    assert all(map(torch.equal, *answers))
    assert all(x.isfinite().all() for x in answers[0])


def test_every_candidate_is_right():
    """Around the borders of its own tiles."""
    kinds = [size for kernel in stage.TILES.values() for sizes in kernel.values() for size in sizes]
    tiles = sorted({tile[:2] for size in kinds for tile in size})
    for M, N in tiles:
        assert max(M, N) <= LARGEST_TILE
        q, k, v, dO = (in_nan(x) for x in normal((1, 1, M + 1, N + 1, 16), 0))
        hidden = torch.arange(N + 1) > torch.arange(M + 1)[:, None] + N - M
        with in_tiles((M, N)):
            got = gradients(stage, q, k, v, dO, causal=True)
        want = true_gradients(q, k, v, dO, hidden[None, None])
        check(got, want, bounds(q, k, v, dO))


# ---- bits, buffers, offsets


@pytest.mark.slow
def test_runs_are_the_same_bit_for_bit():
    q, k, v, dO = normal((2, 4, 40, 37, 8), 0, torch.float16)
    options = {"causal": True, "seqlens_k": lengths(37, 7)}
    first = gradients(stage, q, k[:, :2], v[:, :2], dO, **options)
    for _ in range(9):
        again = gradients(stage, q, k[:, :2], v[:, :2], dO, **options)
        assert all(map(torch.equal, again, first))


def test_nothing_is_written_outside_the_outputs():
    q, k, v, dO = leaves((2, 2, 37, 41, 5), heads=1)
    with guarded_outputs() as asked:
        stage.attend(q, k, v, causal=True).backward(dO)
    rows, keys = (2, 2, 37), (2, 1, 41, 5)
    # lse, o, delta, lse as it was checked, dk, dv, dq
    assert asked == [rows, (*rows, 5), rows, rows, keys, keys, (*rows, 5)]


def test_what_is_kept_is_o_and_the_lse():
    q, k, v, _ = leaves((2, 2, 37, 41, 5))
    o = stage.attend(q, k, v)
    kept = o.grad_fn.saved_tensors[:5]
    assert all(map(torch.equal, kept[:4], (q, k, v, o)))
    plain = torch.zeros(1, 1, 37, 41, dtype=torch.bool)
    in_base_e = kept[4] * math.log(2)
    assert_close(in_base_e, true_lse(q, k, plain), lse_rounding(q, k), "lse")
    assert max(x.numel() for x in kept) == k.numel()  # nothing Nq x Nk


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lends memory that isn't there")
@pytest.mark.parametrize("way", FAR)
def test_offsets_beyond_32_bits(way):
    nq, nk, d, *strides = FAR[way]
    near = normal((1, 1, nq, nk, d), 0, torch.float16)
    far = [far_away(x, *strides) for x in near]
    got, want = (stage.backward(*q_k_v_o_lse_dO(*x), True, None) for x in (far, near))
    assert all(map(torch.equal, got, want))


def q_k_v_o_lse_dO(q, k, v, dO):
    o, lse = s06_triton_flash2.attend_with_lse(q, k, v, causal=True)
    return q, k, v, o, lse / math.log(2), dO


# ---- a node of torch's graph


@pytest.mark.slow
def test_any_strides_of_the_gradient():
    q, k, v, _ = leaves((2, 3, 5, 9, 4))
    g = torch.Generator().manual_seed(1)
    row = torch.randn(4, generator=g)
    for dO in (
        torch.randn(4, 3, 5, 2, generator=g).transpose(0, 3),
        in_nan(torch.randn(2, 3, 5, 4, generator=g), (2, 0, 3, 1), (1, 2, 1, 2)),
        torch.randn(3, 2, 5, 4, generator=g).transpose(0, 1),
        row.expand(2, 3, 5, 4),
        torch.ones(()).expand(2, 3, 5, 4),  # what sum() sends
    ):
        assert not dO.is_contiguous()
        got = torch.autograd.grad(stage.attend(q, k, v), (q, k, v), dO)
        want = true_gradients(q, k, v, dO)[1:]
        for x, y, bound in zip(got, want, gradient_rounding(q, k, v, dO), strict=True):
            assert_close(x, y, bound)
    for x, y in zip(torch.autograd.grad(stage.attend(q, k, v).sum(), (q, k, v)), got, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("needs", ["q", "k", "v", "qk", "qv", "kv", ""])
def test_some_of_them_require_grad(needs):
    q, k, v, dO = leaves()
    want = torch.autograd.grad(stage.attend(q, k, v), (q, k, v), dO)
    some = [x.detach().requires_grad_(name in needs) for name, x in zip("qkv", (q, k, v))]
    o = stage.attend(*some)
    assert o.requires_grad == bool(needs)
    if needs:
        o.backward(dO)
    for name, x, grad in zip("qkv", some, want, strict=True):
        assert torch.equal(x.grad, grad) if name in needs else x.grad is None


def test_gradients_that_are_not_wanted_are_not_computed(monkeypatch):
    launched = []

    class Watched:
        def __init__(self, name):
            self.name = self.__name__ = name
            self.kernel = getattr(stage, name)

        def __getitem__(self, grid):
            launched.append(self.name)
            return self.kernel[grid]

    for name in ("dk_dv_kernel", "dq_kernel"):
        monkeypatch.setattr(stage, name, Watched(name))
    for needs, kernels in {
        "q": ["dq_kernel"], "k": ["dk_dv_kernel"], "v": ["dk_dv_kernel"],
        "kv": ["dk_dv_kernel"], "qkv": ["dk_dv_kernel", "dq_kernel"],
    }.items():  # fmt: skip
        q, k, v, dO = leaves()
        some = [x.detach().requires_grad_(name in needs) for name, x in zip("qkv", (q, k, v))]
        launched.clear()
        stage.attend(*some).backward(dO)
        assert launched == kernels, needs


@pytest.mark.parametrize("how", [torch.no_grad, torch.inference_mode])
def test_without_gradients(how):
    q, k, v, _ = leaves()
    want = stage.attend(q, k, v)
    with how():
        o = stage.attend(q, k, v)
    assert not o.requires_grad and o.grad_fn is None
    assert torch.equal(o, want)
    assert torch.equal(o, s06_triton_flash2.attend(q.detach(), k.detach(), v.detach()))


def test_one_tensor_as_q_k_and_v():
    x, _, _, dO = leaves((1, 2, 5, 5, 4))
    got = torch.autograd.grad(stage.attend(x, x, x), x, dO)[0]
    want = sum(true_gradients(x, x, x, dO)[1:])
    assert_close(got, want, sum(gradient_rounding(x, x, x, dO)))


def test_used_twice_in_one_graph():
    q, k, v, dO = leaves((1, 2, 5, 5, 4))
    once = torch.autograd.grad(stage.attend(q, k, v), (q, k, v), dO)
    for x, y in zip(
        torch.autograd.grad(stage.attend(q, k, v) + stage.attend(q, k, v), (q, k, v), dO),
        once,
        strict=True,
    ):
        assert torch.equal(x, 2 * y)
    # the output of one is the input of the next: as the two steps one by one
    o = stage.attend(q, k, v)
    middle = o.detach().requires_grad_()
    dm, dk2, dv2 = torch.autograd.grad(stage.attend(middle, k, v), (middle, k, v), dO)
    dq, dk1, dv1 = torch.autograd.grad(o, (q, k, v), dm)
    deep = torch.autograd.grad(stage.attend(stage.attend(q, k, v), k, v), (q, k, v), dO)
    assert all(map(torch.equal, deep, (dq, dk1 + dk2, dv1 + dv2)))


def test_gradients_add_up_where_there_are_some():
    q, k, v, dO = leaves()
    stage.attend(q, k, v).backward(dO)
    first = [x.grad.clone() for x in (q, k, v)]
    stage.attend(q, k, v).backward(dO)
    assert all(torch.equal(x.grad, 2 * y) for x, y in zip((q, k, v), first, strict=True))


def test_two_passes_through_one_graph_are_the_same():
    q, k, v, dO = leaves()
    o = stage.attend(q, k, v, causal=True, seqlens_k=lengths(9, 4))
    first = torch.autograd.grad(o, (q, k, v), dO, retain_graph=True)
    torch.autograd.grad(o, (q, k, v), 4 * dO, retain_graph=True)
    again = torch.autograd.grad(o, (q, k, v), dO, retain_graph=True)
    assert all(map(torch.equal, first, again))
    o.backward(dO)
    with pytest.raises(RuntimeError, match="second time"):
        o.backward(dO)


def test_a_gradient_of_a_gradient_is_refused():
    q, k, v, dO = leaves()
    plain = torch.autograd.grad(stage.attend(q, k, v), (q, k, v), dO)
    dO.requires_grad_()
    graphed = torch.autograd.grad(stage.attend(q, k, v), (q, k, v), dO, create_graph=True)
    assert all(map(torch.equal, plain, graphed))  # a graph that nobody goes back through is fine
    assert all(x.requires_grad for x in graphed)
    for wrt in (q, k, v, dO):
        with pytest.raises(RuntimeError, match=r"stage 7 .*differentiated twice.*use stage 3"):
            torch.autograd.grad(sum(x.sum() for x in graphed), wrt, retain_graph=True)


@pytest.mark.parametrize("name", ["q", "k", "v", "seqlens_k", "o"])
def test_what_changes_in_place_before_the_backward_pass_is_refused(name):
    q, k, v, dO = leaves()
    q, k, v = (x * 1 for x in (q, k, v))  # no leaves: those refuse by themselves
    seqlens_k = lengths(9, 4)
    o = stage.attend(q, k, v, seqlens_k=seqlens_k)
    with torch.no_grad():
        {"q": q, "k": k, "v": v, "seqlens_k": seqlens_k, "o": o}[name].mul_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.backward(dO)


# ---- autocast


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("mixed", [False, True])
def test_autocast(dtype, mixed):
    """Output of autocast's dtype, gradients of the inputs' own, each the cast inputs' own, cast."""
    q, k, v, dO = leaves((2, 4, 5, 9, 8), dtype, heads=2)
    if mixed:
        k = k.detach().to(torch.bfloat16).requires_grad_()
        v = v.detach().to(torch.float16).requires_grad_()
    options = {"causal": True, "seqlens_k": lengths(9, 4)}
    with torch.autocast("cpu", dtype=torch.float16):
        o = stage.attend(q, k, v, **options)
    assert o.dtype == torch.float16
    grads = torch.autograd.grad(o, (q, k, v), dO.half())
    cast = [x.detach().half() for x in (q, k, v)]
    want = gradients(stage, *cast, dO.half(), **options)
    assert torch.equal(o, want[0])
    for x, grad, y in zip((q, k, v), grads, want[1:], strict=True):
        assert grad.dtype == x.dtype
        assert torch.equal(grad, y.to(x.dtype))


@pytest.mark.slow
def test_a_training_step_under_autocast():
    """Stage 7 between torch's own operations, the backward pass within autocast and without."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 12, generator=g)
    weight = torch.randn(12, 36, generator=g).mul_(12**-0.5).requires_grad_()

    def by_hand(q, k, v, **options):
        with torch.autocast("cpu", enabled=False):
            return stage.attend(q.half(), k.half(), v.half(), **options)

    def step(attend, backward_within):
        weight.grad = None
        with torch.autocast("cpu", dtype=torch.float16):
            q, k, v = (x @ weight).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
            # in float32 what goes in, in float16 what goes on
            o = attend(q.float(), k.float(), v.float(), causal=True)
            assert o.dtype == torch.float16
            loss = o.float().square().sum()
            if backward_within:
                loss.backward()
        if not backward_within:
            loss.backward()
        assert weight.grad.dtype == torch.float32
        return loss.detach(), weight.grad

    loss, grad = step(by_hand, False)
    assert loss > 0 and (grad.abs().amax(0) > 0).all()
    for within in (False, True):
        assert all(map(torch.equal, step(stage.attend, within), (loss, grad)))


def test_float64_under_autocast_stays_and_is_refused():
    q, k, v, _ = leaves(dtype=torch.float64)
    with (
        torch.autocast("cpu", dtype=torch.float16),
        pytest.raises(ValueError, match=r"^q: got dtype float64: "),
    ):
        stage.attend(q, k, v)
    half = q.detach().half()
    with (
        torch.autocast("cpu", dtype=torch.float16),
        pytest.raises(ValueError, match=r"^k: got dtype float64, expected q's float16"),
    ):
        stage.attend(half, k, v)


def test_bfloat16_under_autocast_is_refused_in_the_interpreter():
    q, k, v, _ = leaves()
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ValueError, match=r"^q: got dtype bfloat16: .*interpreter"),
    ):
        stage.attend(q, k, v)


def test_mixed_dtypes_without_autocast_are_refused():
    q, k, v, _ = leaves()
    with pytest.raises(ValueError, match=r"^k: got dtype float16, expected q's float32"):
        stage.attend(q, k.detach().half(), v)
    with (
        torch.autocast("cpu", dtype=torch.float16, enabled=False),
        pytest.raises(ValueError, match=r"^k: got dtype float16, expected q's float32"),
    ):
        stage.attend(q, k.detach().half(), v)


def test_integers_are_refused_under_autocast_as_without():
    q, k, v, _ = leaves()
    with (
        torch.autocast("cpu", dtype=torch.float16),
        pytest.raises(ValueError, match=r"^v: got dtype int64"),
    ):
        stage.attend(q, k, v.detach().long())
