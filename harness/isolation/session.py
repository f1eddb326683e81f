"""A child process that answers one request after another; its messages are checked here.

This is the one place in the parent that trusts a child's message. A child runs other people's code:
its message may be any JSON. The caller names the expected messages (dataclasses, messages.py); any
other message ends the child and counts as a crash.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from harness.isolation.child import NO_MESSAGE, START_LIMIT, Child, ChildFailed, Message
from harness.isolation.messages import Failed, Loads, Ready, event_of
from harness.records.units import clean
from harness.records.values import BadRecord, check_fields, rules

Own = TypeVar("Own", bound="Session")

LATE: Final = "did not load in {:g} s"
LONGEST_NAME: Final = 40  # characters of an unexpected event's name, in a reason


def believe(message: Message, *kinds: type) -> Any:
    """Check `message` against `kinds`; returns one of these, its texts safe to print.

    Raises ChildFailed: with the child's own status and reason where it reports that it failed, as
    a crash where the event is another one or a field has a wrong value.
    """
    event = clean(message["event"])
    kind = {event_of(each): each for each in (Failed, *kinds)}.get(event)
    if kind is None:
        raise ChildFailed("crashed", f"its process said {event[:LONGEST_NAME]!r} out of turn")
    try:
        named = {name: message[name] for name in rules(kind) if name in message}
        believed = kind(**check_fields(named, kind))
    except BadRecord:
        raise ChildFailed("crashed", NO_MESSAGE) from None
    if kind is Failed:
        raise ChildFailed(believed.status, believed.reason)
    return believed


class Session:
    """A child running `target(connection, *arguments)`, started when it is first needed.

    After a failure the child is ended, and the next request starts a new one. `memory`: bytes that
    it may take above its memory when it sends Loads (before it loads other people's code), or else
    `greeting`, its Ready. `load`: seconds between the two.
    """

    def __init__(
        self, target: Callable[..., None], *arguments: object, memory: int | None = None,
        greeting: type = Ready, load: float = START_LIMIT,
    ) -> None:  # fmt: skip
        self.begin = functools.partial(Child, target, *arguments)
        self.memory, self.load = memory, load
        self.greeting = greeting
        self.child: Child | None = None
        self.since = 0.0  # when the child was started, or sent its last greeting
        self.greeted: Any = None  # the last of Loads and `greeting` that came
        self.output = ""  # output of children that have ended

    def start(self) -> Child:
        """Start the child, if none is running, and return it without waiting until it is ready."""
        if self.child is None:
            self.greeted = None
            self.child, self.since = self.begin(), time.monotonic()
        return self.child

    def ready(self, seconds: float = START_LIMIT, late: str = LATE) -> Any:
        """Wait until the child is ready; returns its 'ready'. `late`: the reason of a timeout."""
        while not self.is_ready(seconds, late):
            pass
        return self.greeted

    def is_ready(self, seconds: float = START_LIMIT, late: str = LATE) -> bool:
        """Whether the child is ready; if not, it is watched for a moment. Raises as `ready` does.

        Several children that are asked in turn start at the same time.
        """
        self.start()
        if not isinstance(self.greeted, self.greeting):
            loads = isinstance(self.greeted, Loads)
            seconds = min(seconds, self.load) if loads else seconds
            kinds = (self.greeting,) if loads else (Loads, self.greeting)
            if self.next_message(*kinds) is not None:
                self.since = time.monotonic()
            elif time.monotonic() > self.since + seconds:
                self.end()
                raise ChildFailed("timeout", late.format(seconds))
        return isinstance(self.greeted, self.greeting)

    def ask(self, message: object, *kinds: type, seconds: float, late: str) -> Any:
        """Send `message` once the child is ready; returns its answer, one of `kinds`."""
        self.ready()
        self.send(message)
        return self.receive(*kinds, seconds=seconds, late=late)

    def send(self, message: object) -> None:
        """Send a message, a dict or a dataclass; nothing happens where the child has ended."""
        if not isinstance(message, dict):
            message = {"event": event_of(type(message)), **vars(message)}
        self.start().send(message)

    def receive(self, *kinds: type, seconds: float, late: str) -> Any:
        """Wait for the child's next message; ChildFailed where it is none of `kinds`.

        `late`: the reason where none comes within `seconds`.
        """
        return self.checked(functools.partial(self.start().receive, seconds, late), *kinds)

    def next_message(self, *kinds: type) -> Any:
        """The child's next message, or None where it has not sent one yet."""
        return self.checked(self.start().next_message, *kinds)

    def checked(self, read: Callable[[], Message | None], *kinds: type) -> Any:
        """The message that `read` gives, one of `kinds`, or None; a failure ends the child.

        The first one limits the child's memory.
        """
        try:
            message = read()
            found = None if message is None else believe(message, *kinds)
        except ChildFailed:
            self.end()
            raise
        if isinstance(found, (Loads, self.greeting)):
            if self.greeted is None and self.memory is not None:
                self.start().limit_memory(self.memory)
            self.greeted = found
        return found

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
