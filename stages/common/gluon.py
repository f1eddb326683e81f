"""Gluon under one set of names, whichever version of Triton is installed (3.6 to 3.9).

`mbarrier.expect` takes its count of bytes by position: the parameter's name changed. Where there is
no Gluon, or one without some of these names, they stand for nothing, so that files can be imported
(stages/common/machine.py says why then).
"""

from typing import Any, dataclass_transform

from stages.common.no_triton import NoTriton


def first_of(module: object, *names: str) -> Any:
    """The first of `names` that `module` has; ImportError where it has none of them."""
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise ImportError(f"this Triton's Gluon has none of {', '.join(names)}")


missing = None
try:
    import triton.language.core
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
    from triton.runtime import driver

    tma, mbarrier = hopper.tma, hopper.mbarrier
    fence_async_shared, store_wait = hopper.fence_async_shared, tma.store_wait
    warpgroup_mma, warpgroup_mma_wait = hopper.warpgroup_mma, hopper.warpgroup_mma_wait
    barrier = first_of(gl, "barrier", "thread_barrier")  # the second in 3.6
    # the second up to 3.7
    async_load = first_of(tma, "async_load", "async_copy_global_to_shared")
    async_store = first_of(tma, "async_store", "async_copy_shared_to_global")
    # the second up to 3.7, and in some versions after it
    reinterpret = first_of(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")
    make_aggregate = first_of(triton.language.core, "aggregate", "_aggregate")

    @dataclass_transform()
    def aggregate(cls: type) -> Any:
        """Gluon's aggregate of the fields that `cls` declares, made of them in that order."""
        # a constexpr, since a kernel's cache looks at those that a function uses
        fields = gl.constexpr(
            [(name, x is gl.constexpr) for name, x in cls.__annotations__.items()]
        )

        def __init__(self: Any, *values: Any) -> None:
            for field, value in zip(fields.value, values, strict=True):
                name, constant = field
                setattr(self, name, gl.constexpr(value) if constant else value)

        if "__init__" not in vars(cls):
            cls.__init__ = gluon.constexpr_function(__init__)  # type: ignore[misc]
        return make_aggregate(cls)

    if hasattr(tma, "async_atomic_add"):  # from 3.8 on; before it only the builder can
        reduce_add = tma.async_atomic_add
    else:

        @gl._core.builtin
        def reduce_add(desc: Any, coordinates: Any, tile: Any, _semantic: Any = None) -> None:
            """Have the copy engine add a tile in shared memory to global memory."""
            place = _semantic._convert_to_ir_values(coordinates, require_i64=False)
            kind = triton._C.libtriton.ir.DESCRIPTOR_REDUCE_KIND.ADD
            _semantic.builder.create_async_tma_reduce(kind, desc.handle, place, tile.handle)
except (ImportError, AttributeError) as error:
    missing = str(error)  # what this Triton's Gluon lacks
    gluon = gl = mbarrier = TensorDescriptor = driver = NoTriton()
    aggregate = gluon  # type: ignore[assignment]
    barrier = async_load = async_store = store_wait = fence_async_shared = gl
    warpgroup_mma = warpgroup_mma_wait = reduce_add = reinterpret = gl
