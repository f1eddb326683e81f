"""The tables of README and docs, generated from committed records between markers.

A part of a page lies between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``. The sources'
figures stand beside ours; they are the only figures in here.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness.problems.cost import source_intensity
from harness.records import units
from harness.records.jsonl import read
from harness.records.units import show_bytes
from harness.report import contests, course
from harness.report.course import CPU, factor
from harness.report.text import GPU, ROOT, find, machine, rows, there
from harness.views import cell_tables, lines, roofline
from harness.views import machine as machine_view
from harness.views.look import LOOKS

README = ROOT / "README.md"
DOCS = ROOT / "docs"

Record = Mapping[str, Any]

# the sources' table 4.1, ms: the first two columns are one query row, the others all rows
SOURCE_4_1 = {
    0: (0.209, 0.446, 0.886, 1.551),
    1: (0.018, 0.032, 0.061, 0.100),
    2: (0.001, 0.005, 0.017, 0.063),
    3: (0.054, 0.049, 0.054, 0.056),
    4: (0.025, 0.034, 0.020, 0.036),
}
# table 4.2: N -> ms of PyTorch and Flash, extra MB of both
SOURCE_4_2 = {
    1024: (0.081, 0.039, 8, 0.25),
    2048: (0.258, 0.158, 32, 0.5),
    4096: (1.668, 0.462, 128, 1.0),
}
# table 4.3: N -> max error of Lite and Online
SOURCE_4_3 = {
    64: (0.002, 0.002),
    128: (0.761, 0.002),
    256: (1.292, 0.002),
    512: (2.287, 0.001),
    1024: (3.491, 0.001),
}
# table 4.4: N -> FLOP per byte of standard and Flash
SOURCE_4_4 = {1024: (15.4, 261), 4096: (16.1, 1044)}


def ms(cell: Record) -> str:
    """A time in ms, three digits; the status where there is none."""
    time = cell["time_ms"]
    return cell["status"] if time is None else units.significant(time)


def first_table() -> str:
    """All stages at N = 64 on a CPU, from the record that gives the steps' factors, too."""
    env, cells = read(CPU / "steps.jsonl")
    chosen = [cell for cell in cells if cell["nk"] == 64]
    return f"{cell_tables.markdown(env, chosen)}\n\n{machine(env)}"


def table_4_1() -> str:
    """Every stage at d = 16, one query row and all, beside the source's figures."""
    env, cells = read(GPU / "table-4.1.jsonl")
    names = cell_tables.titles(env)
    body = []
    for stage, name in there(cells):
        title = names[stage, name]
        for what in ("source", "one row", "all rows"):
            if what == "source":
                if stage not in SOURCE_4_1:
                    continue
                figures = [units.significant(x) for x in SOURCE_4_1[stage]]
                what = "source, one row" if stage < 2 else "source, all rows"
            else:
                sizes = [(1 if what == "one row" else n, n) for n in (8, 16, 32, 64)]
                figures = [
                    ms(find(cells, stage=stage, name=name, nq=nq, nk=nk, paired=False))
                    for nq, nk in sizes
                ]
            body.append([f"{stage} {title}", what, *figures])
    header = ["stage", "work", "N = 8", "16", "32", "64"]
    return f"{rows(header, body)}\n\nTimes in ms, d = 16, float32. {machine(env)}"


def table_4_2() -> str:
    """Stage 5 against stage 3 at d = 64: the speed-up and the memory, precision by precision."""
    env, cells = read(GPU / "table-4.2.jsonl")
    kinds = {"IEEE": "ieee", "TF32": "tf32", "fp16": "float16"}
    parts = []
    for h, heads in ((1, "one head"), (32, "32 heads")):
        body = []
        for n in (1024, 2048, 4096, 8192, 16384):
            source = SOURCE_4_2.get(n)
            row: list[object] = [n, f"{source[0] / source[1]:.1f}x" if source else "-"]
            for precision in kinds.values():
                at = {"nk": n, "h": h, "precision": precision}
                three, five = (find(cells, stage=s, paired=True, **at) for s in (3, 5))
                row += [f"{ms(three)} / {ms(five)}", f"**{factor(cells, 3, 5, **at)}**"]
            body.append(row)
        header = ["N", "source"]
        for kind in kinds:
            header += [f"{kind}: #3 / #5, ms", "#5 faster"]
        parts.append(f"**Time, {heads}** (paired)\n\n{rows(header, body)}")
    parts.append(f"**Against the peers, fp16, 32 heads** (paired, ms)\n\n{peers(env, cells)}")
    parts.append(f"**Peak memory above the inputs, one head, float32**\n\n{memory(cells)}")
    return "\n\n".join([*parts, machine(env)])


def peers(env: Record, cells: Sequence[Record]) -> str:
    """Times of all contestants in turns at fp16, 32 heads."""
    sizes = (1024, 2048, 4096, 8192, 16384)
    body = []
    names = cell_tables.titles(env)
    for stage, name in there([cell for cell in cells if cell["dtype"] == "float16"]):
        title = names[stage, name]
        at = {"stage": stage, "name": name, "h": 32, "dtype": "float16", "paired": True}
        body.append([f"{stage} {title}", *(ms(find(cells, nk=n, **at)) for n in sizes)])
    return rows(["contestant", *(f"N = {n}" for n in sizes)], body)


def memory(cells: Sequence[Record]) -> str:
    """Peak memory of stage 3 and stage 5, and their ratio, beside the source's."""
    body = []
    for n in (1024, 2048, 4096, 8192, 16384):
        at = {"nk": n, "h": 1, "precision": "ieee", "paired": False}
        three, five = (find(cells, stage=s, **at) for s in (3, 5))
        source = SOURCE_4_2.get(n)
        said = f"{source[2]} / {source[3]} MB, {source[2] / source[3]:.0f}x" if source else "-"
        ratio = three["peak_bytes"] / five["peak_bytes"]
        body.append(
            [n, said, cell_tables.show_peak(three), cell_tables.show_peak(five), f"{ratio:.0f}x"]
        )
    return rows(["N", "source", "#3", "#5", "#5 less"], body)


def table_4_3() -> str:
    """The error of Lite and Online against stage 3 as N grows."""
    env, cells = read(GPU / "table-4.3.jsonl")
    body = []
    for n, (lite, online) in SOURCE_4_3.items():
        row: list[object] = [n, lite, online]
        for precision in ("tf32", "ieee"):
            for stage in (4, 5):
                cell = find(cells, stage=stage, nk=n, precision=precision)
                row.append(cell_tables.show_error(cell["err_stage3_max"]))
        body.append(row)
    header = ["N", "source: Lite", "Online", "TF32: Lite", "Online", "IEEE: Lite", "Online"]
    return f"{rows(header, body)}\n\nMax error, d = 64, N(0, 1), one head. {machine(env)}"


def table_4_4() -> str:
    """Arithmetic intensity by the source's count and by ours, and what was achieved."""
    env, cells = read(GPU / "table-4.4.jsonl")
    body = []
    for n in (1024, 2048, 4096, 8192):
        three, five = (find(cells, stage=s, nk=n, paired=True) for s in (3, 5))
        source = SOURCE_4_4.get(n, ("-", "-"))
        row: list[object] = [n, f"{source[0]} / {source[1]}"]
        counted = source_intensity(n, 64)
        standard, flash = counted["standard"], counted["flash"]
        row.append(f"{units.significant(standard)} / {units.significant(flash, 4)}")
        ours = [c["flops"] / c["hbm_bytes"] for c in (three, five)]
        row.append(f"{units.significant(ours[0])} / {units.significant(ours[1], 4)}")
        achieved = [c["flops"] / c["time_ms"] / 1e9 for c in (three, five)]
        row.append(" / ".join(f"{x:.1f}" for x in achieved))
        body.append(row)
    header = ["N", "source", "its count", "ours: products alone", "achieved TFLOP/s"]
    note = "FLOP per byte of memory, stage 3 / stage 5; d = 64, float32 IEEE, one head."
    return f"{rows(header, body)}\n\n{note} {machine(env)}"


def steps() -> str:
    """What each stage bought over the one before it: factors of times taken in turns."""
    cpu_env, cpu = read(CPU / "steps.jsonl")
    gpu_env, gpu = read(GPU / "table-4.2.jsonl")
    bench, train = (read(GPU / f"bench-{x}.jsonl", "bench")[1] for x in ("steps", "train"))

    def less(before: Record, after: Record) -> str:
        return f"{before['peak_bytes'] / after['peak_bytes']:.0f}x less memory"

    at = {"nk": 4096, "h": 32, "precision": "float16"}
    fused = less(*(find(gpu, stage=s, paired=False, **at) for s in (3, 5)))
    five, six = (find(bench, stage=s, nk=4096, d=64, causal=False) for s in (5, 6))
    causal = find(bench, stage=6, nk=4096, d=64, causal=True)
    more = cell_tables.show_ratio(cell_tables.times_faster(six, causal), paired=False)
    masks = f"{cell_tables.show_step(five, six)}; causal {more} more"
    trained = [find(train, stage=s, nk=4096, d=64, causal=False) for s in (3, 7)]
    training = f"{cell_tables.show_step(*trained)}, {less(*trained)}"
    body = [
        ["0 to 1", "no object an operation", factor(cpu, 0, 1, nk=64), "the interpreter"],
        ["1 to 2", "compiled, the graph recorded", factor(cpu, 1, 2, nk=64), "a node an operation"],
        ["2 to 3", "whole matrices", factor(cpu, 2, 3, nk=256), "S and P through memory"],
        ["3 to 5", "one fused kernel, exact", f"{factor(gpu, 3, 5, **at)}, {fused}", "no masks"],
        ["5 to 6", "masks save time", masks, "forward only"],
        ["3 to 7", "it trains, nothing N x N kept", training, "loads and math take turns"],
    ]
    header = ["step", "what it solved", "measured", "what remains"]
    note = (
        "Paired; in brackets the quartiles of the rounds' ratios, where the record has them. 0 to "
        "2: N = 64, 2 to 3: N = 256, both d = 16 on the CPU. From 3 on: N = 4096, d = 64, 32 "
        "heads, fp16 on the GPU (3 to 7 a batch of 4, forward and backward, against the last stage "
        "with gradients); stage 4, which lies between, is fast and wrong."
    )
    return f"{rows(header, body)}\n\n{note} {machine(cpu_env)} {machine(gpu_env)}"


def traffic_table() -> str:
    """Bytes that stages moved, by the profiler, beside those predicted."""
    env, records = read(GPU / "io.jsonl", "io")
    names = cell_tables.titles(env)
    body = []
    for group in machine_view.by_stage(records):
        first = group[0]
        total = sum(map(machine_view.moved, group))
        milliseconds = sum(record["time_ms"] for record in group)
        predicted = first["predicted_bytes"]
        body.append([
            f"{first['stage']} {names[first['stage'], first['name']]}, N = {first['nk']}",
            len(group), show_bytes(total), show_bytes(predicted), f"{total / predicted:.2f}",
            f"{total / milliseconds / 1e9:.2f} TB/s",
        ])  # fmt: skip
    header = ["stage", "kernels", "DRAM moved", "predicted", "ratio", "bandwidth"]
    note = f"{cell_tables.problem_title(first).split(', ', 1)[1]}."
    return f"{rows(header, body)}\n\n{note} {machine(env)}"


def model_table() -> str:
    """MiniLM with its attention replaced, as its embeddings and hidden states take it."""
    env, records = read(GPU / "model-float32.jsonl", "model")
    names = cell_tables.titles(env)
    body = []
    for tokens in (64, 65, 128, 512):
        for cell in (c for c in records if c["tokens"] == tokens):
            body.append([
                f"{tokens} tokens, {cell['stage']} {names[cell['stage'], cell['name']]}",
                f"{cell['cosine']:.4f}", cell_tables.show_error(cell["max_hidden_diff"]),
                cell["status"],
            ])  # fmt: skip
    header = ["text and stage", "cosine of the embedding", "largest hidden difference", "status"]
    return f"{rows(header, body)}\n\nAgainst SDPA, float32. {machine(env)}"


def occupancy() -> str:
    """Why one head is too few: programs of stage 5 against the card's multiprocessors."""
    body = []
    for n in (1024, 2048, 4096, 8192, 16384):
        body.append([n, *(f"{-(-n // rows_each) * h}" for h in (1, 32) for rows_each in (32, 128))])
    header = ["N", "1 head, IEEE", "1 head, TF32 and fp16", "32 heads, IEEE", "TF32 and fp16"]
    return rows(header, body)


def draw(folder: Path) -> list[Path]:
    """README's pictures, from the same records, into `folder`, each for light pages and dark."""
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
    README: {
        "first-table": first_table,
        "table-4.1": table_4_1,
        "table-4.2": table_4_2,
        "table-4.3": table_4_3,
        "table-4.4": table_4_4,
        "steps": steps,
        "traffic": traffic_table,
        "model": model_table,
        "occupancy": occupancy,
        "forward": contests.forward,
        "gradients": contests.gradients,
        "training": contests.training,
        "training-memory": contests.training_memory,
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
