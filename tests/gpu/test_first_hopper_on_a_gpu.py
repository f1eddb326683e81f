"""The smallest kernel of stage 9's folder on a Hopper GPU: the contract, and races."""

import math

import pytest
import torch
from test_on_a_gpu import canaries, outcome, problem
from test_s09_gluon_hopper import views

import stages
from harness.records.code import STAGES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_hopper")]

FIRST = stages.load(STAGES / "s09_gluon_hopper" / "first.py")


@pytest.mark.parametrize("inputs", ["normal", "peaky"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_outputs_are_exact(dtype, inputs):
    for nq, nk in ((1, 1), (63, 64), (65, 127), (128, 128), (129, 257), (300, 1), (1, 1000)):
        for d in (128, 72, 8):
            error, bound = outcome(FIRST, problem(inputs=inputs, dtype=dtype, d=d, nq=nq, nk=nk))
            assert error.within(bound), (nq, nk, d, error, bound)


def test_launches_are_the_same_bit_for_bit():
    """All CTAs of all heads, with outputs that begin as NaN: a race would show in a few of them."""
    q, k, v = (torch.randn(4, 16, n, 128, device="cuda").half() for n in (1000, 1100, 1100))
    want, empty = FIRST.attend(q, k, v), torch.empty
    assert torch.isfinite(want).all()
    for _ in range(200):
        torch.empty = lambda *size, **kwargs: empty(*size, **kwargs).fill_(math.nan)
        try:
            o = FIRST.attend(q, k, v)
        finally:
            torch.empty = empty
        assert torch.equal(o, want)


def test_strides_do_not_matter_and_nothing_is_written_beside_the_output():
    tensors = [torch.randn(2, 3, n, 128, device="cuda").half() for n in (150, 210, 210)]
    with canaries() as asked:
        want = FIRST.attend(*tensors)
    assert asked == [want.shape]
    for laid in zip(*map(views, tensors), strict=True):
        assert torch.equal(FIRST.attend(*laid), want)


def test_what_it_does_not_take_is_refused():
    q = torch.randn(1, 1, 10, 132, device="cuda").half()
    for d in (132, 60):
        with pytest.raises(ValueError, match=f"d = {d}, expected a multiple of 8, at most 128"):
            FIRST.attend(q[..., :d], q[..., :d], q[..., :d])
