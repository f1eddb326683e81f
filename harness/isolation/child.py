"""One process per comparison: started by a server that has torch imported, watched, and ended.

The server imports torch and nothing else: it runs no operation (one would leave threads behind
that hang every child), loads no stage and touches no GPU. What a child says comes as JSON over a
pipe: a stage that writes garbage into it costs its own cell.
"""

import contextlib
import ctypes
import json
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness.records.units import show_bytes

START_LIMIT = 180.0  # seconds for a child to start: the first waits for the server's own import
POLL = 0.02  # seconds between two looks at a child's memory
LAST_WORDS = 5.0  # seconds for what an ended child has said to be read
LONGEST_MESSAGE = 1 << 16  # bytes; a stage that announces more is cut off
MOST_MESSAGES = 64  # unread; a stage that floods the pipe is cut off, too
MARK = "LADDER_CELL"  # in the environment of whatever a child starts

NO_MESSAGE = "what its process reported is not the harness's own message"

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
        self.ended = False
        self.mark = uuid.uuid4().hex
        self.process = context.Process(
            target=enter, args=(target, theirs, str(log), self.mark, arguments), daemon=True
        )
        self.process.start()
        theirs.close()
        self.base_bytes: int | None = None
        self.memory: int | None = None
        # a thread reads: a stage may announce a message that never comes
        self.inbox: queue.Queue[bytes | None] = queue.Queue(MOST_MESSAGES)
        self.closing = threading.Lock()
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        """Put what the child says into the inbox; None at the end, or at what is no message.

        The connection is closed here and nowhere else: were it closed under a thread that waits in
        it, its number could be another file's by the time that the thread reads.
        """
        try:
            while True:
                # an empty message is none of ours; it is passed on as one that can't be parsed
                self.inbox.put_nowait(self.connection.recv_bytes(LONGEST_MESSAGE) or b"null")
        except (EOFError, OSError, MemoryError, ValueError, queue.Full):
            with contextlib.suppress(queue.Full):
                self.inbox.put_nowait(None)
        with self.closing:
            self.connection.close()

    def limit_memory(self, memory: int) -> None:
        """From now on, allow `memory` bytes above what the child holds at this moment."""
        self.base_bytes = resident_bytes(self.process.pid)
        self.memory = memory

    def send(self, message: Message) -> None:
        """Say something to the child; one that has ended doesn't hear it."""
        with self.closing, contextlib.suppress(OSError):
            self.connection.send_bytes(json.dumps(message).encode())

    def receive(self, seconds: float, late: str) -> Message:
        """The child's next message, awaited for `seconds` while its memory is watched.

        Raises ChildFailed where the child ends first (crashed), says nothing in time (timeout,
        whose reason is `late`), outgrows its memory (out-of-memory) or says what is no JSON.
        """
        deadline = time.monotonic() + seconds
        while True:
            # a child that has ended may have spoken before: what it said is still on its way
            ended = not self.process.is_alive()
            try:
                data = self.inbox.get(timeout=LAST_WORDS if ended else POLL)
            except queue.Empty:
                data = None if ended else b""
            if data is None:
                raise ChildFailed(*self.how_it_ended())
            if data:
                return self.parse(data)
            self.check_memory()
            if time.monotonic() > deadline:
                self.end()
                raise ChildFailed("timeout", late)

    def parse(self, data: bytes) -> Message:
        """The message in `data`; ChildFailed where it is none."""
        try:
            message = json.loads(data)
            if isinstance(message, dict) and isinstance(message.get("event"), str):
                return message
        except (ValueError, RecursionError):
            pass
        self.end()
        raise ChildFailed("crashed", NO_MESSAGE)

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
        if code is None:  # it lives, but what came from it can't be read
            self.end()
            return "crashed", NO_MESSAGE
        if code < 0:
            with contextlib.suppress(ValueError):
                return "crashed", f"killed by {signal.Signals(-code).name}"
        return "crashed", f"its process ended (exit code {code}) before it answered"

    def end(self) -> None:
        """End the child, and whatever it has started, now."""
        if self.process.pid is None or self.ended:
            return
        self.ended = True
        started = list(marked(self.mark))
        with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
            os.killpg(self.process.pid, signal.SIGKILL)  # it leads a group of its own once it runs
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        for pid in started:  # what has left the group
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self.process.join(5.0)  # the connection ends with it, and the thread that reads it

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
    target: Callable[..., None],
    connection: Connection,
    log: str,
    mark: str,
    arguments: tuple[object, ...],
) -> None:
    """What every child does first: leave the terminal, and die with its server."""
    os.environ[MARK] = mark
    leave_the_server()
    if hasattr(os, "setsid"):
        os.setsid()  # a Ctrl-C is the parent's to hear; and it can be ended with all it starts
    die_with_parent()
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    target(connection, *arguments)


def leave_the_server() -> None:
    """Close what multiprocessing hands to every child, so that it could start children of its own.

    While a child holds the server's lifeline, the server outlives a killed parent, and the child
    the server; and a stage that writes into every open file would bring the server down.
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


def marked(mark: str) -> Iterator[int]:
    """The processes that a child with this mark has started, wherever they are (Linux)."""
    sign = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if sign in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def die_with_parent() -> None:
    """Have the kernel end this process when its fork server ends (Linux)."""
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def say(connection: Connection, event: str, **fields: Any) -> None:
    """Send the parent a message from a child; one whose parent no longer listens ends here."""
    try:
        connection.send_bytes(json.dumps({"event": event, **fields}).encode())
    except OSError:
        os._exit(1)


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
