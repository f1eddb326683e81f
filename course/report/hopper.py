"""The generated parts of docs/hopper.md and its log: stage 9, its variants and the peers."""

import statistics
import tomllib
from collections.abc import Callable, Sequence
from itertools import groupby
from itertools import product as combinations

from course.report import profile, text
from course.report.comparisons import NOT_MEASURED, PEERS, cut_off, pairs_of, rate, standings
from course.suites import EVEN_AND_ODD
from harness.records.jsonl import read
from harness.records.schema import Record
from harness.views import groups, ratios

SHIPPED = "gluon_hopper"
FASTEST = ("sdpa_cudnn", "flash_attention_3", "flash_attention_4")
# a file's name, and that of its table: TFLOP/s of stage 9 and others
RACES = (
    *("hopper", "hopper-float16", "hopper-fa3", "hopper-graph", "hopper-bwd"),
    *("hopper-train", "hopper-train-float16"),
)
OTHERS = {"triton_flash2": "#6", "triton_training": "#7"} | PEERS


def ideas(direction: str = "fwd") -> dict[str, tuple[str, str]]:
    """The variants that lack one idea each, in the order of the ideas: the idea, and what was
    expected of it."""
    known = tomllib.loads((text.ROOT / "tools" / "variants.toml").read_text(encoding="utf-8"))
    lacking = {
        name: made for name, made in known["9"].items()
        if "idea" in made and made.get("direction", "fwd") == direction
    }  # fmt: skip
    return {name: (made["idea"], made["expected"]) for name, made in lacking.items()}


def climb(name: str) -> str:
    """A table of stage 9's speed, and of the time of its variants.

    Those that lack one idea each come in the order of the ideas, with what was expected.
    """
    file = text.GPU / f"{name}.jsonl"
    if not file.exists():
        return NOT_MEASURED
    env, cells = read(file)
    by_size = ("d", "causal", "nk")
    at = {(cell["name"], *(cell[name] for name in by_size)): cell for cell in cells}
    planned = sorted({tuple(entry[name] for name in by_size) for entry in env["plan"]})
    columns = [list(group) for _, group in groupby(planned, key=lambda problem: problem[:2])]

    def row(title: str, hope: str, name: str, show: Callable[[Record, Record], str]) -> list[str]:
        shown = [
            " / ".join(
                show(at[name, *problem], at[SHIPPED, *problem]) if (name, *problem) in at else "-"
                for problem in column
            )
            for column in columns
        ]
        return [title, hope, *shown]

    _, ceilings = read(text.GPU / "ceilings.jsonl", "ceiling")
    most = text.find(ceilings, what="matmul", dtype=cells[0]["dtype"])["value"]

    def share(cell: Record, _: Record) -> str:
        return f"~{100 * (ratios.tflops(cell) or 0) / most:.0f}%"

    others = {name for _, name in groups.stages_of(cells)} - {SHIPPED}
    tried = ideas()
    body = [
        row("as shipped, TFLOP/s", "", SHIPPED, lambda cell, _: rate(cell)),
        row("of one product alone", "", SHIPPED, share),
    ]
    body += [  # the first idea, roles, has no variant
        row(f"{number}, `{name}`", hope, name, slower)
        for number, (name, (_, hope)) in enumerate(tried.items(), 2)
        if name in others
    ]
    body += [row(f"`{name}`", "", name, slower) for name in sorted(others - tried.keys())]
    sizes = [f"d = {column[0][0]}, {text.MASKS[column[0][1]]}" for column in columns]
    header = ["variant", "expected of the idea", *sizes]
    lengths = " / ".join(str(problem[2]) for problem in columns[0])
    notes = [
        f"bf16, N = {lengths}, B N = 16384, H d = 2048. A variant's time over the shipped stage's: "
        "above 1.00x it is slower. Paired. One product: 8192 x 8192 matrices, "
        f"{most:.0f} TFLOP/s in another run."
    ]
    if others & tried.keys():
        notes.append("Where an idea does not apply, the variant is the shipped stage: 1.00x.")
    else:
        header, *body = ([title, *rest] for title, _, *rest in [header, *body])
    notes += cut_off(len(planned), len({problem[1:] for problem in at}))
    return text.part(" | ".join(header), body, " ".join(notes), env)


def first() -> str:
    """TFLOP/s of the smallest Hopper kernel, and of the others in its record, as times of it."""
    file = text.GPU / "hopper-first.jsonl"
    if not file.exists():
        return NOT_MEASURED
    env, cells = read(file)
    names = groups.titles(env)
    [start] = {who for who in groups.stages_of(cells) if who[1] == "first"}
    others = [who for who in groups.stages_of(cells) if who != start]
    body = []
    for title, at in text.problems(sorted({cell["nk"] for cell in cells}), (128,), {False: ""}):
        ours = text.find(cells, name="first", **at)
        row = [title, f"{rate(ours)}, 1.0x"]
        for _, name in others:
            cell = text.find(cells, name=name, **at)
            row.append(f"{rate(cell)}, {ratios.show_speedup(cell, ours)}")
        body.append(row)
    header = " | ".join(["size", "first", *(f"#{who[0]} {names[who]}" for who in others)])
    note = f"TFLOP/s, and times as fast as `first.py`; {cells[0]['dtype']}, no mask; paired."
    return text.part(header, body, note, env)


def bought(name: str, direction: str, begin: int) -> str:
    """What each idea of stage 9 gained: the least and the most of all problems, and where.

    `begin`: the number of the first of them that has a variant.
    """
    file = text.GPU / f"{name}.jsonl"
    if not file.exists():
        return NOT_MEASURED
    env, cells = read(file)
    body = []
    for number, (without, (idea, hope)) in enumerate(ideas(direction).items(), begin):
        gains = []
        for title, at in text.measured(cells):
            pair = [[c for c in cells if {"name": who, **at}.items() <= c.items()]
                    for who in (without, SHIPPED)]  # fmt: skip
            if all(pair) and (ratio := ratios.times_faster(pair[0][0], pair[1][0])):
                gains.append((ratio, title))
        if gains:
            (least, _), (most, where) = min(gains), max(gains)
            body.append([number, idea, hope, f"{least:.2f}x", f"{most:.2f}x", where])
    note = (
        "What stage 9 gains by an idea: the time without it over the time with it, paired, the "
        "least and the most of all problems; about 1.00x where it doesn't apply. bf16."
    )
    note = " ".join([note, *not_measured(env, cells)])
    return text.part("# | idea | expected of it | least | most | at", body, note, env)


def not_measured(env: Record, cells: Sequence[Record]) -> list[str]:
    """A note on the problems of stage 9 that a run was to measure and didn't, if there are any."""
    return cut_off(*(sum(x["stage"] == 9 for x in each) for each in (env["plan"], cells)))


def slower(cell: Record, ours: Record) -> str:
    """A variant's time over the shipped stage's."""
    return ratios.show_speedup(ours, cell)


def race(name: str) -> str:
    """TFLOP/s of stages 9 and 6 and the peers, by d, mask and N; ratios to the fastest."""
    file = text.GPU / f"{name}.jsonl"
    if not file.exists():
        return NOT_MEASURED
    env, cells = read(file)
    names = {name: title for name, title in OTHERS.items() if any(c["name"] == name for c in cells)}
    fastest = [name for name in FASTEST if name in names]
    over: dict[str, list[float]] = {peer: [] for peer in fastest}
    body = []
    for title, at in text.measured(cells):
        ours = text.find(cells, stage=9, **at)
        rivals = [text.find(cells, name=peer, **at) for peer in fastest]
        for peer, rival in zip(fastest, rivals, strict=True):
            timed = ratios.comparable(ours) and ratios.comparable(rival)
            ratio = ratios.times_faster(rival, ours) if timed else None
            over[peer] += [] if ratio is None else [ratio]
        shown = (ratios.show_speedup(ours, rival) for rival in rivals)
        theirs = (rate(text.find(cells, name=name, **at)) for name in names)
        body.append([title, f"**{rate(ours)}**", *theirs, *shown])
    header = " | ".join(
        ["mask and size", "#9", *names.values(), *(f"#9 over {names[x]}" for x in fastest)]
    )
    means = (f"{statistics.geometric_mean(x):.2f}x {names[peer]}" for peer, x in over.items() if x)
    done = {"fwd": "forward", "bwd": "backward", "train": "both passes"}[cells[0]["direction"]]
    replayed = ", replayed as CUDA graphs" if env["arguments"].get("graph") else ""
    note = (
        f"TFLOP/s, the masked part not counted; {cells[0]['dtype']}, {done}, B N = 16384, "
        f"H d = 2048; paired{replayed}. In the geometric mean {' and '.join(means)}. "
    )
    sizes = sorted({cell["nk"] for cell in cells})
    note += standings("#9", {who: pairs_of(cells, 9, x, sizes) for x, who in names.items()})
    note = " ".join([note, *not_measured(env, cells)])
    return text.part(header, body, note, env)


def other_widths(name: str) -> str:
    """Stage 9 where d is neither 64 nor 128: TFLOP/s at each N, and ratios to the fastest peers."""
    file = text.GPU / f"{name}.jsonl"
    if not file.exists():
        return NOT_MEASURED
    env, cells = read(file)
    sizes, ds = (sorted({cell[field] for cell in cells}) for field in ("nk", "d"))
    peers = [name for name in FASTEST if any(c["name"] == name for c in cells)]

    def row(name: str, d: int, causal: bool) -> list[Record | None]:
        at = {"name": name, "d": d, "causal": causal}
        return [next((c for c in cells if {**at, "nk": n}.items() <= c.items()), None)
                for n in sizes]  # fmt: skip

    def over(own: Record | None, peer: Record | None) -> str:
        return "wrong" if peer and peer["status"] == "wrong" else ratios.show_speedup(own, peer)

    body = []
    for d, causal in combinations(ds, text.MASKS):
        ours = row(SHIPPED, d, causal)
        ahead = ([*map(over, ours, row(peer, d, causal))] for peer in peers)
        rates = ["-" if x == "-" else f"**{x}**" for x in map(rate, ours)]
        body.append([d, text.MASKS[causal], *(" / ".join(each) for each in (rates, *ahead))])
    header = " | ".join(["d", "mask", "#9", *(f"#9 over {PEERS[x]}" for x in peers)])
    done = {"fwd": "forward", "bwd": "backward"}[cells[0]["direction"]]
    at = " / ".join(map(str, sizes))
    wrong = any(c["status"] == "wrong" for c in cells if c["name"] in peers)
    about = "; wrong: the peer's output is" if wrong else ""
    note = (
        f"TFLOP/s at N = {at}, the masked part not counted; bf16, {done}, B N = 16384, "
        f"{cells[0]['h']} heads; paired; -: not measured{about}."
    )
    return text.part(header, body, " ".join([note, *not_measured(env, cells)]), env)


def loops() -> str:
    """What the machine code of stage 9 and its variants takes: registers, instructions, spills."""
    env, records = read(text.CPU / "hopper-loops.jsonl", "loop")
    given = dict.fromkeys(record["d"] for record in records)

    def figures(name: str) -> list[str]:
        at = {record["d"]: record for record in records if record["name"] == name}
        registers = " / ".join(f"{at[d]['registers']} of {at[d]['given']}" for d in given)
        counts = ("instructions", "exponentials", "groups", "spills")
        return [registers, *(" / ".join(str(at[d][field]) for d in given) for field in counts)]

    names = list(dict.fromkeys(record["name"] for record in records))
    shipped = figures(SHIPPED)
    others = [name for name in names if figures(name) != shipped]
    alike = ", ".join(f"`{name}`" for name in names if name not in (*others, SHIPPED))
    body = [["as shipped", *shipped], *([f"`{name}`", *figures(name)] for name in others)]
    sizes = " / ".join(map(str, given))
    header = "variant | registers | instructions | exponentials | groups of products | spills"
    note = (
        f"No mask, d = {sizes}. Registers of a thread that the loop names; instructions of a warp "
        f"for one KV tile, spills among them. As shipped, too: {alike}; what they change lies "
        "outside the loop, or under a mask, or in which slots and barriers it uses."
    )
    return text.part(header, body, note, env)


def timeline() -> str:
    """What a consumer does in one KV tile, in thousand cycles, without idea 3 and with it."""
    file = text.GPU / "hopper-timeline.jsonl"
    if not file.exists():
        return NOT_MEASURED
    env, records = read(file, "timeline")
    parts = tuple(profile.DOING)

    def thousands(cycles: float) -> str:
        return f"{cycles / 1000:.2f}"

    body = []
    for record in records:
        name = "as shipped" if record["name"] == SHIPPED else f"`{record['name']}`"
        cycles = [record["cycles"][part] for part in parts]
        rest = record["tile_cycles"] - sum(cycles)
        body.append([name, *map(thousands, [*cycles, rest, record["tile_cycles"]])])
    first = records[0]
    traced = " and ".join(dict.fromkeys(f"{record['tiles']:,}" for record in records))
    note = (
        f"Thousand cycles, medians over {traced} KV tiles, the last that the profiler's buffer "
        f"holds; the rest: what they leave of a tile's. {first['dtype']}, no mask, "
        f"d = {first['d']}, N = {first['nk']}."
    )
    return text.part(" | ".join(["variant", *parts, "the rest", "a KV tile"]), body, note, env)


def share() -> str:
    """Stage 9's rate, and that of one matrix product with as many FLOPs, timed in turns."""
    file = text.GPU / "hopper-product.jsonl"
    if not file.exists():
        return NOT_MEASURED
    env, records = read(file, "share")
    body = []
    for record in records:
        times = record["time_ms"], record["product_ms"]
        product = record | {"time_ms": times[1], "rounds_ms": record["product_rounds_ms"]}
        rates = (f"{record['flops'] / time / 1e9:.0f}" for time in times)
        size = f"d = {record['d']}, N = {record['nk']}"
        quartiles = ratios.spread(product, record) or ()
        spread = "-".join(f"{100 * x:.0f}" for x in quartiles)
        ratio = ratios.times_faster(product, record) or 0
        body.append([size, *rates, f"{100 * ratio:.0f}% ({spread})"])
    note = (
        f"TFLOP/s; {records[0]['dtype']}, forward, no mask, B N = 16384, H d = 2048; in turns, in "
        "brackets the quartiles of the rounds' shares."
    )
    return text.part("size | #9 | one product | #9 of that", body, note, env)


def odd() -> str:
    """What an odd N, grouped heads and key lengths cost stage 9."""
    file = text.GPU / "hopper-odd.jsonl"
    if not file.exists():
        return NOT_MEASURED
    env, cells = read(file)
    body = []
    for d, causal, (n, ragged) in combinations((64, 128), text.MASKS, EVEN_AND_ODD):
        alike = [cell for cell in cells if (cell["d"], cell["causal"]) == (d, causal)]
        at = {
            (c["nk"], c["h"] // c["hk"], (c["seqlens_k"] or [None])[0]): c["time_ms"] for c in alike
        }
        even = at.get((n, 1, None))
        others = ((ragged, 1, None), (n, 4, None), (n, 1, n), (n, 1, ragged))
        figures = [f"{1e3 * even:.0f} us" if even else "-"]
        figures += [f"~{at[x] / even:.2f}x" if even and x in at else "-" for x in others]
        body.append([f"d = {d}, {text.MASKS[causal]}, N = {n} and {ragged}", *figures])
    header = "mask and sizes | the first N | the second N | four heads share keys"
    header += " | lengths as the first N | as the second"
    note = "n x: a call's time over that of the first N. Not timed in turns: medians."
    return text.part(header, body, " ".join([note, *not_measured(env, cells)]), env)
