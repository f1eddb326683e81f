"""What make_lean leaves out of Triton's interpreter changes no type, and is left out."""

import pytest

tl = pytest.importorskip("triton.language", reason="no wheel of triton")


@pytest.fixture
def asked(monkeypatch):
    """The shapes that Triton has checked: anew for each block, without make_lean."""
    shapes, check = [], tl.core.validate_block_shape
    monkeypatch.setattr(
        tl.core, "validate_block_shape", lambda shape: shapes.append(shape) or check(shape)
    )
    return shapes


def test_a_type_seen_before_is_not_worked_out_again(asked):
    pointer = tl.pointer_type(tl.float16)
    for element in (tl.float32, tl.int1, pointer, tl.pointer_type(tl.float32)):
        first, again = (tl.block_type(element, [2, 64]) for _ in range(2))
        assert len(asked) <= 1
        asked.clear()
        for kind in (first, again):
            assert kind.element_ty is element and kind.numel == 128
            assert kind == tl.block_type(element, [tl.constexpr(2), 64])
            assert kind != tl.block_type(element, [64, 2])
            assert kind.name == f"<{kind.shape}, {element}>"
        asked.clear()
    other = tl.pointer_type(tl.float16, pointer.address_space + 2)
    assert tl.block_type(tl.int32, [64]).with_element_ty(other).scalar is other
    assert tl.block_type(tl.int32, [64]).with_element_ty(pointer).scalar is pointer


def test_a_bad_shape_is_refused_each_time():
    for _ in range(2):
        with pytest.raises(ValueError, match="power of 2"):
            tl.block_type(tl.float32, [3])
        with pytest.raises(TypeError, match="0d"):
            tl.block_type(tl.float32, [])


def test_a_value_has_its_own_numbers_and_type():
    scalar, block = tl.float32, tl.block_type(tl.float32, [4])
    made = [tl.tensor(index, kind) for index in range(2) for kind in (scalar, block)]
    assert [value.handle for value in made] == [0, 0, 1, 1]
    assert [value.type for value in made] == [scalar, block] * 2
    assert [[size.value for size in value.shape] for value in made] == [[], [4]] * 2
    assert [value.numel.value for value in made] == [1, 4] * 2
    assert all(value.dtype == tl.float32 for value in made)
    small = tl.tensor(2, tl.block_type(tl.int8, [4]))
    assert small.dtype == small.type.scalar == tl.int8
