"""``python -m harness ...`` from a checkout, and the ``ladder`` command once installed.

The only module of the harness that imports a package above it: the command line, ladder/.
It imports nothing at the top, because every child process imports it again as its `__main__`.
"""


def main() -> None:
    from harness.search_path import leave_here

    leave_here()  # before a file there can be imported
    from harness import ending

    ending.end_at_once()
    from ladder.app import main as run

    try:
        run()
    finally:  # Python removes our temporary files next
        ending.ignore()


if __name__ == "__main__":
    main()
