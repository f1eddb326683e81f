"""Stage 7: gradients under every mask against float64; a node of torch's graph like any other."""

import math
import sys

import pytest
import torch
from masked_problems import EXAMPLES, in_tiles, make_case, masks
from stage_checks import (
    assert_close,
    gradient_rounding,
    gradients,
    in_nan,
    lse_rounding,
    normal,
    true_gradients,
    true_lse,
)

from stages import s06_triton_flash2
from stages import s07_triton_training as stage
from stages.common.machine import has_module

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" and not has_module("triton"), reason="no triton for this machine"
)


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32)


def leaves(shape=(2, 2, 5, 9, 8), dtype=torch.float32, heads=None, seed=0):
    """q, k, v that require grad, k and v of `heads` heads, and a dO."""
    q, k, v, dO = normal(shape, seed, dtype)
    k, v = (x[:, :heads].clone() for x in (k, v))
    return *(x.requires_grad_() for x in (q, k, v)), dO


# ---- masks


@pytest.mark.parametrize("seed", EXAMPLES)
def test_nan_beyond_the_lengths_changes_no_bit(seed):
    case = make_case(stage, seed, where=lambda problem: problem.seqlens_k is not None)
    (q, k, v, dO), problem = case.tensors(), case.problem
    options, _ = masks(problem)
    answers = []
    for number in (0.0, math.nan):
        for x in (k, v):
            for b, length in enumerate(problem.seqlens_k):
                x[b, :, length:] = number
        with in_tiles(case.tile):
            answers.append(gradients(stage, q, k, v, dO, **options))
    assert all(map(torch.equal, *answers))
    assert all(x.isfinite().all() for x in answers[1])


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


# ---- bits, buffers, offsets


def test_what_is_kept_is_o_and_the_lse():
    q, k, v, _ = leaves((2, 2, 37, 41, 5))
    o = stage.attend(q, k, v)
    kept = o.grad_fn.saved_tensors[:5]
    assert all(map(torch.equal, kept[:4], (q, k, v, o)))
    plain = torch.zeros(1, 1, 37, 41, dtype=torch.bool)
    in_base_e = kept[4] * math.log(2)
    assert_close(in_base_e, true_lse(q, k, plain), lse_rounding(q, k), "lse")
    assert max(x.numel() for x in kept) == k.numel()  # nothing Nq x Nk


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


@pytest.mark.parametrize(
    ("dtypes", "within", "says"),
    [
        (("float64", "float64", "float64"), "float16", "q: got dtype float64: "),
        (("float16", "float64", "float64"), "float16", "k: got dtype float64, expected q's"),
        (("float32", "float32", "float32"), "bfloat16", "q: got dtype bfloat16: .*interpreter"),
        (("float32", "float16", "float32"), None, "k: got dtype float16, expected q's float32"),
        (("float32", "float32", "int64"), "float16", "v: got dtype int64"),
    ],
)
def test_what_is_refused_under_autocast_and_without(dtypes, within, says):
    tensors = [x.to(getattr(torch, name)) for x, name in zip(normal((2, 2, 5, 9, 8), 0), dtypes)]
    dtype = getattr(torch, within or "float16")
    with (
        torch.autocast("cpu", dtype=dtype, enabled=within is not None),
        pytest.raises(ValueError, match=f"^{says}"),
    ):
        stage.attend(*tensors)
