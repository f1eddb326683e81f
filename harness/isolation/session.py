"""A child process that answers one request after another; its messages are checked here.

This is the one place in the parent that trusts a child's message. A child runs other people's code:
its message may be any JSON. The caller names the expected events and the type of each field; any
other message ends the child and counts as a crash.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from harness.isolation.child import NO_MESSAGE, START_LIMIT, Child, ChildFailed, Message
from harness.records.schema import FAILURES
from harness.records.units import clean
from harness.records.values import LONGEST, SHORTEST

Own = TypeVar("Own", bound="Session")
Check = Callable[[Any], bool]
Fields = Mapping[str, Check]  # field of a message -> the check of its value
Events = Mapping[str, Fields]  # each expected event -> its fields

LARGEST = 1 << 63  # far above every measured number
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
    """Whether `value` is a plausible time of a call, ms."""
    return is_number(value) and SHORTEST <= value <= LONGEST


def is_text(value: Any) -> bool:
    """Whether `value` is a string."""
    return isinstance(value, str)


def is_bool(value: Any) -> bool:
    """Whether `value` is true or false."""
    return isinstance(value, bool)


def optional(check: Check) -> Check:
    """The check that a value is None or passes `check`."""
    return lambda value: value is None or check(value)


def list_of(check: Check) -> Check:
    """The check that a value is a list whose elements all pass `check`."""
    return lambda value: isinstance(value, list) and all(map(check, value))


def has(fields: Fields) -> Check:
    """The check that a value is an object with all of `fields`, each passing its check."""
    return lambda value: (
        isinstance(value, dict)
        and all(name in value and check(value[name]) for name, check in fields.items())
    )


# how a stage failed, as reported by its own process, which may never report that it is right
FAULT: Fields = {"status": lambda value: value in (*FAILURES, "skipped"), "reason": is_text}


def believe(message: Message, events: Events) -> Message:
    """Check `message` against `events`; returns it with its texts safe to print.

    Raises ChildFailed: with the child's own status and reason where it reports that it 'failed', as
    a crash where the event is another one or a field has a wrong value.
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

    After a failure the child is ended, and the next request starts a new one. `memory`: bytes that
    it may take above its memory when it sends 'loads' (before it loads other people's code), or
    else 'ready'. `greeting`: the fields of 'ready'. `load`: seconds between 'loads' and 'ready'.
    """

    def __init__(
        self,
        target: Callable[..., None],
        *arguments: object,
        memory: int | None = None,
        greeting: Fields | None = None,
        load: float = START_LIMIT,
    ) -> None:
        self.begin = functools.partial(Child, target, *arguments)
        self.memory, self.load = memory, load
        self.greeting: Events = {"ready": greeting or {}}
        self.child: Child | None = None
        self.greeted: Message | None = None
        self.output = ""  # output of children that have ended

    def start(self) -> Child:
        """Start the child, if none is running, and return it without waiting until it is ready."""
        if self.child is None:
            self.greeted = None
            self.child = self.begin()
        return self.child

    def ready(self, seconds: float = START_LIMIT, late: str = "did not load in {:g} s") -> Message:
        """Wait until the child is ready; returns its 'ready'. `late`: the reason of a timeout."""
        child = self.start()
        if self.greeted is None:
            events = {"loads": {}, **self.greeting}
            message = self.receive(events, seconds, late.format(seconds))
            if self.memory is not None:
                child.limit_memory(self.memory)
            if message["event"] == "loads":
                seconds = min(seconds, self.load)
                message = self.receive(self.greeting, seconds, late.format(seconds))
            self.greeted = message
        return self.greeted

    def ask(self, message: Message, events: Events, seconds: float, late: str) -> Message:
        """Send `message` once the child is ready; returns its answer, one of `events`."""
        self.ready()
        self.send(message)
        return self.receive(events, seconds, late)

    def send(self, message: Message) -> None:
        """Send a message to the child; nothing happens where it has ended."""
        self.start().send(message)

    def receive(self, events: Events, seconds: float, late: str) -> Message:
        """Wait up to `seconds` for the child's next message, one of `events`.

        Raises ChildFailed where the child fails, sends anything else, or is late (with the reason
        `late`).
        """
        try:
            return believe(self.start().receive(seconds, late), events)
        except ChildFailed:
            self.end()
            raise

    def printed(self) -> str:
        """The output of the child since the last call, or the end of it (Child.printed)."""
        text, self.output = self.output, ""
        return text if self.child is None else text + self.child.printed()

    def end(self) -> None:
        """End the child."""
        if self.child is not None:
            self.child.end()
            self.output += self.child.printed()
            self.child = None

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
