"""Stage 8: parts of the keys and their merge, packed rows, the cost model, against float64."""

import math
import sys
from unittest.mock import patch

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from masked_problems import FAR, far_away, layouts, masks, problems, tensors
from stage_checks import (
    assert_close,
    attend,
    guarded_outputs,
    in_nan,
    lse_rounding,
    normal,
    rounding,
    true_lse,
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
SPLITS = (1, 2, 3, 7)  # 7: more parts than tiles, so that some are empty
TILES = ((16, 16), (16, 32), (32, 16), (64, 16))  # BLOCK_M, BLOCK_N


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32)


def tile(M, N, d):
    """A launch configuration of BLOCK_M x BLOCK_N."""
    BLOCK_D = max(16, 1 << (d - 1).bit_length())
    return {"BLOCK_M": M, "BLOCK_N": N, "BLOCK_D": BLOCK_D, "num_warps": 4, "num_stages": 2}


def forward(q, k, v, causal=False, seqlens_k=None, **chosen):
    """o and lse, in base e, in the parts and tiles that are asked for."""
    lse = torch.full(q.shape[:3], math.nan)
    o = stage.forward(q, k, v, causal, seqlens_k, lse, **chosen)
    return o, lse * math.log(2)


def causal_mask(nq, nk):
    return (torch.arange(nk) > torch.arange(nq)[:, None] + nk - nq)[None, None]


# ---- parts


@many
@given(
    problem=problems,
    size=st.sampled_from(TILES),
    splits=st.sampled_from(SPLITS),
    laid=st.tuples(*[layouts] * 4),
)
def test_any_number_of_parts_under_any_mask(problem, size, splits, laid):
    q, k, v, _ = tensors(problem, laid)
    options, hidden = masks(problem)
    with guarded_outputs():
        o, lse = forward(q, k, v, **options, splits=splits, config=tile(*size, problem.d))
    assert (o.dtype, o.shape) == (q.dtype, q.shape)
    assert_close(o, truth(q, k, v, hidden), rounding(q, k, v))
    blind = hidden.all(-1).expand(lse.shape)  # (b, h, nq)
    assert (o[blind] == 0).all()
    assert (lse[blind] == -math.inf).all()
    if not blind.all():
        assert_close(lse[~blind], true_lse(q, k, hidden)[~blind], lse_rounding(q, k), "lse")


@pytest.mark.parametrize("splits", [1, 2, 5, 20])
def test_parts_without_a_key_change_nothing(splits):
    """A batch entry of none, of one and of all keys; 20 parts for 5 tiles."""
    q, k, v, _ = normal((3, 2, 3, 80, 8), 0)
    seqlens_k = lengths(0, 1, 80)
    with guarded_outputs():
        o, lse = forward(q, k, v, seqlens_k=seqlens_k, splits=splits, config=tile(16, 16, 8))
    hidden = torch.arange(80) >= seqlens_k[:, None, None, None]
    assert (o[0] == 0).all() and (lse[0] == -math.inf).all()
    assert_close(o, truth(q, k, v, hidden.expand(3, 1, 3, 80)), rounding(q, k, v))


@pytest.mark.parametrize("nq", [1, 40])
@pytest.mark.parametrize("nk", [1, 70])
def test_no_row_sees_a_key(nq, nk):
    q, k, v, _ = normal((2, 2, nq, nk, 8), 0)
    o, lse = forward(q, k, v, seqlens_k=lengths(0, 0), causal=True)
    assert (o == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("group", [1, 3, 5])
def test_the_heads_of_a_group_are_packed(group, splits):
    """Blocks of 16 packed rows begin and end in the middle of a query's group of 3 or 5."""
    q, k, v, _ = normal((1, 2 * group, 11, 40, 8), 0)
    k, v = k[:, :2], v[:, :2]
    with guarded_outputs():
        o, lse = forward(q, k, v, causal=True, splits=splits, config=tile(16, 16, 8))
    hidden = causal_mask(11, 40)
    assert_close(o, truth(q, k, v, hidden), rounding(q, k, v))
    assert_close(lse, true_lse(q, k, hidden), lse_rounding(q, k), "lse")


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
    o, _ = forward(q, k, v, splits=splits, config=tile(16, N, d))
    assert_close(o, truth(q, k, v), rounding(q, k, v))
    # each row is next to its own key's v, and far from any other's
    nearest = torch.cdist(o[0, 0].double(), v[0, 0].double()).argmin(-1)
    assert nearest.tolist() == positions


def test_lengths_of_any_stride():
    q, k, v, _ = normal((3, 1, 5, 9, 8), 0)
    apart = torch.full((6,), 9, dtype=torch.int32)
    apart[::2] = lengths(2, 5, 0)
    for seqlens_k in (apart[::2], lengths(4).expand(3)):
        assert not seqlens_k.is_contiguous()
        want = stage.attend(q, k, v, seqlens_k=seqlens_k.clone())
        assert torch.equal(stage.attend(q, k, v, seqlens_k=seqlens_k), want)


@pytest.mark.parametrize("splits", SPLITS)
def test_the_lse_changes_nothing(splits):
    q, k, v, _ = normal((2, 2, 5, 70, 8), 0)
    chosen = {"splits": splits, "config": tile(16, 16, 8)}
    plain = stage.forward(q, k, v, True, lengths(50, 70), **chosen)
    assert torch.equal(forward(q, k, v, True, lengths(50, 70), **chosen)[0], plain)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nan_that_no_row_sees_changes_no_bit(causal, dtype, splits):
    """Beyond the lengths, and, under a causal mask, beyond what the block's last row sees."""
    q, k, v, _ = normal((3, 2, 9, 40, 8), 0, dtype)
    k, v, seqlens_k = k[:, :1].clone(), v[:, :1].clone(), lengths(0, 37, 17)
    answers = []
    for number in (0.0, math.nan):
        for x in (k, v):
            for b, length in enumerate(seqlens_k.tolist()):
                x[b, :, length:] = number
        chosen = {"splits": splits, "config": tile(16, 16, 8)}
        answers.append(forward(q, k, v, causal, seqlens_k, **chosen))
    assert all(map(torch.equal, *answers))
    assert answers[1][0].isfinite().all()


def test_a_tile_of_nan_spoils_the_rows_that_see_it_and_no_other():
    """Under a causal mask, each tile in its turn, in two parts; blocks are 16 rows."""
    q, k, v, _ = normal((1, 1, 48, 64, 8), 0)
    chosen = {"causal": True, "splits": 2, "config": tile(16, 16, 8)}
    want, _ = forward(q, k, v, **chosen)
    for start in range(0, 64, 16):
        x, y = k.clone(), v.clone()
        x[:, :, start : start + 16] = y[:, :, start : start + 16] = math.nan
        o, _ = forward(q, x, y, **chosen)
        first_row = max(0, start - 16)  # the first that sees a key of the tile
        untouched = first_row // 16 * 16
        assert torch.equal(o[:, :, :untouched], want[:, :, :untouched])
        assert o[:, :, first_row:].isnan().all()


@pytest.mark.parametrize("splits", SPLITS)
def test_a_hidden_key_may_hold_anything(splits):
    """k of a tile that some rows of the block see: NaN for those, and nothing for the others."""
    q, k, v, _ = normal((1, 1, 16, 64, 8), 0)
    chosen = {"causal": True, "splits": splits, "config": tile(16, 16, 8)}
    want, bound = forward(q, k, v, **chosen)[0], 2 * rounding(q, k, v)
    k[:, :, 60] = math.nan  # rows from 12 on see it
    o, _ = forward(q, k, v, **chosen)
    assert_close(o[:, :, :12], want[:, :, :12], bound)
    assert o[:, :, 12:].isnan().all()


@pytest.mark.parametrize("splits", SPLITS)
def test_scores_of_minus_infinity_first(splits):
    """A first tile, and a first part, of nothing but -inf are no NaN."""
    q, k, v, _ = normal((1, 1, 3, 64, 8), 0)
    q, k = q.abs() + 0.1, k.clone()
    k[:, :, :40] = -math.inf
    o, _ = forward(q, k, v, splits=splits, config=tile(16, 16, 8))
    want = truth(q, k[:, :, 40:], v[:, :, 40:])
    assert_close(o, want, rounding(q, k[:, :, 40:], v[:, :, 40:]))


def test_runs_are_the_same_bit_for_bit():
    q, k, v, _ = normal((2, 4, 3, 600, 8), 0, torch.float16)
    options = {"causal": True, "seqlens_k": lengths(566, 7)}
    first = forward(q, k[:, :2], v[:, :2], **options)
    for _ in range(4):
        again = forward(q, k[:, :2], v[:, :2], **options)
        assert all(map(torch.equal, again, first))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_gradients_are_refused(name):
    names = dict(zip("qkv", normal((1, 1, 2, 3, 4), 0), strict=False))
    names[name].requires_grad_()
    with pytest.raises(ValueError, match=rf"^{name}: got requires_grad=True, expected none"):
        stage.attend(**names)
    with torch.no_grad():
        stage.attend(**names)


# ---- how many parts


SMS = st.sampled_from([1, 16, 108, 132])


@settings(many, max_examples=100)
@given(st.integers(1, 2000), st.integers(1, 5000), SMS, st.integers(0, 500))
def test_splits_are_at_least_one_and_at_most_what_there_is(programs, tiles, sms, most):
    splits = stage.choose_splits(programs, tiles, sms, most)
    assert 1 <= splits <= max(1, min(tiles, most))
    assert programs < 4 * sms or splits == 1  # a full GPU needs no more programs


@pytest.mark.parametrize("programs", [1, 2, 8, 16, 24, 32, 64])
def test_long_keys_fill_the_gpu(programs):
    """Few heads, many keys: so many multiprocessors read that the memory is busy."""
    splits = stage.choose_splits(programs, 10_000, 132, 1 << 30)
    assert stage.ALONE * 132 <= programs * splits <= 2 * 132


@pytest.mark.parametrize("programs", [1, 8, 128, 132, 512])
def test_few_keys_are_not_split(programs):
    assert stage.choose_splits(programs, 1, 132, 1 << 30) == 1
    assert stage.choose_splits(programs, 2, 132, 1 << 30) == 1


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
        ((1, 1, 200, 600, 16), False),
        ((1, 1, 1, 40, 8), False),
    ],
)
def test_the_parts_take_no_more_memory_than_k_and_v(shape, split):
    q, k, v, _ = normal(shape, 0, torch.float16)
    with guarded_outputs() as asked:
        o = stage.attend(q, k, v)
    scratch = [size for size in asked if len(size) == 5]  # (B, H, Nq, parts, d or 2)
    assert 4 * sum(map(math.prod, scratch)) <= k.nbytes + v.nbytes
    assert [size for size in asked if len(size) != 5] == [o.shape]
    assert bool(scratch) == split  # one part: no scratch, and no merge


def test_more_rows_than_a_tile_has():
    """150 packed rows, in several blocks, split by hand."""
    q, k, v, _ = normal((1, 6, 25, 100, 8), 0)
    k, v = k[:, :1], v[:, :1]
    o, lse = forward(q, k, v, causal=True, splits=2)
    hidden = causal_mask(25, 100)
    assert_close(o, truth(q, k, v, hidden), rounding(q, k, v))
    assert_close(lse, true_lse(q, k, hidden), lse_rounding(q, k), "lse")


def every_tile():
    """(kind, d, BLOCK_M, BLOCK_N) of TILES."""
    for table in (stage.TILES, stage.OF_SEVERAL):
        for kind, sizes in table.items():
            for d, tiles in zip((64, 128, 256), sizes, strict=True):
                for M, (N, *_) in tiles.items():
                    yield kind, d, M, N


@pytest.mark.parametrize("size", sorted({x[2:] for x in every_tile()}), ids=str)
def test_every_tile_is_right(size):
    """Around the borders of its own tiles, in one part and in two."""
    nq, nk = size[0] // 2 + 1, size[1] + 1
    q, k, v, _ = (in_nan(x) for x in normal((1, 2, nq, nk, 16), 0))
    k, v = k[:, :1], v[:, :1]
    hidden = causal_mask(nq, nk)
    seen = ~hidden[0, 0].all(1)
    for splits in (1, 2):
        with guarded_outputs():
            o, lse = forward(q, k, v, causal=True, splits=splits, config=tile(*size, 16))
        assert_close(o, truth(q, k, v, hidden), rounding(q, k, v))
        want = true_lse(q, k, hidden)[..., seen]
        assert_close(lse[..., seen], want, lse_rounding(q, k), "lse")


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
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("way", FAR)
def test_offsets_beyond_32_bits(way, splits):
    nq, nk, d, *strides = FAR[way]
    near = normal((1, 1, nq, nk, d), 0, torch.float16)[:3]
    far = [far_away(x, *strides) for x in near]
    config = tile(64, 32, d)
    got = stage.forward(*far, True, None, splits=splits, config=config)
    assert torch.equal(got, stage.forward(*near, True, None, splits=splits, config=config))


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
    chosen = {"splits": 2, "config": tile(16, 16, 16)}
    o = stage.forward(
        q, *pages, True, lengths(48), table=order, rows=lengths(0), longest=48, **chosen
    )
    assert torch.equal(o, stage.forward(q, k, v, True, None, **chosen))


def test_nothing_is_written_outside_the_outputs():
    q, k, v, _ = normal((2, 2, 3, 41, 5), 0)
    assert attend(stage, q, k, v).isfinite().all()
    with guarded_outputs() as asked:
        forward(q, k, v, splits=3, config=tile(16, 16, 5))
    assert asked == [(2, 2, 3, 5), (2, 2, 3, 3, 5), (2, 2, 3, 3, 2)]  # o, acc, m and l
