"""Stage 8 compiled: few query rows against many keys, in several parts; streams, graphs, memory."""

from itertools import product

import pytest
import torch
from on_a_gpu import assert_exact, captured, peak_of, problem
from stage_checks import guarded_outputs

import stages
from attention_ladder.models.training import writing
from attention_ladder.models.training.gpt import GPT
from attention_ladder.models.training.plan import Shape
from harness.problems.inputs import make_inputs

pytestmark = pytest.mark.gpu

split = stages.by_number(8)
# b, h, hk, nk, d: few heads, grouped ones, a single key head; a ragged end; the longest promised
CACHED = [
    (1, 8, 8, 4096, 128),
    (2, 8, 2, 3001, 64),
    (4, 16, 1, 2050, 128),
    (1, 4, 1, 131072, 128),
    (3, 6, 2, 1000, 256),
]


def asked(shape, nq, **fields):
    b, h, hk, nk, d = shape
    return problem(**{"b": b, "h": h, "hk": hk, "nq": nq, "nk": nk, "d": d, **fields})


def parts(problem):
    """In how many parts stage 8 takes a problem."""
    return split.plan(make_inputs(problem)[0], problem.hk, problem.nk)[0]


@pytest.mark.parametrize("shape", CACHED, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("inputs", ["normal", "peaky"])
def test_parts_are_exact(shape, dtype, inputs):
    lengths = tuple(shape[3] * b // shape[0] for b in range(shape[0]))  # the first sees no key
    for nq, causal, seqlens_k in product((1, 8), (False, True), (None, lengths)):
        masks = {"causal": causal, "seqlens_k": seqlens_k}
        each = asked(shape, nq, dtype=dtype, inputs=inputs, **masks)
        assert parts(each) > 1
        assert_exact(split, each)


def test_runs_are_the_same_bit_for_bit_on_two_streams_at_once():
    """Each call has parts of its own: a buffer for all would be written by both."""
    problems = [asked(CACHED[0], 1, dtype="float16", seed=seed) for seed in (1, 2)]
    inputs = [make_inputs(each) for each in problems]
    want = [split.attend(*tensors) for tensors in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    found = [[], []]
    for _ in range(50):
        for stream, tensors, answers in zip(streams, inputs, found, strict=True):
            with torch.cuda.stream(stream):
                answers.append(split.attend(*tensors))
    torch.cuda.synchronize()
    for answers, first in zip(found, want, strict=True):
        assert all(torch.equal(o, first) for o in answers)


def test_a_graph_of_parts_and_merge_replays_on_other_numbers():
    q, k, v = make_inputs(asked(CACHED[1], 2, dtype="float16"))
    split.attend(q, k, v)
    graph, o = captured(lambda: split.attend(q, k, v))
    for x in (q, k, v):
        x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(o, split.attend(q, k, v))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_parts_are_written_whole_and_nothing_else_is(dtype):
    for shape in CACHED[:3]:
        each = asked(shape, 1, dtype=dtype)
        tensors, splits = make_inputs(each), parts(each)
        b, h, d = each.b, each.h, each.d
        with guarded_outputs(whole=True) as made:
            split.attend(*tensors)
        assert sorted(made) == sorted([(b, h, 1, d), (b, h, 1, splits, d), (b, h, 1, splits, 2)])


@pytest.mark.parametrize("shape", CACHED, ids=str)
@pytest.mark.parametrize("nq", [1, 8, 64, 1000])
def test_the_parts_take_no_more_memory_than_the_card_has_programs_for(shape, nq):
    """Four programs at most for each of two places on a multiprocessor, of so many rows each."""
    each = asked(shape, nq, dtype="bfloat16")
    q, k, v = make_inputs(each)
    peak = peak_of(lambda: split.attend(q, k, v))
    places = 2 * torch.cuda.get_device_properties(q.device).multi_processor_count
    rows = (4 * places + each.b * each.hk) * split.MOST_ROWS
    parts_bytes = 4 * rows * (each.d + 2)
    assert peak <= q.nbytes + parts_bytes + 3 * 512  # the allocator's own rounding


def test_a_graph_that_appends_a_token_replays_over_the_borders_of_pages():
    """It computes what calls one after another do, bit for bit; the host only counts."""
    made = torch.Generator("cuda").manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=made, device="cuda").half()

    caches = [split.PagedCache(64, 16, 2, 64, torch.float16, "cuda") for _ in range(2)]
    for name, n in (("a", 14), ("b", 33)):
        k, v = draw(2, n, 64), draw(2, n, 64)
        for cache in caches:
            cache.append(name, k, v)
    plain, replayed = caches
    q, k, v = draw(2, 4, 1, 64), draw(2, 2, 1, 64), draw(2, 2, 1, 64)
    names = ["a", "b"]

    def step(cache):
        cache.append_many(names, k, v)
        return split.attend_paged(q, cache, names)

    assert torch.equal(step(plain), step(replayed))
    one = draw(2, 1, 64), draw(2, 1, 64)
    for cache in caches:
        cache.append("a", *one)  # its page is full
    with (
        torch.cuda.graph(torch.cuda.CUDAGraph()),
        pytest.raises(RuntimeError, match="reserve pages before the capture"),
    ):
        replayed.append_many(names, k, v)
    for name in names:
        replayed.reserve(name, 40)
    length = dict(replayed.length)
    graph, o = captured(lambda: step(replayed))
    assert replayed.length == length
    for _ in range(40):
        for x in (q, k, v):
            x.copy_(draw(*x.shape))
        replayed.advance(names)
        graph.replay()
        assert torch.equal(o, step(plain))  # so few keys are one part
    assert plain.length == replayed.length and torch.equal(plain.lengths, replayed.lengths)


def test_a_model_writes_the_same_tokens_by_replays():
    shape = Shape(layers=2, heads=4, head_dim=64, block=128, batch=1, lr=1e-3)
    torch.manual_seed(0)
    model = GPT(7, shape, split.attend).cuda()
    for weight in model.parameters():  # at first all logits are nearly the same
        weight.data *= 4
    ids = (torch.arange(30, device="cuda") % 7)[None]
    want = list(writing.write(model, split, ids, 60, True))
    assert list(writing.replay(model, split, ids, 60)) == want and len(set(want)) > 1
