"""The generated parts of docs that come from comparisons (`ladder bench`), trainings and tools."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

from attention_ladder.models import views
from course.report import text
from harness.problems import ring_cost
from harness.problems.problem import DIRECTIONS, ONE_GPU, Problem
from harness.records.environment import own_files
from harness.records.jsonl import read
from harness.records.schema import Record
from harness.records.units import show_bytes, show_time, significant
from harness.views import cell_tables, groups, ratios, rings

SHOWN_PEERS = {"sdpa_flash": "SDPA flash", "sdpa_cudnn": "cuDNN", "flex_attention": "FlexAttention"}
FULL = {False: text.MASKS[False]}
PEERS = SHOWN_PEERS | {
    "flash_attention_4": "FlashAttention-4", "flash_attention_3": "FlashAttention-3",
}  # fmt: skip
RING_PEERS = {
    "ring_in_order": "no zigzag", "ring_in_turn": "no overlap", "ring_group": "process group",
    "gather": "gather", "ulysses": "Ulysses", "context_parallel": "context_parallel",
}  # fmt: skip
RING_SHOWN = 32768  # the N of the picture
PREDICTED = (32768, 65536, 131072, 262144, 524288)  # N of four and eight GPUs
NOT_MEASURED = "Not measured yet: the commands above, on a GPU."
# of docs/figures, as `pages.draw` draws it
RING_PICTURE = """\
<picture>
  <source media="(prefers-color-scheme: dark)" srcset="figures/ring-dark.png">
  <img src="figures/ring.png" alt="When the slowest rank computes, merges and sends, by the cost \
model: bars over time, for each problem a panel, with a row for each contestant; a line in each \
row is the measured time. In a ring what is sent lies under what is computed; without overlap, and \
with all keys gathered first, the one is behind the other">
</picture>"""


def rate(cell: Record | None) -> str:
    """The TFLOP/s of a record, or its status where it has none."""
    if cell is None:
        return "-"
    found = ratios.tflops(cell)
    return f"{found:.0f}" if found is not None else str(cell["status"])


def race(name: str, direction: str, stage: int, sizes: Sequence[int]) -> str:
    """A table of TFLOP/s of stage 3, `stage` and the peers, by d, mask and N; ratios to peers."""
    env, cells = read(text.GPU / f"{name}.jsonl")
    cells = [cell for cell in cells if cell["direction"] == direction]
    body = []
    for title, at in text.problems(sizes):
        three, ours = text.both(cells, 3, stage, **at)
        of_peers = (rate(text.find(cells, name=peer, **at)) for peer in SHOWN_PEERS)
        rivals = (text.find(cells, name=peer, **at) for peer in ("sdpa_flash", "flex_attention"))
        over = (ratios.show_speedup(ours, peer) for peer in rivals)
        body.append([title, rate(three), f"**{rate(ours)}**", *of_peers, *over])
    header = f"mask and size | #3 | #{stage} | {' | '.join(SHOWN_PEERS.values())}"
    header += f" | #{stage} over flash | over Flex"
    note = "TFLOP/s, the masked part not counted; fp16, B N = 16384, H d = 2048; paired."
    stands = {who: pairs_of(cells, stage, peer, sizes) for peer, who in SHOWN_PEERS.items()}
    return text.part(header, body, f"{note} {standings(f'#{stage}', stands)}", env)


Pairs = Sequence[tuple[str, Record, Record]]  # a problem's title, the record of a stage, a peer's
STANDINGS = "ahead of", "level with", "behind"


def standing(ours: Record, peer: Record) -> str:
    """Which of STANDINGS a stage is: level where the rounds' quartiles aren't on one side of 1."""
    ratio = ratios.times_faster(peer, ours) or 0.0
    low, high = ratios.spread(peer, ours) or (ratio, ratio)
    return STANDINGS[0 if low > 1 else 2 if high < 1 else 1]


def standings(who: str, peers: Mapping[str, Pairs]) -> str:
    """A sentence: which peers a stage is ahead of, level with or behind, and on which problems."""
    said: dict[str, list[str]] = {}
    for peer, pairs in peers.items():
        found = [(standing(ours, other), title) for title, ours, other in pairs]
        usual = max(STANDINGS, key=[how for how, _ in found].count)
        but = "; ".join(f"{how} it at {title}" for how, title in found if how != usual)
        said.setdefault(f"{usual} {{}}" + (f", but {but}" if but else ""), []).append(peer)
    parts = [how.format(", ".join(names)) for how, names in said.items()]
    rows = "in each row" + ", but as named" * any("but" in part for part in parts)
    return f"By the quartiles of the rounds, {rows}: {who} is {'; '.join(parts)}."


def pairs_of(cells: Sequence[Record], stage: int, peer: str, sizes: Sequence[int]) -> Pairs:
    """The records of a stage and a peer on each problem where both were timed."""
    found = []
    for title, at in text.measured([cell for cell in cells if cell["nk"] in sizes]):
        ours, other = text.find(cells, stage=stage, **at), text.find(cells, name=peer, **at)
        if ratios.comparable(ours) and ratios.comparable(other):
            found.append((title, ours, other))
    return found


def float32(name: str, stages: Sequence[int]) -> str:
    """A table of times in float32 by d and N: stage 3, `stages` and SDPA; the last over both.

    And the largest errors to float64 of stage 3, of the last of `stages` and of SDPA.
    """
    env, cells = read(text.GPU / f"{name}.jsonl")
    body = []
    for d, n in dict.fromkeys((cell["d"], cell["nk"]) for cell in cells):
        found = [text.find(cells, stage=number, d=d, nk=n) for number in (3, *stages, 102)]
        three, *_, ours, peer = found
        shown = (cell["status"] if cell["time_ms"] is None else f"{significant(cell['time_ms'])} ms"
                 for cell in found)  # fmt: skip
        over = (
            ratios.show_speedup(ours, other) if ratios.comparable(other) else "-"
            for other in (three, peer)
        )  # fmt: skip
        errors = ("-" if cell["err_f64_max"] is None else f"{cell['err_f64_max']:.1e}"
                  for cell in (three, ours, peer))  # fmt: skip
        body.append([f"d = {d}, N = {n}", *shown, *over, ", ".join(errors)])
    [*_, last] = stages
    header = " | ".join(["size", *(f"#{number}" for number in (3, *stages)), "SDPA efficient"])
    header += f" | #{last} over #3 | over SDPA | max err of #3, #{last}, SDPA"
    heads = sorted({cell["h"] for cell in cells}, reverse=True)
    note = f"float32, switch at 'ieee', B = 1, H = {' or '.join(map(str, heads))}; no mask; paired."
    return text.part(header, body, note, env)


def training_memory(ds: Sequence[int] = (64, 128)) -> str:
    """A table of the peak memory of a training step, with stage 3, stage 7 and the peers."""
    env, cells = read(text.GPU / "bench-train.jsonl")
    body = []
    for title, at in text.problems(text.SIZES[1:], ds, FULL):
        at["direction"] = "train"
        found = [*text.both(cells, 3, 7, **at)]
        found += [text.find(cells, name=peer, **at) for peer in SHOWN_PEERS]
        peaks = [cell["peak_bytes"] for cell in found]
        shown = ["-" if peak is None else show_bytes(peak) for peak in peaks]
        body.append([title, *shown, f"{peaks[1] / peaks[2]:.2f}x"])
    header = f"size | #3 | #7 | {' | '.join(SHOWN_PEERS.values())} | #7 / SDPA flash"
    note = "Above q, k, v, dO; fp16, B N = 16384, H d = 2048, no mask."
    return text.part(header, body, note, env)


def skipping() -> str:
    """A table of what the causal mask saves: tiles never visited, and time."""
    env, cells = read(text.GPU / "bench-004.jsonl")
    body = []
    for title, at in text.problems(text.SIZES, masks=FULL):
        full, half = (text.find(cells, stage=6, **(at | {"causal": mask})) for mask in text.MASKS)
        times = [cell["time_ms"] for cell in (full, half)]
        shown = [f"{significant(time)} ms" for time in times]
        visited = f"{100 * half['skip_ratio']:.0f}%"
        body.append([title, visited, *shown, f"~{times[0] / times[1]:.2f}x"])
    header = "size | tiles never visited | no mask | causal | faster"
    note = "Not timed in turns, so each ratio is of two medians."
    return text.part(header, body, note, env)


def variants() -> str:
    """A table of variants of stage 6, timed in turns with the shipped stage."""
    env, cells = read(text.GPU / "variants.jsonl")
    names = groups.titles(env)
    others = [other for other in groups.stages_of(cells) if other[0] != 6]
    body = []
    for title, at in text.problems(sorted({cell["nk"] for cell in cells})):
        ours = text.find(cells, stage=6, **at)
        found = (text.find(cells, name=name, **at) for _, name in others)
        shown = (ratios.show_speedup(ours, other) for other in found)
        body.append([title, f"{significant(ours['time_ms'])} ms", *shown])
    header = " | ".join(["mask and size | as shipped", *(names[other] for other in others)])
    note = "fp16; a variant's time over the shipped stage's: above 1.00x it is slower. Paired."
    return text.part(header, body, note, env)


def cut_off(planned: int, measured: int) -> list[str]:
    """A note on the problems of a plan that were not measured, where there are any."""
    missing = planned - measured
    are = "is" if missing == 1 else "are"
    note = f"Of {planned} problems {missing} {are} not measured: a run was cut off."
    return [note] if missing > 0 else []


def decoding() -> str:
    """The table of the decode suite: few query rows, contiguous and paged, and the best peer."""
    files = own_files("decode*.jsonl", text.GPU)
    if not files:
        return "Not measured yet: `ladder bench --suite decode`, on a GPU."
    runs = [read(file) for file in files]
    _, ceilings = read(text.GPU / "ceilings.jsonl", "ceiling")
    every = {"rungs": [stage for env, _ in runs for stage in env["rungs"]]}
    made = cell_tables.decode_table(every, [cell for _, cells in runs for cell in cells], ceilings)
    planned = decode_problems([env for env, _ in runs])
    notes = [*made.notes, *cut_off(planned, len(made.rows))]
    return f"{replace(made, notes=notes).markdown()}\n\n{text.machine(runs[0][0])}"


def flashinfer() -> str:
    """The table of stage 8 beside FlashInfer: one query row, from pages.

    In one piece the peer has one page per sequence, which FlashInfer doesn't split: unlike work.
    """
    env, cells = read(text.GPU / "flashinfer.jsonl")
    fields = ("b", "h", "hk", "nk", "d", "page_size")
    paged = [cell for cell in cells if cell["page_size"]]
    at = {(cell["stage"], *(cell[name] for name in fields)): cell for cell in paged}
    problems = dict.fromkeys(tuple(cell[name] for name in fields) for cell in paged)
    body = []
    for problem in problems:
        ours, theirs = at[8, *problem], at[108, *problem]
        *sizes, page = problem
        times = (f"{significant(1e3 * cell['time_ms'])} us" for cell in (ours, theirs))
        shown = ratios.show_speedup(ours, theirs)
        body.append([", ".join(map(str, sizes)), str(page), *times, shown])
    header = "B, H, Hk, N, d | pages of | #8 | FlashInfer | #8 over it"
    note = "One query row, bf16, from a paged cache, in turns. " + " ".join(
        cut_off(decode_problems([env]), decode_problems([{"plan": cells}]))
    )
    return text.part(header, body, note, env)


def ring_problems(world: int) -> tuple[list[Record], list[list[Record]]]:
    """The env records of runs on `world` GPUs, and the records of each problem, in order."""
    runs = [read(file) for file in text.RINGS[world]]
    problems = [group for _, cells in runs for group in groups.by_problem(cells)]
    return [env for env, _ in runs], sorted(problems, key=ring_order)


def ring(world: int) -> str:
    """The table of `world` GPUs, where they were measured."""
    envs, problems = ring_problems(world)
    if not problems:
        return NOT_MEASURED
    peers = {
        name: title for name, title in RING_PEERS.items()
        if any(cell["name"].startswith(name) for group in problems for cell in group)
    }  # fmt: skip
    body = []
    for group in problems:
        at = {cell["name"]: cell for cell in group if ratios.comparable(cell)}
        ours, alone, machine = at.get("ring"), at.get(ONE_GPU), rings.machine_of(group)
        if ours is None or alone is None or machine is None:
            continue
        if rotations := [at[name] for name in at if name.startswith("context_parallel")]:
            at["context_parallel"] = min(rotations, key=lambda cell: float(cell["time_ms"]))
        if not ours["causal"]:
            at.pop("ring_in_order", None)  # without a mask nothing is in zigzag
        modelled = ring_cost.seconds(Problem.from_json(ours), machine, "ring")
        body.append([
            ours["direction"], text.MASKS[ours["causal"]], ours["nk"],
            show_time(alone["time_ms"]), show_time(ours["time_ms"]),
            f"**{ratios.show_speedup(ours, alone)}**",
            *(ratios.show_speedup(ours, at.get(name)) for name in peers),
            f"{modelled / (1e-3 * ours['time_ms']) - 1:+.0%}", ratios.show_peak(ours),
        ])  # fmt: skip
    heads = "pass | mask | N | one GPU | ring | over it", *peers.values(), "model | peak"
    first, planned = problems[0][0], [entry for env in envs for entry in env["plan"]]
    note = " ".join([
        f"{world} ranks, {first['h']} heads, d = {first['d']}, {first['dtype']}. One GPU: "
        "the whole sequence, by the same kernels; over it: how many times as fast the ring is; "
        "then, as how many times as each of the others, of context_parallel as the faster "
        "rotation. Model: the cost model's time over the measured one. Peak: memory of a rank "
        "above its inputs.",
        *cut_off(len(groups.by_problem(planned)), len(body)),
    ])  # fmt: skip
    return text.part(" | ".join(heads), body, note, *envs)


def ring_of_two() -> str:
    """The table of two GPUs, and the picture of their times, where they were measured."""
    return f"{ring(2)}\n\n{RING_PICTURE}" if text.RINGS[2] else NOT_MEASURED


def ring_predicted() -> str:
    """What the cost model says of four and eight GPUs, by the rates and the link of two."""
    envs, problems = ring_problems(2)
    found = [(Problem.from_json(group[0]), rings.machine_of(group)) for group in problems]
    longest = {(one.direction, one.causal): (one, machine) for one, machine in found if machine}
    if not longest:
        return NOT_MEASURED
    measured = {
        (cell["world"], cell["causal"], cell["nk"], cell["direction"]): cell["time_ms"]
        for group in ring_problems(4)[1]
        for cell in group
        if cell["name"] == "ring"
    }
    body = []
    for world, causal in product((4, 8), text.MASKS):
        for n in PREDICTED:
            row: list[object] = [world, text.MASKS[causal], n]
            for direction in ("fwd", "train"):
                if (direction, causal) not in longest:  # of a run that was cut off
                    row += ["-", "-", "-"]
                    continue
                one, machine = longest[direction, causal]
                one = replace(one, world=world, nq=n, nk=n)
                ring, alone = (ring_cost.seconds(one, machine, x) for x in ("ring", ONE_GPU))
                took = measured.get((world, causal, n, direction))
                row += [show_time(1e3 * ring), f"{alone / ring / world:.2f}"]
                row.append(show_time(took) if took else "-")
            body.append(row)
    header = "GPUs | mask | N | forward | of ideal | measured | training | of ideal | measured"
    note = "Predicted; of ideal: one GPU's time over the ring's, and over the number of GPUs."
    return text.part(header, body, note, *envs)


def ring_order(group: Sequence[Record]) -> tuple[int, bool, int]:
    """The place of a problem in the table: by pass, mask and length."""
    first = group[0]
    return DIRECTIONS.index(first["direction"]), first["causal"], first["nk"]


def decode_problems(envs: Sequence[Record]) -> int:
    """How many rows the plans of decode suites have."""
    return len(groups.shapes([entry for env in envs for entry in env["plan"]]))


def parts() -> str:
    """Stage 8's cost model against measurement: how many parts, and what other rules lose."""
    file = text.GPU / "splits.jsonl"
    if not file.exists():
        return NOT_MEASURED
    env, cells = read(file)
    body = []
    for group in groups.shapes(cells):
        going = {cell["name"]: cell for cell in group if ratios.comparable(cell)}
        fixed = {
            int(name.removeprefix("parts_")): cell
            for name, cell in going.items()
            if name.startswith("parts_")
        }
        if "triton_split_kv" not in going or not fixed:
            continue
        chosen, ours = chosen_parts(group[0]), going["triton_split_kv"]
        best = min(fixed, key=lambda splits: float(fixed[splits]["time_ms"]))
        least = min((ours, fixed[best]), key=lambda cell: float(cell["time_ms"]))
        capped = fixed[8] if chosen > 8 else ours
        others = (fixed[1], capped, going["query_heads"])
        slower = (ratios.show_briefly(cell, least) for cell in (ours, *others))
        figures = [chosen, f"{significant(1e3 * ours['time_ms'])} us", best, *slower]
        body.append([cell_tables.decoded(group[0]), group[0]["nq"], *figures])
    header = "B, H, Hk, N, d | Nq | the model's parts | time | fastest of those tried"
    header += " | model | not split | at most 8 | by query heads"
    note = "n x: the time over the shortest. Paired; the model is asked for 132 multiprocessors."
    notes = [note, *cut_off(decode_problems([env]), len(body))]
    return text.part(header, body, " ".join(notes), env)


def chosen_parts(record: Record) -> int:
    """How many parts stage 8's cost model chooses for a problem, on 132 multiprocessors."""
    import torch  # takes seconds, for this part only

    from stages.s08_triton_split_kv import plan

    shape = (record[name] for name in ("b", "h", "nq", "d"))
    q = torch.empty(tuple(shape), dtype=getattr(torch, record["dtype"]), device="meta")
    return plan(q, record["hk"], record["nk"])[0]


def masks() -> str:
    """What a causal mask and key lengths cost stage 8 where they hide next to nothing."""
    file = text.GPU / "masks.jsonl"
    if not file.exists():
        return "Not measured yet: `ladder bench --suite decode-masks`, on a GPU."
    env, cells = read(file)
    body = []
    for group in groups.shapes(cells, "causal", "seqlens_k"):
        at = {(cell["causal"], bool(cell["seqlens_k"])): cell["time_ms"] for cell in group}
        plain = at[False, False]
        others = ((True, False), (False, True), (True, True))
        kept = (f"~{plain / at[key]:.2f}x" for key in others)
        shape = cell_tables.decoded(group[0] | {"causal": False, "seqlens_k": None})
        body.append([shape, group[0]["nq"], f"{significant(1e3 * plain)} us", *kept])
    header = "B, H, Hk, N, d | Nq | no mask | causal | lengths | both"
    note = "n x: speed relative to no mask. Not timed in turns, so each ratio is of two medians."
    return text.part(header, body, note, env)


# the sources' own results and machines, as far as they are known
SOURCE_001 = "Source 001: an RTX 4070 laptop, fp16, B = 2, H = 4;"
FORWARD_TIME = "1.15-1.35x over SDPA at N >= 4096"
FORWARD_MEMORY = "naive 788 MB against 24 MB at N = 4096"
SOURCES = {
    "001-forward": f"{SOURCE_001} {FORWARD_TIME}.",
    "001-train": f"{SOURCE_001} training up to 1.17x over SDPA at N = 8192, in 13% less memory.",
    "001-memory": f"{SOURCE_001} {FORWARD_MEMORY}; training in 13% less than SDPA.",
    "004": "Source 004: an A100, whose peak is 312 TFLOP/s; standard 3-4 TFLOP/s at every N; its "
    "own about 190 at N = 16384, 61% of the peak, level with SDPA from N = 4096 on.",
}


def trio(cells: Sequence[Record], stage: int, **at: object) -> tuple[Record, Record, Record]:
    """The records of stage 3, `stage` and SDPA's flash backend, as `text.find` finds them."""
    return *text.both(cells, 3, stage, **at), text.find(cells, name="sdpa_flash", **at)


def source_001(direction: str, stage: int) -> str:
    """Source 001's table at its shapes: time, memory, speed-up over SDPA's flash backend."""
    env, cells = read(text.GPU / "bench-001-train.jsonl")
    body = []
    for causal, n in product(text.MASKS, groups.sizes(cells)):
        found = trio(cells, stage, direction=direction, causal=causal, nk=n)
        figures = [cell_tables.figure(cell, what) for what in ("time", "peak") for cell in found]
        figures.insert(3, ratios.show_speedup(found[1], found[2]))
        body.append([f"{text.MASKS[causal]}, N = {n}", *figures])
    header = f"mask and size | #3, ms | #{stage} | SDPA flash | #{stage} over flash"
    header += f" | #3, peak | #{stage} | SDPA flash"
    claims = SOURCES["001-train"]
    if direction == "fwd":  # its table has both
        claims = f"{SOURCE_001} {FORWARD_TIME}; {FORWARD_MEMORY}."
    note = f"{direction}, fp16, B = 2, H = 4, d = 64.\n\n{claims}"
    return text.part(header, body, note, env)


def train_split() -> str:
    """A table of stage 7's and SDPA's forward, backward and both at source 001's shapes."""
    env, cells = read(text.GPU / "bench-001-train.jsonl")
    body = []
    for n in groups.sizes(cells):
        passes = [trio(cells, 7, direction=way, causal=False, nk=n) for way in DIRECTIONS]
        times = [cell_tables.figure(found[who], "time") for who in (1, 2) for found in passes]
        body.append([str(n), *times])
    header = "N | #7: forward | backward | both | SDPA flash: forward | backward | both"
    return text.part(header, body, "ms, no mask, fp16, B = 2, H = 4, d = 64.", env)


def source_004() -> str:
    """Source 004's table: rates of stages 3 and 6 and SDPA, and 6's share of the matrix rate."""
    env, cells = read(text.GPU / "bench-004.jsonl")
    _, ceilings = read(text.GPU / "ceilings.jsonl", "ceiling")
    roof = text.find(ceilings, what="matmul", dtype="float16")["value"]
    header, ns, columns = "N", groups.sizes(cells), []
    for d, causal in product((64, 128), text.MASKS):
        header += f" | d = {d}" + ", causal" * causal
        found = [trio(cells, 6, d=d, causal=causal, nk=n) for n in ns]
        columns.append([
            f"{rate(three)} / {rate(ours)} ({100 * (ratios.tflops(ours) or 0) / roof:.0f}%) / "
            f"{rate(flash)}"
            for three, ours, flash in found
        ])  # fmt: skip
    body = zip(ns, *columns, strict=True)
    note = f"TFLOP/s: #3 / #6 (its share of the {roof:.0f} that the card reached) / SDPA flash;"
    return text.part(header, body, f"{note} fp16.", env)


def curves(name: str) -> str:
    """The table of the training curves' verdicts."""
    env, records = read(text.GPU / f"{name}.jsonl", "train")
    columns = "[the columns](training.md#the-columns)"
    note = f"Losses in nats per character, means over the seeds: {columns}."
    return views.markdown(env, records, note, text.machine(env))


def generated() -> str:
    """Text written by a GPT with a cache and without, against the context's length."""
    file = text.GPU / "generate.jsonl"
    if not file.exists():
        return "Not measured yet: `ladder generate --stage 8`, on a GPU."
    env, records = read(file, "generate")
    made = views.generated_table(env, records)
    return f"{made.markdown()}\n\n{text.machine(env)}"


def sanitizer() -> str:
    """A table of the results of compute-sanitizer."""
    env, records = read(text.GPU / "sanitizer.jsonl", "sanitizer")
    body = [[r["tool"], len(r["ran"]), r["errors"], r["summary"]] for r in records]
    header = "tool | stages x problems x dtypes run | errors | its summary"
    who = groups.numbers({stage["stage"] for stage in env["rungs"]}).capitalize()
    return text.part(header, body, f"{who}. {records[0]['version']}.", env)
