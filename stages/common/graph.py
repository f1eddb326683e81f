"""Launches as one CUDA graph, by the driver's own functions: the host does them as one.

torch.cuda.CUDAGraph is for one capture at a time in a process: until it ends, other threads can't
use the default stream beside a stream like that of its capture, draw random numbers or free cached
memory, and if it fails they can't any more. This is for launches in the middle of anybody's
program. So nothing is captured but what this thread launches on a stream that is nobody else's.
"""

import ctypes
import functools
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

RELAXED, NON_BLOCKING = 2, 1  # CU_STREAM_CAPTURE_MODE_RELAXED, CU_STREAM_NON_BLOCKING


class CUDAError(Exception):
    """A function of the driver has returned an error."""


@functools.cache
def driver() -> Any:
    """The driver's library; OSError where there is none by this name."""
    found = ctypes.CDLL("libcuda.so.1")
    # each step of training calls this: with its types known, it takes plain numbers
    found.cuGraphLaunch.argtypes = ctypes.c_void_p, ctypes.c_void_p
    return found


def call(name: str, *args: Any) -> None:
    """Call a function of the driver; CUDAError where it fails, or an old driver hasn't got it."""
    function = getattr(driver(), name, None)
    if error := function(*args) if function is not None else "no such function":
        raise CUDAError(f"{name} returned {error}")


class Relaxed:
    """Where this thread may do what a capture in another one forbids, such as making a graph."""

    def __enter__(self) -> None:
        self.mode = ctypes.c_int(RELAXED)
        call("cuThreadExchangeStreamCaptureMode", ctypes.byref(self.mode))

    def __exit__(self, *_: object) -> None:
        call("cuThreadExchangeStreamCaptureMode", ctypes.byref(self.mode))


def graph_of(launches: Callable[[int], None], stream: int) -> "Graph | None":
    """Capture what `launches` starts on the stream that it is given, for launches on `stream`.

    None where CUDA refuses, and where `stream` is a green context's: a graph from elsewhere would
    run on all multiprocessors, not on the context's own.
    """
    with suppress(CUDAError, OSError, RuntimeError):
        if not is_green(stream):
            return Graph(launches)
    return None


def is_green(stream: int) -> bool:
    """Whether a stream is a green context's. A driver that can't say has none that torch makes."""
    if not hasattr(driver(), "cuStreamGetCtx_v2"):
        return False
    context, green = ctypes.c_void_p(), ctypes.c_void_p()
    asked = ctypes.c_void_p(stream)
    call("cuStreamGetCtx_v2", asked, ctypes.byref(context), ctypes.byref(green))
    return bool(green)


class Graph:
    """Launches that were captured. Raises CUDAError where the driver refuses, OSError without it.

    launches  starts them on the stream that it is given, an address
    """

    def __init__(self, launches: Callable[[int], None]) -> None:
        self.handle, graph, stream = (ctypes.c_void_p() for _ in range(3))
        with Relaxed():
            call("cuStreamCreate", ctypes.byref(stream), NON_BLOCKING)
            try:
                call("cuStreamBeginCapture_v2", stream, RELAXED)
                try:
                    launches(stream.value or 0)
                except BaseException:
                    with suppress(CUDAError):  # as it has failed, so does the capture
                        call("cuStreamEndCapture", stream, ctypes.byref(graph))
                    raise
                call("cuStreamEndCapture", stream, ctypes.byref(graph))
                # no flags: as urgent as the stream that it is launched on
                flags = ctypes.c_ulonglong(0)
                call("cuGraphInstantiateWithFlags", ctypes.byref(self.handle), graph, flags)
                weakref.finalize(self, destroy, self.handle).atexit = False
            finally:
                if graph:
                    with suppress(CUDAError):
                        call("cuGraphDestroy", graph)
                with suppress(CUDAError):
                    call("cuStreamDestroy_v2", stream)

    def launch(self, stream: int) -> bool:
        """Start all on a stream; False where the driver refuses."""
        return driver().cuGraphLaunch(self.handle, stream) == 0


def destroy(handle: ctypes.c_void_p) -> None:
    """Free a graph; one that still runs is freed when it ends."""
    with suppress(CUDAError), Relaxed():
        call("cuGraphExecDestroy", handle)
