"""The sampler for a GPU, on one that is faked: two clocks, the host's and the device's."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from harness.isolation.changes import Watched
from harness.isolation.measured_stage import MeasuredStage
from harness.isolation.messages import Finish, Finished
from harness.measures import timing
from harness.measures.samples import Series
from harness.measures.timing import cuda_sampler, time_launches

CYCLES_PER_MS = 2_000_000


class Gpu:
    """A GPU whose work takes as long as it is told; `host` and `device` are times in ms."""

    def __init__(self):
        self.host = self.device = 0.0

    def run(self, ms):
        self.device = max(self.device, self.host) + ms

    def wait(self):
        self.host = max(self.host, self.device)

    def event(self, enable_timing):
        """As torch.cuda.Event: `at` is when the device gets to it."""
        event = SimpleNamespace(at=None)

        def record():
            event.at = max(self.device, self.host)

        def synchronize():
            self.host = max(self.host, event.at)

        event.record, event.synchronize = record, synchronize
        event.query = lambda: self.host >= event.at
        event.elapsed_time = lambda end: end.at - event.at
        return event


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: gpu.run(cycles / CYCLES_PER_MS))
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.wait)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda: SimpleNamespace(L2_cache_size=1)
    )
    flush = SimpleNamespace(zero_=lambda: gpu.run(0.01))
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: flush)
    return gpu


def sampled(call, rounds=5, align=int):
    """The samples of a call on the GPU, as its series takes them."""
    series = Series(cuda_sampler(call, align), "cuda")
    series.fix(alone=True)
    for _ in range(rounds):
        series.sample()
    return series.samples_ms


@pytest.mark.parametrize("launch_ms", [0.01, 0.3, 1.0, 4.0])
def test_a_slow_host_adds_nothing_to_the_time_on_the_device(gpu, launch_ms):
    def call():
        for _ in range(3):
            gpu.host += launch_ms
            gpu.run(0.25)

    assert sampled(call) == pytest.approx([0.75] * 5)


def test_a_call_that_waits_for_the_device_is_sampled_with_its_waiting(gpu):
    calls = []

    def call():
        calls.append(1)
        gpu.wait()
        gpu.host += 0.5
        gpu.run(0.25)

    assert sampled(call) == pytest.approx([0.75] * 5)
    assert len(calls) < 12


def test_the_wait_for_ranks_that_begin_later_adds_nothing(gpu):
    assert sampled(lambda: gpu.run(0.25), align=lambda: gpu.run(7.0)) == pytest.approx([0.25] * 5)


def test_launches_are_timed_in_a_row_without_what_the_gpu_does(gpu, monkeypatch):
    monkeypatch.setattr(timing.time, "perf_counter", lambda: 1e-3 * gpu.host)

    def call(launch_ms):
        gpu.host += launch_ms
        gpu.run(0.25)

    for launch_ms in (0.25, 4.0):
        assert time_launches(lambda ms=launch_ms: call(ms), 10) == pytest.approx(launch_ms)
    assert gpu.host >= gpu.device  # it has waited for the calls themselves


def test_of_the_rows_of_launches_the_fastest_counts(gpu, monkeypatch):
    rows = iter([0.09, 0.08, 0.03, 0.2, 0.08])  # a CPU that did something else, too
    monkeypatch.setattr(timing, "time_launches", lambda call, launches: next(rows))
    monkeypatch.setattr(timing, "sm_clock_mhz", lambda call, calls: 1980)
    ours = MeasuredStage.__new__(MeasuredStage)
    ours.device, ours.order = "cuda", SimpleNamespace(alone=True)
    ours.call_again = ours.call = lambda: None
    ours.timed = SimpleNamespace(call=None, change=(1, 2))
    finished = ours.finish(Finish(stage=0, clock_calls=3, launches=20, rows=5))
    assert finished == Finished(1980, 0.03, [1, 2], None) and next(rows, None) is None


@pytest.mark.parametrize("replayed", [True, False])
def test_outputs_with_one_place_for_all_calls_are_a_graphs_alone(replayed):
    x = torch.ones(4, 8)
    out = torch.zeros(4)
    watched = Watched(lambda: (out.copy_(x.sum(-1)),), x, replayed)
    watched.often, watched.cells = False, x.view(torch.int32).view(-1)  # as on a GPU
    while not watched.kept or watched.count == watched.due - 1:
        watched()
    watched()  # of which nothing is kept
    [kept] = watched.kept
    assert not torch.equal(kept, out)  # of a call with one element changed
    assert torch.equal(x, torch.ones(4, 8))
    assert watched.overwritten() == (not replayed)


def test_calls_that_take_turns_on_a_cpu_find_their_data_in_the_caches(monkeypatch):
    """By a clock by which a call takes five times as long after another's: never in a sample."""
    clock, before, calls = [0.0], [""], Counter()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def make(name, seconds):
        def call():
            clock[0] += seconds * (1 if before[0] == name else 5)
            before[0], calls[name] = name, calls[name] + 1

        return call

    short, other, long = make("short", 0.0007), make("other", 0.001), make("long", 0.2)
    timings = timing.alternate([short, other, long], ["cpu"] * 3, rounds=4)
    for each, ms in zip(timings[:2], (0.7, 1.0), strict=True):
        assert each.samples_ms == pytest.approx([ms] * 4)
    assert calls["long"] == 1 + 4  # it fills the caches by itself
