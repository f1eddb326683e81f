"""The pictures that explain, drawn into docs/figures/, and the check that they are up to date.

The PNG of one and the same picture differs from one version of matplotlib to the next, and what is
computed for it in its last digits from one processor to the next. So each file carries a digest of
what it was drawn from instead: the code that decides what is drawn and how, and the records that it
shows. `stale` compares that with the digest of what is there now, and draws nothing. It can't see
that somebody painted over a file by hand; it sees every change of code or records.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.records import syntax
from harness.views.look import LOOKS, Look

HARNESS = Path(__file__).parents[1]
ROOT = HARNESS.parent
FOLDER = ROOT / "docs" / "figures"
CEILINGS = ROOT / "results" / "h200" / "ceilings.jsonl"
MARK = b"ladder figures "  # before the digest, 64 hexadecimal digits, in a file

# writes one look's file, with a comment in it
Save = Callable[[Look, Path, str], None]


@dataclass(frozen=True)
class Picture:
    """One picture: NAME.EXTENSION and NAME-dark.EXTENSION.

    `modules` of harness/ decide what is drawn; with `ceilings`, so does that record. `prepare`
    computes what both looks show, from the path of the ceilings, and returns what writes a file.
    """

    name: str
    extension: str
    modules: tuple[str, ...]
    prepare: Callable[[Path], Save]
    ceilings: bool = False

    def file(self, look: Look) -> str:
        """The name of the look's file."""
        return f"{self.name}{look.suffix}.{self.extension}"

    def digest(self, ceilings: Path) -> str:
        """Of all that it is drawn from. Raises OSError where a record can't be read."""
        total = hashlib.sha256()
        for module in self.modules:
            code = (HARNESS / f"{module}.py").read_text(encoding="utf-8")
            total.update(syntax.digest(code).encode())
        if self.ceilings:  # less what a checkout on Windows may add
            total.update(ceilings.read_bytes().replace(b"\r\n", b"\n"))
        return total.hexdigest()


def by_figure(figure: Callable[[Look], object]) -> Save:
    """What writes a matplotlib Figure as a PNG, without a word of who wrote it when."""

    def save(look: Look, path: Path, comment: str) -> None:
        figure(look).savefig(path, metadata={"Comment": comment, "Software": None})  # type: ignore[attr-defined]

    return save


def memory_hierarchy(ceilings: Path) -> Save:
    from harness.lessons import figures_memory
    from harness.records.jsonl import read

    env, records = read(ceilings, "ceiling")
    figures_memory.levels(records)  # raises before anything is written
    return by_figure(lambda look: figures_memory.figure(env, records, look))


def tiling(_: Path) -> Save:
    from harness.lessons import figures_tiling

    return by_figure(figures_tiling.figure)


def lite_breaks(_: Path) -> Save:
    from harness.lessons import figures_lite

    found = figures_lite.measure()
    return by_figure(lambda look: figures_lite.figure(found, look))


def trace_still(_: Path) -> Save:
    from harness.lessons import trace_plots
    from harness.lessons.trace import example

    trace = example()
    steps, truth = trace.steps(), trace.truth()
    return by_figure(lambda look: trace_plots.still(steps, truth, look))


def trace_moving(_: Path) -> Save:
    from harness.lessons import trace_plots
    from harness.lessons.trace import example

    trace = example()
    steps, truth = trace.steps(), trace.truth()

    def save(look: Look, path: Path, comment: str) -> None:
        trace_plots.moving(steps, truth, path, look, comment)

    return save


TRACE_MODULES = (
    "problems/inputs", "lessons/trace", "lessons/trace_plots", "views/look",
)  # fmt: skip

PICTURES = (
    Picture(
        "memory-hierarchy", "png", ("lessons/cited", "lessons/figures_memory", "views/look"),
        memory_hierarchy, ceilings=True,
    ),
    Picture("tiling", "png", ("lessons/figures_tiling", "views/look"), tiling),
    Picture(
        "lite-breaks", "png",
        ("problems/inputs", "lessons/figures_lite", "lessons/trace", "views/look"), lite_breaks,
    ),
    Picture("trace", "png", TRACE_MODULES, trace_still),
    Picture("trace", "gif", TRACE_MODULES, trace_moving),
)  # fmt: skip


def draw(folder: Path, ceilings: Path = CEILINGS) -> Iterator[Path]:
    """Write every picture into `folder`, and yield each file when it is written.

    Raises ImportError where matplotlib is missing, OSError where a file can't be written or read,
    BadRecord or ValueError where `ceilings` holds nothing that can be drawn.
    """
    for picture in PICTURES:
        save = picture.prepare(ceilings)
        comment = MARK.decode() + picture.digest(ceilings)
        folder.mkdir(parents=True, exist_ok=True)
        for look in LOOKS:
            path = folder / picture.file(look)
            save(look, path, comment)
            yield path


def stale(folder: Path, ceilings: Path = CEILINGS) -> list[str]:
    """The names of the files in `folder` that are missing, or drawn from something else."""
    found = []
    for picture in PICTURES:
        digest = picture.digest(ceilings)
        for look in LOOKS:
            path = folder / picture.file(look)
            if not path.is_file() or digest_in(path.read_bytes()) != digest:
                found.append(path.name)
    return found


def digest_in(data: bytes) -> str | None:
    """The digest that a picture's file carries, PNG and GIF alike as plain letters."""
    start = data.find(MARK)
    if start < 0:
        return None
    digest = data[start + len(MARK) :][:64]
    return digest.decode("ascii", errors="replace")
