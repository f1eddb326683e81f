"""Stage 8: parts of the keys and their merge, packed rows, the cost model, against float64."""

import math
import sys
from unittest.mock import patch

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from masked_problems import SPLITS, a_tile, far_away
from stage_checks import (
    assert_close,
    guarded_outputs,
    normal,
    rounding,
    truth,
)

from stages import s08_triton_split_kv as stage
from stages.common.machine import has_module

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" and not has_module("triton"), reason="no triton for this machine"
)

many = settings(
    max_examples=12, deadline=None, derandomize=True, database=None, phases=[Phase.generate]
)


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32)


# ---- parts


def dominant(nk, positions, d, dtype=torch.float32):
    """q, k, v whose row i sees next to nothing but the key at positions[i]."""
    _, k, v, _ = normal((1, 1, 1, nk, d), 0, torch.float64)
    k = k / k.norm(dim=-1, keepdim=True)
    q = 40 * math.sqrt(d) * k[:, :, positions]
    return q.to(dtype), k.to(dtype), v.to(dtype)


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 9])
def test_a_dominant_key_at_both_ends_of_each_part(splits):
    """A row for each end: no part's, no tile's first or last key may be lost."""
    nk, N, d = 142, 16, 32  # nine tiles, the last one ragged
    tiles = -(-nk // N)
    ends = [tiles * part // splits * N for part in range(splits + 1)]
    positions = sorted({min(nk - 1, x) for end in ends for x in (end, max(end - 1, 0))})
    q, k, v = dominant(nk, positions, d)
    o = stage.forward(q, k, v, False, None, splits=splits, config=a_tile(16, N, d))
    assert_close(o, truth(q, k, v), rounding(q, k, v))
    # each row is next to its own key's v, and far from any other's
    nearest = torch.cdist(o[0, 0].double(), v[0, 0].double()).argmin(-1)
    assert nearest.tolist() == positions


@pytest.mark.parametrize("splits", SPLITS)
def test_scores_of_minus_infinity_first(splits):
    """A first tile, and a first part, of nothing but -inf are no NaN."""
    q, k, v, _ = normal((1, 1, 3, 64, 8), 0)
    q, k = q.abs() + 0.1, k.clone()
    k[:, :, :40] = -math.inf
    o = stage.forward(q, k, v, False, None, splits=splits, config=a_tile(16, 16, 8))
    want = truth(q, k[:, :, 40:], v[:, :, 40:])
    assert_close(o, want, rounding(q, k[:, :, 40:], v[:, :, 40:]))


# ---- how many parts


SMS = st.sampled_from([1, 16, 108, 132])


@settings(many, max_examples=100)
@given(st.integers(1, 2000), st.integers(1, 5000), SMS, st.sampled_from([{}, stage.COMPUTED]))
def test_splits_are_at_least_one_and_at_most_what_there_is(programs, tiles, sms, computed):
    splits = stage.choose_splits(programs, tiles, sms, **computed)
    assert 1 <= splits <= tiles
    assert programs < 4 * sms or splits == 1  # a full GPU needs no more programs
    assert programs * splits < 4 * sms + programs  # nor memory for their parts


@pytest.mark.parametrize("programs", [1, 2, 8, 16, 24, 32, 64])
def test_long_keys_fill_the_gpu(programs):
    """Few heads, many keys: so many multiprocessors read that the memory is busy."""
    splits = stage.choose_splits(programs, 10_000, 132)
    assert stage.ALONE * 132 <= programs * splits <= 2 * 132


@pytest.mark.parametrize("programs", [1, 8, 128, 132, 512])
def test_few_keys_are_not_split(programs):
    assert stage.choose_splits(programs, 1, 132) == 1
    assert stage.choose_splits(programs, 2, 132) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("N", [64, 128, 1024, 2048, 4096, 8192, 16384])
def test_one_head_fills_the_gpu_and_many_heads_are_not_split(N, dtype):
    """About two programs for each of 132 multiprocessors, where there are tiles for so many."""
    with patch.object(stage, "input_precision", lambda q: "bf16x6"):
        one, many_heads = (torch.empty(1, h, N, 64, dtype=dtype, device="meta") for h in (1, 32))
        splits, config = stage.plan(one, 1, N)
        programs = -(-N // config["BLOCK_M"]) * splits
        few_tiles = N // config["BLOCK_N"] <= 8  # in float16 at N = 1024
        assert splits == 1 if N <= 128 else programs == (128 if few_tiles else 256)
        if N >= 1024:
            assert stage.plan(many_heads, 32, N)[0] == 1


def test_the_number_of_parts_comes_from_the_shape_alone():
    """Not from the values of seqlens_k, which would have to be waited for."""
    q, k, v, _ = normal((2, 2, 1, 3000, 16), 0)
    asked = []

    def choose(*shape):
        asked.append(shape)
        return 2

    with patch.object(stage, "choose_splits", choose):
        for seqlens_k in (None, lengths(0, 1), lengths(3000, 7)):
            stage.attend(q, k, v, seqlens_k=seqlens_k)
    assert len(asked) == 3 and len(set(asked)) == 1


@pytest.mark.parametrize(
    ("shape", "split"),
    [
        ((1, 1, 1, 5000, 16), True),
        ((1, 4, 2, 5000, 8), True),
        ((1, 1, 200, 600, 16), True),
        ((1, 1, 1, 40, 8), False),
    ],
)
def test_scratch_is_what_the_parts_take(shape, split):
    q, k, v, _ = normal(shape, 0, torch.float16)
    with guarded_outputs() as asked:
        o = stage.attend(q, k, v)
    scratch = [size for size in asked if len(size) == 5]  # (B, H, Nq, parts, d or 2)
    B, H, Nq, _, d = shape
    splits = stage.plan(q, H, k.shape[2])[0]
    assert sum(map(math.prod, scratch)) == (B * H * Nq * splits * (d + 2) if split else 0)
    assert [size for size in asked if len(size) != 5] == [o.shape]
    assert bool(scratch) == split  # one part: no scratch, and no merge


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("d", [1, 64, 65, 128, 200, 256])
def test_the_tile_is_the_smallest_that_holds_the_rows(d, dtype):
    for several in (False, True):
        heights = [
            stage.launch_config(d, dtype, "ieee", rows, several)["BLOCK_M"]
            for rows in range(1, 129)
        ]
        tallest = max(heights)
        for rows, height in enumerate(heights, 1):
            assert height >= min(rows, tallest)
            assert height == 16 or height // 2 < rows


# ---- far away


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lends memory that isn't there")
def test_pages_beyond_32_bits():
    """Three pages, a gigabyte and more of elements from one to the next."""
    q, k, v, _ = normal((1, 2, 3, 48, 16), 0, torch.float16)
    k, v = k[:, :1], v[:, :1]
    order = torch.tensor([[2, 0, 1] + [0] * 16], dtype=torch.int32)
    pages = []
    for x in (k, v):
        y = torch.empty_like(x)
        y.view(3, 16, 16)[[2, 0, 1]] = x.view(3, 16, 16)
        far = far_away(y.view(1, 1, 3, 256), 1_200_000_000, 1)
        pages.append(far.as_strided((3, 1, 16, 16), (1_200_000_000, 256, 16, 1), 1 << 31))
    chosen = {"splits": 2, "config": a_tile(16, 16, 16)}
    o = stage.forward(
        q, *pages, True, lengths(48), table=order, rows=lengths(0), longest=48, **chosen
    )
    assert torch.equal(o, stage.forward(q, k, v, True, None, **chosen))
