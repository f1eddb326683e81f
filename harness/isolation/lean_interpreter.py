"""Triton's interpreter without what it does for nothing: kernels take about a quarter less time."""

import sys
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary


def make_lean() -> None:
    """Change the interpreter of this process, where Triton is imported and interprets.

    It computes every sum and product of integers twice, in 64 bits too, for an assertion that it
    then leaves out; and for each call within a kernel it patches triton.language, patched already.
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
