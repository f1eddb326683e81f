"""The fork server that children come from: what it imports, and how a process is started by it.

All that touches the parts of multiprocessing without a public name is here.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Final

from harness.ending import ENDING
from harness.isolation.scratch import short_folder
from harness.search_path import without_here

# imported once, by the fork server; what is not installed is left out
PRELOADED: Final = (
    "harness.no_garbage", "torch.utils.benchmark", "stages.common.tuner",
    "triton.runtime.interpreter",
    "triton.experimental.gluon",  # by the first launch of a kernel
    "harness.isolation.measured_stage", "harness.isolation.judge", "harness.measures.oracle",
    "harness.measures.timing",
)  # fmt: skip
# by torch.autograd.grad, with all of SymPy: 0.7 s, so only where gradients are asked for
OF_GRADIENTS: Final = ("torch.fx.experimental.symbolic_shapes",)
PYTHON: Final = ("PYTHONSAFEPATH", "PYTHONPATH")  # where Python searches modules


def server(gradients: bool = False) -> Any:
    """The multiprocessing context with a fork server that imports torch (spawn on Windows).

    `gradients`: a server that is not running yet also imports what computing them imports.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    # torch.utils.benchmark looks for a GPU when imported: NVML does so without initialising CUDA
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    place_sockets()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *(OF_GRADIENTS if gradients else ())])
    return context


def server_pid() -> int | None:
    """The fork server's process id, None where none runs."""
    return getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)


def wake(pid: int | None) -> None:
    """Have a process go on where a stage has stopped it."""
    if pid is not None and hasattr(signal, "SIGCONT"):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)


def stop_server() -> None:
    """End the fork server: the next process starts another one."""
    with contextlib.suppress(Exception):
        forkserver._forkserver._stop()  # type: ignore[attr-defined]


def place_sockets() -> None:
    """Have multiprocessing put its socket where the name is short enough for one.

    Raises OSError where there is no such folder.
    """
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is None:
        config["tempdir"] = short_folder()


def launch(process: Any, theirs: Connection) -> None:
    """Start the process, then close our copy of `theirs`: a Ctrl-C cuts neither, it ends the wait.

    A process that was asked for and not told what to run would print a traceback. Python waits for
    the thread before it exits, which is not long: the command ends the fork server then.
    """

    def start() -> None:
        with theirs, set_apart():  # for the case that the server is started anew
            process.start()

    pool = ThreadPoolExecutor(1)
    try:
        pool.submit(start).result()
    finally:
        pool.shutdown(wait=False)


@contextlib.contextmanager
def set_apart() -> Iterator[None]:
    """What this thread starts meanwhile is ended by us alone, and imports nothing from this folder.

    It hears no Ctrl-C, which this process hears at the end: ignored in place of blocked, it would
    be lost (not on Windows). It searches modules where this process does, but not in the current
    folder.
    """
    before = {name: os.environ.get(name) for name in PYTHON}
    # an entry with a colon in its name can't be told
    path = [entry for entry in without_here(sys.path) if os.pathsep not in entry]
    os.environ |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(path)}
    try:
        with deaf():
            yield
    finally:
        set_variables(before)


def set_variables(values: Mapping[str, str | None]) -> None:
    """Set environment variables; None: there is no such variable."""
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    """Block the signals that end a command, for this thread and what it starts."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        # deaf to the other two by itself; in Python 3.11 its start ends our blocking of them
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # may raise one that came before
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def close_server_handles() -> None:
    """Close the handles of the fork server that multiprocessing passes on to every child.

    While a child has the server's "alive" handle open, the server outlives a killed parent, and the
    child outlives the server; and a stage that writes into every open file would end the server.
    """
    for owner, name in (
        (getattr(forkserver, "_forkserver", None), "_forkserver_alive_fd"),
        (getattr(resource_tracker, "_resource_tracker", None), "_fd"),
    ):
        handle = getattr(owner, name, None)
        if isinstance(handle, int):
            with contextlib.suppress(OSError):
                os.close(handle)
            setattr(owner, name, None)
