"""Scores as large as their dtype makes them, compiled: an interpreter rounds each product."""

from functools import partial
from types import SimpleNamespace

import pytest
import test_magnitudes
import torch

from stages.common.contract import LARGEST_SCORE_TO_TRAIN

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", test_magnitudes.SIZES)
@pytest.mark.parametrize("number", [4, 5, 6, 7, 8, 9])
def test_scores_of_any_size(stage, number, dtype):
    """Stage 4 is exact while a tile holds all keys. In stage 8, in three parts, too."""
    for x in test_magnitudes.SIZES[dtype]:
        tensors = test_magnitudes.of_one_size(x, getattr(torch, dtype), "cuda")
        test_magnitudes.check_size(stage, *tensors)
        if number == 8:
            attend = partial(stage.forward, causal=False, seqlens_k=None, splits=3)
            parts = SimpleNamespace(attend=attend, STAGE=stage.STAGE)
            test_magnitudes.check_size(parts, *tensors)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("number", [7, 9])
def test_gradients_of_large_scores_are_refused(stage, number, dtype):
    for score in (LARGEST_SCORE_TO_TRAIN / 2, 2 * LARGEST_SCORE_TO_TRAIN):
        x = (score * test_magnitudes.D**-0.5) ** 0.5
        tensors = test_magnitudes.of_one_size(x, getattr(torch, dtype), "cuda")
        q, k, v = (each.requires_grad_() for each in tensors)
        stage.attend(q, k, v).backward(torch.ones_like(q))
        for each in (q, k, v):
            refused = score > LARGEST_SCORE_TO_TRAIN
            assert each.grad.isnan().any() if refused else each.grad.isfinite().all()
