"""What a problem costs, held against counting pairs one by one."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up import problem

from course.report.sources import source_intensity
from harness.isolation.roster import read_stages
from harness.problems.cost import (
    THREE_KERNELS_BACKWARD,
    TRAFFIC,
    flash_bytes,
    flops,
    fused_backward_bytes,
    fused_bytes,
    half_fused_bytes,
    hbm_bytes,
    intensity,
    kernel_bytes,
    score_bytes,
    three_kernel_bytes,
    visible_pairs,
)
from harness.runs.comparison import make_record
from harness.runs.process import Outcome
from stages.common.contract import TRAFFICS, Stage


def seen(asked, batch):
    """The (i, j) of one head of batch entry `batch` that the masks leave, one by one."""
    valid = asked.nk if asked.seqlens_k is None else asked.seqlens_k[batch]
    return [
        (i, j)
        for i, j in itertools.product(range(asked.nq), range(asked.nk))
        if j < valid and not (asked.causal and j > i + asked.nk - asked.nq)
    ]


@st.composite
def masked(draw):
    """A small problem, masks, groups and all."""
    nq, nk, b, hk, groups = (draw(st.integers(1, most)) for most in (12, 12, 3, 2, 3))
    lengths = st.tuples(*[st.integers(0, nk)] * b)
    return problem(
        b=b, h=hk * groups, hk=hk, nq=nq, nk=nk, d=10, dtype="float16",
        causal=draw(st.booleans()), seqlens_k=draw(st.none() | lengths),
    )  # fmt: skip


@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(masked(), st.integers(1, 16))
def test_work_and_bytes_are_those_that_can_be_counted(asked, block_m):
    """Four d for each pair; the rows that anybody looks at, and whole outputs; a K per q block."""
    pairs = [seen(asked, batch) for batch in range(asked.b)]
    count = sum(map(len, pairs))
    assert visible_pairs(asked) == count and flops(asked) == 4 * asked.h * 10 * count
    rows = 10 * asked.h * sum(len({i for i, _ in each}) for each in pairs)  # of q
    keys = 10 * asked.hk * sum(len({j for _, j in each}) for each in pairs)
    o, k = asked.b * asked.h * asked.nq * 10, asked.b * asked.hk * asked.nk * 10  # whole
    assert fused_bytes(asked) == hbm_bytes(asked) == 2 * (o + rows + 2 * keys)
    back = replace(asked, direction="bwd")
    moved = 2 * (o + 2 * k + 2 * rows + 2 * keys)  # dq, dk, dv; q and dO; k and v
    assert fused_backward_bytes(back) == hbm_bytes(back) == moved
    tiles = sum(len({(i // block_m, j) for i, j in each}) for each in pairs)
    assert flash_bytes(asked, block_m) == 2 * (2 * o + 2 * asked.h * tiles * 10)


def test_a_problem_too_large_for_any_machine_is_counted_at_once():
    n = 10**9 - 1
    large = problem(b=n, nq=n, nk=n, d=2, causal=True)  # one by one, this would never end
    assert visible_pairs(large) == n * (n * (n + 1) // 2)
    assert hbm_bytes(large) == 4 * n * (4 * n * 2)


def test_flops_of_the_source_and_of_both_directions():
    whole = {"b": 2, "h": 3, "hk": 3, "nq": 64, "nk": 128, "d": 32}
    assert flops(problem(**whole)) == 4 * 2 * 3 * 64 * 128 * 32
    assert flops(problem(**whole, direction="bwd")) == 10 * 2 * 3 * 64 * 128 * 32
    assert flops(problem(**whole, direction="train")) == 14 * 2 * 3 * 64 * 128 * 32


@pytest.mark.parametrize(
    ("dtype", "size"), [("float16", 2), ("bfloat16", 2), ("float32", 4), ("float64", 8)]
)
def test_bytes_are_q_k_v_read_and_o_written(dtype, size):
    asked = problem(b=2, h=6, hk=2, nq=5, nk=7, d=10, dtype=dtype)
    q = o = 2 * 6 * 5 * 10
    k = v = 2 * 2 * 7 * 10
    assert hbm_bytes(asked) == (q + k + v + o) * size


@pytest.mark.parametrize("traffic", TRAFFICS)
def test_training_moves_what_both_passes_do(traffic):
    whole = {"b": 2, "h": 6, "hk": 2, "nq": 5, "nk": 7, "d": 10, "causal": True}
    fwd, bwd, train = (
        hbm_bytes(problem(**whole, direction=direction), traffic)
        for direction in ("fwd", "bwd", "train")
    )
    assert train == fwd + bwd and 0 < fwd < bwd


def test_three_kernels_move_seven_matrices_backward():
    asked = problem(b=2, h=6, hk=2, nq=5, nk=7, d=10, dtype="float16", direction="bwd")
    q = dq = dO = 2 * 6 * 5 * 10
    k = v = dk = dv = 2 * 2 * 7 * 10
    p = dp = ds = 2 * 6 * 5 * 7
    found = kernel_bytes(asked, THREE_KERNELS_BACKWARD)
    assert found == {
        "P^T dO": 2 * (p + dO + dv), "dO V^T": 2 * (dO + v + dp), "softmax'": 2 * (p + dp + ds),
        "dS K": 2 * (ds + k + dq), "dS^T Q": 2 * (ds + q + dk),
    }  # fmt: skip
    assert hbm_bytes(asked, "three-kernel") == sum(found.values()) == 2 * (7 * p + 4 * q + 4 * k)
    # as the module says, e (7 N^2 + 8 N d) and e 7 N d
    square = problem(nq=64, nk=64, d=16, direction="bwd")
    assert hbm_bytes(square, "three-kernel") == 4 * (7 * 64 * 64 + 8 * 64 * 16)
    assert hbm_bytes(square) == 4 * 7 * 64 * 16


def test_no_block_is_refused():
    with pytest.raises(ValueError, match="block_m: got 0"):
        flash_bytes(problem(), 0)


def test_three_kernels_move_s_and_p_twice():
    asked = problem(b=2, h=6, hk=2, nq=5, nk=7, d=10, dtype="float16")
    q = o = 2 * 6 * 5 * 10
    k = v = 2 * 2 * 7 * 10
    s = p = 2 * 6 * 5 * 7
    assert score_bytes(asked) == 2 * s
    assert three_kernel_bytes(asked) == {
        "Q K^T": 2 * (q + k + s), "softmax": 2 * (s + p), "P V": 2 * (p + v + o),
    }  # fmt: skip
    assert half_fused_bytes(asked) == {
        "softmax(Q K^T)": 2 * (q + k + p), "P V": 2 * (p + v + o),
    }  # fmt: skip
    assert hbm_bytes(asked, "three-kernel") == 2 * (4 * s + q + k + v + o)
    half = sum(half_fused_bytes(asked).values())
    assert hbm_bytes(asked, "three-kernel") - half == half - hbm_bytes(asked) == 2 * 2 * s


def test_masks_take_nothing_from_s_and_p():
    whole = problem(b=2, nq=6, nk=8)
    masked = problem(b=2, nq=6, nk=8, causal=True, seqlens_k=(3, 8))
    assert three_kernel_bytes(masked) == three_kernel_bytes(whole)
    assert half_fused_bytes(masked) == half_fused_bytes(whole)
    assert fused_bytes(masked) < fused_bytes(whole)


@pytest.mark.parametrize(
    ("n", "softmax", "standard", "flash"),
    [(1024, True, "15.4", "261"), (4096, True, "16.1", "1044"),
     (1024, False, "15.1", "256"), (4096, False, "15.8", "1024")],
)  # fmt: skip
def test_the_intensities_of_source_000(n, softmax, standard, flash):
    found = source_intensity(n, 64, softmax)
    assert f"{found['standard']:.1f}" == standard
    assert found["flash"] == int(flash)


@pytest.mark.parametrize("n", [1024, 2048, 4096, 16384])
def test_our_intensity_is_the_source_s_without_its_softmax(n):
    asked = problem(nq=n, nk=n, d=64)
    source = source_intensity(n, 64, softmax=False)
    assert intensity(flops(asked), hbm_bytes(asked, "three-kernel")) == source["standard"]
    assert intensity(flops(asked), hbm_bytes(asked)) == source["flash"]


def test_a_stage_declares_its_traffic():
    assert set(TRAFFIC) == set(TRAFFICS)
    words = {"number": 90, "name": "mine", "title": "mine", "idea": "an idea"}
    assert Stage(**words).traffic == "fused"
    for bad in ("half-fused", "", None, ["fused"]):
        with pytest.raises(ValueError, match=r"Stage\.traffic: got .*expected one of fused, three"):
            Stage(**words, traffic=bad)


@pytest.mark.slow
def test_records_hold_a_stage_to_what_it_declares():
    asked = problem(nq=64, nk=64, d=16)
    found = {
        stage.number: make_record(Outcome(stage, asked), paired=False)["hbm_bytes"]
        for stage in read_stages()
        if stage.number in (1, 3, 4, 5)
    }
    least, three = 4 * 4 * 64 * 16, 4 * (4 * 64 * 64 + 4 * 64 * 16)
    assert found == {1: least, 3: three, 4: least, 5: least}
