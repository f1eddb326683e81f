"""How time is measured, and nothing else.

On a CPU by torch.utils.benchmark.Timer, with all of torch's threads and Python's garbage collector
off, as timeit has it. On a GPU by a pair of CUDA events a call, with the L2 cache flushed before
each. A call is timed in samples; the figure is their median, the spread their interquartile range.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.benchmark import Timer

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """The samples of one call, in milliseconds a call."""

    samples_ms: list[float]

    @property
    def median_ms(self) -> float:
        """The median of the samples, ms."""
        return statistics.median(self.samples_ms)

    @property
    def iqr_ms(self) -> float | None:
        """The third quartile less the first, ms; None where there is one sample."""
        if len(self.samples_ms) < 2:
            return None
        first, _, third = statistics.quantiles(self.samples_ms, n=4, method="inclusive")
        return third - first


def time_once(call: Call, device: str) -> tuple[object, float]:
    """What `call` returns and how many ms it took, the device's work waited for."""
    synchronize(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    return result, 1e3 * (time.perf_counter() - start)


def time_call(call: Call, device: str, seconds: float) -> Timing:
    """Time `call`, warmed up already, for about `seconds`."""
    return time_cuda(call, seconds) if device == "cuda" else time_cpu(call, seconds)


def time_cpu(call: Call, seconds: float) -> Timing:
    """Samples by torch.utils.benchmark, each of enough calls to drown the clock's own cost."""
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    measurement = timer.blocked_autorange(min_run_time=seconds)
    return Timing([1e3 * sample for sample in measurement.times])


def time_cuda(call: Call, seconds: float) -> Timing:
    """One sample a call, between two events, the L2 cache overwritten before each."""
    l2_bytes = torch.cuda.get_device_properties().L2_cache_size
    flush = torch.empty(2 * l2_bytes, dtype=torch.int8, device="cuda")
    samples: list[float] = []
    deadline = time.perf_counter() + seconds
    while not samples or time.perf_counter() < deadline:
        flush.zero_()
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end))
    return Timing(samples)


def synchronize(device: str) -> None:
    """Wait for the GPU, where there is one in play."""
    if device == "cuda":
        torch.cuda.synchronize()
