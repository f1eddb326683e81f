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

SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


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
        b=b, h=hk * groups, hk=hk, nq=nq, nk=nk, d=10, dtype=draw(st.sampled_from([*SIZES])),
        causal=draw(st.booleans()), seqlens_k=draw(st.none() | lengths),
    )  # fmt: skip


def whole(asked):
    """The bytes of q, of k and of S; as many has o, v or P, and each of their gradients."""
    of_a_head = SIZES[asked.dtype] * asked.b
    q, k = of_a_head * asked.h * asked.nq * asked.d, of_a_head * asked.hk * asked.nk * asked.d
    return q, k, of_a_head * asked.h * asked.nq * asked.nk


counted = settings(max_examples=250, deadline=None, derandomize=True, database=None)


@counted
@given(masked(), st.integers(1, 16))
def test_work_and_bytes_are_those_that_can_be_counted(asked, block_m):
    """Two d for each pair and product; the rows that anybody looks at, and whole outputs."""
    back, train = (replace(asked, direction=direction) for direction in ("bwd", "train"))
    pairs = [seen(asked, batch) for batch in range(asked.b)]
    count = sum(map(len, pairs))
    assert visible_pairs(asked) == count
    for each, products in ((asked, 2), (back, 5), (train, 7)):
        assert flops(each) == 2 * products * asked.h * 10 * count
    row, (o, k, _) = 10 * SIZES[asked.dtype], whole(asked)
    rows = row * asked.h * sum(len({i for i, _ in each}) for each in pairs)  # of q
    keys = row * asked.hk * sum(len({j for _, j in each}) for each in pairs)
    assert fused_bytes(asked) == hbm_bytes(asked) == o + rows + 2 * keys
    moved = o + 2 * k + 2 * rows + 2 * keys  # dq, dk, dv; q and dO; k and v
    assert fused_backward_bytes(back) == hbm_bytes(back) == moved
    for traffic in TRAFFICS:
        fwd, bwd, both = (hbm_bytes(each, traffic) for each in (asked, back, train))
        assert both == fwd + bwd and 0 < fwd < bwd
    tiles = sum(len({(i // block_m, j) for i, j in each}) for each in pairs)  # a K per q block
    assert flash_bytes(asked, block_m) == 2 * o + 2 * asked.h * tiles * row


@counted
@given(masked())
def test_kernels_apart_move_whole_matrices_whatever_is_masked(asked):
    q, k, s = whole(asked)
    o, v, p, dq, dk, dv, dO, dp, ds = q, k, s, q, k, k, q, s, s
    assert score_bytes(asked) == s
    assert three_kernel_bytes(asked) == {"Q K^T": q + k + s, "softmax": s + p, "P V": p + v + o}
    assert half_fused_bytes(asked) == {"softmax(Q K^T)": q + k + p, "P V": p + v + o}
    assert hbm_bytes(asked, "three-kernel") == 4 * s + 2 * q + 2 * k
    asked = replace(asked, direction="bwd")
    assert kernel_bytes(asked, THREE_KERNELS_BACKWARD) == {
        "P^T dO": p + dO + dv, "dO V^T": dO + v + dp, "softmax'": p + dp + ds, "dS K": ds + k + dq,
        "dS^T Q": ds + q + dk,
    }  # fmt: skip
    assert hbm_bytes(asked, "three-kernel") == 7 * s + 4 * q + 4 * k


def test_a_problem_too_large_for_any_machine_is_counted_at_once():
    n = 10**9 - 1
    large = problem(b=n, nq=n, nk=n, d=2, causal=True)  # one by one, this would never end
    assert visible_pairs(large) == n * (n * (n + 1) // 2)
    assert hbm_bytes(large) == 4 * n * (4 * n * 2)


def test_no_block_is_refused():
    with pytest.raises(ValueError, match="block_m: got 0"):
        flash_bytes(problem(), 0)


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
