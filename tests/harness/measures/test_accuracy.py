"""The judge: row blocks are the whole, and the bounds are those of the design."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from made_up import problem, scores

import stages
from harness.isolation.judge import read_output
from harness.isolation.measured_stage import MeasuredStage
from harness.measures import accuracy, oracle
from harness.measures.accuracy import Error
from harness.measures.oracle import in_blocks, make_oracles, row_blocks
from harness.problems import judged
from harness.problems.inputs import make_inputs

stage3 = stages.by_number(3).attend

SHAPES = [
    {"nq": 100, "nk": 37},
    {"nq": 37, "nk": 100},
    {"nq": 64, "nk": 64, "causal": True},
    {"nq": 100, "nk": 37, "causal": True},
    {"nq": 37, "nk": 100, "causal": True},
    {"nq": 50, "nk": 40, "b": 3, "seqlens_k": (40, 0, 17)},
    {"nq": 50, "nk": 60, "b": 2, "seqlens_k": (60, 5), "causal": True},
    {"nq": 60, "nk": 50, "b": 2, "seqlens_k": (1, 33), "causal": True, "h": 4, "hk": 2},
    {"nq": 40, "nk": 40, "h": 6, "hk": 2},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_row_blocks_are_the_whole(monkeypatch, shape):
    asked = problem(**{"d": 16, **shape})
    if asked.hk == 1:
        asked = problem(**{"d": 16, **shape, "hk": asked.h})
    q, k, v = (x.double() for x in make_inputs(asked))
    options = {"causal": asked.causal}
    if asked.seqlens_k is not None:
        options["seqlens_k"] = torch.tensor(asked.seqlens_k, dtype=torch.int32)
    whole = stage3(q, k, v, **options)
    monkeypatch.setattr(oracle, "BLOCK_BYTES", 7 * 8 * asked.b * asked.h * asked.nk)
    assert len(list(row_blocks(asked))) > 5
    in_parts = in_blocks(stage3, asked, q, k, v)
    assert in_parts.shape == whole.shape
    torch.testing.assert_close(in_parts, whole, rtol=1e-12, atol=1e-13)
    # and the largest score is that of the whole, masked or not
    largest = oracle.largest_score(asked, q, k)
    assert largest == pytest.approx(scores(q, k).abs().max().item(), rel=1e-12)


def test_blocks_never_hold_n_by_n():
    """An oracle in float64 at N = 65536 would be 32 GiB a head; a block is 64 MiB at most."""
    asked = problem(nq=65536, nk=65536)
    blocks = list(row_blocks(asked))
    assert blocks[0][0] == 0 and blocks[-1][1] == 65536
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(blocks))
    assert max(end - start for start, end in blocks) * 65536 * 8 <= 1 << 26


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_several_devices_make_the_same_oracles(monkeypatch, dtype):
    asked = problem(
        b=2, h=4, hk=2, nq=40, nk=50, d=16, dtype=dtype, causal=True, seqlens_k=(50, 9),
        direction="train",
    )  # fmt: skip
    shares = []
    alone = make_oracles(asked)
    monkeypatch.setattr(oracle, "devices_of", lambda asked: [torch.device("cpu")] * 2)
    in_blocks = oracle.in_blocks
    monkeypatch.setattr(
        oracle, "in_blocks", lambda a, part, *x: shares.append(part.h) or in_blocks(a, part, *x)
    )
    together = make_oracles(asked)
    assert set(shares) == {2}
    for name, one in alone.items():
        other = together[name]
        torch.testing.assert_close(other.out64, one.out64, rtol=0, atol=1e-13)
        u = torch.finfo(one.out3.dtype).eps
        assert Error.between(other.out3, one.out3.double()).rel < 2 * u
        for x, y in ((other.bound.max, one.bound.max), (other.bound.rel, one.bound.rel)):
            assert x == pytest.approx(y, rel=0.1)


@pytest.mark.parametrize(
    ("b", "hk", "world", "heads"), [(1, 12, 2, 4), (2, 12, 2, 2), (1, 6, 4, 6)]
)
def test_some_heads_of_a_long_sequence_are_judged(monkeypatch, tmp_path, b, hk, world, heads):
    """One for each rank at least; what is written and the oracles are of the same ones."""
    asked = problem(b=b, h=2 * hk, hk=hk, nq=20, nk=20, d=8, direction="train", world=world)
    whole = make_oracles(asked)
    monkeypatch.setattr(judged, "MOST_SCORES", 4 * 2 * 20 * 20)  # of 4 key heads
    oracles = make_oracles(asked)
    stage, path = object.__new__(MeasuredStage), str(tmp_path / "o")
    stage.problem, stage.out, stage.order = asked, path, SimpleNamespace(rank=0)
    stage.whole = SimpleNamespace(tensors=(*make_inputs(asked), None))
    stage.module = SimpleNamespace(unshard=lambda x, causal: x)
    stage.write(tuple(x.out64.float() for x in whole.values()))
    sizes = [x.out64.numel() for x in oracles.values()]
    written = read_output(path, 4 * sum(sizes)).view(torch.float32).split(sizes)
    for (name, found), x in zip(oracles.items(), written, strict=True):
        assert found.out64.shape[1] == (heads if name in ("dk", "dv") else 2 * heads)
        torch.testing.assert_close(x.view(found.out64.shape), found.out64.float())


def test_a_row_that_sees_no_key_is_zero():
    asked = problem(nq=5, nk=3, causal=True, d=4)
    q, k, v = make_inputs(asked)
    o = in_blocks(stage3, asked, q.double(), k.double(), v.double())
    assert (o[:, :, :2] == 0).all() and (o[:, :, 2:] != 0).any(-1).all()


def test_errors_are_what_they_are_called():
    a = torch.tensor([3.0, 0.0, 4.5])
    b = torch.tensor([3.0, 0.0, 4.0])
    assert Error.between(a, b) == Error(0.5, 0.5 / 5.0)
    assert Error.between(b, b) == Error(0.0, 0.0)
    zero = torch.zeros(3)
    assert Error.between(zero, zero) == Error(0.0, 0.0)
    assert Error.between(a, zero).rel == math.inf
    # float32 outputs are compared in float64: 1 + 2^-40 is not 1
    close = Error.between(torch.ones(2), torch.ones(2).double() + 2**-40)
    assert close.max == 2**-40


def test_nan_and_infinity_are_never_within():
    for bad in (math.nan, math.inf):
        a = torch.ones(4)
        a[2] = bad
        assert not Error.between(a, torch.ones(4)).within(Error(1e300, 1e300))
    assert not Error(math.nan, 0.0).within(Error(1.0, 1.0))
    assert not Error(0.0, math.nan).within(Error(1.0, 1.0))
    assert Error(1.0, 1.0).within(Error(1.0, 1.0))
    assert not Error(1.1, 1.0).within(Error(1.0, 1.0))
    assert not Error(1.0, 1.1).within(Error(1.0, 1.0))


def test_truncation_clears_thirteen_bits():
    x = torch.tensor([1 + 2**-10, 1 + 2**-11, -(1 + 2**-10 + 2**-12), 3.0])
    expected = torch.tensor([1 + 2**-10, 1.0, -(1 + 2**-10), 3.0])
    assert torch.equal(oracle.truncate_to_tf32(x), expected)


def test_what_missed_which_bound_is_said():
    bound = Error(1.0, 0.5)
    assert "max error 2" in accuracy.explain(Error(2.0, 0.1), bound)
    assert "relative error 0.7" in accuracy.explain(Error(0.5, 0.7), bound)
