"""``python -m harness ...`` from a checkout, and the ``ladder`` command once installed.

The only module of the harness that imports a package above it: the command line, ladder/.
It imports nothing at the top, because every child process imports it again as its `__main__`.
"""


def main() -> None:
    from harness.search_path import leave_here

    leave_here()  # before a file there can be imported
    import os
    import signal

    numbers = [getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP")]
    for number in numbers:
        if number and signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            # nothing to clean up until a command begins (ladder/help.py)
            signal.signal(number, lambda got, _: os._exit(128 + got))
    from ladder.app import main as run

    try:
        run()
    finally:  # Python removes our temporary files next
        for number in numbers:
            if number:
                signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
