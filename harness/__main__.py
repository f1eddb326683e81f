"""``python -m harness ...`` from a checkout, and the ``ladder`` command once installed.

The one module here that imports what lies above the harness: the command line, ladder/.
Nothing is imported at the top: every cell's process runs this module again as its `__main__`.
"""


def main() -> None:
    import os
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # nothing has begun yet
    from ladder.app import main as run

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
