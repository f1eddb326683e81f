"""Stage 9's own code on a Hopper GPU in Python (fake_hopper.py): right, whatever happens when.

What only the real one can tell, speed and its own arithmetic among it, is in tests/gpu.
"""

import math
import re
from contextlib import contextmanager
from functools import lru_cache
from itertools import product

import fake_hopper
import make_variants
import pytest
import torch
from fake_hopper import FILES, STAGE, Misuse, Stuck, hopper_stage
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_checks import (
    assert_close,
    gradient_rounding,
    guarded_outputs,
    hidden_keys,
    lse_rounding,
    normal,
    options_of,
    rounding,
    true_gradients,
    true_lse,
)
from test_mutants import mutate

from harness.problems.problem import Problem
from stages.common.machine import has_module, interpreting

pytestmark = [
    pytest.mark.skipif(not has_module("triton"), reason="no wheel of triton for this machine"),
    pytest.mark.skipif(not interpreting(), reason="two small kernels would be compiled for a GPU"),
]

CONFIGS = {"TWO_CONSUMERS": 128, "THREE_CONSUMERS": 64, "THREE_CTAS": 64}  # and the largest d
WHAT = "o", "lse", "dq", "dk", "dv"
HIDDEN = "hidden"  # the problem of hide_values, beside these
# h, hk, nq, nk, causal, seqlens_k of 2 batch entries
PROBLEMS = {
    "whole tiles": (2, 2, 256, 384, False, None),
    "ragged": (1, 1, 65, 300, False, None),
    "grouped heads, lengths": (4, 2, 130, 260, False, (0, 257)),
    "causal": (2, 1, 256, 256, True, None),
    "causal, ragged": (2, 2, 130, 200, True, None),
    "causal, moved by half a tile": (1, 1, 320, 384, True, (384, 100)),
    "causal, rows that see nothing": (2, 1, 257, 129, True, None),
}


@lru_cache
def a_problem(name, d):
    """`truth_of` one of PROBLEMS."""
    h, hk, nq, nk, causal, seqlens_k = PROBLEMS[name]
    half = "float16", "float16"
    return truth_of(Problem("normal", 0, 2, h, hk, nq, nk, d, *half, causal, seqlens_k, "cpu"))


def truth_of(problem):
    """q, k, v, dO of a problem, its options, and what is true of it, with bounds.

    k and v are NaN past the lengths.
    """
    shape = problem.b, problem.h, problem.nq, problem.nk, problem.d
    q, k, v, dO = normal(shape, problem.seed, getattr(torch, problem.dtype))
    k, v, hidden = k[:, : problem.hk], v[:, : problem.hk], hidden_keys(problem)
    o, *grads = true_gradients(q, k, v, dO, hidden)
    lse = true_lse(q, k, hidden) / math.log(2)
    bounds = rounding(q, k, v), lse_rounding(q, k) / math.log(2)
    bounds += tuple(gradient_rounding(q, k, v, dO, hidden))
    k, v = k.clone(), v.clone()
    for b, length in enumerate(problem.seqlens_k or ()):
        k[b, :, length:], v[b, :, length:] = math.nan, math.nan
    options = problem.causal, options_of(problem).get("seqlens_k")
    return (q, k, v, dO), options, (o, lse, *grads), bounds


def answers(stage, tensors, options, seed, config=None, backward=True):
    """o, lse and, if asked for, dq, dk and dv, all launched under `seed`.

    Outputs begin as NaN, and nothing may be written around them.
    """
    q, k, v, dO = tensors
    fake_hopper.Kernel.seed = seed
    with guarded_outputs():
        lse = torch.empty(q.shape[:3])
        o = stage.forward(q, k, v, *options, lse=lse, config=config)
        if not backward:
            return o, lse
        return o, lse, *stage.hopper_gradients.backward(q, k, v, o, lse, dO, *options)


def check(got, want, bounds):
    """Raise AssertionError where one of the answers is off by more than an honest one may be."""
    for x, true, bound, what in zip(got, want, bounds, WHAT, strict=False):
        seen = true.isfinite()  # not the lse of rows that see no key
        assert torch.equal(x.isfinite(), seen), what
        bound = bound if isinstance(bound, float) else bound[seen]
        assert_close(x[seen], true[seen], bound, what)


@pytest.mark.parametrize("seeds", [(0,), pytest.param(range(1, 8), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("config", CONFIGS)
def test_answers_are_exact_and_the_same_whatever_happens_when(config, name, seeds):
    tensors, options, want, bounds = a_problem(name, CONFIGS[config])
    with hopper_stage() as stage:
        first = None
        for seed in seeds:
            got = answers(stage, tensors, options, seed, getattr(stage, config))
            check(got, want, bounds)
            first = first or got
            for x, y, what in zip(got, first, WHAT, strict=True):
                assert what == "dq" or torch.equal(x, y)  # dq is added in any order


@pytest.mark.parametrize("name", ["whole tiles", "grouped heads, lengths", "causal, ragged"])
@pytest.mark.parametrize("d", [64, 128])
def test_gradients_of_keys_and_values_alone_have_the_same_bits(d, name):
    (q, k, v, dO), options, *_ = a_problem(name, d)
    with hopper_stage() as stage:
        o, lse, _, *want = answers(stage, (q, k, v, dO), options, 0)
        backward = stage.hopper_gradients.backward
        dq, *got = backward(q, k, v, o, lse, dO, *options, wanted=(False, True, True))
    assert dq is None
    assert all(map(torch.equal, got, want))


SIZES = st.one_of(st.sampled_from([1, 63, 64, 65, 127, 128, 129, 192, 193]), st.integers(1, 300))
DTYPES = st.sampled_from(["float16", "bfloat16"])


@st.composite
def any_problem(draw):
    """A problem of any options that stage 9's own kernels compute."""
    hk, group, nk = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(SIZES)
    lengths, dtype = st.none() | st.tuples(*[st.integers(0, nk)] * 2), draw(DTYPES)
    return Problem(
        "normal", draw(st.integers(0, 99)), 2, hk * group, hk, draw(SIZES), nk,
        draw(st.sampled_from([1, 8, 40, 64, 72, 128])), dtype, dtype, draw(st.booleans()),
        draw(lengths), "cpu",
    )  # fmt: skip


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(any_problem(), st.integers(0, 1 << 20))
def test_any_problem_is_exact_whatever_happens_when(problem, seed):
    with hopper_stage() as stage:
        tensors, options, want, bounds = truth_of(problem)
        check(answers(stage, tensors, options, seed), want, bounds)


def hide_values(stage, config, d, seed):
    """NaN past the lengths, which end within tiles that the diagonal crosses, changes nothing."""
    q, k, v, _ = normal((3, 1, 300, 260, d), 1, torch.float16)
    lengths = torch.tensor([250, 133, 7], dtype=torch.int32)
    fake_hopper.Kernel.seed = seed
    plain = stage.forward(q, k, v, True, lengths, config=config)
    for b, length in enumerate(lengths.tolist()):
        k[b, :, length:], v[b, :, length:] = math.nan, math.nan
    assert torch.equal(stage.forward(q, k, v, True, lengths, config=config), plain)


@pytest.mark.parametrize("config", CONFIGS)
def test_hidden_values_change_no_output(config):
    with hopper_stage() as stage:
        hide_values(stage, getattr(stage, config), CONFIGS[config], 0)


@pytest.mark.slow
def test_each_variant_is_exact_whatever_happens_when(tmp_path):
    """Each of tools/make_variants.py: what is timed beside the stage computes the same."""
    for path in make_variants.write(tmp_path, 9):
        folder = tmp_path / path.stem
        folder.mkdir()
        path.rename(folder / "__init__.py")
        with hopper_stage(folder) as stage:
            assert path.stem == stage.STAGE.name
            for name, d in (("causal, ragged", 64), ("causal, ragged", 128), ("whole tiles", 128)):
                tensors, options, want, bounds = a_problem(name, d)
                check(answers(stage, tensors, options, 0, backward=False), want, bounds)


# name -> the file, its text, the wrong one; the problem that shows it, and in which configuration
MUTANTS = {
    # the forward pass
    "a key too many": (
        "__init__",
        "before = first[None, :, None] < left[:, None, :]",
        "before = first[None, :, None] <= left[:, None, :]",
        "ragged", "THREE_CONSUMERS",
    ),
    "a diagonal one key off": (
        "schedule",
        "rows + (self.Nk - self.Nq + 1)",
        "rows + (self.Nk - self.Nq)",
        "causal, moved by half a tile", "THREE_CTAS",
    ),
    "one tile with a mask of two": (
        "__init__", "MASKED == 2", "MASKED == 3", "causal, ragged", "THREE_CONSUMERS",
    ),
    "an output never corrected": (
        "__init__",
        "        acc = rescale_if_needed(acc, alpha) if SLACK > 0 else rescale(acc, alpha)\n",
        "",
        "ragged", "TWO_CONSUMERS",
    ),
    "a sum never corrected": (
        "__init__",
        "l_i * gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout))[:, None]",
        "l_i",
        "ragged", "TWO_CONSUMERS",
    ),
    "keys that two tiles have count twice": (
        "__init__",
        "eights) if FIRST else",
        "eights) if False else",
        "ragged", "THREE_CTAS",
    ),
    "hidden keys loaded": (
        "schedule",
        "start_n = gl.minimum(start_n, Nk_valid - self.BLOCK_N)",
        "start_n += 0",
        "ragged", "THREE_CONSUMERS",
    ),
    "the first key head for all": (
        "__init__",
        "h_k = h // problem.group\n"
        "        start_n =",
        "h_k = 0\n"
        "        start_n =",
        "causal, ragged", "THREE_CTAS",
    ),
    "a product used before it is done": (
        "__init__",
        "        s = warpgroup_mma_wait(1, deps=[s])  # the older of the two\n",
        "        s = warpgroup_mma_wait(2, deps=[s])\n",
        "whole tiles", "TWO_CONSUMERS",
    ),
    "K given back before its product is done": (
        "__init__",
        "        s = warpgroup_mma_wait(1, deps=[s])  # the older of the two\n"
        "        k_ring.give_back(use + j)\n",
        "        k_ring.give_back(use + j)\n"
        "        s = warpgroup_mma_wait(1, deps=[s])\n",
        "ragged", "THREE_CTAS",
    ),
    "V given back before its product is done": (
        "__init__",
        "        acc = warpgroup_mma_wait(0, deps=[acc])\n"
        "        v_ring.give_back(use + j - 1)\n",
        "        v_ring.give_back(use + j - 1)\n"
        "        acc = warpgroup_mma_wait(0, deps=[acc])\n",
        "causal, rows that see nothing", "THREE_CONSUMERS",
    ),
    "queries given back before they are read": (
        "__init__",
        "q_ring.give_back(turn + 1, pred=turn > 0)",
        "q_ring.give_back(turn)",
        "grouped heads, lengths", "TWO_CONSUMERS",
    ),
    "a counter that is not set back": (
        "__init__",
        "        gl.store(counter_ptr, 0, mask=fetched == problem.tiles - 1)\n",
        "",
        "hidden", "TWO_CONSUMERS",
    ),
    "hidden keys loaded under a diagonal": (
        "schedule",
        "(HAS_SEQLENS or not CAUSAL)",
        "not CAUSAL",
        HIDDEN, "TWO_CONSUMERS",
    ),
    "the tile moved, its diagonal not": (
        "__init__",
        "s = hide(s, seen - from_n)",
        "s = hide(s, seen - (start_n - skipped * BLOCK_N))",
        "causal, moved by half a tile", "THREE_CONSUMERS",
    ),
    "keys that two tiles have count twice under a diagonal": (
        "__init__",
        "                if earlier > 0:\n",
        "                if earlier > BLOCK_N:\n",
        "causal, moved by half a tile", "TWO_CONSUMERS",
    ),
    # rings and board
    "the other phase of a ring": (
        "pipeline",
        "(use // slots) & 1",
        "(use // slots + 1) & 1",
        "whole tiles", "THREE_CTAS",
    ),
    "a slot filled while it is read": (
        "pipeline",
        "self.threads, use >= self.slots)",
        "self.threads, use < 0)",
        "whole tiles", "TWO_CONSUMERS",
    ),
    "a ring that one consumer gives back": (
        "pipeline", "128 * consumers + 32", "128 + 32", "whole tiles", "THREE_CONSUMERS",
    ),
    # the backward pass
    "P without its mask": (
        "backward",
        "            p = gl.where(seen, p, 0.0)\n",
        "",
        "causal, ragged", "THREE_CONSUMERS",
    ),
    "dS overwritten while it is read": (
        "backward",
        "ds_all = ds_smem.index(use % 2)",
        "ds_all = ds_smem.index(0)",
        "ragged", "TWO_CONSUMERS",
    ),
    "query tiles given back before dK's product is done": (
        "backward",
        "            dk = warpgroup_mma_wait(0, deps=[dk])\n"
        "        else:",
        "            tiles.give_back(use)\n"
        "            dk = warpgroup_mma_wait(0, deps=[dk])\n"
        "        else:",
        "ragged", "TWO_CONSUMERS",
    ),
    "hidden keys that count": (
        "backward",
        "tile.store(gl.where((keys < Nk_valid)[:, None], tile.load(L), 0.0))",
        "tile.store(tile.load(L))",
        "causal, moved by half a tile", "THREE_CONSUMERS",
    ),
    "sums that begin as they are": (
        "gradients", "    if ZERO:", "    if not ZERO:", "ragged", "THREE_CONSUMERS",
    ),
    "delta added": (
        "gradients",
        "-tl.sum(o * do, 1)",
        "tl.sum(o * do, 1)",
        "ragged", "THREE_CONSUMERS",
    ),
}  # fmt: skip


@contextmanager
def some_mistake(folder):
    """Stage 9 with the files in `folder`, which has to be found: a wrong number, nobody who can go
    on, or a misuse of the machine.
    """
    with pytest.raises((AssertionError, Misuse, Stuck)), hopper_stage(folder) as stage:
        yield stage


def try_problem(stage, name, config, seed):
    """Raise an error where stage 9 is wrong on a problem."""
    if name == HIDDEN:
        hide_values(stage, getattr(stage, config), CONFIGS[config], seed)
    else:
        tensors, options, want, bounds = a_problem(name, CONFIGS[config])
        check(answers(stage, tensors, options, seed, getattr(stage, config)), want, bounds)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_dies(name, tmp_path):
    file, old, new, problem, config = MUTANTS[name]
    text = (STAGE / f"{file}.py").read_text(encoding="utf-8")
    (tmp_path / f"{file}.py").write_text(mutate(text, [(old, new)]), encoding="utf-8")
    with some_mistake(tmp_path) as stage:
        for seed in range(8):
            try_problem(stage, problem, config, seed)


SYNCHRONISES = re.compile(
    r" +(mbarrier\.(wait|arrive)|self\.empty\.(wait|arrive)|named_barrier|fence_async_shared"
    r"|store_wait|\w+\.give_back|hand_over)\("
)


def synchronising():
    """(file, index) of each line of stage 9 by which a role waits, or says that it is done."""
    for file in FILES:
        lines = (STAGE / f"{file}.py").read_text(encoding="utf-8").splitlines()
        for index, line in enumerate(lines):
            if SYNCHRONISES.match(line):
                yield pytest.param(file, index, id=f"{file}, {index + 1}: {line.strip()}")


@pytest.mark.parametrize(("file", "index"), [*synchronising()])
def test_nothing_that_waits_or_gives_back_can_be_left_out(file, index, tmp_path):
    lines = (STAGE / f"{file}.py").read_text(encoding="utf-8").splitlines(keepends=True)
    indent = lines[index][: -len(lines[index].lstrip())]
    lines[index] = f"{indent}pass\n"
    (tmp_path / f"{file}.py").write_text("".join(lines), encoding="utf-8")
    with some_mistake(tmp_path) as stage:
        for seed, name, config in product(range(4), ("ragged", HIDDEN, *PROBLEMS), CONFIGS):
            try_problem(stage, name, config, seed)
