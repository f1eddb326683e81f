"""Stage 6: masks, the LSE, and tiles that are never visited, against float64 and plain counting."""

import math
import sys
from unittest.mock import patch

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from masked_problems import (
    FAR,
    TILES,
    far_away,
    in_tiles,
    layouts,
    masks,
    problems,
    skipped_by_definition,
    tensors,
)
from stage_checks import (
    assert_close,
    guarded_outputs,
    in_nan,
    lse_rounding,
    normal,
    rounding,
    true_lse,
    truth,
)

from stages import s06_triton_flash2 as stage
from stages.common.kernels import LARGEST_TILE
from stages.common.machine import has_module

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" and not has_module("triton"), reason="no triton for this machine"
)

many = settings(
    max_examples=30, deadline=None, derandomize=True, database=None, phases=[Phase.generate]
)
some = settings(many, max_examples=20)


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32)


# ---- masks


@pytest.mark.slow
@many
@given(problem=problems, tile=st.sampled_from(TILES), laid=st.tuples(*[layouts] * 4))
def test_masks_against_float64(problem, tile, laid):
    q, k, v, _ = tensors(problem, laid)
    options, hidden = masks(problem)
    with in_tiles(tile), guarded_outputs():
        o, lse = stage.attend_with_lse(q, k, v, **options)
    assert (o.dtype, o.shape) == (q.dtype, q.shape)
    assert (lse.dtype, lse.shape) == (torch.float32, q.shape[:3])
    assert_close(o, truth(q, k, v, hidden), rounding(q, k, v))
    blind = hidden.all(-1).expand(lse.shape)  # (b, h, nq)
    assert (o[blind] == 0).all()
    assert (lse[blind] == -math.inf).all()
    want = true_lse(q, k, hidden)
    if not blind.all():
        assert_close(lse[~blind], want[~blind], lse_rounding(q, k), "lse")


@pytest.mark.parametrize("nq", [1, 40])
@pytest.mark.parametrize("nk", [1, 70])
def test_no_row_sees_a_key(nq, nk):
    q, k, v, _ = normal((2, 2, nq, nk, 8), 0)
    o, lse = stage.attend_with_lse(q, k, v, seqlens_k=lengths(0, 0), causal=True)
    assert (o == 0).all() and (lse == -math.inf).all()
    # and a batch entry of none beside one of all
    o, lse = stage.attend_with_lse(q, k, v, seqlens_k=lengths(0, nk))
    assert (o[0] == 0).all() and (lse[0] == -math.inf).all()
    assert_close(o[1:], truth(q[1:], k[1:], v[1:]), rounding(q, k, v))


def test_lengths_of_all_keys_are_no_lengths():
    q, k, v, _ = normal((2, 2, 40, 70, 8), 0)
    for causal in (False, True):
        plain = stage.attend_with_lse(q, k, v, causal=causal)
        full = stage.attend_with_lse(q, k, v, causal=causal, seqlens_k=lengths(70, 70))
        assert all(map(torch.equal, plain, full))


def test_lengths_of_any_stride():
    q, k, v, _ = normal((3, 1, 5, 9, 8), 0)
    apart = torch.full((6,), 9, dtype=torch.int32)
    apart[::2] = lengths(2, 5, 0)
    for seqlens_k in (apart[::2], lengths(4).expand(3)):
        assert not seqlens_k.is_contiguous()
        want = stage.attend(q, k, v, seqlens_k=seqlens_k.clone())
        assert torch.equal(stage.attend(q, k, v, seqlens_k=seqlens_k), want)


def test_the_lse_changes_nothing():
    q, k, v, _ = normal((2, 2, 40, 70, 8), 0)
    options = {"causal": True, "seqlens_k": lengths(50, 70)}
    assert torch.equal(
        stage.attend_with_lse(q, k, v, **options)[0], stage.attend(q, k, v, **options)
    )


# ---- tiles that are never visited


@pytest.mark.slow
@many
@given(problem=problems, tile=st.sampled_from(TILES))
def test_skipped_blocks_are_those_that_no_row_sees(problem, tile):
    q, k, v, _ = tensors(problem)
    options, hidden = masks(problem)
    with in_tiles(tile), guarded_outputs():
        skipped = stage.skipped_blocks(q, k, v, **options)
    with patch.object(stage, "skipped_blocks", lambda *_, **__: skipped), in_tiles(tile):
        ratio = stage.skip_ratio(q, k, v, **options)
    want = skipped_by_definition(hidden, problem.h, tile)
    assert skipped.dtype == torch.int32
    assert torch.equal(skipped, want)
    pairs = want.numel() * math.ceil(problem.nk / tile[1])
    assert ratio == pytest.approx(want.sum().item() / pairs, rel=1e-12)


def test_nothing_is_skipped_without_a_mask_and_half_of_it_with_one():
    q, k, v, _ = normal((1, 1, 128, 128, 8), 0)
    with in_tiles((16, 16)):
        assert stage.skip_ratio(q, k, v) == 0.0
        assert stage.skip_ratio(q, k, v, causal=True) == 28 / 64
        assert stage.skip_ratio(q, k, v, seqlens_k=lengths(0)) == 1.0


def test_skipped_blocks_count_in_the_tiles_of_the_launch_configuration():
    q, k, v, _ = normal((1, 2, 100, 200, 8), 0)
    config = stage.launch_config(8, torch.float32, "ieee")
    tile = config["BLOCK_M"], config["BLOCK_N"]
    skipped = stage.skipped_blocks(q, k, v, seqlens_k=lengths(70))
    hidden = torch.arange(200).view(1, 1, 1, 200).expand(1, 1, 100, 200) >= 70
    assert torch.equal(skipped, skipped_by_definition(hidden, 2, tile))


@pytest.mark.slow
@some
@given(problem=problems, tile=st.sampled_from(TILES), data=st.data())
def test_what_a_block_skips_is_never_read(problem, tile, data):
    """A tile of NaN, and NaN beyond seqlens_k: not a bit of what doesn't see it changes."""
    q, k, v, _ = tensors(problem)
    options, hidden = masks(problem)
    M, N = tile
    j = data.draw(st.integers(0, math.ceil(problem.nk / N) - 1), label="tile")
    at = slice(j * N, (j + 1) * N)
    # (b, q blocks): whether no row of the block sees any key of tile j
    skips = [hidden[:, 0, i : i + M, at].flatten(1).all(1) for i in range(0, problem.nq, M)]
    rows = torch.stack(skips, 1).repeat_interleave(M, 1)[:, : problem.nq]  # (b, nq)
    answers = []
    for number in (0.0, math.nan):
        x, y = k.clone(), v.clone()
        for z in (x, y):
            z[:, :, at] = number
            for b, length in enumerate(problem.seqlens_k or ()):
                z[b, :, length:] = number
        with in_tiles(tile):
            answers.append(stage.attend_with_lse(q, x, y, **options))
    for zeros, poisoned in zip(*answers, strict=True):
        unread = rows[:, None].expand(zeros.shape[:3])
        assert torch.equal(zeros[unread], poisoned[unread])
    assert answers[1][0].transpose(1, 2)[rows].isfinite().all()


@pytest.mark.parametrize("nq", [64, 48, 41])
def test_a_tile_of_nan_spoils_the_rows_that_see_it_and_no_other(nq):
    """Under a causal mask, each tile in its turn; blocks are 16 rows, and so are tiles."""
    q, k, v, _ = normal((1, 1, nq, 64, 8), 0)
    with in_tiles((16, 16)):
        want = stage.attend(q, k, v, causal=True)
        for start in range(0, 64, 16):
            x, y = k.clone(), v.clone()
            x[:, :, start : start + 16] = y[:, :, start : start + 16] = math.nan
            o = stage.attend(q, x, y, causal=True)
            first_row = max(0, start - (64 - nq))  # the first that sees a key of the tile
            untouched = first_row // 16 * 16
            assert torch.equal(o[:, :, :untouched], want[:, :, :untouched])
            assert o[:, :, first_row:].isnan().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nan_beyond_the_lengths_changes_no_bit(causal, dtype):
    q, k, v, _ = normal((3, 4, 40, 70, 8), 0, dtype)
    k, v, seqlens_k = k[:, :2].clone(), v[:, :2].clone(), lengths(0, 65, 33)
    answers = []
    for number in (0.0, math.nan):
        for x in (k, v):
            for b, length in enumerate(seqlens_k.tolist()):
                x[b, :, length:] = number
        answers.append(stage.attend_with_lse(q, k, v, causal=causal, seqlens_k=seqlens_k))
    assert all(map(torch.equal, *answers))
    assert answers[1][0].isfinite().all()


# ---- tiles, bits, buffers


def distinct_tiles():
    return sorted({tile[:2] for kind in stage.TILES.values() for size in kind for tile in size})


@pytest.mark.parametrize("tile", distinct_tiles(), ids=str)
def test_every_candidate_is_right(tile):
    """Around the borders of its own tiles."""
    nq, nk = tile[0] + 1, tile[1] + 1
    q, k, v, _ = (in_nan(x) for x in normal((1, 1, nq, nk, 16), 0))
    hidden = torch.arange(nk) > torch.arange(nq)[:, None] + nk - nq
    with in_tiles(tile), guarded_outputs():
        o, lse = stage.attend_with_lse(q, k, v, causal=True)
    assert_close(o, truth(q, k, v, hidden[None, None]), rounding(q, k, v))
    seen = ~hidden.all(1)
    want = true_lse(q, k, hidden)[..., seen]
    assert_close(lse[..., seen], want, lse_rounding(q, k), "lse")


def test_no_tile_is_larger_than_the_largest():
    assert max(max(tile) for tile in distinct_tiles()) <= LARGEST_TILE


def test_round_to_tf32_is_to_the_nearest():
    """Ten bits of mantissa stay; what lies in the middle goes away from 0."""
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(x_ptr, out_ptr, N: tl.constexpr):
        at = tl.arange(0, N)
        tl.store(out_ptr + at, stage.round_to_tf32(tl.load(x_ptr + at)))

    step = 2.0**-10
    exact = torch.tensor([0.0, 1.0, -1.0, 1 + step, 2.0**-100, -3 * 2.0**90, 1 - step / 2, 1.5])
    near = torch.tensor(
        [1 - 2e-7, 1 + 2e-7, 1 + step / 2, 1 + step * 0.49, -1 - step * 0.51, 1e-30]
    )
    want = [1, 1, 1 + step, 1, -1 - step, None]
    x = torch.cat([exact, near, normal((1, 1, 1, 50, 1), 0)[1].flatten()])
    out = torch.empty_like(x)
    kernel[(1,)](x, out, N=64)
    assert len(x) == 64
    assert torch.equal(out[:8], exact)
    assert out[8:13].tolist() == want[:5]
    assert ((out.double() - x.double()).abs() <= x.double().abs() * step / 2).all()
    assert not (out.view(torch.int32) & 0x1FFF).any()


def test_runs_are_the_same_bit_for_bit():
    q, k, v, _ = normal((2, 4, 40, 70, 8), 0, torch.float16)
    options = {"causal": True, "seqlens_k": lengths(66, 7)}
    first = stage.attend_with_lse(q, k[:, :2], v[:, :2], **options)
    for _ in range(9):
        again = stage.attend_with_lse(q, k[:, :2], v[:, :2], **options)
        assert all(map(torch.equal, again, first))


def test_nothing_is_written_outside_the_outputs():
    q, k, v, _ = normal((2, 2, 37, 41, 5), 0)
    with guarded_outputs() as asked:
        stage.attend_with_lse(q, k, v)
        stage.skipped_blocks(q, k, v)
    assert asked == [(2, 2, 37), (2, 2, 37, 5), (2, 2, 2), (2, 2, 37, 5)]  # lse, o, skipped, o


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lends memory that isn't there")
@pytest.mark.parametrize("way", FAR)
def test_offsets_beyond_32_bits(way):
    nq, nk, d, *strides = FAR[way]
    near = normal((1, 1, nq, nk, d), 0, torch.float16)[:3]
    far = [far_away(x, *strides) for x in near]
    assert [stage.loadable(x) is x for x in far] == [way == "tiles"] * 3  # the others are copied
    assert torch.equal(stage.attend(*far, causal=True), stage.attend(*near, causal=True))
