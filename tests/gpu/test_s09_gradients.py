"""Stage 9's backward pass on a Hopper GPU: exact, and the same at every launch; else skipped."""

import math

import pytest
import torch
from on_a_gpu import (
    MASKS,
    assert_masked_exact,
    assert_same,
    captured,
    launches,
    peak_of,
)
from stage_checks import everything

import stages
from stages.s09_gluon_hopper import launch as hopper_launch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_hopper")]

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


@pytest.mark.parametrize("inputs", ["normal", "peaky"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("d", [8, 39, 64, 72, 80, 96, 100, 128, 136, 192, 200, 256])
def test_gradients_are_exact(d, dtype, inputs):
    masks = UNMASKED + CAUSAL + MASKS + LENGTHS
    assert_masked_exact(STAGE, masks, inputs=inputs, dtype=dtype, d=d, direction="train")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 80, 96, 128, 192, 256])
def test_launches_agree(d, causal):
    """Outputs begin as NaN: what no CTA writes stays so. dq may differ in its last bits."""
    q, k, v, do = (torch.randn(8, 2048 // d, 1024, d, device="cuda").bfloat16() for _ in range(4))
    lse = torch.empty(q.shape[:3], device="cuda")
    o = hopper_launch.forward(q, k, v, causal, None, lse=lse)
    first = None
    for got in launches(lambda: hopper_launch.backward(q, k, v, o, lse, do, causal, None)):
        first = first or got
        # keys are summed by one CTA each: the same bits; dq by several, in any order
        assert_same(got[1:], first[1:])
        assert distance(got[0], first[0]) <= torch.finfo(q.dtype).eps


def gradients(q, k, v, do, **options):
    """dq, dk and dv, by way of attend."""
    return everything(STAGE, q, k, v, do, **options)[1:]


def distance(x, y):
    """|x - y| over |y|, both as vectors."""
    return ((x.double() - y.double()).norm() / y.double().norm()).item()


@pytest.mark.parametrize("d", [64, 80, 96, 128, 192, 256])
def test_dq_is_added_to_zeros_at_every_call(d):
    """In the sums' place there may be anything, such as the sums of the call before.

    CTAs take several work tiles, of many query tiles each: no part of a sum may be lost.
    """
    q, do = (torch.randn(4, 40, 1024, d, device="cuda").half() for _ in range(2))
    k, v = (torch.randn(4, 40, 256, d, device="cuda").half() for _ in range(2))
    first = gradients(q, k, v, do)  # sums of two tiles of keys have the same bits in any order
    for _ in range(200):
        assert_same(gradients(q, k, v, do), first)


@pytest.mark.parametrize("d", [64, 96, 256])
def test_what_no_row_sees_and_rows_that_see_nothing_change_nothing(d):
    q, k, v, do = (torch.randn(2, 2, n, d, device="cuda").half() for n in (300, 256, 256, 300))
    lengths = torch.tensor([0, 150], dtype=torch.int32, device="cuda")
    options = {"causal": True, "seqlens_k": lengths}  # 44 rows see no key
    plain = gradients(q, k, v, do, **options)
    for b, length in enumerate(lengths.tolist()):
        k[b, :, length:], v[b, :, length:] = math.nan, math.inf
    do[0], do[1, :, :44], q[1, :, :44] = math.nan, math.nan, math.nan
    dq, dk, dv = gradients(q, k, v, do, **options)
    assert_same((dq, dk, dv), plain)
    assert not dq[0].any()
    assert not dq[1, :, :44].any()
    for x in (dk, dv):
        assert not x[0].any()
        assert not x[1, :, 150:].any()


@pytest.mark.parametrize("d", [39, 64, 128, 200])
def test_an_output_gradient_may_have_any_strides(d):
    q, k, v = (torch.randn(2, 4, n, d, device="cuda").half() for n in (150, 210, 210))
    do = torch.randn(2, 4, 150, d, device="cuda").half()
    one = torch.ones((), device="cuda", dtype=q.dtype).expand(do.shape)  # as of a sum
    laid = torch.empty(150, 2, 4, d, device="cuda", dtype=q.dtype).permute(1, 2, 0, 3).copy_(do)
    for x in (one, laid, do.mT.contiguous().mT):
        assert_same(gradients(q, k, v, x), gradients(q, k, v, x.contiguous()))


@pytest.mark.parametrize("d", [64, 96, 192])
@pytest.mark.parametrize("only", range(3))
def test_each_gradient_alone_is_as_with_the_others(only, d):
    q, k, v, do = (torch.randn(2, 4, 200, d, device="cuda").half() for _ in range(4))
    want = gradients(q, k, v, do, causal=True)[only]
    leaves = [x.detach().requires_grad_(i == only) for i, x in enumerate((q, k, v))]
    [got] = torch.autograd.grad(STAGE.attend(*leaves, causal=True), leaves[only], do)
    # by another kernel: dq by stage 7's, dk and dv by the one that is compiled without dq
    assert distance(got, want) <= 2 * torch.finfo(q.dtype).eps


def test_a_second_derivative_is_refused():
    q, k, v = (torch.randn(1, 2, 64, 64, device="cuda").half() for _ in range(3))
    q.requires_grad_()
    [dq] = torch.autograd.grad(STAGE.attend(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"stage 9 .* can't be differentiated twice"):
        dq.sum().backward()


@pytest.mark.parametrize("d", [64, 256])
def test_gradients_come_through_torch_compile_and_a_graph_of_cuda(d):
    q, k, v, do = (torch.randn(2, 4, 256, d, device="cuda").half() for _ in range(4))
    want = gradients(q, k, v, do, causal=True)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(q, k, v):
        return STAGE.attend(q, k, v, causal=True)

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    assert_same(torch.autograd.grad(model(*leaves), leaves, do), want)
    graph, found = captured(lambda: gradients(q, k, v, do, causal=True))
    for _ in range(5):
        for x in found:
            x.fill_(math.nan)
        graph.replay()
        assert_same(found, want)


@pytest.mark.parametrize("d", [39, 64])
def test_a_graph_of_cuda_may_hold_copies(d):
    """Inputs that the copy engine can't read: the counter must not take a copy's memory."""
    wide = [torch.randn(1, 2, 130, 2 * d, device="cuda").half() for _ in range(4)]
    q, k, v, do = (x[..., ::2] for x in wide)
    want = gradients(q, k, v, do)
    graph, found = captured(lambda: gradients(q, k, v, do))
    graph.replay()
    assert_same(found, want)


def test_a_backward_pass_holds_little_more_than_dq_s_sums():
    q, k, v, do = (torch.randn(1, 8, 2048, 128, device="cuda").half() for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = STAGE.attend(*leaves)
    peak = peak_of(lambda: torch.autograd.grad(o, leaves, do, retain_graph=True))
    rows = q.numel() // 128
    assert peak <= 4 * q.numel() + 3 * 2 * q.numel() + 8 * rows + 5 * 512


@pytest.mark.parametrize("d", [64, 128, 256])
def test_dq_is_the_same_where_torch_asks_for_that(d):
    q, k, v, do = (torch.randn(2, 4, 1000, d, device="cuda").half() for _ in range(4))
    lse = torch.empty(q.shape[:3], device="cuda")
    o = hopper_launch.forward(q, k, v, True, None, lse=lse)
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = (
            hopper_launch.backward(q, k, v, o, lse, do, True, None) for _ in range(20)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    for other in others:
        assert_same(other, first)
