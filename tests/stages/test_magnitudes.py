"""Scores as large as their dtype makes them: the output is right, or NaN where a stage says so.

The interpreter multiplies and subtracts one after the other. What a compiler makes of the two is
read from the machine code in test_cubins.py, and run in tests/gpu.
"""

import math
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from masked_problems import in_tiles
from stage_checks import (
    FAKES,
    assert_close,
    device_of,
    for_each,
    gradients,
    is_yardstick,
    most_keys,
    normal,
    rounding,
)

from stages.common.contract import LARGEST_SCORE, LARGEST_SCORE_TO_TRAIN, why_not_dtype

N, D = 40, 8
# stage 3 keeps its scores in the dtype: in float16 they end at 65504
WIDE = [stage for stage in FAKES if most_keys(stage, N) == N and not is_yardstick(stage)]
LIMITED, TRAINED = (6, 7, 9), (7, 9)  # that name a limit, in 16 bits and for gradients
# of few bits, so that equal keys have equal scores in whatever order a product is summed
SIZES = {
    "float16": (1.0, 256.0, 2048.0, 6144.0, 24576.0, 49152.0),
    "bfloat16": (1.0, 2048.0, 3 * 2.0**16, 3 * 2.0**30, 3 * 2.0**60),
    "float32": (1.0, 3 * 2.0**9, 3 * 2.0**20, 3 * 2.0**40, 3 * 2.0**60),
}


def of_one_size(x, dtype, device):
    """q, k and v with scores of +-x^2 scale D, or half of that: (1, 2, 6, D), (1, 2, N, D).

    The keys of every other score come first, a tile of 16 and more, then those of the largest.
    Head 0's queries are positive, head 1's negative: its largest scores are the first keys'.
    """
    q = torch.full((1, 2, 6, D), x, dtype=dtype, device=device)
    q[:, 1] *= -1
    k = torch.full((1, 2, N, D), x, dtype=dtype, device=device)
    k[:, :, : N // 2] /= 2
    v = normal((1, 2, 6, N, D), 0, dtype, device)[2]
    return q, k, v


def largest_score(q, k):
    """Of each row, (B, H, Nq, 1) float64."""
    s = q.double() @ k.double().mT * q.shape[-1] ** -0.5
    return s.amax(-1, keepdim=True)


@for_each(WIDE)
@pytest.mark.parametrize("dtype", SIZES)
def test_scores_of_any_size(stage, dtype):
    """Equal keys weigh the same, and keys far below the others nothing, whatever the scores."""
    device = device_of(stage)
    if reason := why_not_dtype(stage.STAGE, dtype, device):
        pytest.skip(reason)
    # interpreted, a tile of 16 keys takes less time, and these are several
    small = hasattr(stage, "candidates") and device == "cpu"
    with in_tiles((16, 16), stage) if small else nullcontext():
        for x in SIZES[dtype]:
            tensors = of_one_size(x, getattr(torch, dtype), device)
            check_size(stage, *tensors)
            if hasattr(stage, "attend_paged"):  # in parts, too
                attend = partial(stage.forward, causal=False, seqlens_k=None, splits=3)
                check_size(SimpleNamespace(attend=attend, STAGE=stage.STAGE), *tensors)


def check_size(stage, q, k, v):
    """Raise unless the output of one such problem is right, or NaN where it has to be."""
    o = stage.attend(q, k, v)
    top = largest_score(q, k)
    want = torch.softmax(q.double() @ k.double().mT * q.shape[-1] ** -0.5, -1) @ v.double()
    half = q.dtype != torch.float32
    refused = top.abs() > LARGEST_SCORE if half and stage.STAGE.number in LIMITED else top != top
    refused = refused.expand_as(o)
    assert o[refused].isnan().all()
    # larger scores need no larger bound: they are exact, and others' weights are 0
    bound = rounding(q.clamp(-1, 1), k.clamp(-1, 1), v)
    assert_close(o[~refused], want[~refused], bound)


@for_each([stage for stage in WIDE if stage.STAGE.number in TRAINED])
@pytest.mark.parametrize("dtype", SIZES)
def test_gradients_of_large_scores_are_refused(stage, dtype):
    device = device_of(stage)
    if reason := why_not_dtype(stage.STAGE, dtype, device):
        pytest.skip(reason)
    for score in (LARGEST_SCORE_TO_TRAIN / 2, 2 * LARGEST_SCORE_TO_TRAIN):
        x = math.sqrt(score * D**-0.5)  # x^2 D D^-0.5 is the score
        q, k, v = of_one_size(x, getattr(torch, dtype), device)
        _, *grads = gradients(stage, q, k, v, torch.ones_like(q))
        refused = score > LARGEST_SCORE_TO_TRAIN
        for grad in grads:
            assert grad.isnan().any() if refused else grad.isfinite().all()
