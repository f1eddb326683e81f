"""`ladder run --expect FILE`: does each cell have the status that it has in another run's file?"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.text import Text

from harness.records.schema import Record, key
from harness.views.cell_tables import problem_title
from harness.views.table import make_page
from ladder.measuring import open_results
from ladder.options import UserError

SKIPPED = "skipped"  # for a reason of this machine, or of that one: nothing to compare


def read_expected(path: Path | None, plan: Sequence[Record]) -> dict[str, Record] | None:
    """The records of the file of --expect by their key; None without a file.

    Raises UserError where the file can't be read, or has none of the planned cells.
    """
    if path is None:
        return None
    _, records = open_results(path)
    expected = {key(record): record for record in records}
    if not any(key(cell) in expected for cell in plan):
        raise UserError(
            f"--expect: {path}: has none of the {len(plan)} cells to be measured; expected a file "
            "of the same command, on a machine of the same kind (CPU or GPU)"
        )
    return expected


def differences(expected: Mapping[str, Record], records: Sequence[Record]) -> list[str]:
    """One line for each record whose status isn't the expected one; skipped ones don't count."""
    lines = []
    for record in records:
        other = expected.get(key(record))
        if other is None or SKIPPED in (record["status"], other["status"]):
            continue
        if record["status"] != other["status"]:
            what = f"stage {record['stage']} {record['name']}, {problem_title(record)}"
            lines.append(f"{what}: {record['status']}, expected {other['status']}")
    return lines


def as_expected(expected: Mapping[str, Record] | None, records: Sequence[Record]) -> bool:
    """Say which cells differ from the file of --expect; whether none does."""
    if expected is None:
        return True
    different = differences(expected, records)
    known = [(record["status"], expected[key(record)]["status"])
             for record in records if key(record) in expected]  # fmt: skip
    compared = sum(SKIPPED not in pair for pair in known)
    page = make_page()
    for line in different:
        page.print(Text(f"Not as expected: {line}."), soft_wrap=True)
    skipped = f"; {len(known) - compared} skipped here or there" * (compared < len(known))
    same = f"Statuses as expected: {compared - len(different)} of {compared}{skipped}."
    page.print(Text(same), soft_wrap=True)
    return not different
