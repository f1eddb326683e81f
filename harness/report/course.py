"""The generated parts of the course: docs/walkthrough, docs/memory.md, docs/expected-output.md.

As in harness/report/pages.py: every figure is a committed record's or counted by
harness/problems/cost.py. What is cited comes from harness/lessons/cited.py, with its source.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import unified_diff
from functools import partial
from pathlib import Path
from typing import Any

from harness.lessons import cited
from harness.problems import cost
from harness.problems.problem import Problem
from harness.records import units
from harness.records.jsonl import read
from harness.records.units import show_bytes
from harness.report.text import GPU, RESULTS, ROOT, find, machine, rows, there
from harness.views import cell_tables
from harness.views.machine import moved

Record = Mapping[str, Any]

CPU = RESULTS / "cpu"
COURSE = ROOT / "docs" / "walkthrough"
PAIRED = "paired, with the quartiles of the rounds' ratios where the record has them."
ONE_HEAD = Problem(
    "normal", 0, 1, 1, 1, 1, 1, 64, "float16", "float16", False, None, "cuda"
)  # fmt: skip


def square(n: int, problem: Problem = ONE_HEAD) -> Problem:
    """`problem` with n queries and n keys."""
    return replace(problem, nq=n, nk=n)


# ---- memory: what the levels can do, and what attention asks of them


def copy_rate() -> tuple[Record, float]:
    """Where it was measured, and bytes a second that a copy moves there, read and written."""
    env, ceilings = read(GPU / "ceilings.jsonl", "ceiling")
    return env, find(ceilings, what="copy")["value"] * 1e12


def hierarchy() -> str:
    """The levels of a GPU's memory as cited, and its HBM as measured."""
    env, rate = copy_rate()
    body: list[list[object]] = [
        [level.name, level.size, level.cycles, f"{level.rate} TB/s", "sources 002, 004: A100"]
        for level in (cited.SRAM, cited.HBM)
    ]
    body.append([cited.HBM.name, "-", "-", f"{rate / 1e12:.2f} TB/s", "measured: a copy"])
    header = ["level", "size", "cycles", "bandwidth", "whose figures"]
    return f"{rows(header, body)}\n\n{machine(env)}"


def links() -> str:
    """Source 002's links, its NVLink rows put right."""
    body = [
        [link.name, link.theory, link.achieved, f"{link.theory}, as it says"]
        for link in cited.PCIE.values()
    ]
    for generation, link in cited.NVLINK.items():
        card = cited.CARDS[generation]
        right = f"**{card.each:.0f}** ({card.name}: {card.links} links, {card.both // 2} together)"
        body.append([link.name, link.theory, link.achieved, right])
    header = ["link", "source 002: theory", "achieved", "one direction, one link"]
    note = (
        "GB/s. Right: PCIe as the source has it; NVLink from NVIDIA's data sheets, which give the "
        "sum of all links and both directions."
    )
    return f"{rows(header, body)}\n\n{note}"


def scores() -> str:
    """How large S is, and how long memory needs to move it once."""
    env, rate = copy_rate()
    body = []
    for n in (1024, 4096, 8192, 32768):
        one = cost.score_bytes(square(n))
        many = cost.score_bytes(replace(square(n), h=16, hk=16))
        crossing = units.show_time(many / rate * 1e3)
        kept = 4 * n  # bytes of a head's LSE, float32: all that stage 7 keeps of S
        body.append([n, show_bytes(one), show_bytes(many), crossing, show_bytes(kept)])
    header = ["N", "S, a head, fp16", "16 heads", "crosses memory in", "a head's LSE"]
    note = f"Counted; crossing: 16 heads, once, at the {rate / 1e12:.2f} TB/s of a copy."
    return f"{rows(header, body)}\n\n{note} {machine(env)}"


def three_kernels() -> str:
    """What GEMM, softmax, GEMM move, kernel by kernel: predicted, measured; half fused, fused."""
    env, records = read(GPU / "io.jsonl", "io")
    body: list[list[object]] = []
    for n in (1024, 4096):
        ours = [r for r in records if r["nk"] == n]
        # q's scaling, the first, is no kernel of the method: harness/problems/cost.py
        launches = sorted((r for r in ours if r["stage"] == 3), key=lambda r: r["launch"])[1:]
        problem = Problem.from_json(launches[0])
        counted = cost.three_kernel_bytes(problem)
        for (kernel, predicted), launch in zip(counted.items(), launches, strict=True):
            body.append([
                f"N = {n}: {kernel}", show_bytes(predicted), show_bytes(moved(launch)),
                units.show_time(launch["time_ms"]), rate_of([launch]),
            ])  # fmt: skip
        whole: list[object] = [
            f"**N = {n}: three kernels**", show_bytes(sum(counted.values())),
            show_bytes(sum(map(moved, launches))),
            units.show_time(sum(x["time_ms"] for x in launches)), rate_of(launches),
        ]  # fmt: skip
        half = cost.half_fused_bytes(problem)
        online = [r for r in ours if r["stage"] == 5]
        body += [
            whole,
            [f"N = {n}: half fused", show_bytes(sum(half.values())), "-", "-", "-"],
            [
                f"**N = {n}: one kernel (stage 5)**", show_bytes(cost.fused_bytes(problem)),
                show_bytes(sum(map(moved, online))),
                units.show_time(sum(x["time_ms"] for x in online)), rate_of(online),
            ],
        ]  # fmt: skip
    header = ["kernel", "counted", "DRAM moved", "time", "bandwidth"]
    note = f"{cell_tables.problem_title(launches[0]).split(', ', 1)[1]}, by Nsight Compute."
    return f"{rows(header, body)}\n\n{note} {machine(env)}"


def rate_of(launches: Sequence[Record]) -> str:
    """What they moved over the time that they took."""
    milliseconds = sum(launch["time_ms"] for launch in launches)
    return f"{sum(map(moved, launches)) / milliseconds / 1e9:.2f} TB/s"


# ---- the stages, page by page


def tour(name: str = "cpu") -> tuple[Record, list[dict[str, Any]]]:
    """A committed tour."""
    return read(RESULTS / name / "tour.jsonl")


def factor(cells: Sequence[Record], old: int, new: int, **fields: object) -> str:
    """How many times faster `new` is than `old`, from times taken in turns, with its spread."""
    before, after = (find(cells, stage=s, paired=True, **fields) for s in (old, new))
    if not (cell_tables.comparable(before) and cell_tables.comparable(after)):
        return "-"
    return cell_tables.show_step(before, after)


def graph(stage: int) -> str:
    """A Value graph: nodes counted by the stage itself, time and memory measured."""
    import stages  # torch with it: only who asks for this part waits for it

    env, cells = read(CPU / "steps.jsonl")
    body = []
    for n in (64, 256):
        cell = find(cells, stage=stage, nk=n, paired=False)
        nodes = stages.by_number(stage).node_count(1, 1, n, n, 16)
        time, peak = units.show_time(cell["time_ms"]), cell_tables.show_peak(cell)
        body.append([n, f"{nodes:,}", time, peak, f"{cell['peak_bytes'] / nodes:.0f}"])
    header = ["N", "nodes", "time", "peak", "bytes a node"]
    return f"{rows(header, body)}\n\nd = 16, float32, forward. {machine(env)}"


def climb(old: int, new: int, sizes: Sequence[int]) -> str:
    """Two neighbours on the CPU, in turns in one process."""
    env, cells = read(CPU / "steps.jsonl")
    names = cell_tables.titles(env)
    titles = [next(t for (s, _), t in names.items() if s == stage) for stage in (old, new)]
    body = []
    for n in sizes:
        both = [find(cells, stage=s, nk=n, paired=True) for s in (old, new)]
        peaks = [find(cells, stage=s, nk=n, paired=False) for s in (old, new)]
        body.append([
            n, *(units.show_time(cell["time_ms"]) for cell in both),
            factor(cells, old, new, nk=n), *map(cell_tables.show_peak, peaks),
        ])  # fmt: skip
    header = ["N", *(f"{s} {t}" for s, t in zip((old, new), titles, strict=True))]
    header += ["faster", f"peak of {old}", f"of {new}"]
    return f"{rows(header, body)}\n\nd = 16, float32, one thread; {PAIRED} {machine(env)}"


def share_of_s() -> str:
    """Stage 3's peak memory beside its input and output, and what S and P are of it."""
    env, cells = read(GPU / "table-4.2.jsonl")
    body = []
    for n in (1024, 4096, 16384):
        cell = find(cells, stage=3, nk=n, h=1, precision="ieee", paired=False)
        problem = Problem.from_json(cell)
        inputs = cost.query_bytes(problem) + 2 * cost.key_bytes(problem)
        both = 2 * cost.score_bytes(problem)
        counted = [show_bytes(inputs), show_bytes(both)]
        body.append([n, *counted, cell_tables.show_peak(cell), f"{both / cell['peak_bytes']:.3f}"])
    header = ["N", "q, k, v", "S and P, counted", "peak, measured", "S and P / peak"]
    return f"{rows(header, body)}\n\nOne head, d = 64, float32. {machine(env)}"


def fusing() -> str:
    """What Lite buys: bytes and launches; and what it costs: the answer."""
    env, records = read(GPU / "io.jsonl", "io")
    _, cells = tour("h200")
    body = []
    for n in (1024, 4096):
        three, lite = ([r for r in records if (r["stage"], r["nk"]) == (s, n)] for s in (3, 4))
        lost = find(cells, stage=4, nk=n, d=64)
        less = sum(map(moved, three)) / sum(map(moved, lite))
        body.append([
            n, f"{len(three)} / {len(lite)}", show_bytes(sum(map(moved, three))),
            show_bytes(sum(map(moved, lite))), f"{less:.0f}x", lost["status"],
            cell_tables.show_error(lost["err_f64_max"]),
        ])  # fmt: skip
    header = ["N", "kernels, #3 / #4", "DRAM, #3", "#4", "less", "#4 is", "its max error"]
    note = "d = 64; bytes in float16, 96 heads; the error in float32, one head."
    return f"{rows(header, body)}\n\n{note} {machine(env)}"


def price() -> str:
    """Lite and Online: the errors, and what is won over stage 3 by who is right."""
    env, cells = read(GPU / "table-4.2.jsonl")
    _, alone = tour("h200")
    body = []
    for n in (1024, 4096, 16384):
        lite, online = (find(alone, stage=s, nk=n, d=64) for s in (4, 5))
        errors = [cell_tables.show_error(cell["err_f64_max"]) for cell in (lite, online)]
        won = factor(cells, 3, 5, nk=n, h=32, precision="float16")
        body.append([n, lite["status"], errors[0], online["status"], errors[1], won])
    header = ["N", "#4 is", "its max error", "#5 is", "its max error", "#5 over #3"]
    note = "d = 64; errors in float32, one head; the factor in float16, 32 heads,"
    return f"{rows(header, body)}\n\n{note} {PAIRED} {machine(env)}"


def pitfalls(*sources: str) -> str:
    """What comes out of each mistake that those sources warn of, or make."""
    env, records = read(CPU / "pitfalls.jsonl", "pitfall")
    parts = []
    for record in (r for r in records if r["source"] in sources):
        gone = record["raised"] or record["reason"]
        if record["rows_wrong"]:
            gone += f"; {record['rows_wrong']} of {record['rows']} rows wrong"
        changes = "\n".join(change(*pair) for pair in record["changes"])
        tried = f"stage {record['stage']}, {problem_in_short(record)}"
        parts.append(
            f"**{record['name']}.** {record['lesson']}\n\n```diff\n{changes}\n```\n\n"
            f"Comes out ({tried}): *{gone}*."
        )
    note = (
        "Made on purpose by `tools/pitfalls.py`, interpreted, tensors in a storage of NaN; the "
        "shipped stage is exact on each of these problems."
    )
    return "\n\n".join([*parts, f"{note} {machine(env)}"])


def problem_in_short(record: Record) -> str:
    """What of a problem a reader needs."""
    size = f"N = {record['nk']}"
    if record["nq"] != record["nk"]:
        size = f"Nq = {record['nq']}, Nk = {record['nk']}"
    said = [size, f"d = {record['d']}", record["dtype"], f"{record['inputs']} input"]
    return ", ".join(said + ["causal"] * record["causal"])


def change(old: str, new: str) -> str:
    """A changed text as lines of a diff; what both begin or end with stands without a sign."""
    lines = unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=9)
    return "\n".join(
        line.rstrip() for line in list(lines)[3:]
    )  # less the file names and the place, of which there are none


def causal_tiles() -> str:
    """How many tiles a causal mask leaves, of them masked ones, counted for stage 6's own tiles."""
    from stages.s06_triton_flash2 import TILES

    BLOCK_M, BLOCK_N = TILES["half"][0][0][:2]
    body = []
    for n in (1024, 4096, 16384):
        problem = replace(square(n), causal=True)
        blocks = [-(-keys // BLOCK_N) for keys in cost.keys_of_blocks(problem, BLOCK_M)]
        # a block's first row sees the fewest keys: tiles that it sees whole, all its rows do
        full = [(start + 1) // BLOCK_N for start in range(0, n, BLOCK_M)]
        every = len(blocks) * -(-n // BLOCK_N)
        masked = sum(blocks) - sum(full)
        skipped = 100 * (1 - sum(blocks) / every)
        body.append([n, every, sum(full), masked, every - sum(blocks), f"{skipped:.1f}%"])
    header = ["N", "tiles", "without a mask", "with one", "never visited", "of all"]
    note = (
        f"A head, counted: BLOCK_M = {BLOCK_M}, BLOCK_N = {BLOCK_N}, stage 6's for fp16, d <= 64."
    )
    return f"{rows(header, body)}\n\n{note}"


def backward_bytes() -> str:
    """What a backward pass moves, and what is kept for it, with P kept and with P made again."""
    body = []
    for n in (1024, 4096, 16384):
        problem = replace(square(n), direction="bwd")
        kept, again = (cost.hbm_bytes(problem, how) for how in ("three-kernel", "fused"))
        body.append([
            n, show_bytes(cost.score_bytes(problem)), show_bytes(4 * n),
            show_bytes(kept), show_bytes(again), f"{kept / again:.0f}x",
        ])  # fmt: skip
    header = ["N", "P, kept", "LSE, kept", "moved with P kept", "made again, at the least", "less"]
    return f"{rows(header, body)}\n\nA head, d = 64, float16; counted by harness/problems/cost.py."


def training_peak() -> str:
    """Peak memory of a training step on the GPU, stage 3's beside stage 7's."""
    env, cells = read(GPU / "bench-train.jsonl", "bench")
    body = []
    for n in (4096, 16384):
        at = {"direction": "train", "d": 64, "causal": False, "nk": n}
        three, seven = (find(cells, stage=s, **at) for s in (3, 7))
        shown = [
            show_bytes(c["peak_bytes"]) if c["peak_bytes"] else c["status"] for c in (three, seven)
        ]
        body.append([n, *shown])
    header = ["N", "3 torch, three GEMMs", "7 Triton training"]
    note = "B N = 16384, H d = 2048, d = 64, fp16, no mask."
    return f"{rows(header, body)}\n\n{note} {machine(env)}"


# ---- expected output


def expected() -> str:
    """What the tour said of each stage, on the CPU and on the GPU."""
    (cpu_env, cpu), (gpu_env, gpu) = tour(), tour("h200")
    names = cell_tables.titles(cpu_env)
    parts = []
    for stage, name in there(cpu):
        mine = [
            [c for c in cells if (c["stage"], c["name"]) == (stage, name)] for cells in (cpu, gpu)
        ]
        body = []
        for cell in mine[0]:
            at = {key: cell[key] for key in ("inputs", "nk", "d")}
            other = [c for c in mine[1] if all(c[key] == x for key, x in at.items())]
            body.append([
                f"N = {cell['nk']}, d = {cell['d']}, {cell['inputs']}",
                *said_of(cell), *(said_of(other[0]) if other else ("-",) * 4),
            ])  # fmt: skip
        header = ["problem", "CPU", "max err", "time", "peak", "H200", "max err", "time", "peak"]
        parts.append(f"### Stage {stage}, {names[stage, name]}\n\n{rows(header, body)}")
    note = "float32, one head; errors against stage 3 in float64."
    return "\n\n".join([*parts, f"{note} {machine(cpu_env)} {machine(gpu_env)}"])


def said_of(cell: Record) -> list[str]:
    """Status, error, time and peak of a cell; an interpreted time is none."""
    time = "interpreted" if cell["mode"] == "interpreted" else units.show_time(cell["time_ms"])
    status, peak = str(cell["status"]), cell_tables.show_peak(cell)
    return [status, cell_tables.show_error(cell["err_f64_max"]), time, peak]


def as_shown(name: str) -> str:
    """A committed run on the CPU as `ladder table --format markdown` shows it."""
    env, cells = read(CPU / f"{name}.jsonl")
    return f"{cell_tables.markdown(env, cells)}\n\n{machine(env)}"


# page -> its parts, for harness/report/pages.py
COURSE_PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "docs" / "memory.md": {
        "hierarchy": hierarchy,
        "links": links,
        "scores": scores,
        "three-kernels": three_kernels,
    },
    ROOT / "docs" / "expected-output.md": {
        "expected-tour": expected,
        "expected-masks": partial(as_shown, "masks"),
        "expected-gradients": partial(as_shown, "gradients"),
    },
    COURSE / "0-scalar-autograd.md": {"graph-0": partial(graph, 0)},
    COURSE / "1-raw-python.md": {"climb-0-1": partial(climb, 0, 1, (64, 256))},
    COURSE / "2-cpp-value-graph.md": {
        "climb-1-2": partial(climb, 1, 2, (64, 256)),
        "graph-2": partial(graph, 2),
    },
    COURSE / "3-torch-three-gemm.md": {
        "climb-2-3": partial(climb, 2, 3, (64, 256)),
        "share-of-s": share_of_s,
    },
    COURSE / "4-triton-lite.md": {"fusing": fusing},
    COURSE / "5-triton-online.md": {
        "price": price,
        "pitfalls-003": partial(pitfalls, "003"),
        "pitfalls-skeleton": partial(pitfalls, "003's skeleton"),
    },
    COURSE / "6-triton-flash2.md": {"causal-tiles": causal_tiles},
    COURSE / "7-training.md": {
        "backward-bytes": backward_bytes,
        "training-peak": training_peak,
        "pitfalls-001": partial(pitfalls, "001"),
    },
}
