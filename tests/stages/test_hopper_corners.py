"""Stage 9 where a branch decides that few problems reach, on a Hopper GPU in Python."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import test_hopper_emulated
import test_magnitudes
import torch
from stage_checks import assert_close, rounding
from test_hopper_emulated import answers, check, truth_of

from course.emulator import emulated
from harness.problems.problem import Problem
from stages import common
from stages.common.contract import LARGEST_SCORE_TO_TRAIN

pytestmark = test_hopper_emulated.pytestmark


def truth_at(h, nq, nk, d, causal=True, seqlens_k=None, b=1):
    half = "float16", "float16"
    return truth_of(Problem("normal", 0, b, h, h, nq, nk, d, *half, causal, seqlens_k, "cpu"))


def test_the_last_section_may_have_fewer_heads():
    """Two of three heads fit what is taken for the L2 cache, in both passes."""
    h, n, d = 3, 200, 64
    tensors, options, want, bounds = truth_at(h, n, n, d)
    with emulated(9) as stage:
        stage.launch.L2_BYTES = 2 * 4 * n * d  # of each pass
        stage.launch.FEWEST_HEADS = 1
        check(answers(stage, tensors, options, 0), want, bounds)


@pytest.mark.parametrize("nk", [189, 190, 191, 192, 193])
def test_the_first_tile_without_a_mask_is_the_first_that_needs_none(nk):
    """In the backward pass; with queries in tiles of 64 and of 128."""
    with emulated(9) as stage:
        for d, nq, more in ((128, 128, 0), (64, 256, 64 + 128)):
            tensors, options, want, bounds = truth_at(1, nq, nk + more, d)
            check(answers(stage, tensors, options, 0), want, bounds)


@pytest.mark.parametrize("rise", [4, 12, 18])
def test_a_max_that_rises_late_overflows_nothing(rise):
    """One key's scores are `rise` above all others', in base 2; 2^18 is none of float16's numbers.

    Every value is 1, so every output is. The key's tile is the last that is walked.
    """
    q, v = torch.ones(1, 1, 64, 64).half(), torch.ones(1, 1, 384, 64).half()
    k = torch.zeros_like(v)
    k[..., 5, :] = rise * math.log(2) / math.sqrt(64)
    with emulated(9) as stage:
        o = stage.launch.forward(q, k, v, False, None, config=stage.launch.THREE_CONSUMERS)
    assert_close(o, torch.ones_like(o, dtype=torch.float64), rounding(q, k, v), "o")


@pytest.mark.parametrize("d", [36, 40, 81, 100, 130])
def test_a_head_of_any_size_is_written_and_nothing_beside_it(d):
    """d = 36: the copy engine can't write such rows, and what attend returns is contiguous."""
    tensors, options, want, bounds = truth_at(2, 130, 200, d, seqlens_k=(200, 77), b=2)
    with emulated(9) as stage:
        got = answers(stage, tensors, options, 0)
    check(got, want, bounds)
    assert all(x.is_contiguous() for x in got)


@pytest.mark.parametrize("config", ["TWO_CONSUMERS", "THREE_CONSUMERS", "THREE_CTAS"])
def test_scores_of_any_size(config):
    """NaN beyond the contract's limit, and right up to it."""
    for x in test_magnitudes.SIZES["float16"]:
        with emulated(9) as stage:
            attend = partial(
                stage.launch.forward,
                causal=False,
                seqlens_k=None,
                config=getattr(stage.launch, config),
            )
            shown = SimpleNamespace(attend=attend, STAGE=stage.STAGE)
            test_magnitudes.check_size(shown, *test_magnitudes.of_one_size(x, torch.float16, "cpu"))


@pytest.mark.parametrize("score", [LARGEST_SCORE_TO_TRAIN / 2, 2 * LARGEST_SCORE_TO_TRAIN])
def test_gradients_of_large_scores_are_refused(score):
    q, k, v = test_magnitudes.of_one_size((score * 8**-0.5) ** 0.5, torch.float16, "cpu")
    with emulated(9) as stage:
        _, _, *grads = answers(stage, (q, k, v, torch.ones_like(q)), (False, None), 0)
    refused = score > LARGEST_SCORE_TO_TRAIN
    for grad in grads:
        assert grad.isnan().any() if refused else grad.isfinite().all()


def test_gradients_come_for_lengths_and_a_gradient_of_the_output_in_any_layout():
    """The first rows see no key, and are no whole tile; NaN there changes nothing."""
    (q, k, v, dO), (causal, lengths), want, bounds = truth_at(
        2, 210, 200, 64, seqlens_k=(200, 77), b=2
    )
    spread = torch.stack([lengths, lengths + 1], -1)[..., 0]
    with emulated(9) as stage:
        for laid in (dO.mT.contiguous().mT, dO.transpose(1, 2).contiguous().transpose(1, 2)):
            got = answers(stage, (q, k, v, laid), (causal, spread), 0)
            check(got, want, bounds)


def test_torch_and_triton_keep_what_is_not_emulated():
    with emulated():
        assert torch.ones(1).type(torch.float64).type() == "torch.DoubleTensor"
        assert common.no_triton.triton.cdiv(5, 2) == 3
