"""What the kernels of stages 6 to 9 share besides the idea of any: layouts, sizes, TF32's rounding.

It computes a part of their results, so that a change of it counts as a change of each.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from stages.common.contract import MAX_HEAD_DIM
from stages.common.no_triton import tl, triton

LOG2_E = math.log2(math.e)
LARGEST_TILE = 128  # rows or keys, of all launch configurations
Choice = TypeVar("Choice")


@triton.jit
def round_to_tf32(x):
    """Float32 `x` rounded to TF32's 10 bits of mantissa; the matrix unit by itself cuts them off.

    The multiply-add in p's exponent leaves the largest p of a row a little off 1: cutting
    bits off would turn a value just below 1 into 1 - 2^-11.
    """
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


def loadable(x: Tensor) -> Tensor:
    """Return `x` (B, H, N, d) as the kernels can read it, copied where it is stored otherwise.

    They read raw storage, which holds the negative of a tensor from conj().imag; and within a tile
    they count in int32, which rows or columns that are far apart would overflow.
    """
    x = x.resolve_neg()
    far = x.stride(2) * LARGEST_TILE + x.stride(3) * MAX_HEAD_DIM
    return x if far < 1 << 31 else x.contiguous()


def padded_dim(d: int) -> int:
    """BLOCK_D: the power of two that holds d, 16 at least, since tl.dot refuses fewer."""
    return max(16, 1 << (d - 1).bit_length())


def of_size(
    tiles: Mapping[str, Sequence[Choice]], d: int, dtype: torch.dtype, precision: str
) -> Choice:
    """What a stage's table of tiles has for a head dimension and a dtype.

    The table's keys are 'half', 'tf32' and 'ieee'; it has one entry each for a BLOCK_D of up to 64,
    of 128 and of 256.
    """
    kind = "half" if dtype != torch.float32 else precision
    return tiles[kind][(padded_dim(d) > 64) + (padded_dim(d) > 128)]


def as_config(tile: Sequence[int], d: int) -> dict[str, int]:
    """The launch configuration of BLOCK_M, BLOCK_N, num_warps and num_stages, and d's BLOCK_D."""
    names = "BLOCK_M", "BLOCK_N", "num_warps", "num_stages"
    return dict(zip(names, tile, strict=True), BLOCK_D=padded_dim(d))
