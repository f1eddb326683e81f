"""Split products: what three bfloat16 hold of a float32, and what six of nine products give."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from stages.common import products
from stages.common.machine import has_module

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" and not has_module("triton"), reason="no triton for this machine"
)

SIZE = 16
LARGEST = 2.0**111  # of a number: its `high` is finite
LARGEST_PRODUCT = 2.0**95  # 2^32 times it is finite
# what is left out, 2^-8 2^-17 of |a b| twice and 2^-17 2^-17 once, and the last rounding of the sum
BOUND = 2.0**-24 * (1 + 2.0**-10) + 2.0**-24 * (1 + 2.0**-6)

numbers = st.lists(st.floats(width=32), min_size=SIZE, max_size=SIZE)
many = settings(
    max_examples=40, deadline=None, derandomize=True, database=None, phases=[Phase.generate]
)


@pytest.fixture(scope="module")
def kernels():
    """`split` and `dot` in kernels of their own, interpreted, with bfloat16 as a GPU has it.

    The interpreter has 16 bits for it, which it converts wrongly where a number is subnormal, and
    which tl.dot multiplies as integers.
    """
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    cast, multiply = builder.cast_impl, builder.create_dot

    def cast_impl(self, x, to):
        if (x.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, x, to)
        bits = x.data.view(np.uint32)
        assert not (bits & 0xFFFF)[np.isfinite(x.data)].any(), "more bits than a bfloat16 has"
        return handle((bits >> 16).astype(np.uint16), tl.bfloat16)

    def create_dot(self, a, b, *rest):
        wide = (handle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
                for x in (a, b))  # fmt: skip
        return multiply(self, *wide, *rest)

    @triton.jit
    def split(x_ptr, out_ptr, SIZE: tl.constexpr):
        offs = tl.arange(0, SIZE)
        high, middle, low = products.split(tl.load(x_ptr + offs))
        tl.store(out_ptr + offs, high)
        tl.store(out_ptr + SIZE + offs, middle)
        tl.store(out_ptr + 2 * SIZE + offs, low)

    @triton.jit
    def dot(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
        offs = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
        ab = products.dot(tl.load(a_ptr + offs), tl.load(b_ptr + offs), "bf16x6")
        tl.store(out_ptr + offs, ab)

    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(builder, "cast_impl", cast_impl)
        patch.setattr(builder, "create_dot", create_dot)
        yield split, dot


@many
@given(x=numbers)
def test_three_bfloat16_hold_a_float32(kernels, x):
    """Subnormals, too. Their sum is 2^16 x, or NaN where one of them can't be held."""
    x = torch.tensor(x)
    pieces = torch.empty((3, SIZE), dtype=torch.bfloat16)
    kernels[0][(1,)](x, pieces, SIZE)
    found, want = pieces.double().sum(0), 2.0**16 * x.double()
    assert torch.equal(found[x.abs() <= LARGEST], want[x.abs() <= LARGEST])
    assert ((found == want) | found.isnan()).all()


@many
@given(a=numbers, b=numbers)
def test_six_products_are_as_accurate_as_float32_or_nan(kernels, a, b):
    """NaN is computed once more. A score that is -inf is not: its key would weigh nothing."""
    columns, rows, found = (torch.zeros(SIZE, SIZE) for _ in range(3))
    columns[:, 0], rows[0] = torch.tensor(a), torch.tensor(b)
    kernels[1][(1,)](columns, rows, found, SIZE)
    a, b = columns[:, :1].double(), rows[:1].double()
    want = a * b  # all bits of each
    right = (found - want).abs() <= BOUND * want.abs() + 2.0**-149
    assert (right | found.isnan()).all()
    held = (a.abs() <= LARGEST) & (b.abs() <= LARGEST) & (want.abs() <= LARGEST_PRODUCT)
    assert right[held].all()
