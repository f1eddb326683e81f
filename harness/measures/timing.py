"""Measure the time of a call.

On a CPU by torch.utils.benchmark.Timer with its defaults: one thread (the stages before torch have
only one), and Python's garbage collector off. On a GPU by a pair of CUDA events for each call, with
the L2 cache flushed before each. The result is the median of the samples, the spread their
interquartile range.
"""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.utils.benchmark import Timer

Call = Callable[[], object]
T = TypeVar("T")

CLOCK_SECONDS = 0.02  # of calls before the GPU's clock is read
HEAD_START_CYCLES = 2_000_000  # of the GPU's clock, about 1 ms: longer than most calls' launches
LONGEST_HEAD_START = 32_000_000  # about 16 ms
SAMPLE_SECONDS = 0.002  # the shortest sample of CPU calls that take turns
WARM_SECONDS = 0.01  # of untimed calls before it
LAUNCHES = 20  # in a row
LAUNCHES_MS = 40.0  # of the GPU's time for a row, at most, but for two calls
LAUNCH_ROWS = 5  # each in another turn


@dataclass(frozen=True)
class Timing:
    """The samples of one call, in milliseconds per call."""

    samples_ms: list[float]

    @property
    def median_ms(self) -> float:
        """The median of the samples, ms."""
        return statistics.median(self.samples_ms)

    @property
    def rounds_ms(self) -> list[float]:
        """The samples for a record, to six digits, more than any clock resolves."""
        return [float(f"{sample:.6g}") for sample in self.samples_ms]

    @property
    def iqr_ms(self) -> float | None:
        """The third quartile less the first, ms; None where there is one sample."""
        if len(self.samples_ms) < 2:
            return None
        first, _, third = statistics.quantiles(self.samples_ms, n=4, method="inclusive")
        return third - first


def time_once(call: Callable[[], T], device: str) -> tuple[T, float]:
    """Run `call`; returns its result and the ms until the device has finished."""
    synchronize(device)
    with without_collector():
        start = time.perf_counter()
        result = call()
        synchronize(device)
        return result, 1e3 * (time.perf_counter() - start)


def time_call(call: Call, device: str, seconds: float) -> Timing:
    """Time `call`, which is warmed up already, for about `seconds`."""
    return time_cuda(call, seconds) if device == "cuda" else time_cpu(call, seconds)


def time_cpu(call: Call, seconds: float) -> Timing:
    """Samples by torch.utils.benchmark, each of enough calls to make the clock's cost small."""
    timer = Timer("call()", globals={"call": call})
    measurement = timer.blocked_autorange(min_run_time=seconds)
    return Timing([1e3 * sample for sample in measurement.times])


def time_cuda(call: Call, seconds: float) -> Timing:
    """One sample per call, between two events, the L2 cache overwritten before each."""
    samples: list[float] = []
    sample = cuda_sampler(call)
    deadline = time.perf_counter() + seconds
    while not samples or time.perf_counter() < deadline:
        samples.append(sample())
    return Timing(samples)


def alternate(
    calls: Sequence[Call], devices: Sequence[str], seconds: float = 0.0, *, rounds: int
) -> list[Timing]:
    """Time several calls in turns, all warmed up already: one sample of each per round.

    There are at least `rounds` rounds, and more until `seconds` have passed. Each round starts one
    call later than the last, so that no call always follows the same other. A machine whose clock
    drops slows all of them alike, so that the ratio of two medians is fair.
    """
    samplers = [
        cuda_sampler(call) if device == "cuda" else cpu_sampler(call)
        for call, device in zip(calls, devices, strict=True)
    ]
    samples: list[list[float]] = [[] for _ in calls]
    deadline = time.perf_counter() + seconds
    first = 0
    while first < rounds or time.perf_counter() < deadline:
        for offset in range(len(calls)):
            index = (first + offset) % len(calls)
            samples[index].append(samplers[index]())
        first += 1
    return [Timing(each) for each in samples]


def time_launches(call: Call, call_ms: float) -> float:
    """How long Python takes to launch `call` on a GPU, ms: the median of calls in a row.

    `call` is warmed up already and takes about `call_ms`. The GPU works off what was launched
    before, as in a model, and nothing waits for it. (A launch after a wait takes longer, as the
    CPU's caches have other things in them by then.)
    """
    launches = []
    synchronize("cuda")
    with without_collector():
        for _ in range(max(2, min(LAUNCHES, int(LAUNCHES_MS / call_ms)))):
            began = time.perf_counter()
            call()
            launches.append(1e3 * (time.perf_counter() - began))
    synchronize("cuda")
    return statistics.median(launches)


def cpu_sampler(call: Call) -> Callable[[], float]:
    """Make a function that takes one sample of `call`, in ms per call, over at least 2 ms.

    Before it come untimed calls for 10 ms, as many as fit: the caches hold what the other stages
    left there. Stage 2 at N = 64 takes twice as long after a call of stage 0, and as long as alone
    after some calls of its own. What takes longer than that has no use for the caches' old content.
    """

    def seconds(calls: int) -> float:
        """Of one of so many calls."""
        with without_collector():
            start = time.perf_counter()
            for _ in range(calls):
                call()
            return max((time.perf_counter() - start) / max(1, calls), 1e-7)

    each = seconds(1)
    if each < WARM_SECONDS:
        each = seconds(int(WARM_SECONDS / each))
    untimed, number = int(WARM_SECONDS / each), max(1, round(SAMPLE_SECONDS / each))

    def sample() -> float:
        seconds(untimed)
        return 1e3 * seconds(number)

    return sample


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Turn Python's garbage collector off, as timeit does, and on again if it was on."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def cuda_sampler(call: Call) -> Callable[[], float]:
    """Make a function that takes one sample of `call` between two events, the L2 cache flushed.

    The GPU is kept busy while Python launches `call`, so that the sample is the device's own time,
    without the time that an idle GPU would wait for the Python interpreter. Where the GPU was done
    before Python, the sample is taken again with twice the head start. A call that waits for the
    GPU itself gets the longest one, and its waiting counts as its time.
    """
    head_start = HEAD_START_CYCLES
    l2_bytes = torch.cuda.get_device_properties().L2_cache_size
    flush = torch.empty(2 * l2_bytes, dtype=torch.int8, device="cuda")
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)

    def sample() -> float:
        nonlocal head_start
        while True:
            torch.cuda._sleep(head_start)
            flush.zero_()
            start.record()
            call()
            end.record()
            waited = start.query()
            end.synchronize()
            if not waited or head_start >= LONGEST_HEAD_START:
                return start.elapsed_time(end)
            head_start *= 2

    return sample


def captured(call: Callable[[], T]) -> Callable[[], T]:
    """Capture `call` into a CUDA graph: returns a call that replays it, with the same outputs."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()

    def replay() -> T:
        graph.replay()
        return outputs

    return replay


def sm_clock_mhz(call: Call, device: str) -> int | None:
    """The clock of the GPU's multiprocessors while `call` runs, MHz: it drops under load.

    None on a CPU, and where torch can't read it (it needs nvidia-ml-py).
    """
    if device != "cuda":
        return None
    start = time.perf_counter()
    while time.perf_counter() < start + CLOCK_SECONDS:
        call()
        torch.cuda.synchronize()
    call()
    try:
        return int(torch.cuda.clock_rate())
    except (ModuleNotFoundError, RuntimeError):
        return None
    finally:
        torch.cuda.synchronize()


def synchronize(device: str) -> None:
    """Wait for the GPU, where `device` is one."""
    if device == "cuda":
        torch.cuda.synchronize()
