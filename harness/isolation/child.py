"""One process per comparison: started by a server that has torch imported, watched, and ended.

The server imports torch and nothing else: it runs no operation (one would leave threads behind
that hang every child), loads no stage and touches no GPU. What a child says comes as JSON over a
pipe: a stage that writes garbage into it costs its own cell.
"""

import contextlib
import json
import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness.isolation.processes import (
    ADOPT,
    DIE_WITH_PARENT,
    DUMPABLE,
    ask_kernel,
    end_family,
    end_process,
    family,
    processes,
    resident_bytes,
)
from harness.records.units import show_bytes

START_LIMIT = 180.0  # seconds for a child to start: the first waits for the server's own import
POLL = 0.02  # seconds between two looks at a child's memory
LAST_WORDS = 5.0  # seconds for what an ended child has said to be read
LONGEST_MESSAGE = 1 << 16  # bytes; a stage that announces more is cut off
MOST_MESSAGES = 64  # unread; a stage that floods the pipe is cut off, too
LOOK = 0.2  # seconds between two looks at what a child has started
SHOWN_LOG = 1 << 16  # bytes at the end of what a child prints: what is kept and shown of it
LONGEST_LOG = 1 << 20  # bytes of it that lie on the disk
STARTS = 3  # a fork server that a stage has ended is started again

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

    What it prints goes to a file, never to our own output; `printed` is its end.
    """

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        # read by its handle: what a stage does to the name is no matter
        handle, self.path = tempfile.mkstemp(prefix="ladder-", suffix=".log")
        self.log = os.fdopen(handle, "r+b", buffering=0)
        self.shown, self.unseen = 0, ""  # bytes of the log; what is kept of it once it is closed
        self.ended = False
        self.base_bytes: int | None = None
        self.memory: int | None = None
        self.kin: dict[int, int] = {}  # processes seen under it -> when each began
        self.looked = 0.0
        self.process, self.connection = begin(target, self.path, arguments)
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
        self.base_bytes, self.memory = self.held_bytes(), memory

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
            self.watch()
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

    def watch(self) -> None:
        """Keep its log short, and end it where it has outgrown its memory."""
        if os.fstat(self.log.fileno()).st_size > LONGEST_LOG:
            self.unseen, self.shown = self.printed(), 0
            os.ftruncate(self.log.fileno(), 0)
        if self.memory is None or self.base_bytes is None:
            return
        if self.held_bytes() > self.base_bytes + self.memory:
            self.end()
            raise ChildFailed("out-of-memory", f"took more than {show_bytes(self.memory)}")

    def held_bytes(self) -> int:
        """The resident sets of it and all that it has started, a page that they share once."""
        if time.monotonic() > self.looked + LOOK:
            self.kin = family(self.process.pid)
            self.looked = time.monotonic()
        held = resident_bytes([*self.kin] or [self.process.pid], "Rss")
        if len(self.kin) > 1 and held > (self.base_bytes or 0) + (self.memory or 0):
            held = resident_bytes([*self.kin], "Pss")
        return held

    def printed(self) -> str:
        """What it has printed since the last time, or the last SHOWN_LOG bytes of that."""
        text, self.unseen = self.unseen, ""
        if not self.log.closed:
            size = os.fstat(self.log.fileno()).st_size
            first = max(self.shown, size - SHOWN_LOG)
            self.log.seek(first)
            text += self.log.read(SHOWN_LOG).decode(errors="replace")
            self.shown = max(size, self.shown)
        return text[-SHOWN_LOG:]

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
        end_family(self.process.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
            os.killpg(self.process.pid, signal.SIGKILL)  # it leads a group of its own once it runs
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        known = processes() if self.kin else {}
        for pid, begun in self.kin.items():  # what stood over them may have been ended before them
            if pid in known and known[pid][1] == begun:
                end_process(pid)
        self.process.join(5.0)  # the connection ends with it, and the thread that reads it
        self.unseen = self.printed()
        self.log.close()
        with contextlib.suppress(OSError):
            Path(self.path).unlink()

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


def begin(
    target: Callable[..., None], log: str, arguments: tuple[object, ...]
) -> tuple[Any, Connection]:
    """A process running `target`, and our end of its connection.

    Raises ChildFailed where none can be started.
    """
    context = server()
    for _ in range(STARTS):
        running = getattr(forkserver, "_forkserver", None)
        if pid := getattr(running, "_forkserver_pid", None):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)  # a stage may have stopped it
        ours, theirs = context.Pipe()
        process = context.Process(target=enter, args=(target, theirs, log, arguments), daemon=True)
        try:
            process.start()
            return process, ours
        except (OSError, EOFError) as error:
            reason = f"no process could be started: {error}"
            ours.close()
            with contextlib.suppress(Exception):
                running._stop()  # type: ignore[union-attr]  # the next has one of its own
        finally:
            theirs.close()
    raise ChildFailed("crashed", reason)


def enter(
    target: Callable[..., None], connection: Connection, log: str, arguments: tuple[object, ...]
) -> None:
    """What every child does first: leave the terminal, and die with its server."""
    leave_the_server()
    if hasattr(os, "setsid"):
        os.setsid()  # a Ctrl-C is the parent's to hear; and it can be ended with all it starts
    ask_kernel(DIE_WITH_PARENT, signal.SIGKILL)
    handle = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    if sys.platform == "linux":
        stand_over(connection)
    target(connection, *arguments)


def stand_over(connection: Connection) -> None:
    """Fork, and go on in the new process; the old one adopts whatever that leaves behind.

    Processes that have lost their parent come to the old one, whatever session, group or
    environment they have chosen: there they are found and ended.
    """
    ask_kernel(ADOPT, 1)
    worker = os.fork()
    if worker == 0:
        ask_kernel(DIE_WITH_PARENT, signal.SIGKILL)
        return
    connection.close()
    status = None
    while status is None:
        pid, how = os.wait()
        status = how if pid == worker else None
    end_family(os.getpid())
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # it says how the worker ended
        with contextlib.suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        ask_kernel(DUMPABLE, 0)
        os.kill(os.getpid(), -code)
    os._exit(code)


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
