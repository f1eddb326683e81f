"""Triton's interpreter as the harness changes it."""

import pytest


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
