"""What is true of attention whatever its numbers are, of every stage, at the sizes it can bear.

All tensors lie in a storage of NaN, so an element read that isn't a tensor's own shows; and so
does one of the output that was never written.
"""

import random

import pytest
import torch
from masked_problems import make_case
from stage_checks import (
    assert_close,
    attend,
    device_of,
    every_stage,
    gradients,
    in_nan,
    normal,
    rounding,
)

WIDE = ("float32", "float64")
FEW = [pytest.param(seed, marks=[pytest.mark.slow] * (seed > 0)) for seed in range(6)]


def draw(stage, seed, where=lambda problem: True):
    """Dense q, k, v of any size without masks, of equal heads, in float32 or float64."""
    case = make_case(
        stage, seed, lambda problem: problem.dtype in WIDE and where(problem),
        inputs="normal", causal=False, seqlens_k=None,
    )  # fmt: skip
    q, k, v, _ = case.tensors()
    group = q.shape[1] // k.shape[1]
    return in_nan(q), *(in_nan(x.repeat_interleave(group, 1)) for x in (k, v))


@every_stage
@pytest.mark.parametrize("seed", FEW)
def test_rows_lie_in_the_hull_of_v(stage, seed):
    q, k, v = draw(stage, seed)
    o = attend(stage, q, k, v)
    # whatever the scores' errors, the weights sum to 1: Nk products, sums and a division are off by
    # Nk + 10 roundings at most, each of half an eps, above the line and below it
    slack = (k.shape[2] + 10) * torch.finfo(v.dtype).eps * v.abs().max()
    assert (o >= v.amin(2, keepdim=True) - slack).all()
    assert (o <= v.amax(2, keepdim=True) + slack).all()


@every_stage
@pytest.mark.parametrize("seed", FEW)
def test_the_order_of_keys_does_not_matter(stage, seed):
    q, k, v = draw(stage, seed, where=lambda problem: problem.nk > 1)
    order = torch.randperm(k.shape[2], generator=torch.Generator().manual_seed(seed)).to(k.device)
    shuffled = attend(stage, q, in_nan(k[:, :, order]), in_nan(v[:, :, order]))
    assert_close(shuffled, attend(stage, q, k, v), 2 * rounding(q, k, v))


@every_stage
@pytest.mark.parametrize("seed", FEW)
def test_a_shift_of_all_the_logits_does_not_matter(stage, seed):
    q, k, v = draw(stage, seed)
    c, _, _, _ = normal((*k.shape[:2], 1, 1, k.shape[3]), seed + 1, k.dtype, k.device)
    k = in_nan((k * 64).round() / 64)  # on a grid, k + c is what it says, without rounding
    shift = (c * (1, 100)[seed % 2] * 64).round() / 64
    shifted = in_nan(k + shift)  # every logit of row i moves by q_i . shift
    assert torch.equal(shifted - shift, k)
    bound = rounding(q, k, v) + rounding(q, shifted, v)
    assert_close(attend(stage, q, shifted, v), attend(stage, q, k, v), bound)


@every_stage
@pytest.mark.parametrize("seed", FEW)
def test_linear_in_v(stage, seed):
    a, b = (random.Random(f"{at} {seed}").randint(-32, 32) / 8 for at in "ab")  # exact in any dtype
    q, k, v1 = draw(stage, seed)
    v2, _, _, _ = normal((*v1.shape[:3], 1, v1.shape[3]), seed + 1, v1.dtype, v1.device)
    both = a * v1 + b * v2
    o1, o2 = attend(stage, q, k, v1), attend(stage, q, k, in_nan(v2))
    # the sum itself is rounded: three times an element, less than the n of rounding()
    size = abs(a) * v1.abs() + abs(b) * v2.abs()
    bound = 2 * rounding(q, k, size) + rounding(q, k, both)
    assert_close(attend(stage, q, k, in_nan(both)), a * o1.double() + b * o2.double(), bound)


@every_stage
@pytest.mark.parametrize("seed", FEW)
def test_heads_and_batches_are_apart(stage, seed):
    q, k, v = draw(stage, seed, where=lambda problem: problem.b * problem.h > 1)
    o = attend(stage, q, k, v)
    b, h = seed % q.shape[0], seed // 2 % q.shape[1]
    alone = [in_nan(x[b : b + 1, h : h + 1]) for x in (q, k, v)]
    assert_close(o[b : b + 1, h : h + 1], attend(stage, *alone), 2 * rounding(*alone))


@every_stage
@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("expanded", [0, 1, 2, 3])
def test_one_element_may_stand_for_all_along_an_axis(stage, which, expanded):
    """Its stride is 0; other strides are part of any problem."""
    seed = expanded
    q, k, v = draw(stage, seed)
    dense = {"q": q, "k": k, "v": v}
    x = dense[which]
    other = in_nan(x.narrow(expanded, 0, 1)).expand(x.shape)
    assert other.stride(expanded) == 0 or x.shape[expanded] == 1
    dense[which] = in_nan(other)
    q, k, v = dense.values()
    o = attend(stage, **(dense | {which: other}))
    assert_close(o, attend(stage, q, k, v), 2 * rounding(q, k, v))


@every_stage
def test_a_lazily_negated_view_is_what_it_says(stage):
    """As conj().imag has them: the storage holds the negative of what the tensor is."""
    q, k, v, dO = normal((2, 2, 5, 9, 4), 0, device=device_of(stage))
    views = [torch._neg_view(-x) for x in (q, k, v, dO)]
    assert all(x.is_neg() and torch.equal(x, y) for x, y in zip(views, (q, k, v, dO)))
    assert torch.equal(stage.attend(*views[:3]), stage.attend(q, k, v))
    if stage.STAGE.gradients:
        for got, want in zip(gradients(stage, *views), gradients(stage, q, k, v, dO)):
            assert torch.equal(got, want)
