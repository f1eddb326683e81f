"""The checks bite: mistakes written into the shipped stages, each of which must be caught.

A mutant is the shipped stage with one text replaced (mutants.toml). It is killed when a check fails
that the shipped stage passes, or when it raises. All tensors, the output too, lie in a storage of
NaN, so that a mutant that strays reads NaN and damages nothing but that.

`make test` has the first mutant of each line; those that change a line once more are slow.
"""

import math
import operator
import tomllib
import warnings
from functools import lru_cache
from itertools import takewhile
from pathlib import Path

import pytest
import test_hidden
import test_magnitudes
import torch
from masked_problems import a_tile, in_tiles, masks, skipped_by_definition
from stage_checks import (
    assert_close,
    assert_exact,
    attend,
    device_of,
    gradient_rounding,
    gradients,
    guarded_outputs,
    hidden_keys,
    in_nan,
    lse_rounding,
    most_keys,
    normal,
    options_of,
    rounding,
    true_gradients,
    true_lse,
    truth,
)

import stages
from course.edits import changed, texts_of, write_changed
from harness.measures.oracle import make_oracle
from harness.problems.inputs import make_inputs
from harness.problems.problem import Problem

# b, h, nq, nk, d and the strides of q, k, v: small, since stage 0 has to bear them; each stage
# takes as many of the keys as it is exact for
DENSE = ((0, 1, 2, 3), (1, 1, 1, 1))
STRIDED = ((2, 0, 3, 1), (1, 2, 2, 1)), ((0, 3, 1, 2), (1, 1, 3, 2)), ((3, 2, 1, 0), (2, 1, 1, 3))
BATTERY = {
    "square tiles": ("normal", (1, 1, 3, 64, 64), (DENSE,) * 3),
    "heads": ("normal", (3, 2, 5, 70, 8), (DENSE,) * 3),  # 3 and 2: a mixed-up head stays in range
    "peaky": ("peaky", (1, 1, 7, 150, 16), (DENSE,) * 3),
    "ragged and strided": ("normal", (2, 1, 33, 65, 5), STRIDED),
    "a few keys": ("normal", (1, 2, 2, 3, 40), STRIDED),
}
# nq, nk, hk, causal, seqlens_k; two batch entries, four heads
MASKS = [
    (5, 9, 2, True, None),
    (9, 5, 4, True, None),
    (5, 9, 1, False, (9, 4)),
    (3, 7, 2, False, (0, 7)),
]
# b, h, hk, nq, nk, d, causal, seqlens_k, and the tile, for the stages that walk tiles under masks.
# Tiles begin and end one key or row before and after what a mask lets be seen, and right there.
# LOW is the one with logits so low that exp(-lse) overflows: no masked key may be taken for a 0.
# Those of the fewest tiles come first: what kills most mutants should take the least time.
TILED = [
    (1, 1, 1, 70, 5, 8, False, None, (64, 16)),  # delta's own tiles have 64 rows
    (2, 1, 1, 17, 33, 8, True, (0, 20), (32, 16)),
    (1, 1, 1, 33, 50, 8, True, None, (16, 16)),
    (1, 1, 1, 33, 47, 16, True, None, (16, 16)),
    (1, 4, 2, 40, 9, 16, True, None, (16, 16)),
    (2, 2, 1, 32, 40, 8, False, (33, 16), (16, 16)),
]
LOW = 1
# of q, k, v and dO; a dO whose columns aren't neighbours is copied before the kernels see it
GRADIENT_LAYOUTS = *STRIDED, ((2, 0, 1, 3), (1, 1, 2, 1))


@lru_cache
def a_tiled_problem(index):
    """The tensors of TILED[index], NaN beyond the lengths; options, mask; the truth and bounds."""
    b, h, hk, nq, nk, d, causal, seqlens_k, _ = TILED[index]
    problem = Problem("normal", 0, b, h, hk, nq, nk, d, "float32", "ieee", causal, seqlens_k, "cpu")
    options, hidden = masks(problem)
    q, k, v, dO = normal((b, h, nq, nk, d), 0)
    k, v = k[:, :hk], v[:, :hk]
    if index == LOW:
        q, k = q + 8, k - 8
    o, *grads = true_gradients(q, k, v, dO, hidden)
    bounds = rounding(q, k, v), *gradient_rounding(q, k, v, dO, hidden)
    want = {"o": o, "lse": true_lse(q, k, hidden), "gradients": grads}
    allowed = {"o": bounds[0], "lse": lse_rounding(q, k), "gradients": bounds[1:]}
    k, v = (x.clone() for x in (k, v))
    for x in (k, v):
        for entry, length in enumerate(seqlens_k or ()):
            x[entry, :, length:] = math.nan
    laid = [in_nan(x, *layout) for x, layout in zip((q, k, v, dO), GRADIENT_LAYOUTS, strict=True)]
    return laid, options, hidden, want, allowed


def tiled_battery(stage):
    """Raise where a stage that walks tiles under masks is wrong, in tiles as small as they get."""
    for index, (*_, tile) in enumerate(TILED):
        (q, k, v, dO), options, hidden, want, allowed = a_tiled_problem(index)
        with in_tiles(tile, stage):
            if stage.STAGE.gradients:
                o, *grads = gradients(stage, q, k, v, dO, **options)
                for got, grad, bound in zip(
                    grads, want["gradients"], allowed["gradients"], strict=True
                ):
                    assert_close(got, grad, bound)
            else:
                with guarded_outputs():
                    o, lse = stage.attend_with_lse(q, k, v, **options)
                    skipped = stage.skipped_blocks(q, k, v, **options)
                seen = want["lse"].isfinite()
                assert torch.equal(lse.isfinite(), seen)
                assert_close(lse[seen], want["lse"][seen], allowed["lse"])
                assert torch.equal(skipped, skipped_by_definition(hidden, q.shape[1], tile))
            assert_close(o, want["o"], allowed["o"])


# b, h (with one key head), nq, nk, causal, parts and the tile, for a stage that splits the keys:
# parts past what is merged at once, blocks that begin within a group, blocks of more rows
PARTS = [
    (1, 1, 2, 280, False, 18, (16, 16)),
    (2, 2, 20, 40, True, 1, (16, 16)),
    (1, 3, 7, 100, False, 2, (32, 16)),
    (1, 2, 2, 40, True, 3, (16, 16)),
]


def split_battery(stage):
    """Raise where a stage that splits the keys is wrong, in small tiles, one part and several."""
    for b, h, nq, nk, causal, splits, size in PARTS:
        q, k, v, _ = (in_nan(x) for x in normal((b, h, nq, nk, 8), 0))
        k, v = in_nan(k[:, :1], *STRIDED[1]), in_nan(v[:, :1], *STRIDED[2])
        k[:, :, -16:] *= 3  # the largest scores come last, so that what was before is rescaled
        with guarded_outputs():
            o = stage.forward(q, k, v, causal, None, splits=splits, config=a_tile(*size))
        hidden = torch.arange(nk) > torch.arange(nq)[:, None] + (nk - nq if causal else nk)
        assert_close(o, truth(q, k, v, hidden[None, None]), rounding(q, k, v))
    for index, (*_, size) in enumerate(TILED):
        (q, k, v, _), options, _, want, allowed = a_tiled_problem(index)
        causal, seqlens_k = options.get("causal", False), options.get("seqlens_k")
        seen = want["lse"].isfinite()
        # a row that sees no key is another matter in each number of parts
        for splits in ((2, 1, 5)[index % 3],) if seen.all() else (1, 2, 5):
            lse = torch.empty(q.shape[:3])
            with guarded_outputs():
                o = stage.forward(
                    q, k, v, causal, seqlens_k, lse, splits=splits, config=a_tile(*size)
                )
            lse = lse * math.log(2)
            assert torch.equal(lse.isfinite(), seen)
            assert_close(lse[seen], want["lse"][seen], allowed["lse"])
            assert_close(o, want["o"], allowed["o"])
    paged_battery(stage)


def paged_battery(stage):
    """Raise where a stage is wrong that reads from a cache of pages, in tiles of several, or parts.

    The pages are in no order, with NaN in whatever no sequence holds.
    """
    check_pages(stage, 16, 32, True)
    check_pages(stage, 32, 16, False)


def check_pages(stage, page_size, N, causal):
    """Raise where it's wrong in pages of `page_size` and tiles of N keys, in two parts."""
    q, k, v, _ = normal((2, 4, 2, 70, 8), 0)
    k, v, lengths = k[:, :2], v[:, :2], (70, 33)
    cache = stage.PagedCache(12, page_size, 2, 8, torch.float32, "cpu")
    cache.free_pages = [(5 * page + 2) % 12 for page in range(12)]
    cache.k.fill_(math.nan), cache.v.fill_(math.nan)
    cache.append("a row that is not asked for", k[0, :, :0], v[0, :, :0])
    for b in (1, 0):
        cache.append(b, k[b, :, : lengths[b]], v[b, :, : lengths[b]])
    rows, longest = cache.rows([0, 1])
    with guarded_outputs():
        o = stage.forward(
            q, cache.k, cache.v, causal, cache.lengths, table=cache.table, rows=rows,
            longest=longest, splits=2, config=a_tile(16, N),
        )  # fmt: skip
    for b, length in enumerate(lengths):
        late = length - 2 if causal else length
        hidden = torch.arange(length) > torch.arange(2)[:, None] + late
        one, key, value = q[b : b + 1], k[b : b + 1, :, :length], v[b : b + 1, :, :length]
        want = truth(one, key, value, hidden[None, None])
        assert_close(o[b : b + 1], want, rounding(one, key, value))
    assert_close(stage.attend_paged(q, cache, [0, 1], causal=causal), o, 2 * rounding(q, k, v))


@lru_cache
def a_problem(name, device, most):
    """The tensors of a problem of BATTERY, at most `most` keys of it, and its oracle."""
    inputs, (b, h, nq, nk, d), layouts = BATTERY[name]
    problem = Problem(
        inputs, 0, b, h, h, nq, min(nk, most), d, "float32", "ieee", False, None, device
    )
    tensors = make_inputs(problem)
    laid = [in_nan(x, *layout) for x, layout in zip(tensors, layouts, strict=True)]
    return laid, make_oracle(problem)


def battery(stage, device):
    """Raise where `stage` is wrong; every shipped stage passes."""
    if hasattr(stage, "candidates"):
        tiled_battery(stage)
        half_battery(stage)
    if hasattr(stage, "attend_paged"):
        split_battery(stage)
    if stage.STAGE.gradients:
        q, k, v, dO = normal((2, 3, 4, 7, 5), 0, device=device)
        # and logits so low that exp(-lse) overflows: nobody may take it for a key that isn't there
        for tensors in ((q, k, v, dO), (q + 8, k - 8, v, dO)):
            tensors = [in_nan(x, *at) for x, at in zip(tensors, GRADIENT_LAYOUTS, strict=True)]
            bounds = rounding(*tensors[:3]), *gradient_rounding(*tensors)
            answers = gradients(stage, *tensors), true_gradients(*tensors), bounds
            for got, want, bound in zip(*answers, strict=True):
                assert_close(got, want, bound)
    for name in BATTERY:
        tensors, oracle = a_problem(name, device, most_keys(stage, 150))
        assert_exact(attend(stage, *tensors), oracle)
    # logits past exp's overflow in double, in which stages 0 to 2 compute
    (q, k, v), _ = a_problem("peaky", device, most_keys(stage, 150))
    q = in_nan(8 * q)
    assert_close(attend(stage, q, k, v), truth(q, k, v), rounding(q, k, v))
    if stage.STAGE.options:
        for nq, nk, hk, causal, seqlens_k in MASKS:
            problem = Problem(
                "normal", 0, 2, 4, hk, nq, nk, 8, "float32", "ieee", causal, seqlens_k, device
            )
            q, k, v = (in_nan(x) for x in make_inputs(problem))
            o = attend(stage, q, k, v, **options_of(problem))
            assert_close(o, truth(q, k, v, hidden_keys(problem)), rounding(q, k, v))
    if stage.STAGE.exact_up_to is None:
        test_hidden.test_a_tile_of_overflowing_scores_counts_for_nothing(stage)
    if {"causal", "seqlens_k"} <= {*stage.STAGE.options}:
        hidden_battery(stage)


def hidden_battery(stage):
    """Raise where a stage with masks is spoilt by what a row doesn't see, or hides what it sees."""
    for case in range(len(test_hidden.HIDING)):
        test_hidden.test_what_is_hidden_may_hold_anything(stage, case, "nan")
    test_hidden.test_a_row_that_sees_minus_infinity_only_is_nan_under_a_mask(stage, "float32")


def half_battery(stage):
    """Raise where a stage is wrong in float16, or with scores of any size."""
    q, k, v, _ = normal((1, 2, 33, 47, 16), 0, torch.float16)
    with in_tiles((16, 16), stage):
        o = attend(stage, in_nan(q), in_nan(k), in_nan(v), causal=True)
    hidden = torch.arange(47) > torch.arange(33)[:, None] + 14
    assert_close(o, truth(q, k, v, hidden[None, None]), rounding(q, k, v))
    for dtype in ("float16", "float32"):
        test_magnitudes.test_scores_of_any_size(stage, dtype)
    if stage.STAGE.gradients:
        test_magnitudes.test_gradients_of_large_scores_are_refused(stage, "float32")


# what kills some mutants, where the battery comes to it late
PAGED = """page table off by one; page table off by one in large pages; first page for a tile;
    the pages of the last tile again; the page of the last tile again; the last page unmasked;
    slots not within a page; slot of a tile forgotten; pages of the first sequence;
    a sequence s row by its place; causal by the capacity"""
HIDDEN = """minus infinity only taken for nothing seen; unseen keys not taken out;
    unseen values not taken out; unseen by the first row; blind q not taken out"""
CHECKS = (PAGED, paged_battery), (HIDDEN, hidden_battery)
FIRST = {" ".join(name.split()): check for names, check in CHECKS for name in names.split(";")}


def read():
    """number -> name of the mutant -> what mutants.toml has of it."""
    path = Path(__file__).with_name("mutants.toml")
    found = {}
    for numbers, mutants in tomllib.loads(path.read_text(encoding="utf-8")).items():
        for number in numbers.split():
            found.setdefault(int(number), {}).update(mutants)
    return found


MUTANTS = read()
BY_BATTERY = sorted({*MUTANTS} - {9})  # stage 9's are in test_hopper_emulated.py


def shipped(number):
    """The text of all files of stage `number`."""
    return "".join(texts_of(number).values())


def line_changed(text, old, new):
    """The line of `text` in which the first change of `old` to `new` is."""
    same = len([*takewhile(bool, map(operator.eq, old, new))])
    return text.count("\n", 0, text.find(old) + same)


def every_mutant():
    """(number, name) of each, slow where one before it has changed the same line."""
    for number in BY_BATTERY:
        text, lines = shipped(number), set()
        for name, pair in MUTANTS[number].items():
            line = line_changed(text, *pair)
            yield pytest.param(number, name, marks=pytest.mark.slow if line in lines else ())
            lines.add(line)


@pytest.mark.slow
@pytest.mark.parametrize("number", BY_BATTERY)
def test_the_shipped_stage_lives(number):
    stage = stages.by_number(number)
    battery(stage, device_of(stage))


@pytest.mark.parametrize(("number", "name"), [*every_mutant()])
def test_the_mutant_dies(number, name, tmp_path):
    device = device_of(stages.by_number(number))
    words = "".join(x if x.isalnum() else "_" for x in name)
    path = write_changed(number, [MUTANTS[number][name]], tmp_path, f"mutant_{number}_{words}")
    mutant = stages.load(path)  # one that can't be imported was never alive
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of overflow, which is how some of them die
        try:
            FIRST.get(name, str)(mutant)
            battery(mutant, device)
        except Exception:
            return
    pytest.fail(f"a mutant of stage {number} survives: {name}")


@pytest.mark.parametrize("number", MUTANTS)
def test_a_mutant_differs_from_what_is_shipped(number):
    texts = texts_of(number)
    mutants = [changed(number, [pair[:2]], name) for name, pair in MUTANTS[number].items()]
    assert texts not in mutants
    assert all(mutant not in mutants[at + 1 :] for at, mutant in enumerate(mutants))
