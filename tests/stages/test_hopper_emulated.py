"""Stage 9's own code on a Hopper GPU in Python (course/emulator): right, whatever happens when.

What only the real one can tell, speed and its own arithmetic among it, is in tests/gpu.
"""

import math
import re
from contextlib import contextmanager
from functools import lru_cache
from itertools import product

import make_variants
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import quickly, slowly
from stage_checks import (
    assert_close,
    everything,
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
from test_mutants import MUTANTS

from course.edits import texts_of, write_texts
from course.emulator import Kernel, Misuse, Stuck, emulated
from harness.problems.problem import Problem
from stages.common import inputs
from stages.common.machine import has_module

pytestmark = pytest.mark.skipif(
    not has_module("triton"), reason="no wheel of triton for this machine"
)

# and the largest d
CONFIGS = {
    "TWO_CONSUMERS": 128,
    "THREE_CONSUMERS": 64,
    "THREE_CTAS": 64,
    "D_80": 80,
    "D_96": 96,
    "D_192": 192,
    "D_256": 256,
}
WHAT = "o", "lse", "dq", "dk", "dv"
HIDDEN, LOW = "hidden", "low scores"  # of hide_values and low_scores, beside these
# h, hk, nq, nk, causal, seqlens_k of 2 batch entries; first those that show most with fewest tiles
PROBLEMS = {
    "ragged": (1, 1, 65, 300, False, None),
    "causal, moved by half a tile": (1, 1, 320, 384, True, (384, 100)),
    "causal, ragged": (2, 2, 130, 200, True, None),
    "grouped heads, lengths": (4, 2, 130, 260, False, (0, 257)),
    "causal, rows that see nothing": (2, 1, 257, 129, True, None),
    "causal": (2, 1, 256, 256, True, None),
    "whole tiles": (2, 2, 256, 384, False, None),
}


@lru_cache
def a_problem(name, d):
    """`truth_of` one of PROBLEMS."""
    h, hk, nq, nk, causal, seqlens_k = PROBLEMS[name]
    half = "float16", "float16"
    return truth_of(Problem("normal", 0, 2, h, hk, nq, nk, d, *half, causal, seqlens_k, "cpu"))


def truth_of(problem):
    """q, k, v, dO of a problem, its options, and what is true of it, with bounds.

    k and v are NaN past the lengths, q and dO where a row sees no key.
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
    blind = hidden.all(-1)[..., None]
    q, dO = q.masked_fill(blind, math.nan), dO.masked_fill(blind, math.nan)
    options = problem.causal, options_of(problem).get("seqlens_k")
    return (q, k, v, dO), options, (o, lse, *grads), bounds


def answers(stage, tensors, options, seed, config=None, backward=True):
    """o, lse and, if asked for, dq, dk and dv, all under `seed`.

    Outputs begin as NaN, and nothing may be written around them.
    """
    q, k, v, dO = tensors
    Kernel.seed = seed
    with guarded_outputs():
        lse = torch.empty(q.shape[:3])
        o = stage.launch.forward(q, k, v, *options, lse=lse, config=config)
        if not backward:
            return o, lse
        return o, lse, *stage.launch.backward(q, k, v, o, lse, dO, *options)


@lru_cache
def shipped(name, config, seed):
    """What stage 9 answers to one of PROBLEMS; no gradients in the configuration THREE_CTAS."""
    tensors, options, *_ = a_problem(name, CONFIGS[config])
    with emulated(9) as stage:
        # the backward pass at d = 64 is the same behind both configurations for it
        made = getattr(stage.launch, config)
        return answers(stage, tensors, options, seed, made, backward=config != "THREE_CTAS")


def check(got, want, bounds):
    """Raise AssertionError where one of the answers is off by more than an honest one may be."""
    for x, true, bound, what in zip(got, want, bounds, WHAT, strict=False):
        if what == "lse":  # of rows that see no key it isn't finite
            seen = true.isfinite()
            assert torch.equal(x.isfinite(), seen), what
            x, true = x[seen], true[seen]
        assert_close(x, true, bound, what)


@pytest.mark.parametrize("seeds", [(0,), *slowly(range(1, 5))])
@pytest.mark.parametrize("name", quickly(4, PROBLEMS))
@pytest.mark.parametrize("config", CONFIGS)
def test_answers_are_exact_and_the_same_whatever_happens_when(config, name, seeds):
    *_, want, bounds = a_problem(name, CONFIGS[config])
    first = shipped(name, config, seeds[0])
    for seed in seeds:
        got = shipped(name, config, seed)
        check(got, want, bounds)
        for x, y, what in zip(got, first, WHAT, strict=False):
            assert what == "dq" or torch.equal(x, y)  # dq is added in any order


@pytest.mark.parametrize("name", ["causal, ragged", "grouped heads, lengths"])
def test_attend_and_its_gradients_go_the_whole_way_twice(name, monkeypatch):
    """From the arguments to the launches, those of the second call being known."""
    for reason in ("why_not", "why_not_dtype"):
        monkeypatch.setattr(inputs, reason, lambda *_: None)
    (*qkv, dO), (causal, seqlens_k), (o, _, *grads), (bound, _, *bounds) = a_problem(name, 64)
    options = {"causal": causal, "seqlens_k": seqlens_k}
    with emulated(9) as stage:
        for _ in range(2):
            got = everything(stage, *qkv, dO, **options)
            for x, true, most in zip(got, (o, *grads), (bound, *bounds), strict=True):
                assert_close(x, true, most)
            assert torch.equal(stage.attend(*qkv, **options), got[0])


each_kernel = pytest.mark.parametrize(
    "config", ["THREE_CONSUMERS", "D_80", "TWO_CONSUMERS", "D_192", "D_256"]
)


@pytest.mark.parametrize(
    "name", quickly(1, ["grouped heads, lengths", "whole tiles", "causal, ragged"])
)
@each_kernel
def test_gradients_of_keys_and_values_alone_have_the_same_bits(config, name):
    (q, k, v, dO), options, *_ = a_problem(name, CONFIGS[config])
    o, lse, _, *want = shipped(name, config, 0)
    with emulated(9) as stage:
        backward = stage.launch.backward
        dq, *got = backward(q, k, v, o, lse, dO, *options, wanted=(False, True, True))
    assert dq is None
    assert all(map(torch.equal, got, want))


@each_kernel
def test_gradients_left_in_float32_round_to_those_in_16_bits(config):
    (q, k, v, dO), options, *_ = a_problem("causal, ragged", CONFIGS[config])
    o, lse, dq, *want = shipped("causal, ragged", config, 0)
    with emulated(9) as stage:
        wanted = True, True, True
        wide = stage.launch.launch_for(q, k, v, o, lse, dO, *options, wanted, wide=True)
    assert {x.dtype for x in wide} == {torch.float32}
    assert all(torch.equal(x.half(), y) for x, y in zip(wide[1:], want, strict=True))
    assert (wide[0] - dq).norm() <= 2 * torch.finfo(dq.dtype).eps * dq.norm()


SIZES = st.one_of(st.sampled_from([1, 63, 64, 65, 127, 128, 129, 192, 193]), st.integers(1, 300))
DTYPES = st.sampled_from(["float16", "bfloat16"])
HEADS = st.sampled_from([1, 8, 40, 64, 72, 80, 90, 128, 136, 200])


@st.composite
def any_problem(draw):
    """A problem of any options that stage 9's own kernels compute."""
    hk, group, nk = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(SIZES)
    lengths, dtype = st.none() | st.tuples(*[st.integers(0, nk)] * 2), draw(DTYPES)
    return Problem(
        "normal", draw(st.integers(0, 99)), 2, hk * group, hk, draw(SIZES), nk,
        draw(HEADS), dtype, dtype, draw(st.booleans()), draw(lengths), "cpu",
    )  # fmt: skip


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(any_problem(), st.integers(0, 1 << 20))
def test_any_problem_is_exact_whatever_happens_when(problem, seed):
    with emulated(9) as stage:
        tensors, options, want, bounds = truth_of(problem)
        check(answers(stage, tensors, options, seed), want, bounds)


def low_scores(stage, d, seed):
    """Keys past a length change no gradient where all scores are low.

    Such a key is cleared, its score 0, and 2^-lse is more than 16 bits hold.
    """
    q, k, v, dO = normal((1, 1, 2, 2, d), 0, torch.float16)
    q, k = torch.full_like(q, 1.5), torch.full_like(k, -1.5)
    length, seen = torch.tensor([1], dtype=torch.int32), (k[:, :, :1], v[:, :, :1])
    Kernel.seed = seed
    for causal in (False, True):
        with guarded_outputs():
            lse = torch.empty(q.shape[:3])
            o = stage.launch.forward(q, k, v, causal, length, lse=lse)
            dq, *others = stage.launch.backward(q, k, v, o, lse, dO, causal, length)
            want = stage.launch.backward(q, *seen, o, lse, dO, False, None)
        for x, true in zip((dq, *(x[:, :, :1] for x in others)), want, strict=True):
            assert torch.equal(x, true)
        assert not any(x[:, :, 1:].any() for x in others)


@pytest.mark.parametrize("d", [64, 96, 128, 192])
def test_hidden_keys_change_no_gradient_where_scores_are_low(d):
    with emulated(9) as stage:
        low_scores(stage, d, 0)


def hide_values(stage, config, d, seed):
    """NaN past the lengths, which end within tiles that the diagonal crosses, changes nothing."""
    q, k, v, _ = normal((3, 1, 300, 260, d), 1, torch.float16)
    lengths = torch.tensor([250, 133, 7], dtype=torch.int32)
    Kernel.seed = seed
    plain = stage.launch.forward(q, k, v, True, lengths, config=config)
    for b, length in enumerate(lengths.tolist()):
        k[b, :, length:], v[b, :, length:] = math.nan, math.nan
    assert torch.equal(stage.launch.forward(q, k, v, True, lengths, config=config), plain)


@pytest.mark.parametrize("config", CONFIGS)
def test_hidden_values_change_no_output(config):
    with emulated(9) as stage:
        hide_values(stage, getattr(stage.launch, config), CONFIGS[config], 0)


@pytest.mark.slow
@pytest.mark.parametrize("variant", make_variants.VARIANTS[9])
def test_each_variant_is_exact_whatever_happens_when(variant, tmp_path):
    """Each of tools/make_variants.py: what is timed beside the stage computes the same."""
    trains = make_variants.VARIANTS[9][variant].get("direction") == "bwd"
    with emulated(write_texts(9, make_variants.variant(variant), tmp_path, variant)) as stage:
        assert variant == stage.STAGE.name
        wide = {"padded": 80, "wide_two": 192}.get(variant, 256)  # where those differ
        for name, d in (("causal, ragged", 64), ("causal, ragged", 128), ("whole tiles", wide)):
            tensors, options, want, bounds = a_problem(name, d)
            backward = d > 128 or trains
            check(answers(stage, tensors, options, 0, backward=backward), want, bounds)


@contextmanager
def some_mistake(*change, of=9):
    """A stage with a text replaced, which has to be found: a wrong number, nobody who can go on, or
    a misuse of the machine.
    """
    with emulated(of, [change]) as stage, pytest.raises((AssertionError, Misuse, Stuck)):
        yield stage


def left_out(text, line):
    """`text`, the last line of which is `line`, with pass in the place of that."""
    return text.removesuffix(line) + line[: -len(line.lstrip())] + "pass\n"


def try_problem(stage, name, config, seed, backward=True):
    """Raise an error where stage 9 is wrong on a problem; `backward`: with its gradients."""
    if name == HIDDEN:
        hide_values(stage, getattr(stage.launch, config), CONFIGS[config], seed)
    elif name == LOW:
        low_scores(stage, CONFIGS[config], seed)
    else:
        tensors, options, want, bounds = a_problem(name, CONFIGS[config])
        made = getattr(stage.launch, config)
        check(answers(stage, tensors, options, seed, made, backward=backward), want, bounds)


# slow: most mistakes that only this machine finds are among the lines left out below, too
@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS[9])
def test_the_mutant_dies(name):
    old, new, problem, config = MUTANTS[9][name]
    with some_mistake(old, new) as stage:
        for seed in range(8):
            try_problem(stage, problem, config, seed)


SYNCHRONISES = re.compile(
    r" +(mbarrier\.(wait|arrive)|self\.empty\.(wait|arrive)|named_barrier|fence_async_shared"
    r"|store_wait|[\w.]+\.consumer_(wait|release)|release_parts|queries\.(release|part))\("
)


def synchronising():
    """Each line of stage 9 by which a role waits or says that it is done, with text before it that
    makes it the only one, its file, and the configurations that it may be for. (first.py has
    test_first_hopper.py.)
    """
    texts = texts_of(9)
    whole = "".join(texts.values())
    for file, text in texts.items():
        lines = text.splitlines(keepends=True)
        for index, line in enumerate(lines):
            if SYNCHRONISES.match(line) and file != "first.py":
                first = index
                while whole.count(before := "".join(lines[first:index]) + line) > 1:
                    first -= 1
                configs = [name for name, d in CONFIGS.items() if d > 128 or "two_pass" not in file]
                marks = pytest.mark.slow if "store_wait(" in line else ()  # few problems show it
                said = f"{file}, {index + 1}: {line.strip()}"
                yield pytest.param(before, line, file, configs, id=said, marks=marks)


@pytest.mark.parametrize(("text", "line", "file", "configs"), [*synchronising()])
def test_nothing_that_waits_or_releases_can_be_left_out(text, line, file, configs):
    with some_mistake(text, left_out(text, line)) as stage:
        first, *others = PROBLEMS
        for seed, name, config in product(range(4), (first, HIDDEN, *others), configs):
            try_problem(stage, name, config, seed, backward=file != "forward.py")
