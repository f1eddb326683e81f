"""The pages that `ladder readme` writes, each with its parts, and the pictures beside them.

A part of a page lies between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``. Every figure is a
committed record's; what the sources claim stands beside.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from harness.records.jsonl import read
from harness.report import contests, course, front, sources
from harness.report.text import CPU, DOCS, GPU, ROOT, SIZES, as_shown
from harness.views import cell_tables, lines, roofline
from harness.views import machine as machine_view
from harness.views.look import LOOKS

README = ROOT / "README.md"


def draw(folder: Path) -> list[Path]:
    """The pictures of README and docs into `folder`, each for light pages and for dark."""
    env, cells = read(GPU / "table-4.2.jsonl")
    # no peer follows torch's TF32 switch: in that panel they would stand for something else
    many = [c for c in cells if c["h"] == 32 and (c["stage"] < 100 or c["precision"] != "tf32")]
    # the tour has every stage, with one head; its problems have panels of their own
    tour_env, tour = read(GPU / "tour.jsonl")
    tour = [cell for cell in tour if cell["inputs"] == "normal"]
    error_env, error_cells = read(GPU / "table-4.3.jsonl")
    tf32 = [cell for cell in error_cells if cell["precision"] == "tf32"]
    io_env, records = read(GPU / "io.jsonl", "io")
    _, ceilings = read(GPU / "ceilings.jsonl", "ceiling")
    all_stages = {
        "rungs": [stage for each in (env, tour_env, error_env) for stage in each["rungs"]]
    }
    # N from where the others begin, or the roof would be small beside the launches of tiny calls
    one_head = [c for c in tour if c["d"] == 64 and c["nk"] >= min(each["nk"] for each in many)]
    roofs = [panel for each in (many, one_head) for panel in roofline.panels(each, ceilings)]
    written: list[Path] = []
    for look in LOOKS:
        for measure in ("time", "memory"):
            shown = [*tour, *many]
            written.append(lines.plot_measure(all_stages, shown, measure, folder, look))
        shown = [*(cell for cell in tour if cell["d"] < 128), *tf32]
        written.append(lines.plot_measure(all_stages, shown, "error", folder, look))
        written.append(folder / f"traffic{look.suffix}.png")
        machine_view.plot_traffic(records, cell_tables.titles(io_env), written[-1], look)
        written.append(roofline.draw(all_stages, roofs, folder, look))
        written += contests.draw(folder, look)
    return written


# page -> its parts
PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    README: {"first-table": front.first_table, "ladder": front.ladder, "top": front.top},
    DOCS / "results.md": {
        "steps": partial(as_shown, CPU / "steps.jsonl"),
        "forward": partial(contests.race, "bench-004", "fwd", 6, SIZES),
        "training": partial(contests.race, "bench-train", "train", 7, SIZES[1:]),
        "training-memory": contests.training_memory,
        "gradients": partial(as_shown, GPU / "gradients.jsonl", nk=64),
        "traffic": sources.traffic,
        "model": sources.model,
    },
    DOCS / "source-tables.md": {
        "table-4.1": sources.table_4_1,
        "table-4.2": sources.table_4_2,
        "occupancy": sources.occupancy,
        "table-4.3": sources.table_4_3,
        "table-4.4": sources.table_4_4,
    },
    DOCS / "flash2.md": {
        "skipping": contests.skipping,
        "variants": contests.variants,
        "tuner-key": contests.tuner_key,
        "sanitizer": contests.sanitizer,
    },
    DOCS / "benchmarks.md": {
        "001-forward": partial(contests.source_001, "fwd", 6),
        "001-train": partial(contests.source_001, "train", 7),
        "001-split": contests.train_split,
        "004": contests.source_004,
        "decode": contests.decoding,
    },
    DOCS / "training.md": {"curves": contests.curves},
    **course.COURSE_PAGES,
}


def generate(text: str, page: Path = README) -> str:
    """`text` of a page, every part made again; ValueError where a part's markers are missing."""
    for name, make in PAGES[page].items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"{page.name}: expected one part between {begin.strip()} and {end}")
        before, rest = text.split(begin)
        text = before + begin + make() + "\n" + end + rest.split(end)[1]
    return text
