"""How a signal ends a command: Ctrl-C, a scheduler's SIGTERM, and SIGHUP of a closed terminal.

One after the other: `end_at_once` until a command begins, since there is nothing to clean up and
pydantic, with which typer parses options, may swallow an exception; `listen` while it works, so
that a signal is an exception; `ignore` once it ends. What its child processes hear of a signal is
in harness/isolation/child.py.
"""

import os
import signal
from types import FrameType

# sent by a terminal or a scheduler to all processes: the command hears them, and ends the rest
ENDING = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]
INTERRUPTED = 130  # the exit code after a Ctrl-C
LONGEST_CHAIN = 20  # of errors, each raised from another


class Stopped(BaseException):
    """A command is ended from outside, by a signal but Ctrl-C: nothing more is shown."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}; what is done is kept")
        self.code = 128 + number  # the exit code


def end_at_once() -> None:
    """From now on a signal ends this process, unless it is handled already."""
    for number in ENDING:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, lambda got, _: os._exit(128 + got))


def listen() -> None:
    """From now on a signal raises KeyboardInterrupt or Stopped, unless it is ignored already."""
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else stop)


def stop(number: int, frame: FrameType | None) -> None:
    """Raise Stopped, once: a second signal must not end the ending."""
    ignore()
    raise Stopped(number)


def ignore() -> None:
    """From now on these signals do nothing."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def signal_behind(error: BaseException | None) -> KeyboardInterrupt | Stopped | None:
    """The signal that led to an error, or None.

    Python raises a RuntimeError from a Ctrl-C that comes while a class is made, in an import, and
    from a second signal while the first is on its way out of a lock.
    """
    for _ in range(LONGEST_CHAIN):
        if error is None or isinstance(error, (KeyboardInterrupt, Stopped)):
            return error
        error = error.__cause__ or error.__context__
    return None
