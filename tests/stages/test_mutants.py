"""The checks bite: mistakes written into the shipped stages, each of which must be caught.

A mutant is the shipped stage with one text replaced (mutants.toml). It is killed when a check fails
that the shipped stage passes, or when it raises. All tensors, the output too, lie in a storage of
NaN, so that a mutant that strays reads NaN and damages nothing but that.

`make test` has the first mutant of each function, unless a stage below has the same; the others
are slow.
"""

import math
import operator
import re
import tomllib
import warnings
from itertools import takewhile
from pathlib import Path

import pytest
import test_exactness
import test_hidden
import test_magnitudes
import test_problems
import test_s06_triton_flash2
import torch
from masked_problems import BORDERS, TILED, a_tile, border_case, make_case
from stage_checks import assert_close, device_of, guarded_outputs, normal, rounding, truth

import stages
from course.edits import changed, texts_of, write_changed

SEEDS = range(12)


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


def battery(stage, seeds=SEEDS):
    """Raise where `stage` is wrong; every shipped stage passes: what all stages are asked.

    First what takes little and kills most, the random cases last.
    """
    if stage.STAGE.number in TILED:
        for index in range(len(BORDERS)):
            check_case(stage, border_case(stage, index))
    if hasattr(stage, "attend_paged"):
        paged_battery(stage)
    test_exactness.test_logits_past_the_overflow_of_exp_in_double(stage, "float32")
    if stage.STAGE.exact_up_to is None:
        test_hidden.test_a_tile_of_overflowing_scores_counts_for_nothing(stage)
    if stage.STAGE.gradients:
        test_problems.test_logits_so_low_that_no_masked_key_may_pass_for_a_zero(stage)
    if {"causal", "seqlens_k"} <= {*stage.STAGE.options}:
        hidden_battery(stage)
    for seed in seeds:
        check_case(stage, make_case(stage, seed))
    if hasattr(stage, "candidates"):
        large_battery(stage)


def check_case(stage, case):
    """Raise where it is wrong in a case, or doesn't skip the tiles there that it should."""
    test_problems.check_case(stage, case)
    if hasattr(stage, "skipped_blocks"):
        test_s06_triton_flash2.check_skipped_blocks(stage, case)


def large_battery(stage):
    """Raise where a tuned stage is wrong in large scores, or refuses others."""
    for dtype in ("float16", "float32"):
        test_magnitudes.test_scores_of_any_size(stage, dtype)
    if stage.STAGE.gradients:
        test_magnitudes.test_gradients_of_large_scores_are_refused(stage, "float32")


def hidden_battery(stage):
    """Raise where a stage with masks is spoilt by what a row doesn't see, or hides what it sees."""
    for case in range(len(test_hidden.HIDING)):
        test_hidden.test_what_is_hidden_may_hold_anything(stage, case, "nan")
    test_hidden.test_a_row_that_sees_minus_infinity_only_is_nan_under_a_mask(stage, "float32")


# what kills some mutants, where the battery comes to it late
PAGED = """page table off by one; page table off by one in large pages; first page for a tile;
    the pages of the last tile again; the page of the last tile again; the last page unmasked;
    slots not within a page; slot of a tile forgotten; pages of the first sequence;
    a sequence s row by its place; causal by the capacity"""
HIDDEN = """minus infinity only taken for nothing seen; unseen keys not taken out;
    unseen values not taken out; unseen by the first row; blind q not taken out;
    no key divides by 0"""
LARGE = """gradients of large scores not refused; float32 refused; large scores not refused;
    large negative scores not refused"""
CHECKS = (PAGED, paged_battery), (HIDDEN, hidden_battery), (LARGE, large_battery)
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
# stage 9's are in test_hopper_emulated.py, stage 10's in test_ring.py
BY_BATTERY = sorted({*MUTANTS} - {9, 10})


def shipped(number):
    """The text of all files of stage `number`."""
    return "".join(texts_of(number).values())


def function_changed(text, old, new):
    """Where the function, or the struct of C++, begins in which the first change of a text is."""
    same = len([*takewhile(bool, map(operator.eq, old, new))])
    begins = [x.start() for x in re.finditer(r"^(def |class |struct |\w.*\) *\{)", text, re.M)]
    return max([x for x in begins if x <= text.find(old) + same], default=0)


def every_mutant():
    """(number, name) of each, slow where one before it is the same or is in the same function."""
    made = []
    for number in BY_BATTERY:
        text, functions = shipped(number), set()
        for name, pair in MUTANTS[number].items():
            function = function_changed(text, *pair)
            again = function in functions or pair in made
            yield pytest.param(number, name, marks=pytest.mark.slow if again else ())
            if not again:
                functions.add(function)
            made.append(pair)


@pytest.mark.slow
@pytest.mark.parametrize("number", BY_BATTERY)
def test_the_shipped_stage_lives(number):
    stage = stages.by_number(number)
    device_of(stage)
    battery(stage, seeds=())  # those are asked in test_problems.py, and more


@pytest.mark.parametrize(("number", "name"), [*every_mutant()])
def test_the_mutant_dies(number, name, tmp_path):
    device_of(stages.by_number(number))
    words = "".join(x if x.isalnum() else "_" for x in name)
    path = write_changed(number, [MUTANTS[number][name]], tmp_path, f"mutant_{number}_{words}")
    mutant = stages.load(path)  # one that can't be imported was never alive
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of overflow, which is how some of them die
        try:
            FIRST.get(name, str)(mutant)
            battery(mutant)
        except Exception:
            return
    pytest.fail(f"a mutant of stage {number} survives: {name}")


@pytest.mark.parametrize("number", MUTANTS)
def test_a_mutant_differs_from_what_is_shipped(number):
    texts = texts_of(number)
    mutants = [changed(number, [pair[:2]], name) for name, pair in MUTANTS[number].items()]
    assert texts not in mutants
    assert all(mutant not in mutants[at + 1 :] for at, mutant in enumerate(mutants))
