"""Stages 6 to 8 compiled: masks, gradients, memory, far offsets, and the tuner, on a GPU."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from on_a_gpu import (
    KINDS,
    MASKS,
    assert_exact,
    assert_masked_exact,
    assert_same,
    call_of,
    captured,
    peak_of,
    problem,
    verdict,
)
from stage_checks import everything

import stages
from harness.measures.memory import measure_peak
from harness.peers import p100_sdpa_flash
from harness.problems.inputs import make_inputs
from stages.common import tuner

pytestmark = pytest.mark.gpu

FLASH2, TRAINING, SPLIT = (stages.by_number(number) for number in (6, 7, 8))


@pytest.mark.parametrize(("dtype", "precision"), KINDS)
@pytest.mark.parametrize("inputs", ["normal", "peaky"])
@pytest.mark.parametrize("d", [40, 64, 128])
def test_masked_outputs_and_gradients_are_exact(inputs, dtype, precision, d):
    fields = {"inputs": inputs, "dtype": dtype, "precision": precision, "d": d}
    for stage, direction in ((FLASH2, "fwd"), (SPLIT, "fwd"), (TRAINING, "train")):
        assert_masked_exact(stage, MASKS, direction=direction, **fields)


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("d", [64, 128, 256])
def test_every_candidate_is_exact(index, d, pick):
    pick(index)
    for (dtype, precision), causal in product(KINDS[1:3], (False, True)):
        fields = {"dtype": dtype, "precision": precision, "d": d, "causal": causal}
        assert_exact(TRAINING, problem(nq=400, nk=400, direction="train", **fields))


@pytest.mark.parametrize("d", [1, 16, 59, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gradients_of_other_head_dimensions_are_exact(d, dtype):
    for causal in (False, True):
        fields = {"dtype": dtype, "d": d, "causal": causal}
        assert_exact(TRAINING, problem(nq=150, nk=210, direction="train", **fields))


def test_ieee_outputs_and_gradients_are_within_1e_5_of_float64():
    for d, causal in product((64, 128), (False, True)):
        asked = problem(d=d, nq=1024, nk=1024, causal=causal, direction="train")
        assert verdict(TRAINING, asked)["err_f64_rel"] <= 1e-5


def near_and_far(n=130, d=64):
    """q, k, v and dO, and the same with heads 2^31 elements apart: int32 would read another's."""
    far = (1 << 31) + 1024
    big = torch.empty(far + 4 * n * d, dtype=torch.float16, device="cuda")
    near = [torch.randn(1, 2, n, d, device="cuda").half() for _ in range(4)]
    views = [big[i * n * d :].as_strided((1, 2, n, d), (far, far, d, 1)) for i in range(4)]
    for view, x in zip(views, near, strict=True):
        view.copy_(x)
    return near, views


@pytest.mark.parametrize("number", [7, 9])
def test_gradients_at_offsets_beyond_32_bits_are_those_of_near_tensors(stage):
    near, views = near_and_far()
    assert_same(everything(stage, *views, causal=True), everything(stage, *near, causal=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype):
    q, k, v = (torch.randn(1, 2, 100, 64, device="cuda", requires_grad=True) for _ in range(3))
    with torch.autocast("cuda", dtype=dtype):
        o = TRAINING.attend(q, k, v, causal=True)
    assert o.dtype == dtype
    o.float().square().sum().backward()
    want = TRAINING.attend(*(x.detach().to(dtype) for x in (q, k, v)), causal=True)
    assert torch.equal(o.detach(), want)
    for x in (q, k, v):
        assert x.grad.dtype == torch.float32
        assert torch.isfinite(x.grad).all()
        assert x.grad.norm() > 0


def test_nan_in_hidden_tiles_changes_no_output():
    q, k, v = (torch.randn(2, 2, 300, 64, device="cuda").half() for _ in range(3))
    lengths = torch.tensor([37, 150], dtype=torch.int32, device="cuda")
    clean = FLASH2.attend_with_lse(q, k, v, causal=True, seqlens_k=lengths)
    for x in (k, v):
        for b, length in enumerate(lengths.tolist()):
            x[b, :, length:] = float("nan")
    poisoned = FLASH2.attend_with_lse(q, k, v, causal=True, seqlens_k=lengths)
    assert_same(poisoned, clean)


def test_a_training_step_holds_what_it_must_and_nothing_else():
    """o, dq, dk, dv, lse twice and delta: no tensor of N x N, and no other one of float32."""
    asked = problem(dtype="float16", h=8, hk=8, nq=2048, nk=2048, direction="train")
    peak = peak_of(call_of(TRAINING, asked))
    rows = asked.b * asked.h * asked.nq
    assert peak <= 4 * 2 * rows * asked.d + 3 * 4 * rows + 4 * 512  # a block is rounded to 512


@pytest.mark.parametrize("causal", [False, True])
def test_a_training_step_holds_no_more_than_sdpa_does(causal):
    """Its flash backend's peak, and a twentieth."""
    asked = problem(dtype="float16", h=16, hk=16, nq=4096, nk=4096, causal=causal)
    asked = replace(asked, direction="train")
    peaks = [peak_of(call_of(stage, asked)) for stage in (TRAINING, p100_sdpa_flash)]
    assert peaks[0] <= 1.05 * peaks[1]


@pytest.mark.tuner
def test_tuning_holds_the_output_and_nothing_else():
    """At the first call, in which each candidate is timed on the caller's own tensors."""
    asked = problem(dtype="float16", nq=1024, nk=1024, d=32)
    q, k, v = make_inputs(asked)
    before = len(tuner.chosen)
    o, peak, _ = measure_peak(lambda: FLASH2.attend(q, k, v), "cuda")
    assert len(tuner.chosen) == before + 1, "tuned before: this would test nothing"
    assert peak == o.numel() * o.element_size()


@pytest.mark.tuner
def test_a_kind_of_call_is_tuned_once_and_nothing_is_left_on_disk(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    timed, inner = [], tuner.time_each
    monkeypatch.setattr(tuner, "time_each", lambda c, launch: timed.append(1) or inner(c, launch))
    q, k, v = (torch.randn(1, 2, 333, 40, device="cuda").half() for _ in range(3))
    for _ in range(2):
        FLASH2.attend(q, k, v)
    assert timed == [1]
    assert not (tmp_path / "attention-ladder").exists()


@pytest.mark.tuner
def test_a_cuda_graph_captures_what_is_not_tuned_yet():
    q, k, v = (torch.randn(1, 1, 70, 48, device="cuda").half() for _ in range(3))
    want = FLASH2.forward(q, k, v, False, None, config=FLASH2.launch_config(48, q.dtype, "ieee"))
    graph, o = captured(lambda: FLASH2.attend(q, k, v))
    o.zero_()
    graph.replay()
    assert torch.equal(o, want)
