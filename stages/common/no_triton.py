"""`triton` and `tl`, its language; where there is no wheel of it, what stands in for both."""

from typing import Any


class NoTriton:
    """Stands in for `triton` and `triton.language` where there is no wheel of it, and for Gluon.

    It lets a stage's file be imported: decorators return the function as it is, types are empty.
    The kernels are never called, since `attend` has raised before.
    """

    @staticmethod
    def jit(fn: Any = None, **options: Any) -> Any:
        return fn if fn is not None else lambda fn: fn

    constexpr = constexpr_function = __call__ = jit  # `aggregate` is called as a decorator

    def __getattr__(self, name: str) -> Any:
        return None


no_triton = NoTriton()

try:
    import triton
    import triton.language as tl
except ImportError:  # files with kernels can be imported all the same; attend says why it can't run
    triton = tl = no_triton
