"""Stage 9's backward pass on a Hopper GPU: exact, and the same at every launch; else skipped."""

import faulthandler
import math

import pytest
import torch
from test_masks_and_gradients import MASKS, verdict
from test_on_a_gpu import problem

import stages
from stages import hopper_gradients
from stages import s07_triton_training as s07
from stages.contract import why_not

pytestmark = pytest.mark.gpu

STAGE = stages.by_number(9)
# keys and queries of one tile, of several, and of none that is whole; several tiles before a mask
SIZES = [(1, 1), (64, 128), (65, 129), (300, 1), (1, 300), (128, 500), (500, 128), (1000, 1000)]
UNMASKED = [(nq, nk, 2, False, None) for nq, nk in SIZES]
CAUSAL = [(nq, nk, 2, True, None) for nq, nk in SIZES]
LENGTHS = [
    (200, 384, 1, False, (128, 384)),
    (384, 384, 2, True, (256, 1)),
    (70, 300, 4, True, (0, 7)),
]


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    if reason := why_not(STAGE.STAGE, "cuda"):
        pytest.skip(reason)
    # a wrong barrier hangs, and a hanging kernel can't be interrupted
    faulthandler.dump_traceback_later(300, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("inputs", ["normal", "peaky"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("d", [8, 39, 64, 100, 128])
def test_gradients_are_exact(d, dtype, inputs, monkeypatch):
    kernels = s07.backward

    def backward(q, *rest):
        both = hopper_gradients.backward if q.dtype == getattr(torch, dtype) else kernels
        return both(q, *rest)

    monkeypatch.setattr(s07, "backward", backward)
    for nq, nk, hk, causal, seqlens_k in UNMASKED + CAUSAL + MASKS + LENGTHS:
        asked = problem(
            inputs=inputs, dtype=dtype, d=d, b=2, h=4, hk=hk, nq=nq, nk=nk,
            causal=causal, seqlens_k=seqlens_k, direction="train",
        )  # fmt: skip
        found = verdict(STAGE, asked)
        assert found["exact"], (asked, found["why"])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_launches_agree(d, causal, monkeypatch):
    """Outputs begin as NaN: what no CTA writes stays so. dq may differ in its last bits."""
    q, k, v, do = (torch.randn(8, 2048 // d, 1024, d, device="cuda").bfloat16() for _ in range(4))
    lse = torch.empty(q.shape[:3], device="cuda")
    o = STAGE.forward(q, k, v, causal, None, lse=lse)
    empty, first = torch.empty, None
    for launch in range(200):
        monkeypatch.setattr(torch, "empty", lambda *size, **to: empty(*size, **to).fill_(math.nan))
        got = hopper_gradients.backward(q, k, v, o, lse, do, causal, None)
        monkeypatch.setattr(torch, "empty", empty)
        first = first or got
        assert torch.equal(got[1], first[1]), launch
        assert torch.equal(got[2], first[2]), launch
        torch.testing.assert_close(got[0], first[0], atol=2**-8 * first[0].abs().max(), rtol=2**-7)


@pytest.mark.parametrize("d", [64, 128])
def test_dq_is_the_same_where_torch_asks_for_that(d):
    q, k, v, do = (torch.randn(2, 4, 1000, d, device="cuda").half() for _ in range(4))
    lse = torch.empty(q.shape[:3], device="cuda")
    o = STAGE.forward(q, k, v, True, None, lse=lse)
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = (
            hopper_gradients.backward(q, k, v, o, lse, do, True, None) for _ in range(20)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    for other in others:
        for x, y in zip(other, first, strict=True):
            assert torch.equal(x, y)
