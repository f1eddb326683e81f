"""Triton's interpreter without what it does for nothing: kernels take about a third of the time."""

import sys
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary


def make_lean() -> None:
    """Change the interpreter of this process, where Triton is imported and interprets.

    It computes every sum and product of integers twice, in 64 bits too, for an assertion that it
    then leaves out; for each call within a kernel it patches triton.language, patched already; and
    for each value it works out anew what follows from its type and shape.
    A Triton that has other names for these is left as it is.
    """
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    builder: Any = getattr(interpreter, "interpreter_builder", None)
    patch_language: Any = getattr(interpreter, "_patch_lang", None)
    if not hasattr(getattr(builder, "options", None), "sanitize_overflow"):
        return
    builder.options = replace(builder.options, sanitize_overflow=False)
    if patch_language is None or patch_language.__module__ == __name__:
        return
    language = interpreter.tl
    patched: list[list[Any]] = []
    of_each: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()  # its names of triton.language

    class Scope:
        """What restores triton.language: at the end of the launch that patched it."""

        def __init__(self, fn: Any) -> None:
            if fn not in of_each:
                modules = language, language.core
                of_each[fn] = [x for x in fn.__globals__.values() if any(x is y for y in modules)]
            self.seen = of_each[fn]
            self.scope = None if self.seen in patched else patch_language(fn)
            if self.scope:
                patched.append(self.seen)

        def restore(self) -> None:
            if self.scope:
                patched.remove(self.seen)
                self.scope.restore()

    interpreter._patch_lang = Scope
    remember_types(interpreter)


def remember_types(interpreter: Any) -> None:
    """Have each type's NumPy type, and what a block's shape says of it, worked out once."""
    from stages.common.machine import interpreting  # imports torch: not before Triton is there

    core = interpreter.tl.core
    numpy_type = getattr(interpreter, "_get_np_dtype", None)
    if numpy_type is None or not interpreting():  # what is compiled uses the same classes
        return
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    numpy_types: dict[str, Any] = {}
    types: dict[tuple[Any, ...], dict[str, Any]] = {}
    tensors: dict[tuple[Any, ...], dict[str, Any]] = {}

    def numpy_type_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(kind)
        return numpy_types[name]

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        known = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if known not in types:
            make_type(self, element_ty, shape)
            types[known] = {**vars(self)}
        vars(self).update(types[known], element_ty=element_ty)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        known = (*type.shape,) if type.is_block() else ()
        if known not in tensors:
            make_tensor(self, handle, type)
            tensors[known] = {**vars(self), "handle": None}  # its numbers are not kept
        vars(self).update(tensors[known], handle=handle, type=type, dtype=type.scalar)

    interpreter._get_np_dtype = numpy_type_of
    core.block_type.__init__, core.tensor.__init__ = init_type, init_tensor
