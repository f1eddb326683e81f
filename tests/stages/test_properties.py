"""What is true of attention whatever its numbers are, of every stage, at the sizes it can bear.

All tensors lie in a storage of NaN, so an element read that isn't a tensor's own shows; and so
does one of the output that was never written.
"""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from stage_checks import (
    assert_close,
    attend,
    device_of,
    every_stage,
    gradients,
    in_nan,
    normal,
    rounding,
    shapes,
    truth,
)

# no shrinking: the shapes can be read as they are, and stage 0 would shrink for minutes
few = settings(
    max_examples=8, deadline=None, derandomize=True, database=None, phases=[Phase.generate]
)
seeds = st.integers(0, 2**32 - 1)
eighths = st.integers(-32, 32).map(lambda n: n / 8)  # exact in any dtype, and never denormal


def draw(data, stage, where=lambda shape: True):
    """q, k, v of some shape and dtype, and a seed for what else a property needs."""
    device = device_of(stage)
    shape = data.draw(
        st.sampled_from([s for s in shapes(stage, device) if where(s)]), label="b, h, nq, nk, d"
    )
    dtypes = [name for name in ("float32", "float64") if name in stage.STAGE.dtypes]
    dtype = getattr(torch, data.draw(st.sampled_from(dtypes), label="dtype"))
    seed = data.draw(seeds, label="seed")
    q, k, v, _ = normal(shape, seed, dtype, device)
    return in_nan(q), in_nan(k), in_nan(v), seed


@every_stage
@few
@given(data=st.data())
def test_the_truth_at_ragged_sizes(stage, data):
    q, k, v, _ = draw(data, stage)
    assert_close(attend(stage, q, k, v), truth(q, k, v), rounding(q, k, v))


@pytest.mark.slow
@every_stage
@few
@given(data=st.data())
def test_rows_lie_in_the_hull_of_v(stage, data):
    q, k, v, _ = draw(data, stage)
    o = attend(stage, q, k, v)
    # whatever the scores' errors, the weights sum to 1: Nk products, sums and a division are off by
    # Nk + 10 roundings at most, each of half an eps, above the line and below it
    slack = (k.shape[2] + 10) * torch.finfo(v.dtype).eps * v.abs().max()
    assert (o >= v.amin(2, keepdim=True) - slack).all()
    assert (o <= v.amax(2, keepdim=True) + slack).all()


@pytest.mark.slow
@every_stage
@few
@given(data=st.data())
def test_the_order_of_keys_does_not_matter(stage, data):
    q, k, v, seed = draw(data, stage, where=lambda shape: shape[3] > 1)
    order = torch.randperm(k.shape[2], generator=torch.Generator().manual_seed(seed)).to(k.device)
    shuffled = attend(stage, q, in_nan(k[:, :, order]), in_nan(v[:, :, order]))
    assert_close(shuffled, attend(stage, q, k, v), 2 * rounding(q, k, v))


@pytest.mark.slow
@every_stage
@few
@given(data=st.data(), size=st.sampled_from([1.0, 100.0]))
def test_a_shift_of_all_the_logits_does_not_matter(stage, data, size):
    q, k, v, seed = draw(data, stage)
    c, _, _, _ = normal((*k.shape[:2], 1, 1, k.shape[3]), seed + 1, k.dtype, k.device)
    k = in_nan((k * 64).round() / 64)  # on a grid, k + c is what it says, without rounding
    shift = (c * size * 64).round() / 64
    shifted = in_nan(k + shift)  # every logit of row i moves by q_i . shift
    assert torch.equal(shifted - shift, k)
    bound = rounding(q, k, v) + rounding(q, shifted, v)
    assert_close(attend(stage, q, shifted, v), attend(stage, q, k, v), bound)


@pytest.mark.slow
@every_stage
@few
@given(data=st.data(), a=eighths, b=eighths)
def test_linear_in_v(stage, data, a, b):
    q, k, v1, seed = draw(data, stage)
    v2, _, _, _ = normal((*v1.shape[:3], 1, v1.shape[3]), seed + 1, v1.dtype, v1.device)
    both = a * v1 + b * v2
    o1, o2 = attend(stage, q, k, v1), attend(stage, q, k, in_nan(v2))
    # the sum itself is rounded: three times an element, less than the n of rounding()
    size = abs(a) * v1.abs() + abs(b) * v2.abs()
    bound = 2 * rounding(q, k, size) + rounding(q, k, both)
    assert_close(attend(stage, q, k, in_nan(both)), a * o1.double() + b * o2.double(), bound)


@pytest.mark.slow
@every_stage
@few
@given(data=st.data())
def test_heads_and_batches_are_apart(stage, data):
    q, k, v, _ = draw(data, stage, where=lambda shape: shape[0] * shape[1] > 1)
    o = attend(stage, q, k, v)
    b = data.draw(st.integers(0, q.shape[0] - 1), label="b")
    h = data.draw(st.integers(0, q.shape[1] - 1), label="h")
    alone = [in_nan(x[b : b + 1, h : h + 1]) for x in (q, k, v)]
    assert_close(o[b : b + 1, h : h + 1], attend(stage, *alone), 2 * rounding(*alone))


@pytest.mark.slow
@every_stage
@pytest.mark.parametrize("which", ["q", "k", "v"])
@few
@given(
    data=st.data(),
    order=st.permutations(range(4)),
    steps=st.tuples(*[st.sampled_from([1, 2])] * 4),
    expanded=st.sampled_from([None, 0, 1, 2, 3]),
)
def test_strides_do_not_matter(stage, which, data, order, steps, expanded):
    q, k, v, _ = draw(data, stage)
    dense = {"q": q, "k": k, "v": v}
    x = dense[which]
    if expanded is None:
        other = in_nan(x, tuple(order), steps)
    else:  # stride 0: one element stands for all along an axis
        other = in_nan(x.narrow(expanded, 0, 1), tuple(order), steps).expand(x.shape)
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
