"""Triton's interpreter without what it does for nothing: kernels take a quarter of the time."""

import sys
from dataclasses import replace
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from harness.isolation.lean_operands import make_operands_lean


def make_lean() -> None:
    """Change the interpreter of this process, where Triton is imported and interprets.

    It computes every sum and product of integers twice, in 64 bits too, for an assertion that it
    then leaves out; for each call within a kernel it patches triton.language, patched already; it
    makes each number's type anew; and it rewrites a function anew for each module that has it. A
    Triton that has other names for these is left as it is.
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
    make_operands_lean(interpreter)
    keep_types(interpreter)
    keep_rewritten(interpreter)


def keep_rewritten(interpreter: Any) -> None:
    """Rewrite functions of the same code once: those that a changed stage has as it was, mostly."""
    rewriter: Any = getattr(interpreter, "FunctionRewriter", None)
    rewrite = getattr(rewriter, "rewrite_ast", None)
    if rewrite is None:
        return
    known: dict[CodeType, CodeType] = {}

    def rewritten(self: Any) -> Any:
        fn = self.fn
        if fn.__closure__:
            return rewrite(self)
        if fn.__code__ not in known:
            known[fn.__code__] = rewrite(self).__code__
        # errors name the module's own file
        code = known[fn.__code__].replace(co_filename=fn.__code__.co_filename)
        for name, value in vars(interpreter).items():
            fn.__globals__.setdefault(name, value)  # as `rewrite` does
        made = FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__)
        made.__kwdefaults__, made.__annotations__ = fn.__kwdefaults__, fn.__annotations__
        return made

    rewriter.rewrite_ast = rewritten


def keep_types(interpreter: Any) -> None:
    """Make what a type alone decides once for each: its shape, a tensor's, and NumPy's dtype.

    And look for a wrapped constant only where there may be one.
    """
    core: Any = interpreter.tl.core
    np_dtype: Any = getattr(interpreter, "_get_np_dtype", None)
    unwrap: Any = getattr(core, "_unwrap_if_constexpr", None)
    plain = {int, float, bool, core.dtype, core.block_type, core.tensor}  # nothing to unwrap
    init_block, init_tensor = core.block_type.__init__, core.tensor.__init__
    blocks: dict[Any, dict[str, Any]] = {}
    tensors: dict[str, dict[str, Any]] = {}
    dtypes: dict[str, Any] = {}

    def block_of(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [getattr(size, "value", size) for size in shape]
        key = (element_ty.name, *sizes, *map(type, sizes))  # 64.0 is equal to 64, and refused
        if key not in blocks:
            init_block(self, element_ty, shape)
            blocks[key] = {**vars(self)}
        vars(self).update(blocks[key])

    def tensor_of(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            init_tensor(self, None, type)
            tensors[type.name] = {**vars(self)}
        vars(self).update(tensors[type.name], handle=handle)

    def np_dtype_of(type: Any) -> Any:
        name = type.scalar.name
        if name not in dtypes:
            dtypes[name] = np_dtype(type)
        return dtypes[name]

    def unwrapped(x: Any) -> Any:
        return x if type(x) in plain else unwrap(x)

    core.block_type.__init__, core.tensor.__init__ = block_of, tensor_of
    if np_dtype is not None:
        interpreter._get_np_dtype = np_dtype_of
    if unwrap is not None:
        core._unwrap_if_constexpr = unwrapped
