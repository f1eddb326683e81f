"""Inputs: from one seed, the same for all, and peaky where it hurts."""

import math

import pytest
import torch
from made_up import problem, scores

from harness.problems.inputs import TILE, make_inputs


@pytest.mark.parametrize("inputs", ["normal", "peaky", "real"])
def test_one_seed_gives_the_same_bytes_and_dtypes_differ_by_rounding_only(inputs):
    d = 32 if inputs == "real" else 64
    first = make_inputs(problem(inputs=inputs, d=d))
    torch.rand(3)  # whatever else has drawn a number meanwhile
    again = make_inputs(problem(inputs=inputs, d=d))
    for x, y in zip(first, again):
        assert x.dtype == torch.float32
        assert torch.equal(x, y)
    for dtype in ("float16", "bfloat16", "float64"):
        for x, y in zip(first, make_inputs(problem(inputs=inputs, d=d, dtype=dtype))):
            assert torch.equal(x.to(getattr(torch, dtype)), y)
            assert torch.isfinite(y).all()
    other = make_inputs(problem(inputs=inputs, d=d, seed=8))
    assert all(torch.equal(x, y) == (inputs == "real") for x, y in zip(first, other))


def test_q_k_and_v_are_not_each_other():
    q, k, v = make_inputs(problem())
    assert not torch.equal(q, k) and not torch.equal(k, v) and not torch.equal(q, v)
    for x in (q, k, v):
        assert abs(x.mean()) < 0.05 and abs(x.std() - 1) < 0.05


def test_real_inputs_of_another_shape_are_refused():
    for changes in ({"d": 64}, {"h": 4, "hk": 2}, {"nk": 513}):
        with pytest.raises(ValueError, match="real inputs"):
            make_inputs(problem(**{"inputs": "real", "d": 32, **changes}))


@pytest.mark.parametrize(
    ("nk", "d"), [(64, 64), (65, 64), (127, 64), (130, 16), (300, 64), (512, 128), (513, 256)]
)
def test_peaky_rows_overflow_a_softmax_without_its_max(nk, d):
    q, k, _ = make_inputs(problem(inputs="peaky", nq=nk, nk=nk, d=d))
    s = scores(q, k)  # (1, 1, nk, nk)
    largest = s.amax(-1)
    assert (largest > 100).all() and (largest < 180).all()
    assert torch.isinf(s.float().exp()).any(-1).all()
    # q and k are bounded: it's their angle that makes the softmax sharp
    assert (k.norm(dim=-1) < 1.2 * math.sqrt(d)).all()
    assert (q.norm(dim=-1) < 420).all()
    # the largest few hold nearly everything
    p = torch.softmax(s, -1)
    assert p.topk(min(8, nk), dim=-1).values.sum(-1).median() > 0.9


@pytest.mark.parametrize("nk", [128, 130, 191, 200, 513])
def test_peaky_rows_point_into_every_tile_the_ragged_last_one_included(nk):
    q, k, _ = make_inputs(problem(inputs="peaky", nq=nk, nk=nk))
    top = scores(q, k).argmax(-1).flatten() // TILE
    tiles = math.ceil(nk / TILE)
    assert sorted(set(top.tolist())) == list(range(tiles))
    share = torch.bincount(top, minlength=tiles) / nk
    assert (share > 0.5 / tiles).all()
    # a forgotten rescale needs a larger max *after* the first tile, in the very first row too
    assert top[0] > 0


@pytest.mark.parametrize("nk", [128, 200, 513])
def test_peaky_rows_have_near_ties_in_different_tiles(nk):
    q, k, _ = make_inputs(problem(inputs="peaky", nq=nk, nk=nk))
    values, keys = scores(q, k).flatten(0, 2).topk(2, dim=-1)  # (nk, 2)
    near = (values[:, 0] - values[:, 1] < 0.5) & (keys[:, 0] // TILE != keys[:, 1] // TILE)
    assert near[::4].float().mean() > 0.9
    # the others have one peak that stands alone
    assert near.float().mean() < 0.35


@pytest.mark.parametrize("inputs", ["normal", "peaky"])
@pytest.mark.parametrize(
    ("b", "h", "hk", "nq", "nk", "d"),
    [(1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 1, 64), (1, 1, 1, 1, 65, 1), (1, 1, 1, 63, 64, 2),
     (1, 1, 1, 65, 1, 16), (1, 1, 1, 3, 127, 1), (1, 1, 1, 7, 129, 256), (2, 6, 2, 1, 70, 40)],
)  # fmt: skip
def test_ragged_sizes_grouped_heads_and_a_single_dimension_are_no_trouble(
    inputs, b, h, hk, nq, nk, d
):
    q, k, v = make_inputs(problem(inputs=inputs, b=b, h=h, hk=hk, nq=nq, nk=nk, d=d))
    assert q.shape == (b, h, nq, d) and k.shape == v.shape == (b, hk, nk, d)
    for x in (q, k, v):
        assert torch.isfinite(x).all() and torch.isfinite(x.half()).all()
    if inputs == "peaky":
        assert (scores(q, k).amax(-1) > 100).all()


def test_peaky_stays_peaky_in_half_precision():
    for dtype in ("float16", "bfloat16"):
        q, k, _ = make_inputs(problem(inputs="peaky", dtype=dtype))
        assert (scores(q, k).amax(-1) > 95).all()
