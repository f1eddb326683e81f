"""Stage 9 on a Hopper GPU: the contract, each configuration, and races; elsewhere skipped."""

import math

import pytest
import torch
from on_a_gpu import MASKS, assert_masked_exact, assert_same, captured, launches
from stage_checks import everything, guarded_outputs

import stages
from stages.common import launch as path

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_hopper")]

STAGE, FLASH2 = stages.by_number(9), stages.by_number(6)
RAGGED = [
    (nq, nk, 4, False, None)
    for nq, nk in ((1, 1), (63, 64), (65, 127), (300, 1), (1, 300), (256, 384), (1000, 1000))
]
# lengths that end with a tile: no tile needs its mask, and a loop over those that do has no turn
WHOLE = [(128, 128, 4, False, (64, 128)), (300, 384, 2, True, (128, 384))]
# rows for one consumer and a bit: the others have none, whatever the lengths
FEW_ROWS = [(65, 500, 2, False, (490, 130)), (65, 500, 2, False, (500, 0))]
# the diagonal moved by 64 keys, which a consumer's rows see in one tile, and by some whole tiles
MOVED = [(320, 384, 2, True, (100, 384)), (384, 256, 2, True, None), (129, 513, 2, True, None)]
CONFIGS = [
    (128, "TWO_CONSUMERS"),
    (64, "THREE_CTAS"),
    (64, "THREE_CONSUMERS"),
    (80, "D_80"),
    (96, "D_96"),
    (192, "D_192"),
    (256, "D_256"),
]


@pytest.mark.parametrize("inputs", ["normal", "peaky"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("most", "name"), CONFIGS)
def test_each_configuration_is_exact(most, name, dtype, inputs, monkeypatch):
    """Head dimensions up to `most`, padded where they are less; outputs and gradients."""
    monkeypatch.setattr(STAGE.launch, "plan", lambda *problem: getattr(STAGE.launch, name))
    for d in (most, most - 16, most - 23, 1):
        masks = RAGGED + MASKS + WHOLE + FEW_ROWS + MOVED
        assert_masked_exact(STAGE, masks, inputs=inputs, dtype=dtype, d=d, direction="train")


@pytest.mark.parametrize(("d", "name"), CONFIGS)
def test_what_is_past_a_length_changes_no_output(d, name, monkeypatch):
    """Keys and values of NaN past lengths that end within tiles, which the diagonal crosses."""
    monkeypatch.setattr(STAGE.launch, "plan", lambda *problem: getattr(STAGE.launch, name))
    for nq, nk, seqlens_k in ((500, 500, (300, 77)), (300, 515, (515, 1)), (700, 500, (129, 0))):
        q, k, v = (torch.randn(2, 3, n, d, device="cuda").half() for n in (nq, nk, nk))
        lengths = torch.tensor(seqlens_k, device="cuda").int()
        plain = STAGE.attend(q, k, v, causal=True, seqlens_k=lengths)
        for b, length in enumerate(seqlens_k):
            k[b, :, length:], v[b, :, length:] = math.nan, math.nan
        assert torch.equal(STAGE.attend(q, k, v, causal=True, seqlens_k=lengths), plain)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_what_is_past_a_length_changes_no_output_of_many_tiles(d, causal):
    """Each CTA has several blocks; key heads are shared, lengths end within tiles."""
    q = torch.randn(8, 32, 1024, d, device="cuda").half()
    k, v = (torch.randn(8, 4, 1024, d, device="cuda").half() for _ in range(2))
    lengths = torch.arange(8, device="cuda").int() * 131
    plain = STAGE.launch.forward(q, k, v, causal, lengths)
    for b, length in enumerate(lengths.tolist()):
        k[b, :, length:], v[b, :, length:] = math.nan, math.inf
    lse, first = torch.empty(q.shape[:3], device="cuda"), None
    for _ in range(20):
        lse.fill_(math.nan)
        assert torch.equal(STAGE.launch.forward(q, k, v, causal, lengths, lse=lse), plain)
        first = lse.clone() if first is None else first
        assert torch.equal(lse, first)
    assert not lse.isnan().any()
    graph, o = captured(lambda: STAGE.launch.forward(q, k, v, causal, lengths))
    for _ in range(3):
        o.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(o, plain)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("d", "name"), CONFIGS)
def test_launches_are_the_same_bit_for_bit(d, name, causal):
    """A race lost whole tiles in a few of hundreds of launches: outputs begin as NaN, all heads."""
    q, k, v = (torch.randn(8, 2048 // d, 1024, d, device="cuda").bfloat16() for _ in range(3))
    config, first = getattr(STAGE.launch, name), None

    def launch():
        lse = torch.empty(q.shape[:3], device="cuda")
        return STAGE.launch.forward(q, k, v, causal, None, lse=lse, config=config), lse

    for found in launches(launch):
        first = first or found
        assert_same(found, first)
    assert torch.isfinite(first[0]).all()
    assert torch.isfinite(first[1]).all()


def views(x):
    """`x` (B, H, N, d) in other places and orders, as the copy engine can read it or can't."""
    yield x.transpose(1, 2).contiguous().transpose(1, 2)
    yield x.transpose(2, 3).contiguous().transpose(2, 3)
    wide = torch.full((*x.shape[:3], x.shape[3] + 3), math.nan, dtype=x.dtype, device=x.device)
    yield wide[..., 1:-2].copy_(x)  # neither starts nor rows at multiples of 16 bytes
    every_other = torch.full((*x.shape[:3], 2 * x.shape[3]), math.nan, dtype=x.dtype, device="cuda")
    yield every_other[..., ::2].copy_(x)


@pytest.mark.parametrize("d", [40, 64, 128, 200])
def test_strides_do_not_matter(d):
    tensors = [torch.randn(2, 4, n, d, device="cuda").half() for n in (150, 210, 210, 150)]
    want = everything(STAGE, *tensors)
    for laid in zip(*map(views, tensors), strict=True):
        # dq too: two tiles of keys give the same sums in either order
        assert_same(everything(STAGE, *laid), want)
    q, k, v, _ = tensors
    alike = [x[:1, :1].expand_as(x) for x in (q, k, v)]
    assert torch.equal(STAGE.attend(*alike), STAGE.attend(*(x.contiguous() for x in alike)))


@pytest.mark.parametrize("d", [64, 256])
def test_float32_goes_to_stage_6(d):
    # heads enough for all multiprocessors; of fewer stage 8 splits the keys
    q, k, v = (torch.randn(2, 150, 100, d, device="cuda") for _ in range(3))
    assert torch.equal(STAGE.attend(q, k, v, causal=True), FLASH2.attend(q, k, v, causal=True))


@pytest.mark.parametrize(("n", "d"), [(1, 8), (63, 64), (65, 40), (130, 128), (400, 64)])
def test_nothing_is_written_outside_what_is_allocated(n, d, monkeypatch):
    """Nor left out: the output, lse and its rows with delta, dq's sums and all gradients."""
    monkeypatch.setattr(path, "kept", {})  # those launches know margins that are gone
    for dtype in (torch.float16, torch.bfloat16):
        tensors = [torch.randn(2, 3, n, d, device="cuda").to(dtype) for _ in range(4)]
        with guarded_outputs(whole=True) as asked:
            everything(STAGE, *tensors)
        assert asked.count((2, 3, n, d)) == 4
        assert len(asked) == 7


def test_streams_and_graphs_share_no_counter():
    inputs = [[torch.randn(4, 16, 1024, 64, device="cuda").half() for _ in range(3)] for _ in "ab"]
    want = [STAGE.attend(*x, causal=True) for x in inputs]
    graph, o = captured(lambda: STAGE.attend(*inputs[0], causal=True))
    other = torch.cuda.Stream()
    for _ in range(20):
        o.fill_(math.nan)
        other.wait_stream(torch.cuda.current_stream())
        graph.replay()
        with torch.cuda.stream(other):
            beside = STAGE.attend(*inputs[1], causal=True)
        torch.cuda.synchronize()
        assert_same((o, beside), want)


def test_kept_descriptors_keep_no_memory():
    before = torch.cuda.memory_allocated()
    q, k, v = (torch.randn(1, 2, 1000, 64, device="cuda").half() for _ in range(3))
    STAGE.attend(q, k, v)  # and the stream's counter, at the first call
    held = torch.cuda.memory_allocated() - before
    del q, k, v
    assert torch.cuda.memory_allocated() - before <= held - 3 * 2 * 1000 * 64 * 2
