"""The pages that `ladder readme` writes, their generated parts, and their pictures.

A part of a page is between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``. Every number comes
from a committed record, or is counted by harness/problems/cost.py, or is a source's claim.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from attention_ladder.models import views
from course.report import comparisons, course, front, hopper, profile, sources
from course.report.text import CPU, DOCS, GPU, RINGS, ROOT, SIZES, as_shown
from harness.records.jsonl import read
from harness.records.schema import Record
from harness.views import machine, plots, roofline
from harness.views.look import DARK, LOOKS

README = ROOT / "README.md"

# name of a part -> the function that makes it; markers in a page say which parts it has
PARTS: dict[str, Callable[[], str]] = {
    "first-table": front.first_table,
    "on-a-cpu": front.on_a_cpu,
    "ladder": front.ladder,
    "top": front.top,
    # docs/use.md
    "takes": front.takes,
    # docs/results.md
    "steps": partial(as_shown, CPU / "steps.jsonl"),
    "forward": partial(comparisons.race, "bench-004", "fwd", 6, SIZES),
    "training": partial(comparisons.race, "bench-train", "train", 7, SIZES[1:]),
    "float32": partial(comparisons.float32, "float32", (5, 8, 6)),
    "float32-one-head": partial(comparisons.float32, "float32-one-head", (5, 6, 8)),
    "float32-backward": partial(comparisons.float32, "float32-backward", (7,)),
    "training-memory": comparisons.training_memory,
    "decode": comparisons.decoding,
    "flashinfer": comparisons.flashinfer,
    "decode-parts": comparisons.parts,
    "decode-masks": comparisons.masks,
    **{name: partial(hopper.race, name) for name in hopper.RACES},
    "hopper-loss": partial(comparisons.curves, "hopper-loss"),
    "gradients": partial(as_shown, GPU / "gradients.jsonl", nk=64),
    "traffic": sources.traffic,
    "model": sources.model,
    # docs/source-tables.md
    "table-4.1": sources.table_4_1,
    "table-4.2": sources.table_4_2,
    "occupancy": sources.occupancy,
    "table-4.3": sources.table_4_3,
    "table-4.4": sources.table_4_4,
    "001-forward": partial(comparisons.source_001, "fwd", 6),
    "001-train": partial(comparisons.source_001, "train", 7),
    "001-split": comparisons.train_split,
    "004": comparisons.source_004,
    # docs/flash2.md
    "skipping": comparisons.skipping,
    "variants": comparisons.variants,
    # docs/hopper.md, with one of the races, and docs/backward.md with another
    "hopper-first": hopper.first,
    "hopper-climb": partial(hopper.bought, "hopper-variants", "fwd", 2),
    "hopper-bwd-climb": partial(hopper.bought, "hopper-bwd-climb", "bwd", 1),
    "hopper-bwd-variants": partial(hopper.climb, "hopper-bwd-variants"),
    # docs/log/hopper.md
    "hopper-variants": partial(hopper.climb, "hopper-variants"),
    "hopper-tried": partial(hopper.climb, "hopper-tried"),
    "hopper-loops": hopper.loops,
    "hopper-product": hopper.share,
    "hopper-waits": partial(sources.waits, "hopper-io"),
    "hopper-timeline": hopper.timeline,
    "hopper-odd": hopper.odd,
    "hopper-wide": partial(hopper.other_widths, "hopper-wide"),
    "hopper-wide-bwd": partial(hopper.other_widths, "hopper-wide-bwd"),
    "hopper-host": partial(sources.launches, "hopper-host"),
    "host-times": sources.host_times,
    "sanitizer": comparisons.sanitizer,
    # docs/training.md, docs/profiling.md
    "curves": partial(comparisons.curves, "train"),
    "generated": comparisons.generated,
    "waits": partial(sources.waits, "io"),
    # docs/memory.md
    "hierarchy": course.hierarchy,
    "links": course.links,
    "scores": course.scores,
    "three-kernels": course.three_kernels,
    # docs/walkthrough
    "graph-0": partial(course.graph, 0),
    "climb-0-1": partial(course.climb, 0, 1),
    "climb-1-2": partial(course.climb, 1, 2),
    "graph-2": partial(course.graph, 2),
    "climb-2-3": partial(course.climb, 2, 3),
    "share-of-s": course.share_of_s,
    "fusing": course.fusing,
    "price": course.price,
    "pitfalls-003": partial(course.pitfalls, "003"),
    "pitfalls-skeleton": partial(course.pitfalls, "003's skeleton"),
    "causal-tiles": course.causal_tiles,
    "backward-bytes": course.backward_bytes,
    "pitfalls-001": partial(course.pitfalls, "001"),
    # docs/ring.md
    "ring": comparisons.ring_of_two,
    "ring-four": partial(comparisons.ring, 4),
    "ring-predicted": comparisons.ring_predicted,
    "cluster": course.cluster,
}


def parts_of(text: str) -> list[str]:
    """The names of the parts of a page's text."""
    return re.findall(r"^<!-- begin (\S+) -->$", text, re.MULTILINE)


# page -> the names of its parts
PAGES = {
    page: names
    for page in [*ROOT.glob("README.md"), *sorted(DOCS.rglob("*.md"))]
    if (names := parts_of(page.read_text(encoding="utf-8")))
}


def generate(text: str, page: Path = README) -> str:
    """Make every part in the `text` of a page again; ValueError where markers are wrong."""
    for name in parts_of(text):
        begin, end = markers(name)
        if name not in PARTS:
            known = ", ".join(PARTS)
            raise ValueError(f"{page.name}: got a part called {name!r}, expected one of {known}")
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"{page.name}: expected one part between {begin.strip()} and {end}")
    for name in parts_of(text):
        begin, end = markers(name)
        before, rest = text.split(begin)
        text = before + begin + PARTS[name]() + "\n" + end + rest.split(end)[1]
    return text


def markers(name: str) -> tuple[str, str]:
    """The comments before and after a part."""
    return f"<!-- begin {name} -->\n", f"<!-- end {name} -->"


def under_roofs() -> tuple[list[Record], list[Record]]:
    """The stages, from env lines, and the cells of the roofline: one size, in two dtypes.

    In float32 with its own products ('ieee', of an older commit), then with those of 16 bits.
    """
    files = (GPU / f"roofline-{name}.jsonl" for name in ("float16", "ieee", "float32"))
    runs = [read(path) for path in files]
    return [stage for env, _ in runs for stage in env["rungs"]], [c for _, own in runs for c in own]


def draw(folder: Path) -> list[Path]:
    """Draw the pictures of README and docs into `folder`, for light pages and for dark ones."""
    env, cells = read(GPU / "table-4.2.jsonl")
    # no peer follows torch's TF32 switch: in that panel they would show another precision
    many = [c for c in cells if c["h"] == 32 and (c["stage"] < 100 or c["precision"] != "tf32")]
    # the tour has every stage, with one head: its problems get their own panels
    tour_env, tour = read(GPU / "tour.jsonl")
    tour = [cell for cell in tour if cell["inputs"] == "normal"]
    error_env, error_cells = read(GPU / "table-4.3.jsonl")
    tf32 = [cell for cell in error_cells if cell["precision"] == "tf32"]
    every = {"rungs": [stage for each in (env, tour_env, error_env) for stage in each["rungs"]]}
    _, ceilings = read(GPU / "ceilings.jsonl", "ceiling")
    rungs, cells = under_roofs()
    roofs = roofline.panels(cells, ceilings)
    io_env, io = read(GPU / "io.jsonl", "io")
    hopper_env, walks = read(GPU / "hopper-io.jsonl", "io")
    timeline_env, timeline = read(GPU / "hopper-timeline.jsonl", "timeline")
    train = read(GPU / "train.jsonl", "train")
    written: list[Path] = []
    for look in LOOKS:
        errors = [*(cell for cell in tour if cell["d"] < 128), *tf32]
        for measure, shown in (("time", tour + many), ("memory", tour + many), ("error", errors)):
            path = folder / f"{measure}{look.suffix}.png"
            written.append(plots.plot_one(every, shown, measure, path, look=look))
        written.append(roofline.draw({"rungs": rungs}, roofs, folder, dark=look is DARK))
        for name, files in (
            ("bench-004", {"tflops": "rate"}),
            ("bench-001-train", {
                f"001-{file}": what for file, what in plots.COMPARED.items() if what != "rate"
            }),
        ):  # fmt: skip
            run = read(GPU / f"{name}.jsonl")
            written += plots.plot(*run, folder, ceilings, look, files)
        traffic, within, over_time, loss = (
            folder / f"{name}{look.suffix}.png"
            for name in ("traffic", "profile", "timeline", "loss")
        )
        machine.plot_traffic(io_env, io, traffic, look)
        profile.plot_profile(hopper_env, walks, within, look)
        profile.plot_timeline(timeline_env, timeline, over_time, look)
        views.plot(*train, loss, look)
        written += [traffic, within, over_time, loss]
        for file in RINGS[2]:
            env, cells = read(file)
            cells = [cell for cell in cells if cell["nk"] == comparisons.RING_SHOWN]
            written += plots.plot(env, cells, folder, look=look)
    return written
