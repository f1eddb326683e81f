"""The generated parts of the course: docs/walkthrough and docs/memory.md.

Cited figures are in course/lessons/cited.py, with their sources.
"""

from collections.abc import Sequence
from dataclasses import replace
from difflib import unified_diff
from operator import itemgetter

from course.lessons import cited
from course.report import text
from harness.problems import cost
from harness.problems.problem import Problem
from harness.records.jsonl import read
from harness.records.schema import Record
from harness.records.units import show_bytes, show_time
from harness.views import groups, ratios, rings
from harness.views.machine import moved, traffic

LAUNCH = itemgetter("launch")
PAIRED = f"paired: {text.READING.format('../')}."
ONE_HEAD = Problem(
    "normal", 0, 1, 1, 1, 1, 1, 64, "float16", "float16", False, None, "cuda"
)  # fmt: skip
# the heads that `ladder ring` takes on GPUs
CLUSTER = replace(ONE_HEAD, h=16, hk=16, d=128, dtype="bfloat16", precision="bfloat16")


def square(n: int, problem: Problem = ONE_HEAD) -> Problem:
    """`problem` with n queries and n keys."""
    return replace(problem, nq=n, nk=n)


# ---- memory: the rates of its levels, and what attention moves


def copy_rate() -> tuple[Record, float]:
    """The env line of the ceilings, and bytes per second of a copy, read and written."""
    env, ceilings = read(text.GPU / "ceilings.jsonl", "ceiling")
    return env, text.find(ceilings, what="copy")["value"] * 1e12


def hierarchy() -> str:
    """A table of the levels of a GPU's memory as cited, and of its HBM as measured."""
    env, rate = copy_rate()
    body = [
        *([x.name, x.size, x.cycles, f"{x.rate} TB/s", "sources 002, 004: A100"]
          for x in (cited.SRAM, cited.HBM)),
        [cited.HBM.name, "-", "-", f"{rate / 1e12:.2f} TB/s", "measured: a copy"],
    ]  # fmt: skip
    return text.part("level | size | cycles | bandwidth | whose figures", body, "", env)


def links() -> str:
    """Source 002's table of links, with its NVLink rows corrected."""
    body = [
        [link.name, link.theory, link.achieved, f"{link.theory}, as it says"]
        for link in cited.PCIE.values()
    ]
    for generation, link in cited.NVLINK.items():
        card = cited.CARDS[generation]
        right = f"**{card.each:.0f}** ({card.name}: {card.links} links, {card.both // 2} together)"
        body.append([link.name, link.theory, link.achieved, right])
    header = "link | source 002: theory | achieved | one direction, one link"
    note = "GB/s. In bold: from NVIDIA's data sheets, which give the sum over links and directions."
    return text.part(header, body, note)


def cluster() -> str:
    """What the cost model says of clusters, for the heads of CLUSTER."""
    return rings.cluster_table(CLUSTER).markdown()


def scores() -> str:
    """A table of the size of S, and the time to move it once."""
    env, rate = copy_rate()
    body = []
    for n in (1024, 4096, 8192, 32768):
        one, many = (cost.score_bytes(replace(square(n), h=h, hk=h)) for h in (1, 16))
        kept = 4 * n  # bytes of a head's LSE, float32: all that stage 7 keeps of S
        body.append([n, *map(show_bytes, (one, many)), show_time(many / rate * 1e3),
                     show_bytes(kept)])  # fmt: skip
    header = "N | S of one head, fp16 | 16 heads | crosses memory in | LSE of one head"
    note = f"Counted; crossing: 16 heads, once, at the {rate / 1e12:.2f} TB/s of a copy."
    return text.part(header, body, note, env)


def three_kernels() -> str:
    """A table of bytes moved by GEMM, softmax, GEMM, half fused and fused: counted, measured."""
    env, records = read(text.GPU / "io.jsonl", "io")
    body: list[list[object]] = []
    for n in text.SIZES[:2]:
        # stage 3's first kernel, which scales q, is not counted: harness/problems/cost.py
        three, online = (
            sorted((r for r in records if (r["nk"], r["stage"]) == (n, s)), key=LAUNCH)[skip:]
            for s, skip in ((3, 1), (5, 0))
        )
        problem = Problem.from_json(three[0])
        counted = cost.three_kernel_bytes(problem)
        for (kernel, predicted), launch in zip(counted.items(), three, strict=True):
            body.append([f"N = {n}: {kernel}", show_bytes(predicted), *measured([launch])])
        half = sum(cost.half_fused_bytes(problem).values())
        total, fused = sum(counted.values()), cost.fused_bytes(problem)
        body += [
            [f"**N = {n}: three kernels**", show_bytes(total), *measured(three)],
            [f"N = {n}: half fused", show_bytes(half), "-", "-", "-"],
            [f"**N = {n}: one kernel (stage 5)**", show_bytes(fused), *measured(online)],
        ]
    note = f"{text.problem_but_n(three[0])}, by Nsight Compute."
    return text.part("kernel | counted | DRAM moved | time | bandwidth", body, note, env)


def measured(launches: Sequence[Record]) -> list[str]:
    """The bytes moved by launches, their time, and the bandwidth."""
    time, _, _, rate = traffic(launches)
    return [show_bytes(sum(map(moved, launches))), time, f"{rate} TB/s"]


# ---- the stages, page by page


def graph(stage: int) -> str:
    """A table of a stage's Value graph: its own count of nodes, measured time and memory."""
    import stages  # imports torch, for this part only

    env, cells = read(text.CPU / "steps.jsonl")
    body = []
    for n in (64, 256):
        cell = text.find(cells, stage=stage, nk=n, paired=False)
        nodes = stages.by_number(stage).node_count(1, 1, n, n, 16)
        time, peak = show_time(cell["time_ms"]), ratios.show_peak(cell)
        body.append([n, f"{nodes:,}", time, peak, f"{cell['peak_bytes'] / nodes:.0f}"])
    header = "N | nodes | time | peak | bytes per node"
    return text.part(header, body, "d = 16, float32, forward.", env)


def climb(old: int, new: int) -> str:
    """A table of two neighbouring stages on the CPU, timed in turns in one process."""
    env, cells = read(text.CPU / "steps.jsonl")
    titles = {number: label for (number, _), label in groups.labels(env).items()}
    body = []
    for n in (64, 256):
        times = [show_time(c["time_ms"]) for c in text.both(cells, old, new, nk=n, paired=True)]
        peaks = map(ratios.show_peak, text.both(cells, old, new, nk=n, paired=False))
        body.append([n, *times, text.factor(cells, old, new, nk=n), *peaks])
    header = f"N | {titles[old]} | {titles[new]} | faster | peak of {old} | of {new}"
    return text.part(header, body, f"d = 16, float32, one thread; {PAIRED}", env)


def share_of_s() -> str:
    """A table of stage 3's peak memory and inputs, and the share of S and P in the peak."""
    env, cells = read(text.GPU / "table-4.2.jsonl")
    body = []
    for n in text.SIZES:
        cell = text.find(cells, stage=3, nk=n, h=1, precision="ieee", paired=False)
        problem = Problem.from_json(cell)
        inputs = cost.query_bytes(problem) + 2 * cost.key_bytes(problem)
        square_part = 2 * cost.score_bytes(problem)
        share = f"{square_part / cell['peak_bytes']:.3f}"
        peak = ratios.show_peak(cell)
        body.append([n, show_bytes(inputs), show_bytes(square_part), peak, share])
    header = "N | q, k, v | S and P, counted | peak, measured | S and P / peak"
    return text.part(header, body, "One head, d = 64, float32.", env)


def fusing() -> str:
    """A table of what Lite saves, bytes and launches, and of its error."""
    env, records = read(text.GPU / "io.jsonl", "io")
    _, cells = read(text.GPU / "tour.jsonl")
    body = []
    for n in text.SIZES[:2]:
        three, lite = ([r for r in records if (r["stage"], r["nk"]) == (s, n)] for s in (3, 4))
        lite_cell = text.find(cells, stage=4, nk=n, d=64)
        bytes_of = [sum(map(moved, launches)) for launches in (three, lite)]
        body.append([
            n, f"{len(three)} / {len(lite)}", *map(show_bytes, bytes_of),
            f"{bytes_of[0] / bytes_of[1]:.0f}x", lite_cell["status"],
            ratios.show_error(lite_cell["err_f64_max"]),
        ])  # fmt: skip
    header = "N | kernels, #3 / #4 | DRAM, #3 | #4 | less | #4 is | its max error"
    note = "d = 64; bytes in float16, 96 heads; the error in float32 against float64."
    return text.part(header, body, note, env)


def price() -> str:
    """A table of the errors of Lite and Online, and of Online's speed-up over stage 3."""
    env, cells = read(text.GPU / "table-4.2.jsonl")
    _, alone = read(text.GPU / "tour.jsonl")
    body = []
    for n in text.SIZES:
        judged = []
        for cell in text.both(alone, 4, 5, nk=n, d=64):
            judged += [cell["status"], ratios.show_error(cell["err_f64_max"])]
        body.append([n, *judged, text.factor(cells, 3, 5, nk=n, h=32, precision="float16")])
    header = "N | #4 is | its max error | #5 is | its max error | #5 over #3"
    note = "d = 64; errors in float32, against float64; the factor in float16, 32 heads,"
    return text.part(header, body, f"{note} {PAIRED}", env)


def pitfalls(*sources: str) -> str:
    """The effect of each mistake that those sources warn of, or make."""
    env, records = read(text.CPU / "pitfalls.jsonl", "pitfall")
    parts = []
    for record in (r for r in records if r["source"] in sources):
        gone = record["raised"] or record["reason"]
        if record["rows_wrong"]:
            gone += f"; {record['rows_wrong']} of {record['rows']} rows wrong"
        changes = "\n".join(change(*pair) for pair in record["changes"])
        tried = f"stage {record['stage']}, {groups.title([record])}"
        parts.append(
            f"**{record['name']}.** {record['lesson']}\n\n```diff\n{changes}\n```\n\n"
            f"Comes out ({tried}): *{gone}*."
        )
    note = "Made by `tools/pitfalls.py`, interpreted; the shipped stage is exact on each of these."
    return "\n\n".join([*parts, note, text.machine(env)])


def change(old: str, new: str) -> str:
    """The lines of a diff of two texts, with the lines before and after a change."""
    lines = list(unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=9))
    return "\n".join(line.rstrip() for line in lines[3:])  # without the diff's header


def causal_tiles() -> str:
    """A table of how many of stage 6's tiles a causal mask leaves, and how many need a mask."""
    from stages.s06_triton_flash2 import TILES

    BLOCK_M, BLOCK_N = TILES["half"][0][0][:2]
    body = []
    for n in text.SIZES:
        problem = replace(square(n), causal=True)
        blocks = [-(-keys // BLOCK_N) for keys in cost.keys_of_blocks(problem, BLOCK_M)]
        # a block's first row sees the fewest keys: all rows see the tiles that it sees completely
        full = [(start + 1) // BLOCK_N for start in range(0, n, BLOCK_M)]
        every = len(blocks) * -(-n // BLOCK_N)
        masked = sum(blocks) - sum(full)
        skipped = 100 * (1 - sum(blocks) / every)
        body.append([n, every, sum(full), masked, every - sum(blocks), f"{skipped:.1f}%"])
    header = "N | tiles | without a mask | with one | never visited | of all"
    tiles = f"BLOCK_M = {BLOCK_M}, BLOCK_N = {BLOCK_N}"
    return text.part(header, body, f"One head, counted: {tiles}, stage 6's for fp16, d <= 64.")


def backward_bytes() -> str:
    """A table of bytes kept for and moved by a backward pass, P kept or recomputed."""
    body = []
    for n in text.SIZES:
        problem = replace(square(n), direction="bwd")
        kept, recomputed = (cost.hbm_bytes(problem, how) for how in ("three-kernel", "fused"))
        body.append([
            n, show_bytes(cost.score_bytes(problem)), show_bytes(4 * n),
            show_bytes(kept), show_bytes(recomputed), f"{kept / recomputed:.0f}x",
        ])  # fmt: skip
    header = "N | P, kept | LSE, kept | moved with P kept | made again, at the least | less"
    note = "One head, d = 64, float16; counted by harness/problems/cost.py."
    return text.part(header, body, note)
