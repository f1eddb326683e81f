"""Stages 6 to 8 compiled: masks, gradients, memory, far offsets, and the tuner, on a GPU."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from test_on_a_gpu import KINDS, problem

import stages
from harness.isolation.call import bind, prepare
from harness.measures.accuracy import judge_outputs, set_precision
from harness.measures.memory import measure_peak
from harness.measures.oracle import make_oracles
from harness.peers import p100_sdpa_flash
from harness.problems.directions import make_output_gradient
from harness.problems.inputs import make_inputs
from stages.common import tuner

pytestmark = pytest.mark.gpu

FLASH2, TRAINING, SPLIT = (stages.by_number(number) for number in (6, 7, 8))
# nq, nk, hk of 4 heads, causal, seqlens_k of 2 batch entries
MASKS = [
    (130, 130, 4, True, None),
    (257, 129, 2, True, None),  # the first rows see nothing
    (65, 300, 1, True, None),
    (100, 200, 2, False, (0, 137)),
    (300, 300, 4, True, (300, 77)),
    (1, 500, 1, True, (3, 500)),
    (512, 512, 4, True, None),
]


def verdict(stage, asked):
    """What the harness's judge says of a stage's answer to a problem."""
    if asked.dtype == "float32":
        set_precision(asked.precision)
    try:
        oracles = make_oracles(asked)
        dO = None if asked.direction == "fwd" else make_output_gradient(asked)
        outputs = prepare(bind(stage.attend, asked), asked.direction, *make_inputs(asked), dO)()
        return judge_outputs([o.double() for o in outputs], oracles)
    finally:
        set_precision("ieee")


@pytest.mark.parametrize(("dtype", "precision"), KINDS)
@pytest.mark.parametrize("inputs", ["normal", "peaky"])
@pytest.mark.parametrize("d", [40, 64, 128])
def test_masked_outputs_and_gradients_are_exact(inputs, dtype, precision, d):
    for nq, nk, hk, causal, seqlens_k in MASKS:
        for stage, direction in ((FLASH2, "fwd"), (SPLIT, "fwd"), (TRAINING, "train")):
            asked = problem(
                inputs=inputs, dtype=dtype, precision=precision, d=d, b=2, h=4, hk=hk, nq=nq, nk=nk,
                causal=causal, seqlens_k=seqlens_k, direction=direction,
            )  # fmt: skip
            found = verdict(stage, asked)
            assert found["exact"], (stage.STAGE.number, asked, found["why"])


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("d", [64, 128, 256])
def test_every_candidate_is_exact(index, d, pick):
    pick(index)
    for dtype in ("float16", "float32"):
        precision = "tf32" if dtype == "float32" else dtype
        for causal in (False, True):
            asked = problem(
                dtype=dtype, precision=precision, d=d, nq=400, nk=400, causal=causal,
                direction="train",
            )  # fmt: skip
            found = verdict(TRAINING, asked)
            assert found["exact"], (asked, found["why"])


@pytest.mark.parametrize("d", [1, 16, 59, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gradients_of_other_head_dimensions_are_exact(d, dtype):
    precision = "ieee" if dtype == "float32" else dtype
    for causal in (False, True):
        asked = problem(
            dtype=dtype, precision=precision, d=d, nq=150, nk=210, causal=causal, direction="train"
        )
        found = verdict(TRAINING, asked)
        assert found["exact"], (asked, found["why"])


def test_ieee_outputs_and_gradients_are_within_1e_5_of_float64():
    for d, causal in product((64, 128), (False, True)):
        asked = problem(d=d, nq=1024, nk=1024, causal=causal, direction="train")
        assert verdict(TRAINING, asked)["err_f64_rel"] <= 1e-5


def test_runs_are_the_same_bit_for_bit_gradients_too():
    asked = problem(dtype="float16", nq=500, nk=700, h=4, hk=2, causal=True, direction="train")
    call = prepare(
        bind(TRAINING.attend, asked), "train", *make_inputs(asked), make_output_gradient(asked)
    )
    first = call()
    for _ in range(10):
        for got, want in zip(call(), first, strict=True):
            assert torch.equal(got, want)


def near_and_far(n=130, d=64):
    """q, k, v and dO, and the same with heads 2^31 elements apart: int32 would read another's."""
    far = (1 << 31) + 1024
    big = torch.empty(far + 4 * n * d, dtype=torch.float16, device="cuda")
    near = [torch.randn(1, 2, n, d, device="cuda").half() for _ in range(4)]
    views = [big[i * n * d :].as_strided((1, 2, n, d), (far, far, d, 1)) for i in range(4)]
    for view, x in zip(views, near, strict=True):
        view.copy_(x)
    return near, views


def test_gradients_at_offsets_beyond_32_bits_are_those_of_near_tensors():
    near, views = near_and_far()
    answers = []
    for q, k, v, dO in (views, near):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o = TRAINING.attend(*leaves, causal=True)
        answers.append((o.detach(), *torch.autograd.grad(o, leaves, dO)))
    for got, want in zip(*answers, strict=True):
        assert torch.equal(got, want)


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
    for got, want in zip(poisoned, clean, strict=True):
        assert torch.equal(got, want)


def test_a_training_step_holds_what_it_must_and_nothing_else():
    """o, dq, dk, dv, lse twice and delta: no tensor of N x N, and no other one of float32."""
    asked = problem(dtype="float16", h=8, hk=8, nq=2048, nk=2048, direction="train")
    call = prepare(
        bind(TRAINING.attend, asked), "train", *make_inputs(asked), make_output_gradient(asked)
    )
    call()
    _, peak, _ = measure_peak(call, "cuda")
    rows = asked.b * asked.h * asked.nq
    assert peak <= 4 * 2 * rows * asked.d + 3 * 4 * rows + 4 * 512  # a block is rounded to 512


@pytest.mark.parametrize("causal", [False, True])
def test_a_training_step_holds_no_more_than_sdpa_does(causal):
    """Its flash backend's peak, and a twentieth."""
    asked = problem(dtype="float16", h=16, hk=16, nq=4096, nk=4096, causal=causal)
    asked = replace(asked, direction="train")
    peaks = []
    for stage in (TRAINING, p100_sdpa_flash):
        call = prepare(
            bind(stage.attend, asked), "train", *make_inputs(asked), make_output_gradient(asked)
        )
        call()
        peaks.append(measure_peak(call, "cuda")[1])
        del call
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
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = FLASH2.attend(q, k, v)
    o.zero_()
    graph.replay()
    assert torch.equal(o, want)
