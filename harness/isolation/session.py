"""A child process that is asked one thing after another, and whose answers are checked here.

This is the one place in the parent where a child's message is believed. A child runs code of
others: what it sends may be anything that JSON can say. Whoever asks names the events that may come
and what their fields must hold; any other message ends the child, as a crash of its own.
"""

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from harness.isolation.child import NO_MESSAGE, START_LIMIT, Child, ChildFailed, Message
from harness.records.schema import FAILURES
from harness.records.units import clean
from harness.records.values import LONGEST, SHORTEST

Own = TypeVar("Own", bound="Session")
Check = Callable[[Any], bool]
Fields = Mapping[str, Check]  # field of a message -> whether its value is what it must be
Events = Mapping[str, Fields]  # each event that may come -> its fields

LARGEST = 1 << 63  # no figure of a measurement comes near it
LONGEST_NAME = 40  # characters of an unexpected event's name, in a reason


def is_number(value: Any) -> bool:
    """Whether `value` is a finite number."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST


def is_count(value: Any) -> bool:
    """Whether `value` is a whole number of at least 0."""
    return isinstance(value, int) and is_number(value) and value >= 0


def is_time(value: Any) -> bool:
    """Whether `value` is a time that a call can take, ms."""
    return is_number(value) and SHORTEST <= value <= LONGEST


def is_text(value: Any) -> bool:
    """Whether `value` is a string."""
    return isinstance(value, str)


def is_bool(value: Any) -> bool:
    """Whether `value` is true or false."""
    return isinstance(value, bool)


def optional(check: Check) -> Check:
    """Whether a value is None, or passes `check`."""
    return lambda value: value is None or check(value)


def list_of(check: Check) -> Check:
    """Whether a value is a list whose elements all pass `check`."""
    return lambda value: isinstance(value, list) and all(map(check, value))


def has(fields: Fields) -> Check:
    """Whether a value is an object with all of `fields`, each as it must be."""
    return lambda value: (
        isinstance(value, dict)
        and all(name in value and check(value[name]) for name, check in fields.items())
    )


# how a stage failed, as its own process says it: never that it is right
FAULT: Fields = {"status": lambda value: value in (*FAILURES, "skipped"), "reason": is_text}


def believe(message: Message, events: Events) -> Message:
    """`message`, safe to show, where it is one of `events` with all of its fields.

    Raises ChildFailed: with the child's own status and reason where it says that it 'failed', as a
    crash where the message is another one or holds something else.
    """
    message = clean(message)
    event = message["event"]
    if event == "failed" and has(FAULT)(message):
        raise ChildFailed(message["status"], message["reason"])
    if event in events and has(events[event])(message):
        return message
    if event in events or event == "failed":
        raise ChildFailed("crashed", NO_MESSAGE)
    raise ChildFailed("crashed", f"its process said {event[:LONGEST_NAME]!r} out of turn")


class Session:
    """A child running `target(connection, *arguments)`, started when it is first needed.

    After a failure it is ended, and the next question starts a new one. What it prints goes to the
    file `log`. `memory`: bytes that it may take above what it holds when it is ready. `greeting`:
    the fields of its first message, 'ready'.
    """

    def __init__(
        self,
        target: Callable[..., None],
        *arguments: object,
        log: Path,
        memory: int | None = None,
        greeting: Fields | None = None,
    ) -> None:
        self.begin = functools.partial(Child, target, *arguments, log=log)
        self.log, self.memory = log, memory
        self.greeting: Events = {"ready": greeting or {}}
        self.child: Child | None = None
        self.greeted: Message | None = None
        self.shown = 0  # bytes of the log
        log.unlink(missing_ok=True)  # another's

    def start(self) -> Child:
        """Start the child where none runs. It gets ready by itself."""
        if self.child is None:
            self.log.unlink(missing_ok=True)
            self.shown, self.greeted = 0, None
            self.child = self.begin()
        return self.child

    def ready(self, seconds: float = START_LIMIT, late: str = "did not load in {:g} s") -> Message:
        """Its 'ready', waited for where it has not come yet; `late`: why, where it never does."""
        child = self.start()
        if self.greeted is None:
            self.greeted = self.receive(self.greeting, seconds, late.format(seconds))
            if self.memory is not None:
                child.limit_memory(self.memory)
        return self.greeted

    def ask(self, message: Message, events: Events, seconds: float, late: str) -> Message:
        """Its answer to `message`, one of `events`, within `seconds` once it is ready."""
        self.ready()
        self.send(message)
        return self.receive(events, seconds, late)

    def send(self, message: Message) -> None:
        """Say something to the child; one that has ended does not hear it."""
        self.start().send(message)

    def receive(self, events: Events, seconds: float, late: str) -> Message:
        """Its next message, one of `events`, within `seconds`.

        Raises ChildFailed where it fails, says anything else, or is late, whose reason is `late`.
        """
        try:
            return believe(self.start().receive(seconds, late), events)
        except ChildFailed:
            self.end()
            raise

    def printed(self) -> str:
        """What it has printed since the last time."""
        data = self.log.read_bytes()[self.shown :] if self.log.exists() else b""
        self.shown += len(data)
        return data.decode(errors="replace")

    def end(self) -> None:
        """End its process."""
        if self.child is not None:
            self.child.end()
            self.child = None

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
