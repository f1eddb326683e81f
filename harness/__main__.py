"""``python -m harness ...`` from a checkout, and the ``ladder`` command once installed.

The only module of the harness that imports a package above it: the command line, ladder/.
It imports nothing at the top, because every child process imports it again as its `__main__`.
"""


def main() -> None:
    import os
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # nothing to clean up until a command begins (ladder/help.py)
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from ladder.app import main as run

    run()


if __name__ == "__main__":
    main()
