"""Whether the committed page was made from what is here now; to compare is cheaper than to make.

A page of the project's own records has in it a digest of what it was made from: the records, the
stages' files, and the modules, styles and libraries that decide what it shows.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from course.page import page
from course.page.ladder_data import GLOSSARY
from course.report.text import DOCS, RESULTS, ROOT
from harness.records.code import behind, built_in_files, digest, files_of, peer_files
from harness.records.environment import own_files

PAGE = DOCS / "report.html"
# besides the modules of course/page/
MODULES = (
    "course/lessons/diff", "course/lessons/marks", "course/report/course", "course/report/text",
    "harness/problems/cost", "harness/problems/ring_cost", "harness/records/units",
    "harness/views/groups", "harness/views/look", "harness/views/plots", "harness/views/ratios",
    "harness/views/rings", "harness/views/roofline",
)  # fmt: skip


def sources() -> list[Path]:
    """The project's records."""
    return own_files("**/*.jsonl", RESULTS)


def made_from() -> str:
    """A digest of all that the page of the project's records is made from, in hexadecimal."""
    total = hashlib.sha256()
    for path in texts():  # without the CRs of a checkout on Windows
        total.update(path.name.encode() + path.read_bytes().replace(b"\r\n", b"\n"))
    here = sorted(Path(__file__).parent.glob("*.py"))
    for path in (*here, *(ROOT / f"{module}.py" for module in MODULES)):
        total.update(digest(path.read_text(encoding="utf-8")).encode())
    return total.hexdigest()


def texts() -> Iterator[Path]:
    """The files whose every letter counts."""
    yield from sources()
    yield from sorted(path for path in page.WEB.rglob("*") if path.is_file())
    if GLOSSARY.is_file():
        yield GLOSSARY
    for first in built_in_files():
        yield from files_of(first)
    for first in (*built_in_files(), *peer_files()):  # of edits since a measurement
        yield from behind(first)


def is_stale() -> bool:
    """Whether the committed page is missing, or not made from what is here."""
    return not PAGE.is_file() or made_from().encode() not in PAGE.read_bytes()
