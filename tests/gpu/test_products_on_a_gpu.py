"""Float32 as six products of bfloat16, over all of float32's range: nothing is lost in silence."""

import math

import pytest
import torch

import stages
from harness.measures.accuracy import set_precision
from stages.common import inputs

pytestmark = pytest.mark.gpu

SPLIT = [stages.by_number(number) for number in (5, 6, 7, 8)]
NAMES = [stage.STAGE.name for stage in SPLIT]
# exponents of 2 by which q, k, v and dO are multiplied; scores stay what they are
RANGES = [
    (0, 0, 0, 0), (0, 0, -110, 0), (0, 0, -126, 0), (0, 0, -140, 0), (0, 0, 112, 0), (0, 0, 123, 0),
    (-60, 60, 0, 0), (-112, 112, 0, 0), (-120, 120, 0, 0), (112, -112, 0, 0), (120, -120, 0, 0),
]  # fmt: skip
GRADIENTS = [(0, 0, 0, 0), (0, 0, 0, -110), (0, 0, 0, -120), (0, 0, -60, -60), (0, 0, 0, 110),
             (-100, 100, 0, 0), (0, 0, 60, 50)]  # fmt: skip


@pytest.fixture(autouse=True)
def ieee():
    set_precision("ieee")
    inputs.asked_for.clear()
    yield
    assert inputs.asked_for == {"bf16x6"}, "no product was split: these tests test nothing"


def tensors(d, powers=(0, 0, 0, 0), n=300):
    """q, k, v and dO (1, 2, n, d) float32, each times a power of two."""
    generator = torch.Generator("cuda").manual_seed(d)
    drawn = (torch.randn(1, 2, n, d, device="cuda", generator=generator) for _ in range(4))
    return [x * 2.0**power for x, power in zip(drawn, powers, strict=True)]


def gradients_of(attend, q, k, v, dO):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    attend(*leaves).backward(dO)
    return [x.grad for x in leaves]


def assert_as_near(found, plain, exact):
    """Raise unless `found` is as near to `exact`, in float64, as plain float32 is, or 4 times off.

    Where plain float32 happens to be right, an error of a rounding of the largest number counts.
    """
    assert found.isfinite().all()
    rounding = max(2.0**-23 * exact.abs().max().item(), 2.0**-149)
    allowed = 4 * max((plain.double() - exact).abs().max().item(), rounding)
    assert (found.double() - exact).abs().max().item() <= allowed


@pytest.mark.parametrize("stage", SPLIT, ids=NAMES)
@pytest.mark.parametrize("d", [64, 80, 128, 256])
@pytest.mark.parametrize("powers", RANGES, ids=str)
def test_outputs_are_as_near_as_float32_whatever_the_size_of_the_numbers(stage, d, powers):
    q, k, v, _ = tensors(d, powers)
    plain = stages.by_number(3).attend(q, k, v)
    exact = stages.by_number(3).attend(q.double(), k.double(), v.double())
    assert_as_near(stage.attend(q, k, v), plain, exact)
    if stage.STAGE.number == 8:
        assert_as_near(stage.forward(q, k, v, False, None, splits=3), plain, exact)


@pytest.mark.parametrize("d", [64, 80, 128, 256])
@pytest.mark.parametrize("powers", GRADIENTS, ids=str)
def test_gradients_are_as_near_as_float32_whatever_the_size_of_the_numbers(d, powers):
    x = tensors(d, powers)
    three = stages.by_number(3).attend
    plain, exact = gradients_of(three, *x), gradients_of(three, *(y.double() for y in x))
    for found, *others in zip(
        gradients_of(stages.by_number(7).attend, *x), plain, exact, strict=True
    ):
        assert_as_near(found, *others)


@pytest.mark.parametrize("stage", SPLIT, ids=NAMES)
@pytest.mark.parametrize("name", ["v", "k", "q"])
@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan, 1e37, -1e37])
def test_infinities_nan_and_large_numbers_count_where_they_do_in_float32(stage, name, odd):
    q, k, v, _ = tensors(64)
    {"q": q, "k": k, "v": v}[name][0, 1, 7, 3] = odd
    wanted = stages.by_number(3).attend(q, k, v)
    found = stage.attend(q, k, v)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.isinf(), wanted.isinf())
    seen = wanted.isfinite() & (wanted.abs() < 1e30)
    exact = stages.by_number(3).attend(q.double(), k.double(), v.double())
    assert_as_near(found[seen], wanted[seen], exact[seen])


@pytest.mark.parametrize("stage", SPLIT, ids=NAMES)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_score_counts_whose_sum_is_too_large_on_its_way(stage, sign):
    """Lifted, the first products pass float32's largest, and the rest cancel them: a score of 0."""
    q, k, v, _ = tensors(64)
    low, high = [0, 16, 32], [48, 49, 50]
    q[..., 7, :], k[..., 7, :] = 0.0, 0.0
    k[..., low + high] = 0.0
    q[..., 7, low + high] = 2.0**48
    k[..., 7, low], k[..., 7, high] = -sign * 2.0**47, sign * 2.0**47
    exact = stages.by_number(3).attend(q.double(), k.double(), v.double())
    assert_as_near(stage.attend(q, k, v), stages.by_number(3).attend(q, k, v), exact)


@pytest.mark.parametrize("number", [6, 7, 8, 9])
def test_hidden_keys_may_hold_anything(number):
    if number == 9 and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("no Hopper GPU")
    attend = stages.by_number(number).attend
    q, k, v, _ = tensors(64)
    lengths = torch.tensor([200], dtype=torch.int32, device="cuda")
    wanted = attend(q, k, v, seqlens_k=lengths)
    k[:, :, 200:], v[:, :, 200:] = math.nan, math.inf
    assert torch.equal(attend(q, k, v, seqlens_k=lengths), wanted)
