"""What the kernels of stages 6 to 9 share besides the idea of any: layouts, TF32's rounding.

It computes a part of their results, so that a change of it counts as a change of each.
"""

import math

from torch import Tensor

from stages.common.contract import MAX_HEAD_DIM
from stages.common.no_triton import tl, triton

LOG2_E = math.log2(math.e)
LARGEST_TILE = 128  # rows or keys, of all launch configurations


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
    if x.is_neg():
        x = x.resolve_neg()
    _, _, row, column = x.stride()
    return x if row * LARGEST_TILE + column * MAX_HEAD_DIM < 1 << 31 else x.contiguous()
