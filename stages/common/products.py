"""Float32 products on the matrix unit, as accurate as float32: six products of bfloat16 for one.

A float32 has 24 bits of mantissa; a bfloat16 has 8, and the same exponent. So three of them hold
one float32, and a product of two has nine parts, of which the three smallest are left out:

    x = high + middle + low                 8 bits each, the next below the last one's
    a b = a.high b.high                                                        1
        + a.high b.middle + a.middle b.high                                    2^-8 of it
        + a.high b.low    + a.middle b.middle + a.low b.high                   2^-16
      ( + a.middle b.low  + a.low b.middle    + a.low b.low                    2^-24: left out )

The matrix unit multiplies bfloat16 exactly and adds in float32. On an H200 it is so much faster
than the units that multiply float32 that six of its products take less time than one of theirs.

Bfloat16 has no bits below 2^-133, where float32 goes on to 2^-149: so all numbers are multiplied by
2^16 first. A number that is then past bfloat16's largest has an infinite `high` and NaN as `low`,
and an output that needs it isn't finite. Nor is it where a sum passes float32's largest on its way:
a score would be -inf then, and its key would weigh nothing, so such a score is made NaN.
So the kernels are launched twice: the second time with REDO and in 'ieee', they compute the blocks
of the output that aren't finite, and leave the others.

After "Leveraging the bfloat16 artificial intelligence datatype for higher-precision computations",
Henry, Tang, Heinecke 2019, https://arxiv.org/abs/1904.06376.
"""

from stages.common.no_triton import tl, triton


@triton.jit
def round_to_bfloat16(x):
    """Float32 `x` rounded to bfloat16's 8 bits, by integers: a GPU has few units that convert."""
    return ((x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def split(x):
    """Three bfloat16, high, middle and low, whose sum is 2^16 times float32 `x`."""
    x *= 65536.0
    high = round_to_bfloat16(x)
    middle = round_to_bfloat16(x - high)
    low = x - high - middle
    return high.to(tl.bfloat16), middle.to(tl.bfloat16), low.to(tl.bfloat16)


@triton.jit
def dot(a, b, PRECISION: tl.constexpr, acc=None):
    """a b, (M, K) x (K, N), added to `acc` (M, N) float32 if given; in float32 as PRECISION says.

    'bf16x6': as above; 'ieee' and 'tf32': as tl.dot does. 16 bits are multiplied as they are.
    """
    if PRECISION == "bf16x6":
        a_high, a_middle, a_low = split(a)
        b_high, b_middle, b_low = split(b)
        # the smallest first, and apart from `acc`: the matrix unit's own sum drops what is far
        # below the largest number that goes into it
        ab = tl.dot(a_low, b_high)
        ab = tl.dot(a_high, b_low, ab)
        ab = tl.dot(a_middle, b_middle, ab)
        ab = tl.dot(a_middle, b_high, ab)
        ab = tl.dot(a_high, b_middle, ab)
        ab = tl.dot(a_high, b_high, ab)
        lowered = ab * 2.3283064365386963e-10  # 2^-32 of it
        return lowered + ab * 0.0 if acc is None else acc + lowered  # + NaN where it is infinite
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def is_finite(ptrs, mask):
    """Whether all numbers at `ptrs`, where `mask` is set, are finite."""
    x = tl.load(ptrs, mask=mask, other=0.0)
    return tl.min((tl.abs(x) < float("inf")).to(tl.int32)) == 1
