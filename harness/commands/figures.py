"""`ladder figures`: the pictures that explain, and whether those committed are up to date."""

import sys
from pathlib import Path

from harness.commands import options
from harness.commands.options import UserError
from harness.records import checkout
from harness.records.schema import BadRecord


def figures_command(
    out: options.Figures = None,
    ceilings: options.FigureCeilings = None,
    check: options.CheckFigures = False,
) -> int:
    """Draw the pictures that explain, for README and docs."""
    from harness.lessons import figures  # with NumPy: loaded by who asks for this command alone

    if out is None or ceilings is None:
        checkout.need("ladder figures", ", or name both --out and --ceilings")
    folder = figures.FOLDER if out is None else out
    record = figures.CEILINGS if ceilings is None else ceilings
    try:
        # before seconds are spent on the others
        if not record.is_file():
            raise UserError(f"--ceilings: {record}: no such file")
        if check:
            return tell(folder, figures.stale(folder, record))
        for path in figures.draw(folder, record):
            print(path.relative_to(figures.ROOT) if out is None else path, flush=True)
    except ImportError as error:
        raise UserError(f"pictures need matplotlib: {error}; pip install matplotlib") from None
    except BadRecord:  # which says by itself what is wrong where
        raise
    except ValueError as error:
        raise UserError(f"--ceilings: {record}: {error}") from None
    except OSError as error:
        raise UserError(f"{error.filename or folder}: {error.strerror or error}") from None
    return 0


def tell(folder: Path, stale: list[str]) -> int:
    """Say which pictures are stale; returns the exit code for it."""
    for name in stale:
        print(
            f"{folder / name}: missing, or not drawn from what is here now: run `ladder figures`",
            file=sys.stderr,
        )
    return int(bool(stale))
