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
