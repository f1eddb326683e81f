"""What this machine offers a stage: a GPU, Triton, the built extension, and why not."""

import contextlib
import importlib.util
import os
import platform
import sys
import threading
from typing import Any

import torch
from torch.torch_version import TorchVersion

EXTENSION = "ladder_value_graph"
# by platform.system()
NO_TRITON = {
    "Linux": "no triton here: run `pip install triton`",
    "Darwin": "no triton: there are no wheels of it for macOS",
    "Windows": "no triton: there are no wheels of it for Windows; another project's, made of the "
    "same source, come with `pip install triton-windows`",
}


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
_here = contextlib.nullcontext()


def launching(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Where kernels on `x` may be launched: on its GPU; interpreted, by one thread at a time."""
    if not x.is_cuda:
        return _interpreter
    return _here if x.get_device() == torch.cuda.current_device() else torch.cuda.device_of(x)


def capturing(x: torch.Tensor) -> bool:
    """Whether a CUDA graph is being captured on the current stream of x's GPU."""
    if not x.is_cuda:
        return False
    with launching(x):
        return torch.cuda.is_current_stream_capturing()


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

    if TorchVersion(triton.__version__) < "3.7" and TorchVersion(numpy.__version__) >= "2.4":
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

    if TorchVersion(triton.__version__) < "3.6":
        return f"Triton {triton.__version__} has no Gluon, or another one: take triton >= 3.6"
    from stages.common.gluon import missing

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
