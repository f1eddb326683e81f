"""The fastest method to read memory once: torch's sum, or our own kernel with several settings.

A sum must read every byte and writes next to nothing. All programs go through x together, each with
`depth` tiles of 16-byte loads in flight.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from harness.measures.timing import time_call
from stages.common.no_triton import no_triton  # stages first: it decides whether Triton interprets

try:
    import triton
    import triton.language as tl
except ImportError:  # only torch's sum is available
    triton = tl = no_triton

TRIAL_SECONDS: Final = 0.1
# floats in a tile, warps, depth, programs for each multiprocessor
SHAPES: Final = ((8192, 4, 4, 1), (8192, 4, 4, 2), (4096, 4, 4, 4), (8192, 8, 1, 4))


@triton.jit
def sum_kernel(  # type: ignore[no-untyped-def]
    x_ptr, sums_ptr, tiles, TILE: tl.constexpr, DEPTH: tl.constexpr
):
    """Sum a program's share of the `tiles` tiles of TILE float32 of x into its place in sums."""
    program = tl.program_id(0)
    acc = tl.zeros((TILE,), dtype=tl.float32)
    for tile in tl.range(program, tiles, tl.num_programs(0), num_stages=DEPTH):
        offs = tl.cast(tile, tl.int64) * TILE + tl.arange(0, TILE)
        acc += tl.load(x_ptr + offs, eviction_policy="evict_first")  # nothing is read twice
    tl.store(sums_ptr + program, tl.sum(acc, 0))


def methods(x: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Name -> a call that reads x (n,) float32, n a multiple of 8192, and returns partial sums."""

    def launch(sums: torch.Tensor, tile: int, warps: int, depth: int) -> torch.Tensor:
        sum_kernel[(len(sums),)](x, sums, x.numel() // tile, tile, depth, num_warps=warps)
        return sums

    found: dict[str, Callable[[], torch.Tensor]] = {"torch.sum": x.sum}
    sms = torch.cuda.get_device_properties(0).multi_processor_count if x.is_cuda else 3
    for tile, warps, depth, each in SHAPES if triton is not no_triton else ():
        sums = torch.empty(each * sms, device=x.device)
        found[f"{each} x {depth} x {tile >> 8} KB"] = partial(launch, sums, tile, warps, depth)
    return found


def fastest(size: int, device: str) -> tuple[str, Callable[[], object]]:
    """The name and the call of the fastest of `methods` for `size` bytes, each timed briefly."""
    found = methods(torch.randn(size // 4, device=device))
    times = {name: time_call(call, device, TRIAL_SECONDS).median_ms for name, call in found.items()}
    name = min(times, key=lambda each: times[each])
    return name, found[name]
