"""Stage 6: masks, the LSE, and tiles that are never visited, against float64 and plain counting."""

import math
import sys
from unittest.mock import patch

import pytest
import torch
from masked_problems import (
    BORDERS,
    EXAMPLES,
    border_case,
    in_tiles,
    make_case,
    masks,
    skipped_by_definition,
)
from stage_checks import (
    guarded_outputs,
    normal,
)

from stages import s06_triton_flash2 as stage
from stages.common.machine import has_module

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" and not has_module("triton"), reason="no triton for this machine"
)


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32)


# ---- tiles that are never visited


@pytest.mark.parametrize("seed", EXAMPLES)
def test_skipped_blocks_are_those_that_no_row_sees(seed):
    check_skipped_blocks(stage, make_case(stage, seed))


@pytest.mark.parametrize("index", range(len(BORDERS)))
def test_skipped_blocks_are_those_that_no_row_sees_at_the_borders_of_tiles(index):
    check_skipped_blocks(stage, border_case(stage, index))


def check_skipped_blocks(stage, case):
    """Raise unless as many tiles are skipped as have no key that a row of the block sees."""
    (q, k, v, _), problem, tile = case.tensors(), case.problem, case.tile
    options, hidden = masks(problem)
    with in_tiles(tile, stage), guarded_outputs():
        skipped = stage.skipped_blocks(q, k, v, **options)
    with patch.object(stage, "skipped_blocks", lambda *_, **__: skipped), in_tiles(tile, stage):
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


def test_a_second_launch_of_other_blocks_counts_nothing(monkeypatch):
    """Its blocks of rows are smaller: their counts would lie past the end of `skipped`."""
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *_, REDO, COUNT, **options: launched.append((REDO, COUNT, grid))

    monkeypatch.setattr(stage, "attention_kernel", Kernel())
    monkeypatch.setattr(stage, "input_precision", lambda x: "bf16x6")
    q, k, v, _ = normal((1, 1, 128, 64, 8), 0)
    assert stage.skipped_blocks(q, k, v).shape == (1, 1, 1)
    assert launched == [(False, True, (1, 1, 1)), (True, False, (4, 1, 1))]


@pytest.mark.parametrize("seed", EXAMPLES)
def test_what_a_block_skips_is_never_read(seed):
    """A tile of NaN, and NaN beyond seqlens_k: not a bit of what doesn't see it changes."""
    case = make_case(stage, seed)
    (q, k, v, _), problem, tile = case.tensors(), case.problem, case.tile
    options, hidden = masks(problem)
    M, N = tile
    j = seed % math.ceil(problem.nk / N)
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


# ---- tiles, bits, buffers


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
