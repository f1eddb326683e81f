"""How time is measured, and nothing else.

On a CPU by torch.utils.benchmark.Timer, as it has it: one thread (the stages before torch have no
more), and Python's garbage collector off. On a GPU by a pair of CUDA events for each call, with the
L2 cache flushed before each. The figure is the median of the samples, the spread their
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

CLOCK_SECONDS = 0.02  # of calls before the GPU is asked for its clock
LEAST_ROUNDS = 5
HEAD_START_CYCLES = 2_000_000  # of the GPU's clock, about 1 ms: longer than launches from Python
SAMPLE_SECONDS = 0.002  # a sample of alternating CPU contestants is at least so long


@dataclass(frozen=True)
class Timing:
    """The samples of one call, in milliseconds a call."""

    samples_ms: list[float]

    @property
    def median_ms(self) -> float:
        """The median of the samples, ms."""
        return statistics.median(self.samples_ms)

    @property
    def rounds_ms(self) -> list[float]:
        """The samples for a record: six digits, more than any clock here has."""
        return [float(f"{sample:.6g}") for sample in self.samples_ms]

    @property
    def iqr_ms(self) -> float | None:
        """The third quartile less the first, ms; None where there is one sample."""
        if len(self.samples_ms) < 2:
            return None
        first, _, third = statistics.quantiles(self.samples_ms, n=4, method="inclusive")
        return third - first


def time_once(call: Callable[[], T], device: str) -> tuple[T, float]:
    """What `call` returns and how many ms it took, the device's work waited for."""
    synchronize(device)
    with without_collector():
        start = time.perf_counter()
        result = call()
        synchronize(device)
        return result, 1e3 * (time.perf_counter() - start)


def time_call(call: Call, device: str, seconds: float) -> Timing:
    """Time `call`, warmed up already, for about `seconds`."""
    return time_cuda(call, seconds) if device == "cuda" else time_cpu(call, seconds)


def time_cpu(call: Call, seconds: float) -> Timing:
    """Samples by torch.utils.benchmark, each of enough calls to drown the clock's own cost."""
    timer = Timer("call()", globals={"call": call})
    measurement = timer.blocked_autorange(min_run_time=seconds)
    return Timing([1e3 * sample for sample in measurement.times])


def time_cuda(call: Call, seconds: float) -> Timing:
    """One sample a call, between two events, the L2 cache overwritten before each."""
    sample = cuda_sampler(call)
    samples: list[float] = []
    deadline = time.perf_counter() + seconds
    while not samples or time.perf_counter() < deadline:
        samples.append(sample())
    return Timing(samples)


def alternate(
    calls: Sequence[Call],
    devices: Sequence[str],
    seconds: float = 0.0,
    rounds: int = LEAST_ROUNDS,
) -> list[Timing]:
    """Time contestants in turns, all warmed up already: round after round, one sample each.

    As many `rounds` as are asked for, and more until `seconds` have passed. Each round starts one
    contestant later than the last, so that none always follows the same other. The clocks of the
    machine sag for all alike, so that the ratio of two medians is fair.
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


def cpu_sampler(call: Call) -> Callable[[], float]:
    """A function that takes one sample of `call`, ms a call, of at least 2 ms together."""
    timer = Timer("call()", globals={"call": call})
    number = max(1, round(SAMPLE_SECONDS / max(timer.timeit(1).mean, 1e-7)))

    def sample() -> float:
        with without_collector():
            start = time.perf_counter()
            for _ in range(number):
                call()
            return 1e3 * (time.perf_counter() - start) / number

    return sample


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Python's garbage collector off, as timeit has it, and on again if it was."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def cuda_sampler(call: Call) -> Callable[[], float]:
    """A function that takes one sample of `call` between two events, the L2 cache flushed.

    The GPU is kept busy while Python launches `call`, so that the figure is the device's own time:
    what a stream of work would see, not what an idle GPU waits for the interpreter.
    """
    l2_bytes = torch.cuda.get_device_properties().L2_cache_size
    flush = torch.empty(2 * l2_bytes, dtype=torch.int8, device="cuda")
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)

    def sample() -> float:
        torch.cuda._sleep(HEAD_START_CYCLES)
        flush.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    return sample


def sm_clock_mhz(call: Call, device: str) -> int | None:
    """The clock of the GPU's multiprocessors while `call` runs, MHz: it sags under load.

    None on a CPU, and where torch can't ask (it needs nvidia-ml-py).
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
    """Wait for the GPU, where there is one in play."""
    if device == "cuda":
        torch.cuda.synchronize()
