"""Measure the time of a call.

On a CPU by torch.utils.benchmark.Timer: one thread (the stages before torch have only one), and
Python's garbage collector off. On a GPU by a pair of CUDA events for each call, with the L2 cache
flushed before each. The result is the median of the samples, the spread their interquartile range;
samples.py says how many calls a sample takes, and who decides.
"""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch.utils.benchmark import Timer

from harness.measures.samples import Plan, Sampled, Series, rounds_in, turns

Call = Callable[[], object]
T = TypeVar("T")


def time_once(call: Callable[[], T], device: str) -> tuple[T, float]:
    """Run `call`; returns its result and the ms until the device has finished."""
    synchronize(device)
    with without_collector():
        start = time.perf_counter()
        result = call()
        synchronize(device)
        return result, 1e3 * (time.perf_counter() - start)


def time_call(call: Call, device: str, seconds: float) -> Series:
    """Time `call`, which is warmed up already, for about `seconds`."""
    [series] = alternate([call], [device], seconds)
    return series


def alternate(
    calls: Sequence[Call], devices: Sequence[str], seconds: float = 0.0, rounds: int | None = None
) -> list[Series]:
    """Time several calls of this process in turns, all warmed up already: one sample per round.

    There are `rounds` rounds, or as many as fit into `seconds`. A machine whose clock drops slows
    all of them alike, so that the ratio of two medians is fair.
    """
    series = [
        Series(sampler(call, device), device) for call, device in zip(calls, devices, strict=True)
    ]
    for each in series:
        each.fix(alone=len(calls) == 1)
    rounds = rounds or rounds_in(seconds, sum(each.cost for each in series))
    for index in turns(len(series), rounds):
        series[index].sample()
    return series


def sampler(call: Call, device: str, align: Call = int) -> Callable[[Plan], Sampled]:
    """Make a function that takes one sample of `call`, as a plan says.

    `align` is called right before: processes that compute together begin together by it.
    """
    return (cuda_sampler if device == "cuda" else cpu_sampler)(call, align)


def cpu_sampler(call: Call, align: Call = int) -> Callable[[Plan], Sampled]:
    """Make a function that takes one sample of `call` on a CPU.

    Calls of which only one is a sample take long: torch's Timer would call each twice before it.
    """
    timer = Timer("call()", globals={"call": call}, timer=lambda: time.perf_counter())

    def sample(plan: Plan) -> Sampled:
        with without_collector():
            for _ in range(plan.untimed):
                call()
        align()
        if plan.calls == 1:
            return Sampled(time_once(call, "cpu")[1])
        return Sampled(1e3 * timer.timeit(plan.calls).mean)

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


def cuda_sampler(call: Call, align: Call = int) -> Callable[[Plan], Sampled]:
    """Make a function that takes one sample of `call` between two events, the L2 cache flushed.

    The GPU is kept busy while Python launches `call`, so that the sample is the device's own time,
    without the time that an idle GPU would wait for the Python interpreter.
    """
    l2_bytes = torch.cuda.get_device_properties().L2_cache_size
    flush = torch.empty(2 * l2_bytes, dtype=torch.int8, device="cuda")
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)

    def sample(plan: Plan) -> Sampled:
        torch.cuda._sleep(plan.head_start)
        flush.zero_()
        align()
        start.record()
        call()
        end.record()
        late = start.query()
        end.synchronize()
        return Sampled(start.elapsed_time(end), late)

    return sample


def time_launches(call: Call, launches: int) -> float:
    """How long Python takes to launch `call` on a GPU, ms: the median of `launches` in a row.

    `call` is warmed up already. The GPU works off what was launched before, as in a model, and
    nothing waits for it. (A launch after a wait takes longer, as the CPU's caches have other things
    in them by then.)
    """
    took = []
    synchronize("cuda")
    with without_collector():
        for _ in range(launches):
            began = time.perf_counter()
            call()
            took.append(1e3 * (time.perf_counter() - began))
    synchronize("cuda")
    return statistics.median(took)


def captured(call: Callable[[], T]) -> Callable[[], T]:
    """Capture `call` into a CUDA graph: returns a call that replays it, with the same outputs."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()

    def replay() -> T:
        graph.replay()
        return outputs

    return replay


def sm_clock_mhz(call: Call, calls: int) -> int | None:
    """The clock of the GPU's multiprocessors during the last of `calls` calls: it drops under load.

    None where torch can't read it (it needs nvidia-ml-py).
    """
    for _ in range(calls):
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
