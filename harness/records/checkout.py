"""Which checkout this code belongs to, if any, and whether the user works in another one."""

import sys
from pathlib import Path

from harness.records.environment import ROOT


class NoCheckout(Exception):
    """This code was installed without the checkout that a command needs; the message says so."""


def is_checkout(folder: Path) -> bool:
    """Whether `folder` is a checkout of the ladder, and not an installed wheel."""
    return all((folder / name).is_file() for name in ("pyproject.toml", "ladder/app.py"))


def need(command: str, instead: str = "") -> None:
    """Raise NoCheckout where this code has no checkout around it, or one to hand out to students.

    That is what `command` needs; `instead`: what else can be done.
    """
    if not is_checkout(ROOT):
        raise NoCheckout(
            f"{command} needs a checkout, whose records and pages it reads, and this ladder was "
            f"installed without one: clone the repository and run it there{instead}"
        )
    if not (ROOT / "tools").is_dir():
        raise NoCheckout(f"{command} needs the whole checkout, and this is a course's copy of it")


def to_be_written() -> int | None:
    """The stage that a copy for students leaves to them (`ladder lab export`); None elsewhere."""
    return next((int(path.name[0]) for path in (ROOT / "stubs").glob("[0-9]-small")), None)


def warning() -> str | None:
    """A warning where the user is in one checkout and Python imports another's ladder, or None.

    An editable install comes before the current folder, so that edits there would have no effect.
    """
    try:
        here = Path.cwd()
    except OSError:  # the folder is gone
        return None
    current = next((folder for folder in (here, *here.parents) if is_checkout(folder)), None)
    if current is None or current.samefile(ROOT):
        return None
    return (
        f"warning: you are in the checkout {current}, but this Python ({sys.executable}) runs the "
        f"ladder of {ROOT}. To run the one you are in: `make ladder` and `.venv/bin/ladder` there, "
        "or `pip install -e .` there"
    )
