"""How a signal ends a command: Ctrl-C, a scheduler's SIGTERM, and a terminal that is closed."""

import signal
from types import FrameType

from harness.isolation.child import ENDING


class Stopped(BaseException):
    """A command is ended from outside, by a signal but Ctrl-C: nothing more is shown."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}; what is done is kept")
        self.code = 128 + number  # the exit code


def listen() -> None:
    """From now on a signal raises KeyboardInterrupt or Stopped, unless it is ignored already."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else stop)


def stop(number: int, frame: FrameType | None) -> None:
    """Raise Stopped, once: a second signal must not end the ending."""
    ignore(*ENDING)
    raise Stopped(number)


def ignore(*numbers: int) -> None:
    """Hear these signals no more."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
