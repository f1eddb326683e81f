"""Stage 10 on two GPUs of one host: by copy engine and by NCCL the same bits, and exact.

Skipped where there are fewer GPUs, or they don't reach each other's memory.
"""

import pytest
import ring_ranks
import torch
from test_ring import problem

from harness.measures.accuracy import explain
from harness.measures.oracle import make_oracles

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

WAYS = ("engine", "group")
LAUNCHES = 200


@pytest.fixture(scope="module")
def ranks():
    ranks = ring_ranks.Ranks(2, backend="cpu:gloo,cuda:nccl")
    yield ranks
    ranks.end()


def large(**fields):
    """A problem whose copies take some time."""
    defaults = {"n": 4096, "b": 1, "h": 16, "hk": 16, "d": 128, "dtype": "bfloat16"}
    return problem(**(defaults | {"device": "cuda"} | fields))


@pytest.mark.parametrize("fields", [
    {}, {"causal": False}, {"n": 4099}, {"hk": 4}, {"dtype": "float16", "d": 64},
    {"causal": False, "nk": 6000}, {"seqlens_k": (1500,)}, {"inputs": "peaky", "n": 2048},
    {"dtype": "float32", "n": 1024}, {"d": 100, "n": 1000}, {"dtype": "float64", "n": 256},
])  # fmt: skip
@pytest.mark.parametrize("copies", WAYS)
def test_the_error_is_within_the_bound(ranks, copies, fields):
    asked = large(**fields)
    found = ranks.one(ring_ranks.run, asked, 2, {"copies": copies})
    for x, (name, oracle) in zip(found, make_oracles(asked).items(), strict=True):
        error = oracle.error(torch.from_numpy(x).cuda())
        assert error.within(oracle.bound), f"{name}: {explain(error, oracle.bound)}"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_both_ways_to_copy_give_the_same_bits(ranks, causal, overlap):
    """Of o, dk and dv; the last bits of dq differ from run to run in stage 9."""
    asked = large(causal=causal)
    engine, group = (
        ranks.one(ring_ranks.run, asked, 2, {"copies": copies, "overlap": overlap})
        for copies in WAYS
    )
    for name, x, y in zip(("o", "dq", "dk", "dv"), engine, group, strict=True):
        assert name == "dq" or (x == y).all(), name


@pytest.mark.parametrize("copies", WAYS)
def test_launches_have_the_same_bits_beside_other_copies(ranks, copies):
    """A missing fence shows as another answer once in a while, while links and engines are busy."""
    assert ranks.all(ring_ranks.repeats, large(n=2048), copies, LAUNCHES) == [[0, 0, 0]] * 2


@pytest.mark.parametrize("copies", WAYS)
def test_calls_of_other_sizes_take_turns(ranks, copies):
    """The slots to receive in are used again, in another layout, and grow."""
    small, big = large(n=512, h=2, hk=2), large(n=2048)
    before = ranks.one(ring_ranks.run, small, 2, {"copies": copies})
    ranks.one(ring_ranks.run, big, 2, {"copies": copies})
    after = ranks.one(ring_ranks.run, small, 2, {"copies": copies})
    for name, x, y in zip(("o", "dq", "dk", "dv"), before, after, strict=True):
        assert name == "dq" or (x == y).all(), name


def test_the_engine_is_chosen_where_gpus_reach_each_other(ranks):
    assert ranks.all(ring_ranks.chosen, large(n=256)) == ["engine"] * 2


def test_the_merge_on_a_gpu_is_that_of_torch(ranks):
    assert ranks.all(ring_ranks.merges_alike) == [True] * 2
