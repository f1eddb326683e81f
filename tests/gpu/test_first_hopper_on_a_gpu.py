"""The smallest kernel of stage 9's folder on a Hopper GPU: the contract, and races."""

import pytest
import torch
from on_a_gpu import assert_exact, launches, problem
from stage_checks import guarded_outputs
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
            assert_exact(FIRST, problem(inputs=inputs, dtype=dtype, d=d, nq=nq, nk=nk))


def test_launches_are_the_same_bit_for_bit():
    """All CTAs of all heads, with outputs that begin as NaN: a race would show in a few of them."""
    q, k, v = (torch.randn(4, 16, n, 128, device="cuda").half() for n in (1000, 1100, 1100))
    want = FIRST.attend(q, k, v)
    assert torch.isfinite(want).all()
    for o in launches(lambda: FIRST.attend(q, k, v)):
        assert torch.equal(o, want)


def test_strides_do_not_matter_and_nothing_is_written_beside_the_output():
    tensors = [torch.randn(2, 3, n, 128, device="cuda").half() for n in (150, 210, 210)]
    with guarded_outputs(whole=True) as asked:
        want = FIRST.attend(*tensors)
    assert asked == [want.shape]
    for laid in zip(*map(views, tensors), strict=True):
        assert torch.equal(FIRST.attend(*laid), want)


def test_what_it_does_not_take_is_refused():
    q = torch.randn(1, 1, 10, 132, device="cuda").half()
    for d in (132, 60):
        with pytest.raises(ValueError, match=f"d = {d}, expected a multiple of 8, at most 128"):
            FIRST.attend(q[..., :d], q[..., :d], q[..., :d])
