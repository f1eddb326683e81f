"""Draw the explaining pictures into docs/figures/, and check that they are up to date.

The bytes of a PNG depend on the version of matplotlib, and computed values differ between
processors in their last digits. So each file has in it a digest of what it was drawn from: the code
that decides what is drawn and how, and the records that it shows. `stale` compares this digest with
the present one, and draws nothing.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course.lessons import figures_lite, figures_memory, figures_products, figures_tiling
from course.tracing import trace_plots
from course.tracing.trace import example
from harness.records.code import digest
from harness.records.files import whole
from harness.records.jsonl import read
from harness.views.look import LOOKS, Look

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "figures"
CEILINGS = ROOT / "results" / "h200" / "ceilings.jsonl"
MARK = b"ladder figures "  # before the digest, 64 hexadecimal digits, in a file


@dataclass(frozen=True)
class Picture:
    """One picture: NAME.EXTENSION and NAME-dark.EXTENSION.

    `modules`: the paths of the modules that decide what is drawn; `ceilings`: whether that record
    does, too. `write(look, ceilings, path, comment)` writes the file of one look, with the comment.
    """

    name: str
    extension: str
    modules: tuple[str, ...]
    write: Callable[[Look, Path, Path, str], object]
    ceilings: bool = False

    def file(self, look: Look) -> str:
        """The name of the file for a look."""
        return f"{self.name}{look.suffix}.{self.extension}"

    def digest(self, ceilings: Path) -> str:
        """A digest of all that the picture is drawn from; OSError where a record can't be read."""
        total = hashlib.sha256()
        for module in self.modules:
            text = (ROOT / f"{module}.py").read_text(encoding="utf-8")
            total.update(digest(text).encode())
        if self.ceilings:  # without the CRs of a checkout on Windows
            total.update(ceilings.read_bytes().replace(b"\r\n", b"\n"))
        return total.hexdigest()


def as_png(figure: Callable[[Look, Path], Any]) -> Callable[[Look, Path, Path, str], None]:
    """Make a function that writes `figure(look, ceilings)` as a PNG without software and date."""

    def write(look: Look, ceilings: Path, path: Path, comment: str) -> None:
        made = figure(look, ceilings)  # raises before anything is written
        with whole(path) as draft:
            made.savefig(draft, metadata={"Comment": comment, "Software": None})

    return write


def memory_hierarchy(look: Look, ceilings: Path) -> Any:
    return figures_memory.figure(*read(ceilings, "ceiling"), look)


def lite_breaks(look: Look, _: Path) -> Any:
    return figures_lite.figure(figures_lite.measure(), look)


def trace_still(look: Look, _: Path) -> Any:
    return trace_plots.still(example().steps(), example().truth(), look)


def trace_moving(look: Look, _: Path, path: Path, comment: str) -> Path:
    return trace_plots.moving(example().steps(), example().truth(), path, look, comment)


LOOK, INPUTS = ("harness/views/look", "harness/records/files"), "harness/problems/inputs"
MEMORY = ("course/lessons/cited", "course/lessons/figures_memory", *LOOK)
TILING = ("course/lessons/figures_tiling", *LOOK)
PRODUCTS = ("course/lessons/figures_products", *LOOK)
LITE = (INPUTS, "course/lessons/figures_lite", "course/tracing/trace", *LOOK)
TRACE = (INPUTS, "course/tracing/trace", "course/tracing/trace_plots", *LOOK)

PICTURES = (
    Picture("memory-hierarchy", "png", MEMORY, as_png(memory_hierarchy), ceilings=True),
    Picture("tiling", "png", TILING, as_png(lambda look, _: figures_tiling.figure(look))),
    Picture("products", "png", PRODUCTS, as_png(lambda look, _: figures_products.figure(look))),
    Picture("lite-breaks", "png", LITE, as_png(lite_breaks)),
    Picture("trace", "png", TRACE, as_png(trace_still)),
    Picture("trace", "gif", TRACE, trace_moving),
)


def draw(folder: Path, ceilings: Path = CEILINGS) -> Iterator[Path]:
    """Write every picture into `folder`, and yield each file after it is written.

    Raises ImportError where matplotlib is missing, OSError where a file can't be written or read,
    BadRecord or ValueError where `ceilings` has nothing that can be drawn.
    """
    for picture in PICTURES:
        comment = MARK.decode() + picture.digest(ceilings)
        for look in LOOKS:
            path = folder / picture.file(look)
            picture.write(look, ceilings, path, comment)
            yield path


def stale(folder: Path, ceilings: Path = CEILINGS) -> list[str]:
    """The names of the files in `folder` that are missing or not up to date."""
    found = []
    for picture in PICTURES:
        mark = MARK + picture.digest(ceilings).encode()
        for look in LOOKS:
            path = folder / picture.file(look)
            if not path.is_file() or mark not in path.read_bytes():
                found.append(path.name)
    return found
