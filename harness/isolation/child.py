"""Start a child process from a fork server that has torch imported, watch it, and end it.

The server imports what every child would, and does nothing else: it runs no operation (one would
leave threads behind that hang every child), loads no stage and touches no GPU. Children send their
messages as JSON over a pipe: a stage that writes garbage into the pipe makes only its own cell
fail.
"""

import contextlib
import gc
import json
import os
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from harness.ending import ENDING
from harness.isolation.fork_server import (
    PYTHON,
    close_server_handles,
    launch,
    server,
    server_pid,
    set_variables,
    stop_server,
    wake,
)
from harness.isolation.processes import (
    DIE_WITH_PARENT,
    DUMPABLE,
    SUBREAPER,
    ask_kernel,
    descendants,
    end_descendants,
    resident_bytes,
)
from harness.isolation.scratch import scratch
from harness.records.units import show_bytes
from harness.search_path import leave_here

START_LIMIT: Final = 180.0  # seconds for a child to start, at first with the import of torch
POLL: Final = 0.02  # seconds between two checks of a child's memory
LAST_WORDS: Final = 5.0  # seconds to read the messages that an ended child has sent
LONGEST_MESSAGE: Final = 1 << 16  # bytes; a child that announces a longer message is ended
MOST_MESSAGES: Final = 64  # unread; a child that floods the pipe is ended, too
LOOK: Final = 0.2  # seconds between two searches for processes that a child has started
SHOWN_LOG: Final = 1 << 16  # bytes of a child's output that are kept and shown: its end
LONGEST_REASON: Final = 300  # characters of an error, as a reason
LONGEST_LOG: Final = 1 << 20  # bytes of a child's output on the disk
STARTS: Final = 3  # attempts: a fork server that a stage has killed is started again

HEARD: Final = 0.5  # seconds until this process has heard a signal that a scheduler sends to all

NO_MESSAGE: Final = "what its process reported is not the harness's own message"

Message = dict[str, Any]


class ChildFailed(Exception):
    """A child ended, hung or took too much memory; `status` and `reason` are those of a record."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class Child:
    """A child process running `target(connection, *arguments)`.

    Its output goes to a file, never to the parent's terminal; `printed` returns the end of it.
    """

    def __init__(self, target: Callable[..., None], *arguments: object) -> None:
        # read through its handle: a stage may delete or replace the file
        handle, self.path = tempfile.mkstemp(suffix=".log", dir=scratch())
        self.log = os.fdopen(handle, "r+b", buffering=0)
        self.shown, self.unseen = 0, ""  # bytes shown so far; text not shown yet
        self.ended = False
        self.base_bytes: int | None = None
        self.memory: int | None = None
        self.descendants: set[int] = set()
        self.looked = 0.0
        self.process, self.connection = begin(target, self.path, arguments)
        # a thread reads, since a stage may announce a message and never send it
        self.inbox: queue.Queue[bytes | None] = queue.Queue(MOST_MESSAGES)
        self.closing = threading.Lock()
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        """Put the child's messages into the inbox; None at the end, or when one can't be read.

        The connection is closed here and nowhere else: closed while this thread waits for it, its
        file descriptor could belong to another file when the thread reads.
        """
        try:
            while True:
                # the harness sends no empty message: it is passed on as one that is no message
                self.inbox.put_nowait(self.connection.recv_bytes(LONGEST_MESSAGE) or b"null")
        except (EOFError, OSError, MemoryError, ValueError, queue.Full):
            with contextlib.suppress(queue.Full):
                self.inbox.put_nowait(None)
        with self.closing:
            self.connection.close()

    def limit_memory(self, memory: int) -> None:
        """From now on, allow `memory` bytes above the child's present memory."""
        self.base_bytes, self.memory = self.memory_bytes(), memory

    def send(self, message: Message) -> None:
        """Send a message to the child; nothing happens where it has ended."""
        with self.closing, contextlib.suppress(OSError):
            self.connection.send_bytes(json.dumps(message).encode())

    def receive(self, seconds: float, late: str) -> Message:
        """Wait up to `seconds` for the child's next message, and watch its memory.

        Raises ChildFailed where the child ends first (crashed), sends nothing in time (timeout,
        with the reason `late`), takes too much memory (out-of-memory) or sends no valid message.
        """
        deadline = time.monotonic() + seconds
        while (message := self.next_message()) is None:
            if time.monotonic() > deadline:
                self.end()
                raise ChildFailed("timeout", late)
        return message

    def next_message(self) -> Message | None:
        """The child's next message; None where none comes within POLL. Raises as `receive` does.

        A child that starts nothing, as a judge, goes on where another child has stopped it.
        """
        # a child that has ended may have sent messages before, which are still in the pipe
        ended = not self.process.is_alive()
        try:
            data = self.inbox.get(timeout=LAST_WORDS if ended else POLL)
        except queue.Empty:
            data = None if ended else b""
        if data is None:
            raise ChildFailed(*self.how_it_ended())
        if data:
            return self.parse(data)
        if not ended:  # its number may be another process's by now
            wake(self.process.pid)
        self.watch()
        return None

    def parse(self, data: bytes) -> Message:
        """Parse the message in `data`; ChildFailed where it is none."""
        try:
            message = json.loads(data)
            if isinstance(message, dict) and isinstance(message.get("event"), str):
                return message
        except (ValueError, RecursionError):
            pass
        self.end()
        raise ChildFailed("crashed", NO_MESSAGE)

    def watch(self) -> None:
        """Keep the child's log short, and end a child that takes too much memory."""
        if os.fstat(self.log.fileno()).st_size > LONGEST_LOG:
            self.unseen, self.shown = self.printed(), 0
            os.ftruncate(self.log.fileno(), 0)
        if self.memory is None or self.base_bytes is None:
            return
        if self.memory_bytes() > self.base_bytes + self.memory:
            self.end()
            raise ChildFailed("out-of-memory", f"took more than {show_bytes(self.memory)}")

    def memory_bytes(self) -> int:
        """The resident memory of the child and its descendants, shared pages counted once."""
        if time.monotonic() > self.looked + LOOK:
            self.descendants = descendants(self.process.pid)
            self.looked = time.monotonic()
        resident = resident_bytes([*self.descendants] or [self.process.pid], "Rss")
        if len(self.descendants) > 1 and resident > (self.base_bytes or 0) + (self.memory or 0):
            resident = resident_bytes([*self.descendants], "Pss")
        return resident

    def printed(self) -> str:
        """The output of the child since the last call, at most the last SHOWN_LOG bytes of it."""
        text, self.unseen = self.unseen, ""
        if not self.log.closed:
            size = os.fstat(self.log.fileno()).st_size
            first = max(self.shown, size - SHOWN_LOG)
            self.log.seek(first)
            text += self.log.read(SHOWN_LOG).decode(errors="replace")
            self.shown = max(size, self.shown)
        return text[-SHOWN_LOG:]

    def how_it_ended(self) -> tuple[str, str]:
        """Status and reason of a child that ended before it sent its last message."""
        self.process.join(1.0)
        code = self.process.exitcode
        if code is None:  # it runs, but its message can't be read
            self.end()
            return "crashed", NO_MESSAGE
        if code < 0:
            if -code in ENDING:  # sent to all processes, this one included: no fault of the stage's
                time.sleep(HEARD)
            with contextlib.suppress(ValueError):
                return "crashed", f"killed by {signal.Signals(-code).name}"
        return "crashed", f"its process ended (exit code {code}) before it answered"

    def end(self) -> None:
        """Kill the child and all its descendants."""
        if self.process.pid is None or self.ended:
            return
        self.ended = True
        end_descendants(self.process.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
            os.killpg(self.process.pid, signal.SIGKILL)  # once it runs, it leads its own group
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        wake(server_pid())  # it reports that the process has ended
        self.process.join(5.0)  # this also ends the connection and the thread that reads it
        self.unseen = self.printed()
        self.log.close()
        with contextlib.suppress(OSError):
            Path(self.path).unlink()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def begin(
    target: Callable[..., None], log: str, arguments: tuple[object, ...]
) -> tuple[Any, Connection]:
    """Start a process that runs `target`; returns it and the parent's end of its connection.

    Raises ChildFailed where no process can be started.
    """
    context = server()
    for _ in range(STARTS):
        wake(server_pid())
        ours, theirs = context.Pipe()
        told = (target, theirs, log, arguments, {name: os.environ.get(name) for name in PYTHON})
        process = context.Process(target=enter, args=told, daemon=True)
        try:
            launch(process, theirs)
            return process, ours
        except (OSError, EOFError) as error:
            reason = f"no process could be started: {error}"
            ours.close()
            stop_server()  # the next attempt starts a new one
    raise ChildFailed("crashed", reason)


def enter(
    target: Callable[..., None], connection: Connection, log: str, arguments: tuple[object, ...],
    variables: Mapping[str, str | None],
) -> None:  # fmt: skip
    """Set a child up (own session, dies with its server, output to `log`), and run `target`.

    `variables`: of PYTHON, for what it starts itself.
    """
    close_server_handles()
    leave_here()
    del sys.argv[1:]  # the command's: a peer's library reads them, and takes --h for --help
    set_variables(variables)
    gc.freeze()  # what the server imported is no garbage: gc.collect() would walk all of it
    gc.enable()  # harness/no_garbage.py
    if hasattr(os, "setsid"):
        os.setsid()  # a Ctrl-C goes to the parent alone, and the group can be killed
        # what a stage starts may be ended by a SIGTERM, as everywhere
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*ENDING} - {signal.SIGINT})
    ask_kernel(DIE_WITH_PARENT, signal.SIGKILL)
    try:
        handle = os.open(log, os.O_WRONLY | os.O_APPEND)
    except FileNotFoundError:
        os._exit(1)  # its parent has ended, and cleared up: nobody is told, or waits
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    for stream in (sys.stdout, sys.stderr):  # this process is killed: what waited would be lost
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if sys.platform == "linux" and not getattr(target, "starts_nothing", False):
        fork_under_subreaper(connection)
    from harness.isolation.lean_interpreter import make_lean  # imports torch, as the server has

    make_lean()
    target(connection, *arguments)


def starts_nothing(target: Callable[..., None]) -> Callable[..., None]:
    """Mark what a child runs: the harness's own code alone, which starts no process.

    Such a child needs no subreaper, which takes as long to start as the child itself.
    """
    target.starts_nothing = True  # type: ignore[attr-defined]
    return target


def fork_under_subreaper(connection: Connection) -> None:
    """Fork and go on in the new process; the old one becomes the subreaper of its descendants.

    Processes that lose their parent become children of the subreaper, whatever session, group or
    environment they have set: there they are found and ended.
    """
    ask_kernel(SUBREAPER, 1)
    worker = os.fork()
    if worker == 0:
        ask_kernel(DIE_WITH_PARENT, signal.SIGKILL)
        return
    connection.close()
    status = None
    while status is None:
        pid, how = os.wait()
        status = how if pid == worker else None
    end_descendants(os.getpid())
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # this process ends by the same signal as the worker
        with contextlib.suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        ask_kernel(DUMPABLE, 0)
        os.kill(os.getpid(), -code)
    os._exit(code)


def say(connection: Connection, event: str, **fields: Any) -> None:
    """In a child: send the parent a message; ends the child where the parent has gone."""
    try:
        connection.send_bytes(json.dumps({"event": event, **fields}).encode())
    except OSError:
        os._exit(1)


def one_line(error: BaseException) -> str:
    """The type and the message of an error in one line, for a reason."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_REASON]


def hear(connection: Connection) -> Message:
    """In a child: wait for the parent's next message; ends the child where the parent has gone."""
    try:
        return dict(json.loads(connection.recv_bytes()))
    except (EOFError, OSError):
        os._exit(1)
