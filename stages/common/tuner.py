"""Find the fastest launch configuration of a kernel: timed at the first call of a kind.

Triton's own autotuner needs a driver even where kernels are interpreted, times with a buffer of its
own (which the harness's memory meter would count as the stage's) and doesn't tell what it chose. So
a kernel's two or three candidates are timed in turns, once per process, on the caller's own
tensors. The first that is within 2% of the fastest is taken, so that two processes rarely differ.
Nothing is kept on disk. Where nothing can be timed (in the interpreter, while a CUDA graph is
captured), or the same bits are asked for at every run, the first candidate runs: others sum up in
another order.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

Config = dict[str, int]  # BLOCK_M, ..., num_warps, num_stages: keyword arguments of a launch
Launch = Callable[[Config], None]

ROUNDS: Final = 7
AS_FAST: Final = 1.02  # times the fastest time: as good as that, whatever the noise
# the GPU is busy while Python launches: see harness/measures/timing.py
HEAD_START_CYCLES: Final = 1_000_000

chosen: dict[tuple[Any, ...], Config] = {}  # of this process
latest: dict[str, Config] = {}  # kernel -> what `choose` last gave, for whoever keeps records


def choose(
    kernel: Any,
    candidates: Sequence[Config],
    launch: Launch,
    like: torch.Tensor,
    kind: tuple[Any, ...],
    sizes: tuple[int, ...],
) -> Config:
    """Return the configuration to launch `kernel` with, one of `candidates`; noted in `latest`.

    candidates  in a fixed order, the safest first: that one runs where nothing can be timed, and
                under torch.use_deterministic_algorithms(True)
    launch      runs the kernel with a configuration, its outputs the same for each
    like        a tensor on the device and of the dtype in question
    kind        what else calls must have in common to share a choice
    sizes       of the problem; those up to the same power of two share a choice

    Raises RuntimeError where no candidate fits this GPU.
    """
    config = candidates[0]
    choice = len(candidates) > 1 and not torch.are_deterministic_algorithms_enabled()
    if like.device.type == "cuda" and choice:
        buckets = ((n - 1).bit_length() for n in sizes)
        key = (kernel, like.device.index, like.dtype, kind, *buckets)
        if key not in chosen and not torch.cuda.is_current_stream_capturing():
            with torch.cuda.device(like.device):
                times = time_each(candidates, launch)
            enough = AS_FAST * min(times.values())
            chosen[key] = candidates[min(i for i, ms in times.items() if ms <= enough)]
        config = chosen.get(key, config)
    latest[kernel.__name__] = config
    return config


def time_each(candidates: Sequence[Config], launch: Launch) -> dict[int, float]:
    """Index of each candidate that this GPU can launch -> median of its times in turns, ms."""
    from triton.runtime.errors import OutOfResources, PTXASError

    able, refusals = [], []
    for index, config in enumerate(candidates):
        try:
            launch(config)  # compiles
            able.append(index)
        except (OutOfResources, PTXASError) as error:  # too large for this GPU
            refusals.append(str(error))
    if not able:
        raise RuntimeError(f"none of {len(candidates)} configurations fits this GPU: {refusals[0]}")
    samples: dict[int, list[float]] = {index: [] for index in able}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(ROUNDS):
        for index in able:
            torch.cuda._sleep(HEAD_START_CYCLES)
            start.record()
            launch(candidates[index])
            end.record()
            end.synchronize()
            samples[index].append(start.elapsed_time(end))
    return {index: statistics.median(times) for index, times in samples.items()}
