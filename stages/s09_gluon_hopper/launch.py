"""What a launch of stage 9 needs on the host: the copy engine's descriptors, the tile counter.

What depends only on the kind of problem, not on its numbers, is computed once and kept.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from stages.common.gluon import TensorDescriptor, driver, gl
from stages.contract import Stage, check_inputs

MOST_KEPT = 4096  # of each sort


class Launch:
    """A kernel's launch for one kind of problem on one GPU; called with the tensors.

    The first call compiles. At each of the later ones Triton would look at every argument's type
    again to find the compiled kernel, which takes longer than the launch.
    """

    def __init__(
        self,
        kernel: Any,
        grid: int,
        sizes: tuple[Any, ...],
        switches: tuple[Any, ...],
        **options: Any,
    ) -> None:
        self.kernel = kernel
        self.grid = (grid, 1, 1)
        self.rest = (*sizes, *switches)  # after the tensors, as in the kernel's signature
        self.options = options  # of the compiler
        self.run: Callable[..., None] | None = None

    def __call__(self, *tensors: Any) -> None:
        if self.run is not None:
            self.run(*tensors, *self.rest)
        else:
            compiled = self.kernel[self.grid](*tensors, *self.rest, **self.options)
            self.run = compiled[self.grid]


def checks(stage: Stage) -> Callable[..., None]:
    """Check inputs as check_inputs for a `stage` on a GPU, but each kind of input only once."""
    passed: set[Any] = set()

    def kind(x: Any) -> Any:
        if type(x) is torch.Tensor and not x.is_nested:
            return x.shape, x.dtype, x.device, x.layout
        return None if x is None else object()  # which is like no other

    def check(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        seqlens_k: torch.Tensor | None,
    ) -> None:
        asked = kind(q), kind(k), kind(v), kind(seqlens_k), causal is True, causal is False
        if asked not in passed:
            check_inputs(stage, q, k, v, causal=causal, seqlens_k=seqlens_k)
            if len(passed) == MOST_KEPT:
                passed.clear()
            passed.add(asked)

    return check


class Address:
    """Stands in for a tensor in a descriptor that is kept: it keeps no memory alive."""

    def __init__(self, pointer: int, dtype: torch.dtype) -> None:
        self.pointer = pointer
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self.pointer


@functools.lru_cache(maxsize=MOST_KEPT)
def descriptor(
    pointer: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    rows: int,
    BLOCK_D: int,
) -> Any:
    """Return the copy engine's descriptor of a tensor (B, H, N, d), 16 bits each, or None.

    It reads blocks of (1, 1, rows, BLOCK_D), with zeros past the ends, of tensors whose last
    dimension is contiguous and whose other steps are multiples of 16 bytes, none of them 0. Kept,
    since making one takes as long as a launch. It holds an address and no GPU: addresses differ
    among all GPUs of a process.
    """
    pitch = -(-shape[3] // 8) * 8  # stands for strides of axes of size 1, which may be anything
    steps = [s if n > 1 else pitch for n, s in zip(shape[:3], strides[:3], strict=True)]
    contiguous = shape[3] == 1 or strides[3] == 1
    if pointer % 16 or not contiguous or not all(0 < s < 1 << 39 and s % 8 == 0 for s in steps):
        return None
    layout = gl.NVMMASharedLayout(128, 16, rank=4)
    block = [1, 1, rows, BLOCK_D]
    return TensorDescriptor(Address(pointer, dtype), list(shape), [*steps, 1], block, layout)


def described(x: torch.Tensor, rows: int, BLOCK_D: int) -> tuple[torch.Tensor, Any]:
    """Return `x` and its descriptor; a copy where the copy engine can't read `x` itself."""
    found = descriptor(x.data_ptr(), x.dtype, x.shape, x.stride(), rows, BLOCK_D)
    if found is None or x.is_neg():
        return described(padded(x.shape, x).copy_(x), rows, BLOCK_D)
    return x, found


def padded(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised tensor (B, H, N, d) with rows a multiple of 16 bytes apart."""
    *outer, d = shape
    width = -(-d // 8) * 8
    x = torch.empty((*outer, width), dtype=like.dtype, device=like.device)
    return x if width == d else x[..., :d]


counters: dict[tuple[int, int], torch.Tensor] = {}


def counter_of(device: torch.device) -> torch.Tensor:
    """The tile counter (1,) int32, 0 between launches.

    One tensor for each stream, since their launches overlap; torch has a few dozen. A CUDA graph
    gets one of its own for each launch in it, zeroed in the graph.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    # as Triton asks for it; torch.cuda.current_stream would make an object of it first
    key = (device.index, driver.active.get_current_stream(device.index))
    if key not in counters:
        counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return counters[key]


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
