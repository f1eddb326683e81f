"""Scores of -inf, and NaN in what is hidden: none reaches a row that it has no part in."""

import math
from contextlib import nullcontext

import pytest
import torch
from marks import quickly
from masked_problems import a_tile, in_tiles
from stage_checks import (
    FAKES,
    assert_close,
    device_of,
    for_each,
    gradient_rounding,
    gradients,
    hidden_keys,
    normal,
    options_of,
    rounding,
    true_gradients,
    truth,
)

from harness.problems.problem import Problem

LONG = [stage for stage in FAKES if stage.STAGE.exact_up_to is None]
MASKED = [stage for stage in FAKES if {"causal", "seqlens_k"} <= {*stage.STAGE.options}]
HALF = [stage for stage in LONG if stage.STAGE.number not in (0, 1, 2)]
BAD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
SLOW = quickly(1, BAD)
LOW = 64  # so many keys come first whose scores are -inf: a whole tile
# nq, nk, causal, seqlens_k, the tile: several tiles that some rows see whole and others in part
HIDING = [
    (17, 34, True, None, (16, 16)),
    (20, 18, True, None, (32, 16)),
    (17, 33, True, (33, 9), (16, 32)),
    (3, 40, False, (0, 21), (16, 16)),
]


def tiles_of(stage, tile):
    """Small tiles, for a stage that walks tiles under masks."""
    return in_tiles(tile, stage) if hasattr(stage, "candidates") else nullcontext()


def problem(nq, nk, causal, seqlens_k, device, dtype="float32"):
    """Two batch entries, two heads of one key head."""
    return Problem(
        "normal", 0, 2, 2, 1, nq, nk, 8, dtype, "ieee", causal, seqlens_k, device
    )  # fmt: skip


@for_each(LONG)
def test_a_tile_of_overflowing_scores_counts_for_nothing(stage):
    q, k, v, dO = normal((1, 2, 2, 70, 2), 0, device=device_of(stage))
    q, k = 1e20 * q.abs(), 1e-20 * k
    tail = k[:, :, LOW:], v[:, :, LOW:]
    k[:, :, :LOW] = -3e20 - 1e20 * k[:, :, :LOW].abs()  # q k is finite in float64 alone
    want, *grads = true_gradients(q, *tail, dO)
    assert_close(stage.attend(q, k, v), want, rounding(q, *tail))
    if not stage.STAGE.gradients:
        return
    _, dq, dk, dv = gradients(stage, q, k, v, dO)
    assert not dk[:, :, :LOW].any()
    assert not dv[:, :, :LOW].any()
    got = dq, dk[:, :, LOW:], dv[:, :, LOW:]
    for x, grad, bound in zip(got, grads, gradient_rounding(q, *tail, dO), strict=True):
        assert_close(x, grad, bound)


@for_each(LONG)
def test_keys_of_minus_infinity_count_for_nothing(stage):
    dtype = torch.float16 if stage in HALF else torch.float32
    q, k, v, _ = normal((1, 1, 3, 130, 4), 0, dtype, device_of(stage))
    q, tail = q.abs() + 1, (k[:, :, 2 * LOW :], v[:, :, 2 * LOW :])
    k[:, :, : 2 * LOW] = -math.inf
    bound = rounding(q, *tail)
    if stage.STAGE.number == 3:
        bound *= 8  # whose scores are of the dtype, below 8 here
    assert_close(stage.attend(q, k, v), truth(q, *tail), bound)


@for_each(FAKES)
def test_a_row_of_minus_infinity_only_is_nan(stage):
    q, k, v, _ = normal((1, 2, 2, 5, 4), 0, device=device_of(stage))
    k[..., 0] = -math.inf
    assert stage.attend(q.abs() + 1, k, v).isnan().all()


@for_each(MASKED)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_row_that_sees_minus_infinity_only_is_nan_under_a_mask(stage, dtype):
    asked = problem(9, 7, True, (7, 0), device_of(stage), dtype)
    q, k, v, _ = normal((2, 2, 9, 7, 8), 0, getattr(torch, dtype), asked.device)
    q, k, v = q.abs() + 1, -k[:, :1].abs(), v[:, :1]
    k[:, :, :3] = -math.inf
    forwards = [stage.attend]
    if hasattr(stage, "attend_paged"):
        forwards.append(lambda q, k, v, causal, seqlens_k: stage.forward(
            q, k, v, causal, seqlens_k, splits=3
        ))  # fmt: skip
    for forward in forwards:
        o = forward(q, k, v, **options_of(asked))
        assert not o[1].any()
        assert not o[0, :, :2].any()
        assert o[0, :, 2:5].isnan().all()
        assert o[0, :, 5:].isfinite().all()


@for_each(MASKED)
@pytest.mark.parametrize("bad", SLOW)
@pytest.mark.parametrize("case", range(len(HIDING)))
def test_what_is_hidden_may_hold_anything(stage, case, bad):
    nq, nk, causal, seqlens_k, tile = HIDING[case]
    asked = problem(nq, nk, causal, seqlens_k, device_of(stage))
    options, hidden = options_of(asked), hidden_keys(asked)  # (2 or 1, 1, nq, nk)
    q, k, v, dO = normal((2, 2, nq, nk, 8), 0, device=asked.device)
    k, v = k[:, :1].clone(), v[:, :1].clone()

    def answers(q, k, v, dO):
        with tiles_of(stage, tile):
            if stage.STAGE.gradients:
                return gradients(stage, q, k, v, dO, **options)
            if hasattr(stage, "attend_paged"):  # in one part, or in several
                chosen = {"splits": 1 + case % 2 * 2, "config": a_tile(*tile)}
                return (stage.forward(q, k, v, causal, options.get("seqlens_k"), **chosen),)
            return (stage.attend(q, k, v, **options),)

    clean = answers(q, k, v, dO)
    hidden = hidden.expand(2, 1, nq, nk)
    unseen, blind = hidden.all(-2)[..., None], hidden.all(-1)[..., None]
    # keys that no row sees, and rows that see no key: nothing changes at all
    where = (q, blind), (k, unseen), (v, unseen), (dO, blind)
    spoiled = [x.masked_fill(mask, BAD[bad]) for x, mask in where]
    for got, want in zip(answers(*spoiled), clean, strict=True):
        assert torch.equal(got, want)
    if not causal:
        return
    # and a key that some rows see: the others stay right. (A value may reach them: 0 * NaN is NaN)
    want, bound = truth(q, k, v, hidden), rounding(q, k, v)
    j = min(nk - 2, nk // 2 + 3)
    apart = hidden[..., j, None].expand(2, 2, nq, 8)
    k[:, :, j, 3] = BAD[bad]
    o = answers(q, k, v, dO)[0]
    assert_close(o[apart], want[apart], bound)
    if bad == "nan":  # an infinite k can make a score of -inf
        assert not o[~apart].isfinite().any()
