"""Triton's interpreter as the harness changes it."""

from contextlib import nullcontext
from importlib.util import module_from_spec, spec_from_file_location
from traceback import extract_tb

import pytest
import torch

from stages.common.machine import interpreting


def test_what_is_no_size_is_refused_after_an_equal_one_that_is():
    core = pytest.importorskip("triton").language.core
    assert core.block_type(core.float32, [64]).numel == 64
    for sizes in ([64.0], [64, 64.0], [63], []):
        with pytest.raises((TypeError, ValueError)):
            core.block_type(core.float32, sizes)
        core.block_type(core.float32, [64, 64])


def test_blocks_of_one_shape_keep_their_own_type():
    core = pytest.importorskip("triton").language.core
    types = core.float32, core.float16, core.pointer_type(core.float16)
    assert [core.block_type(each, [64]).element_ty for each in types] == [*types]


KERNEL = """
import triton
import triton.language as tl
FACTOR: tl.constexpr = {factor}
@triton.jit
def scaled(x, {n}):
    return x * (FACTOR + N)
@triton.jit
def kernel(ptr, N: tl.constexpr):
    tl.store(ptr, scaled(tl.load(ptr), N))
    tl.arange(0, FACTOR)
"""


@pytest.mark.skipif(not interpreting(), reason="kernels are compiled here")
def test_functions_of_the_same_code_are_those_of_their_own_module(tmp_path):
    """Rewritten once for both: each has its own constants, and errors name its own file."""
    errors = pytest.importorskip("triton").runtime.errors
    found = []
    for factor, n in (2, "N"), (3, "N: tl.constexpr"):
        path = tmp_path / f"times_{factor}.py"
        path.write_text(KERNEL.format(factor=factor, n=n))
        spec = spec_from_file_location(path.stem, path)
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        x, fails = torch.ones(1), factor == 3  # no power of 2
        with pytest.raises(errors.InterpreterError) if fails else nullcontext() as raised:
            module.kernel[(1,)](x, N=4)
        found.append(x.item())
    assert found == [6, 7]
    files = [frame.filename for frame in extract_tb(raised.value.__cause__.__traceback__)]
    assert str(path) in files


OPERANDS = """
import triton
import triton.language as tl
@triton.jit
def kernel(ptr, out_ptr, n, wide, KIND: tl.constexpr):
    i = tl.arange(0, 16)
    if KIND == "row":
        x = i[:, None] * wide + i[None, :]
    elif KIND == "axes":
        x = tl.reshape(i, (4, 4)) + tl.arange(0, 4)
    elif KIND == "floats":
        half = i.to(tl.float16)
        x = half * half + half / (half + 1) * 0.1 + i.to(tl.float64)
    elif KIND == "integers":
        x = (i.to(tl.uint32) - 5) // 3 + i.to(tl.int8).to(tl.int64) * -n + (i < n) * i.to(tl.int1)
    elif KIND == "flags":  # of a scalar one keeps its number, as the interpreter has it
        x = ((i < 2) - n.to(tl.int1)).to(tl.int32)
    else:
        x = tl.load(ptr + i % n + tl.zeros((16,), tl.int64), mask=i < n, other=-1)
    tl.store(out_ptr + tl.arange(0, x.numel), tl.ravel(x))
"""


@pytest.mark.skipif(not interpreting(), reason="kernels are compiled here")
@pytest.mark.parametrize("kind", ["row", "axes", "floats", "integers", "flags", "masked"])
def test_operands_are_converted_and_spread_as_triton_does(kind, tmp_path):
    """The first time by Triton itself, then by what was noted."""
    pytest.importorskip("triton")
    path = tmp_path / "operands.py"
    path.write_text(OPERANDS)
    spec = spec_from_file_location("operands", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    i = torch.arange(16)
    n, wide = 7, 1 << 33
    x = torch.arange(100, 116, dtype=torch.float32)
    right = {
        "row": i[:, None] * wide + i,
        "axes": i.view(4, 4) + torch.arange(4),
        "floats": i * i + i.float() / (i + 1) * 0.1 + i.double(),
        "integers": ((i - 5) % 2**32) // 3 + i * -n + ((i < n) & (i > 0)),
        "flags": torch.where(i < 2, 0, -1),
        "masked": torch.where(i < n, x, -1),
    }[kind]
    for _ in range(2):
        out = torch.zeros(right.numel(), dtype=right.dtype)
        module.kernel[(1,)](x, out, n, wide, KIND=kind)
        assert torch.equal(out.view(right.shape), right)
