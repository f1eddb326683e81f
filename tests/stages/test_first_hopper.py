"""The smallest kernel of stage 9's folder on a Hopper GPU in Python: right, whatever happens when.

Each line at which a role waits, or says that it is done, is left out once: all are needed.
"""

import re
from itertools import product

import pytest
import test_hopper_emulated
import torch
from stage_checks import assert_close, guarded_outputs, normal, rounding, true_gradients
from test_hopper_emulated import left_out, some_mistake

from course.emulator import Kernel, emulated
from harness.records.code import first_file

pytestmark = test_hopper_emulated.pytestmark

PATH = first_file(9).with_name("first.py")
LINES = PATH.read_text(encoding="utf-8").splitlines(keepends=True)
# B, H, Nq, Nk, d: whole tiles, more rounds of the pipeline than one; ragged; few of everything
PROBLEMS = [(1, 2, 128, 640, 128), (2, 1, 130, 300, 128), (1, 1, 1, 1, 128), (1, 1, 65, 129, 72)]
# not barrier(), among the four warps of a warpgroup, which only a GPU shows (tests/gpu)
SYNCHRONISES = re.compile(
    r" +(mbarrier\.(expect|wait|arrive)|acquire|wait|release|fence_async_shared|store_wait)\("
)


def check(stage, problem, seed, dtype=torch.float16):
    """Raise AssertionError where an output is off by more than an honest one may be."""
    B, H, Nq, Nk, d = problem
    q, k, v, dO = normal((B, H, Nq, Nk, d), 0, dtype)
    Kernel.seed = seed
    with guarded_outputs():
        o = stage.forward(q, k, v)
    assert_close(o, true_gradients(q, k, v, dO, None)[0], rounding(q, k, v), "o")


@pytest.mark.parametrize("problem", PROBLEMS)
def test_outputs_are_exact_whatever_happens_when(problem):
    with emulated(PATH) as stage:
        for seed in range(4):
            check(stage, problem, seed)
        check(stage, problem, 0, torch.bfloat16)


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(i, id=f"{i + 1}: {line.strip()}")
        for i, line in enumerate(LINES)
        if SYNCHRONISES.match(line)
    ],
)
def test_nothing_that_waits_or_releases_can_be_left_out(index):
    text = "".join(LINES[: index + 1])
    assert_wrong(text, left_out(text, LINES[index]))


def assert_wrong(old, new):
    """A mistake in the kernel shows: some seed finds it."""
    with some_mistake(old, new, of=PATH) as stage:
        for seed, problem in product(range(8), PROBLEMS[:2]):
            check(stage, problem, seed)


MISTAKES = {
    "the other phase of a full barrier": ("(count // SLOTS) & 1", "(count // SLOTS + 1) & 1"),
    "the other phase of an empty barrier": ("(count // SLOTS + 1) & 1", "(count // SLOTS) & 1"),
    "a slot that one of two consumers releases": (
        "make_barriers(SLOTS, 2)",
        "make_barriers(SLOTS, 1)",
    ),
    "a slot released before P V has read it": (
        "        acc = warpgroup_mma_wait(0, deps=[acc])  # (64, BLOCK_D)\n"
        "        release(empty, j, SLOTS)\n",
        "        release(empty, j, SLOTS)\n"
        "        acc = warpgroup_mma_wait(0, deps=[acc])\n",
    ),
    "bytes of K alone": (
        "k_desc.block_type.nbytes + v_desc.block_type.nbytes",
        "k_desc.block_type.nbytes",
    ),
    "keys past the last": ("< Nk - j * BLOCK_N", "< BLOCK_N"),
    "a max never corrected": ("acc = acc * gl", "acc = acc * 1.0  # gl"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_shows(name):
    assert_wrong(*MISTAKES[name])
