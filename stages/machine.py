"""What this machine offers a stage: a GPU, Triton, the built extension, and why not."""

import contextlib
import functools
import importlib.util
import os
import platform
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch

EXTENSION = "ladder_value_graph"
Function = TypeVar("Function", bound=Callable[..., Any])


# by platform.system()
NO_TRITON = {
    "Linux": "no triton here: run `pip install triton`",
    "Darwin": "no triton: there are no wheels of it for macOS",
    "Windows": "no triton: there are no wheels of it for Windows; another project's, made of the "
    "same source, come with `pip install triton-windows`",
}


class NoTriton:
    """Stands in for `triton` and `triton.language` where there is no wheel of it.

    It lets a stage's file be imported: decorators return the function as it is, types are empty.
    The kernels are never called, since `attend` has raised before.
    """

    @staticmethod
    def jit(fn: Any = None, **options: Any) -> Any:
        return fn if fn is not None else lambda fn: fn

    def __getattr__(self, name: str) -> Any:
        return None


no_triton = NoTriton()


def version_tuple(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: '2.13.0+cpu' -> (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def has_module(name: str) -> bool:
    """Whether `name` can be imported, without importing it."""
    if name in sys.modules:
        return sys.modules[name] is not None
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def interpreting() -> bool:
    """Whether Triton kernels run in Triton's interpreter in this process."""
    return os.environ.get("TRITON_INTERPRET", "0") in {"1", "true", "on", "yes", "y"}


_interpreter = threading.RLock()  # Triton's interpreter patches triton.language while it runs


@contextlib.contextmanager
def launching(x: torch.Tensor) -> Iterator[None]:
    """Where kernels on `x` may be launched: on its GPU; interpreted, by one thread at a time."""
    with _interpreter if interpreting() else contextlib.nullcontext(), torch.cuda.device_of(x):
        yield


def recording() -> bool:
    """Whether make_fx or torch.jit.trace is recording what torch is called with."""
    if torch.jit.is_tracing():
        return True
    key = torch._C._TorchDispatchModeKey.PROXY
    # make_fx(pre_dispatch=True) has a stack of modes to itself
    modes = torch._C._get_dispatch_mode(key), torch._ops._get_dispatch_mode_pre_dispatch(key)
    return modes != (None, None)


def untraced(function: Function) -> Function:
    """`function`, which torch.compile takes as one operator of its graph, or leaves out of it.

    An operator is made of the `attend` of a stage in Triton (stages/library.py); make_fx and
    torch.jit.trace take it, too. Anything else is called as it is by torch.compile, and refused by
    those two, which would keep its answer as a constant: ValueError. (torch.compiler.disable takes
    a second to import, if nobody has yet.)
    """
    disabled: list[Function] = []
    traced = None
    built_in = function.__module__.startswith("stages.s")
    if (
        built_in
        and function.__name__ == "attend"
        and "triton" in function.__globals__["STAGE"].needs
    ):
        from stages.library import Operators

        traced = Operators(function)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        compiling = torch.compiler.is_compiling()  # which can't look into `recording`
        recorded = not compiling and recording()
        tracing = compiling or recorded
        if tracing and traced is not None and traced.takes(*args, **options):
            return traced(*args, **options)
        if recorded:
            raise ValueError(
                f"{function.__name__}: make_fx or torch.jit.trace would keep its answer as a "
                "constant, since it computes outside torch: trace stage 3, or a stage in Triton"
            )
        if "torch._dynamo" not in sys.modules:
            return function(*args, **options)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **options)

    return cast(Function, call)


def why_no_gpu() -> str | None:
    """Why no stage can run on a GPU here, or None where one can."""
    if torch.cuda.is_available():
        return None
    if not torch.backends.cuda.is_built():
        return f"no GPU: this torch ({torch.__version__}) is built without CUDA"
    return "no GPU: torch sees no CUDA device"


def why_no_triton(device: str) -> str | None:
    """Why Triton kernels can't run on `device` ('cpu' or 'cuda') here, or None where they can."""
    if not has_module("triton"):
        return NO_TRITON.get(platform.system(), f"no triton for {platform.system()}")
    if device == "cuda":
        if interpreting():
            return "TRITON_INTERPRET is set: kernels would be interpreted, not compiled; unset it"
        return None
    if not interpreting():
        if why_no_gpu() is None:
            return (
                "a GPU is there, so kernels are compiled; "
                "set TRITON_INTERPRET=1 to interpret them on the CPU"
            )
        setting = os.environ.get("TRITON_INTERPRET", "")
        return (
            f"no GPU to compile kernels for, and TRITON_INTERPRET={setting} forbids to interpret "
            "them: unset it"
        )
    import numpy
    import triton

    if version_tuple(triton.__version__) < (3, 7) and version_tuple(numpy.__version__) >= (2, 4):
        return (
            f"Triton {triton.__version__}'s interpreter fails with NumPy {numpy.__version__}: "
            "take triton >= 3.7 or numpy < 2.4"
        )
    if isinstance(triton.language.zeros, triton.JITFunction):  # as it was when first imported
        return (
            "Triton was imported, by you or by another package such as transformers, before "
            "`stages` told it to interpret: import stages first, or set TRITON_INTERPRET=1"
        )
    return None


def why_no_gluon() -> str | None:
    """Why Gluon kernels can't be compiled by the Triton that is here, or None where they can."""
    import triton

    if version_tuple(triton.__version__) < (3, 6):
        return f"Triton {triton.__version__} has no Gluon, or another one: take triton >= 3.6"
    from stages.gluon_names import missing

    if missing:
        known = f"take triton 3.6 to 3.9 ({missing})"
        return f"the Gluon of Triton {triton.__version__} has other names: {known}"
    return None


# a package that a peer needs -> the module that it brings, and what it is
PACKAGES = {
    "flash-attn-4": ("flash_attn.cute", "FlashAttention-4"),
    "fa3-fwd": ("fa3_fwd_interface", "FlashAttention-3"),
    "flashinfer-python": ("flashinfer", "FlashInfer"),
}


def why_no_package(package: str) -> str | None:
    """Why one of PACKAGES can't be used here, or None where it can."""
    module, title = PACKAGES[package]
    return None if has_module(module) else f"no {title} here: run `pip install {package}`"


def why_no_extension() -> str | None:
    """Why the C++ extension can't be used here, or None where it can."""
    if not has_module(EXTENSION):
        return (
            "the C++ extension is not built, for want of a C++ compiler or of Python's headers: "
            "install them, then run `pip install -e .`"
        )
    try:
        importlib.import_module(EXTENSION)
    except ImportError as error:
        return (
            f"the C++ extension was built for another Python or machine ({error}): "
            "run `pip install -e .` again"
        )
    return None
