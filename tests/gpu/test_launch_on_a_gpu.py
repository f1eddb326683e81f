"""The launch path starts the kernel that Triton itself would: bit for bit, wherever it runs."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
from on_a_gpu import assert_same, captured

import stages
from stages.common import launch as path
from stages.s09_gluon_hopper import launch as hopper

pytestmark = pytest.mark.gpu

each_stage = pytest.mark.parametrize("number", [6, 7, 8, 9])
# b, h, hk, nq, nk, d: sizes that are 1, that are multiples of 16, and that are neither
SIZES = [
    (1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 16, 16), (1, 1, 1, 16, 1, 64), (2, 4, 2, 48, 64, 64),
    (2, 4, 1, 33, 65, 40), (1, 2, 2, 128, 129, 64), (16, 16, 16, 1, 16, 64), (3, 1, 1, 7, 256, 128),
]  # fmt: skip


def at(x, offset):
    """A copy of `x` whose first number is `offset` numbers past a multiple of 16 bytes."""
    memory = torch.empty(x.numel() + offset, dtype=x.dtype, device=x.device)
    return memory[offset:].view(x.shape).copy_(x)


def calls_of(stage, device="cuda", half=True):
    """Calls of a stage, each with tensors of its own, which may lie anywhere; they return lists."""
    for seed, (b, h, hk, nq, nk, d) in enumerate(SIZES):
        for dtype in (torch.float16, torch.bfloat16) if half else (torch.float32,):
            made = torch.Generator(device).manual_seed(seed)
            shapes = (b, h, nq, d), (b, hk, nk, d), (b, hk, nk, d)
            q, k, v = (torch.randn(x, generator=made, device=device).to(dtype) for x in shapes)
            lengths = torch.randint(0, nk + 1, (b,), generator=made, device=device).int()
            for offsets in ((0, 0, 0, 0), (1, 0, 0, 0), (0, 8, 4, 0), (0, 0, 0, 1)):
                tensors = [at(x, n) for x, n in zip((q, k, v), offsets, strict=False)]
                for causal, seqlens_k in ((False, None), (True, at(lengths, offsets[3]))):
                    yield call_of(stage, tensors, causal=causal, seqlens_k=seqlens_k)


def call_of(stage, tensors, **masks):
    if not stage.STAGE.gradients:
        return lambda: [stage.attend(*tensors, **masks)]

    def call():
        leaves = [x.detach().requires_grad_() for x in tensors]
        o = stage.attend(*leaves, **masks)
        return [o.detach(), *torch.autograd.grad(o, leaves, torch.ones_like(o))[1:]]  # dk and dv

    return call


def as_triton_does(call, monkeypatch):
    """What a call gives when no launch is known before."""
    with monkeypatch.context() as patch:
        patch.setattr(path, "launches", {})
        caches = hopper.forward_launch, hopper.backward_launches
        for cache in caches:
            cache.cache_clear()
        found = call()
        for cache in caches:
            cache.cache_clear()
    return found


@each_stage
@pytest.mark.parametrize("half", [True, False], ids=["16 bits", "32 bits"])
def test_a_known_launch_is_the_one_that_triton_would_find(stage, half, monkeypatch):
    calls = [*calls_of(stage, half=half)]
    want = [as_triton_does(call, monkeypatch) for call in calls]
    monkeypatch.setattr(path, "launches", {})
    for call, expected in zip(calls, want, strict=True):
        assert_same(call(), expected)
    found, run = [], triton.JITFunction.run
    monkeypatch.setattr(triton.JITFunction, "run", lambda *a, **b: found.append(a) or run(*a, **b))
    for call, expected in zip(calls, want, strict=True):
        assert_same(call(), expected)
    assert not found, "all of them are known"


def test_gradients_that_are_launched_again_have_the_same_bits(monkeypatch):
    """On whichever stream; their tensors lie where they lay, since all that was made is free."""
    tensors, _ = a_call(stages.by_number(9))
    leaves = [x.requires_grad_() for x in tensors]
    o = stages.by_number(9).attend(*leaves, causal=True)
    do, again, known = torch.ones_like(o), hopper.launch_again, []
    monkeypatch.setattr(hopper, "launch_again", lambda key: known.append(again(key)) or known[-1])
    monkeypatch.setattr(path, "graphs_may_be_made", lambda: True)  # whatever threads pytest has

    def gradients():
        return torch.autograd.grad(o, leaves, do, retain_graph=True)[1:]  # dk and dv

    want = [x.clone() for x in gradients()]
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(path.GRAPH_FROM + 5):
                assert_same(gradients(), want)
        stream.synchronize()
    assert any(known)
    assert any(each.graph for each in path.kept.values())  # all launches as one
    do.normal_()
    found = [x.clone() for x in gradients()]
    monkeypatch.setattr(path, "kept", {})
    assert_same(gradients(), found)


def test_a_graph_is_made_beside_work_on_the_default_stream(monkeypatch):
    """Random numbers, memory that is asked for and given back, and what waits for a stream."""
    monkeypatch.setattr(path, "graphs_may_be_made", lambda: True)
    monkeypatch.setattr(path, "kept", {})
    end = threading.Event()

    def beside():
        found = []
        while not end.is_set():
            x = torch.rand(1 << 20, device="cuda")
            found.append(x.mean().item())
            del x
            torch.cuda.empty_cache()
        return found

    with ThreadPoolExecutor(1) as threads, torch.cuda.stream(torch.cuda.Stream()):
        other = threads.submit(beside)
        try:
            for n in range(64, 64 * 20, 64):
                q, k, v = (x[:, :, :1].expand(2, 4, n, 64) for x in a_call(stages.by_number(9))[0])
                leaves = [x.clone().requires_grad_() for x in (q, k, v)]
                o = stages.by_number(9).attend(*leaves)
                do = torch.ones_like(o)
                want = None
                for _ in range(path.GRAPH_FROM + 3):
                    found = torch.autograd.grad(o, leaves, do, retain_graph=True)[1:]
                    want = want or [x.clone() for x in found]
                    assert_same(found, want)
                    del found
        finally:
            end.set()
        assert all(0.49 < mean < 0.51 for mean in other.result())
    assert any(each.graph for each in path.kept.values())


def test_a_backward_pass_on_a_green_context_s_stream_stays_on_its_multiprocessors(monkeypatch):
    """As launches, since a graph that was captured elsewhere would take all of them."""
    contexts = pytest.importorskip("torch.cuda.green_contexts")
    if not hasattr(contexts.GreenContext, "Stream"):
        pytest.skip("this version of torch gives no stream of a green context")
    monkeypatch.setattr(path, "graphs_may_be_made", lambda: True)
    tensors, _ = a_call(stages.by_number(9))
    leaves = [x.requires_grad_() for x in tensors]
    context = contexts.GreenContext.create(num_sms=16, device_id=0)
    for stream, graphs in (torch.cuda.Stream(), True), (context.Stream(), False):
        monkeypatch.setattr(path, "kept", {})
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            o = stages.by_number(9).attend(*leaves, causal=True)
            do = torch.ones_like(o)
            for _ in range(path.GRAPH_FROM + 5):
                torch.autograd.grad(o, leaves, do, retain_graph=True)
        stream.synchronize()
        assert max(each.times for each in path.kept.values()) >= path.GRAPH_FROM or graphs
        assert any(each.graph for each in path.kept.values()) == graphs


def a_call(stage, seed=0, device="cuda"):
    made = torch.Generator(device).manual_seed(seed)
    tensors = [
        torch.randn(2, 4, 300, 64, generator=made, device=device).bfloat16() for _ in range(3)
    ]
    return tensors, call_of(stage, tensors, causal=True)


@each_stage
def test_threads_and_streams_at_once(stage):
    calls = [a_call(stage, seed)[1] for seed in range(4)]
    want = [call() for call in calls]
    torch.cuda.synchronize()

    def often(call):
        with torch.cuda.stream(torch.cuda.Stream()):
            found = [call() for _ in range(50)]
            torch.cuda.current_stream().synchronize()
        return found

    with ThreadPoolExecutor(len(calls)) as threads:
        for found, expected in zip(threads.map(often, calls), want, strict=True):
            for each in found:
                assert_same(each, expected)


@pytest.mark.parametrize("number", [6, 8, 9])
def test_a_graph_of_a_known_launch_replays_on_other_numbers(stage):
    (q, k, v), _ = a_call(stage)
    with torch.no_grad():
        for _ in range(2):
            stage.attend(q, k, v, causal=True)
        graph, o = captured(lambda: stage.attend(q, k, v, causal=True))
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
        graph.replay()
        assert_same([o], [stage.attend(q, k, v, causal=True)])


@each_stage
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_in_turns(stage, monkeypatch):
    calls = [a_call(stage, seed, f"cuda:{seed}")[1] for seed in (0, 1)]
    want = [as_triton_does(call, monkeypatch) for call in calls]
    for _ in range(3):
        for call, expected in zip(calls, want, strict=True):
            assert_same(call(), expected)


@each_stage
def test_a_hook_of_the_kernel_sees_each_launch(stage):
    """Triton's profilers and users' own: kernel.add_pre_run_hook."""
    _, call = a_call(stage)
    call()
    flash2 = stages.by_number(6).attention_kernel
    first = {6: flash2, 7: flash2, 9: hopper.attention_kernel}
    kernel = first.get(stage.STAGE.number) or stage.split_kernel
    seen = []
    kernel.add_pre_run_hook(lambda *args, **options: seen.append(args))
    try:
        call()
    finally:
        kernel.pre_run_hooks.clear()
    assert len(seen) == 1
