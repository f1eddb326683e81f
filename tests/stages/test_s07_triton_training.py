"""Stage 7: gradients under every mask against float64; a node of torch's graph like any other."""

import math
import sys

import pytest
import torch
from stage_checks import (
    assert_close,
    gradients,
    lse_rounding,
    normal,
    true_lse,
)

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
