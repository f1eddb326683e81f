"""Draw the picture that explains, of the memory hierarchy, into docs/figures/; find a stale one.

The bytes of a PNG depend on the version of matplotlib. So each file has in it a digest of what it
was drawn from: the code that decides what is drawn and how, and the records that it shows. `stale`
compares this digest with the present one, and draws nothing. (tools/picture_of_page.py makes the
pictures of the page.)
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from course.lessons import figures_memory
from harness.records.code import digest
from harness.records.files import whole
from harness.records.jsonl import read
from harness.views.look import LOOKS, Look

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "figures"
CEILINGS = ROOT / "results" / "h200" / "ceilings.jsonl"
# the modules that decide what is drawn
MODULES = (
    "course/lessons/cited", "course/lessons/figures_memory", "harness/views/look",
    "harness/records/files",
)  # fmt: skip


def name(look: Look) -> str:
    """The name of the file for a look."""
    return f"memory-hierarchy{look.suffix}.png"


def mark(ceilings: Path) -> str:
    """What a file has in it: a digest of all that it is drawn from; OSError without the record."""
    total = hashlib.sha256()
    for module in MODULES:
        total.update(digest((ROOT / f"{module}.py").read_text(encoding="utf-8")).encode())
    total.update(ceilings.read_bytes().replace(b"\r\n", b"\n"))  # of a checkout on Windows
    return f"ladder figures {total.hexdigest()}"


def draw(folder: Path, ceilings: Path = CEILINGS) -> Iterator[Path]:
    """Write the picture into `folder` in each look, and yield each file after it is written.

    Raises ImportError where matplotlib is missing, OSError where a file can't be written or read,
    BadRecord or ValueError where `ceilings` has nothing that can be drawn.
    """
    for look in LOOKS:
        made = figures_memory.figure(*read(ceilings, "ceiling"), look)
        path = folder / name(look)
        with whole(path) as draft:
            made.savefig(draft, metadata={"Comment": mark(ceilings), "Software": None})
        yield path


def stale(folder: Path, ceilings: Path = CEILINGS) -> list[str]:
    """The names of the files in `folder` that are missing or not up to date."""
    now = mark(ceilings).encode()
    paths = [folder / name(look) for look in LOOKS]
    return [path.name for path in paths if not path.is_file() or now not in path.read_bytes()]
