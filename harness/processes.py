"""A process a cell: started from a fork server that has torch imported, watched, and ended.

The server imports torch and nothing else: it runs no operation (one would leave threads behind
that hang every child), loads no rung and touches no GPU. What a child says comes as JSON over a
pipe: a rung that writes garbage into it costs its own cell.
"""

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

START_LIMIT = 180.0  # seconds for a child to start: the first waits for the server's own import
POLL = 0.02  # seconds between two looks at a child's memory

Message = dict[str, Any]


class ChildFailed(Exception):
    """A child ended, hung or outgrew its memory; `status` is a record's, the text its reason."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class Child:
    """A child process running `target(connection, *arguments)`.

    What it prints goes to the file `log`, never to our own output.
    """

    def __init__(self, target: Callable[..., None], *arguments: object, log: Path) -> None:
        context = server()
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=enter, args=(target, theirs, str(log), arguments), daemon=True
        )
        self.process.start()
        theirs.close()
        self.base_bytes: int | None = None
        self.memory: int | None = None

    def limit_memory(self, memory: int) -> None:
        """From now on, allow `memory` bytes above what the child holds at this moment."""
        self.base_bytes = resident_bytes(self.process.pid)
        self.memory = memory

    def send(self, message: Message) -> None:
        """Say something to the child; one that has ended doesn't hear it."""
        with contextlib.suppress(OSError):
            self.connection.send_bytes(json.dumps(message).encode())

    def receive(self, seconds: float, late: str) -> Message:
        """The child's next message, awaited for `seconds` while its memory is watched.

        Raises ChildFailed where the child ends first (crashed), says nothing in time (timeout,
        whose reason is `late`), outgrows its memory (out-of-memory) or says what is no JSON.
        """
        deadline = time.monotonic() + seconds
        while True:
            ready = wait([self.connection, self.process.sentinel], timeout=POLL)
            if self.connection in ready:
                return self.parse()
            if ready:
                raise ChildFailed(*self.how_it_ended())
            self.check_memory()
            if time.monotonic() > deadline:
                self.end()
                raise ChildFailed("timeout", late)

    def parse(self) -> Message:
        try:
            data = self.connection.recv_bytes()
        except (EOFError, OSError):
            self.process.join(1.0)
            raise ChildFailed(*self.how_it_ended()) from None
        try:
            message = json.loads(data)
            if isinstance(message, dict) and isinstance(message.get("event"), str):
                return message
        except ValueError:
            pass
        self.end()
        raise ChildFailed("crashed", "what its process reported is not the harness's own message")

    def check_memory(self) -> None:
        if self.memory is None or self.base_bytes is None:
            return
        resident = resident_bytes(self.process.pid)
        if resident is not None and resident - self.base_bytes > self.memory:
            self.end()
            raise ChildFailed("out-of-memory", f"took more than {show_bytes(self.memory)}")

    def how_it_ended(self) -> tuple[str, str]:
        """Status and reason of a child that ended without its last message."""
        self.process.join(1.0)
        code = self.process.exitcode
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return "crashed", f"killed by {signal.Signals(-code).name}"
        return "crashed", f"its process ended (exit code {code}) before it answered"

    def end(self) -> None:
        """End the child, and whatever it has started, now."""
        pid = self.process.pid
        with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
            if pid is not None:
                os.killpg(pid, signal.SIGKILL)  # it leads a group of its own once it runs
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.join(5.0)
        self.connection.close()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def server() -> Any:
    """The multiprocessing context whose fork server has torch imported (spawn on Windows)."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    # torch.utils.benchmark looks for a GPU as it is imported; by NVML, that doesn't initialise CUDA
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.utils.benchmark", "numpy"])
    return context


def enter(
    target: Callable[..., None], connection: Connection, log: str, arguments: tuple[object, ...]
) -> None:
    """What every child does first: leave the terminal, and die with its server."""
    if hasattr(os, "setsid"):
        os.setsid()  # a Ctrl-C is the parent's to hear; and it can be ended with all it starts
    die_with_parent()
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    target(connection, *arguments)


def die_with_parent() -> None:
    """Have the kernel end this process when its fork server ends (Linux)."""
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def say(connection: Connection, event: str, **fields: Any) -> None:
    """Send the parent a message from a child."""
    connection.send_bytes(json.dumps({"event": event, **fields}).encode())


def hear(connection: Connection) -> Message:
    """The parent's next message; a child whose parent has gone ends here."""
    try:
        return dict(json.loads(connection.recv_bytes()))
    except (EOFError, OSError):
        os._exit(1)


def resident_bytes(pid: int | None) -> int | None:
    """The resident set of a process in bytes, None where it can't be told."""
    if pid is None:
        return None
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        pass
    try:
        import psutil

        return int(psutil.Process(pid).memory_info().rss)
    except Exception:  # not installed, or the process has just ended
        return None


def show_bytes(size: float) -> str:
    """A size for people, in powers of 1024: 1.5 MB."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1024 or unit == "GB":
            break
        size /= 1024
    return f"{size:.3g} {unit}"
