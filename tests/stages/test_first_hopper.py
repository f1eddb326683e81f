"""The smallest kernel of stage 9's folder on a Hopper GPU in Python: right, whatever happens when.

Each line at which a role waits, or says that it is done, is left out once: all are needed.
"""

import re

import fake_hopper
import pytest
import torch
from fake_hopper import STAGES, Misuse, Stuck
from stage_checks import assert_close, guarded_outputs, normal, rounding, true_gradients

from stages.common.machine import has_module

pytestmark = pytest.mark.skipif(
    not has_module("triton"), reason="no wheel of triton for this machine"
)

PATH = STAGES / "s09_gluon_hopper" / "first.py"
# B, H, Nq, Nk, d: whole tiles, more rounds of the pipeline than one; ragged; few of everything
PROBLEMS = [(1, 2, 128, 640, 128), (2, 1, 130, 300, 128), (1, 1, 1, 1, 128), (1, 1, 65, 129, 72)]


def check(stage, problem, seed, dtype=torch.float16):
    """Raise AssertionError where an output is off by more than an honest one may be."""
    B, H, Nq, Nk, d = problem
    q, k, v, dO = normal((B, H, Nq, Nk, d), 0, dtype)
    fake_hopper.Kernel.seed = seed
    with guarded_outputs():
        o = stage.forward(q, k, v)
    assert_close(o, true_gradients(q, k, v, dO, None)[0], rounding(q, k, v), "o")


@pytest.mark.parametrize("problem", PROBLEMS)
def test_outputs_are_exact_whatever_happens_when(problem):
    stage = fake_hopper.load_alone(PATH)
    for seed in range(4):
        check(stage, problem, seed)
    check(stage, problem, 0, torch.bfloat16)
