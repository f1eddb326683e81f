"""What a launch of stage 9 needs on the host: the copy engine's descriptors, the tile counter."""

import functools
from typing import Any

import torch

from stages.gluon_names import TensorDescriptor, gl


class Address:
    """Stands in for a tensor in a descriptor that is kept: it keeps no memory alive."""

    def __init__(self, pointer: int, dtype: torch.dtype) -> None:
        self.pointer = pointer
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self.pointer


@functools.lru_cache(maxsize=4096)
def descriptor(
    pointer: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    rows: int,
    BLOCK_D: int,
) -> Any:
    """What the copy engine must know of a tensor (B, H, N, d), in blocks of (1, 1, rows, BLOCK_D).

    Kept, since to make one takes longer than to launch: 15 us.
    """
    pitch = -(-shape[3] // 8) * 8  # stands for strides of axes of size 1, which may be anything
    strides = (*(s if n > 1 else pitch for n, s in zip(shape[:3], strides, strict=False)), 1)
    layout = gl.NVMMASharedLayout(128, 16, rank=4)
    block = [1, 1, rows, BLOCK_D]
    return TensorDescriptor(Address(pointer, dtype), list(shape), list(strides), block, layout)


def describable(x: torch.Tensor) -> bool:
    """Whether the copy engine can read `x` (B, H, N, d), 16 bits each, where it is."""
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
    if x.shape[3] > 1 and strides.pop() != 1:
        return False
    in_steps = all(0 < stride < 1 << 39 and stride % 8 == 0 for stride in strides)
    return in_steps and x.data_ptr() % 16 == 0 and not x.is_neg()


def padded(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """An uninitialised tensor (B, H, N, d) whose rows are multiples of 16 bytes apart."""
    *outer, d = shape
    width = -(-d // 8) * 8
    return torch.empty((*outer, width), dtype=like.dtype, device=like.device)[..., :d]


def loadable(x: torch.Tensor) -> torch.Tensor:
    """`x` as the copy engine can read it, copied where it can't read `x` itself."""
    return x if describable(x) else padded(x.shape, x).copy_(x)


counters: dict[tuple[int, int], torch.Tensor] = {}


def counter_of(device: torch.device) -> torch.Tensor:
    """The tile counter (1,) int32, 0 between launches: one for each stream, since they overlap.

    A CUDA graph gets one of its own for each launch in it, zeroed in the graph.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = (device.index, torch.cuda.current_stream(device).cuda_stream)
    if key not in counters:
        counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return counters[key]


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
