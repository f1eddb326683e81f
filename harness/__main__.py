"""``python -m harness ...`` from a checkout, and the ``ladder`` command once installed.

Nothing is imported at the top: every cell's process runs this module again as its `__main__`.
"""


def main() -> None:
    from harness.commands.app import main as run

    run()


if __name__ == "__main__":
    main()
