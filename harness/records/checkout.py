"""Which checkout this code belongs to, if any, and whether the user stands in another one."""

import sys
from pathlib import Path

from harness.records.environment import ROOT


class NoCheckout(Exception):
    """This code was installed without the checkout that a command needs; the message says so."""


def is_checkout(folder: Path) -> bool:
    """Whether `folder` is a checkout of the ladder, rather than where a wheel was unpacked."""
    return all((folder / name).is_file() for name in ("pyproject.toml", "ladder/app.py"))


def need(command: str, instead: str = "") -> None:
    """Raise NoCheckout where this code was installed without the checkout that `command` needs."""
    if not is_checkout(ROOT):
        raise NoCheckout(
            f"{command} needs a checkout, whose records and pages it reads, and this ladder was "
            f"installed without one: clone the repository and run it there{instead}"
        )


def warning() -> str | None:
    """What to say where the user stands in one checkout and Python imports the ladder of another.

    An editable install comes before the current folder: what is changed here would have no effect.
    """
    try:
        here = Path.cwd()
    except OSError:  # the folder is gone
        return None
    mine = next((folder for folder in (here, *here.parents) if is_checkout(folder)), None)
    if mine is None or mine.samefile(ROOT):
        return None
    return (
        f"warning: you are in the checkout {mine}, but this Python ({sys.executable}) runs the "
        f"ladder of {ROOT}. To run the one you are in: `make ladder` and `.venv/bin/ladder` there, "
        "or `pip install -e .` there"
    )
