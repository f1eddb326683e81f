"""Triton's interpreter with what two types alone decide decided once for each pair of types."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any


def make_operands_lean(interpreter: Any) -> None:
    """Change how the interpreter prepares the operands of an operation, and keeps their numbers.

    To which type two operands are converted, and how one is spread to the other's shape, follows
    from their types. Triton's own functions say so once, and raise where two types don't fit. A
    Triton that has other names for these is left as it is.
    """
    semantic: Any = getattr(interpreter, "interpreter_semantic", None)
    names = "binary_op_type_checking_impl", "broadcast_impl_value", "computation_type_impl"
    if not all(hasattr(semantic, name) for name in names):
        return
    core = interpreter.tl.core
    semantic.broadcast_impl_value = broadcasting(semantic, core)
    semantic.binary_op_type_checking_impl = converting(semantic, core)
    same_types(semantic, core)
    handles(interpreter, core)
    calls(interpreter, semantic)


def broadcasting(semantic: Any, core: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
    """`broadcast_impl_value`: both operands in the shape of the two."""
    broadcast, builder, tensor = semantic.broadcast_impl_value, semantic.builder, core.tensor
    known: dict[tuple[str, str], Any] = {}

    def way(before: Any, after: Any) -> Any:
        """How one operand was changed: its new type and, of a block, shape; None: not at all."""
        if after is before:
            return None
        return after.type, list(after.type.shape) if before.type.is_block() else None

    def changed(x: Any, made: Any) -> Any:
        new, shape = made
        if shape is None:
            return tensor(builder.create_splat(new, x.handle), new)
        return tensor(builder.create_broadcast(x.handle, shape), new)

    def both(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        key = lhs.type.name, rhs.type.name
        if key in known:
            left, right = known[key]
            return (
                lhs if left is None else changed(lhs, left),
                rhs if right is None else changed(rhs, right),
            )
        found = broadcast(lhs, rhs)
        known[key] = way(lhs, found[0]), way(rhs, found[1])
        return found

    return both


def converting(semantic: Any, core: Any) -> Callable[..., tuple[Any, Any]]:
    """`binary_op_type_checking_impl`: both operands in one type and one shape."""
    check, tensor = semantic.binary_op_type_checking_impl, core.tensor
    known: dict[Any, Any] = {}  # -> the type that both get; None for pointers, which keep theirs

    def both(
        lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> tuple[Any, Any]:  # fmt: skip
        rules = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        if type(lhs) is not tensor or type(rhs) is not tensor:
            return check(lhs, rhs, *rules)
        left, right = lhs.type.scalar, rhs.type.scalar
        key = left.name, right.name, *rules
        if key not in known:
            found = check(lhs, rhs, *rules)
            kept = not arithmetic_check or left.is_ptr() or right.is_ptr()
            of = left, False, right, False, div_or_mod  # neither is a number of Python's
            known[key] = None if kept else semantic.computation_type_impl(*of)
            return found
        if (to := known[key]) is not None:
            lhs = lhs if to.name == left.name else semantic.cast(lhs, to)
            rhs = rhs if to.name == right.name else semantic.cast(rhs, to)
        return semantic.broadcast_impl_value(lhs, rhs)

    return both


def same_types(semantic: Any, core: Any) -> None:
    """Compare types by their identity and names first; make a block of another type once.

    And convert integers, as offsets are, by what their types say; Triton has its way for the rest.
    """
    equal, cast, to_tensor = core.dtype.__eq__, semantic.cast, semantic.to_tensor
    builder, tensor = semantic.builder, core.tensor
    block_type, integers = core.block_type, {*core.dtype.SINT_TYPES, *core.dtype.UINT_TYPES}
    sized = integers - {"int1"}  # to that Triton compares with 0
    blocks: dict[tuple[str, str], Any] = {}

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        key = self.name, scalar_ty.name
        if key not in blocks:
            blocks[key] = block_type(scalar_ty, self.shape)
        return blocks[key]

    def cast_to(input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        old, new = input.type.scalar, dst_ty.scalar
        if old.name == new.name:
            return input
        if fp_downcast_rounding is None and old.name in integers and new.name in sized:
            made = input.type.with_element_ty(new)
            return tensor(builder.create_int_cast(input.handle, made, old.is_int_signed()), made)
        return cast(input, dst_ty, fp_downcast_rounding)

    def tensor_from(x: Any, check_type: bool = True) -> Any:
        return x if type(x) is tensor else to_tensor(x, check_type)

    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    core.dtype.is_int = lambda self: self.name in integers
    block_type.with_element_ty = with_element_ty
    semantic.cast, semantic.to_tensor = cast_to, tensor_from


def handles(interpreter: Any, core: Any) -> None:
    """Keep an array with its type, checked as Triton checks it, but in one function."""
    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    fields = [field.name for field in dataclasses.fields(handle)]
    if fields != ["data", "dtype", "attr"] or not hasattr(handle, "__post_init__"):
        return
    pointer = core.pointer_type

    def too_wide(data: Any, dtype: Any) -> bool:
        bits = 8 * data.itemsize
        return bits > 8 and type(dtype) is not pointer and bits > dtype.primitive_bitwidth

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if too_wide(data, dtype):
            self.__post_init__()  # which raises

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
        output, dtype = op(lhs.data, rhs.data), lhs.dtype.scalar
        if too_wide(output, dtype):
            output = output.astype(interpreter._get_np_dtype(dtype))
        return handle(output, dtype)

    handle.__init__, builder.binary_op = init, binary_op


def calls(interpreter: Any, semantic: Any) -> None:
    """Let a kernel call triton.language's own functions without what asks for a compiler first."""
    patch, builtin = getattr(interpreter, "_patch_attr", None), interpreter.tl.core.builtin
    names = ["obj", "name", "member", "builder", "scope"]
    if patch is None or [*inspect.signature(patch).parameters] != names:
        return
    asks = builtin(lambda: None).__code__

    def patched(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        while getattr(member, "__code__", None) is asks:
            member = member.__wrapped__
        function = member

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*args, **options)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patched
