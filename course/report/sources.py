"""Tables of the course project (source 000), made from our records, with its own figures."""

from collections.abc import Sequence

from course.report import profile, text
from harness.problems.cost import intensity
from harness.records.jsonl import read
from harness.records.schema import Record
from harness.records.units import show_bytes, show_time, significant
from harness.views import groups, machine, ratios
from harness.views.groups import stage_of, stages_of

# the source's table 4.1, ms: stages 0 and 1 with one query row, the others with all rows
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
    64: (0.002, 0.002), 128: (0.761, 0.002), 256: (1.292, 0.002), 512: (2.287, 0.001),
    1024: (3.491, 0.001),
}  # fmt: skip
# table 4.4: N -> FLOP per byte of standard and Flash
SOURCE_4_4 = {1024: (15.4, 261), 4096: (16.1, 1044)}


def ms(cell: Record) -> str:
    """A time in ms, three digits; the status where there is none."""
    time = cell["time_ms"]
    return cell["status"] if time is None else significant(time)


def table_4_1() -> str:
    """Every stage at d = 16, with one query row and with all, and the source's figures."""
    env, cells = read(text.GPU / "table-4.1.jsonl")
    labels, sizes = groups.labels(env), (8, 16, 32, 64)
    body = []
    # stage 9 gives float32 to stage 6's kernel
    shown = [(stage, name) for stage, name in stages_of(cells) if stage != 9]
    for stage, name in shown:
        title = labels[stage, name]
        at = {"stage": stage, "name": name, "paired": False}
        if stage in SOURCE_4_1:
            work = "source, one row" if stage < 2 else "source, all rows"
            body.append([title, work, *map(significant, SOURCE_4_1[stage])])
        body.append([title, "one row", *(ms(text.find(cells, nq=1, nk=n, **at)) for n in sizes)])
        body.append([title, "all rows", *(ms(text.find(cells, nq=n, nk=n, **at)) for n in sizes)])
    header = "stage | work | N = 8 | 16 | 32 | 64"
    machine = text.machine(env, shown=dict(shown))
    return "\n\n".join([text.rows(header, body), "Times in ms, d = 16, float32.", machine])


def table_4_2() -> str:
    """Stages 3 and 5 at d = 64: speed-up and memory for each precision, and the peers."""
    env, cells = read(text.GPU / "table-4.2.jsonl")
    kinds = {"IEEE": "ieee", "TF32": "tf32", "fp16": "float16"}
    header = "N | source" + "".join(f" | {kind}: #3 / #5, ms | #5 faster" for kind in kinds)
    parts = []
    for h, heads in ((1, "one head"), (32, "32 heads")):
        body = []
        for n in text.ALL_SIZES:
            row: list[object] = [n, said_4_2(n)]
            for precision in kinds.values():
                at = {"nk": n, "h": h, "precision": precision}
                times = " / ".join(map(ms, text.both(cells, 3, 5, paired=True, **at)))
                row += [times, f"**{text.factor(cells, 3, 5, **at)}**"]
            body.append(row)
        parts.append(f"**Time, {heads}** (paired)\n\n{text.rows(header, body)}")
    for kind, precision in kinds.items():
        header = "N | source | #3, ms | #5 | #8 | #8 faster than #3 | than #5"
        title = f"**Keys split too, {kind}, one head** (paired)"
        parts.append(f"{title}\n\n{text.rows(header, split(cells, precision))}")
    parts.append(f"**Against the peers, fp16, 32 heads** (paired, ms)\n\n{peers(env, cells)}")
    parts.append(f"**Peak memory above the inputs, one head, float32**\n\n{memory(cells)}")
    return "\n\n".join([*parts, text.machine(env)])


def said_4_2(n: int) -> str:
    """How many times as fast as PyTorch the source's kernel was."""
    pytorch, flash, *_ = SOURCE_4_2.get(n, (0.0, 0.0))
    return f"{pytorch / flash:.1f}x" if flash else "-"


def split(cells: Sequence[Record], precision: str) -> list[list[object]]:
    """The rows of stages 3, 5 and 8 for one head, which leaves most of a GPU idle."""
    body: list[list[object]] = []
    own = [cell for cell in cells if cell["stage"] == 8 and cell["precision"] == precision]
    for n in sorted({cell["nk"] for cell in own}):
        at = {"nk": n, "h": 1, "precision": precision}
        three, eight = text.both(cells, 3, 8, paired=True, **at)
        five = text.find(cells, stage=5, paired=True, **at)
        factors = (f"**{text.factor(cells, old, 8, **at)}**" for old in (3, 5))
        body.append([n, said_4_2(n), *map(ms, (three, five, eight)), *factors])
    return body


def peers(env: Record, cells: Sequence[Record]) -> str:
    """A table of the times of all stages and peers, in turns, at fp16 with 32 heads."""
    cells = [c for c in cells if c["dtype"] == "float16" and c["h"] == 32 and c["paired"]]
    labels = groups.labels(env)
    body = [
        [labels[stage], *(ms(text.find(cells, name=stage[1], nk=n)) for n in text.ALL_SIZES)]
        for stage in stages_of(cells)
    ]
    return text.rows("stage or peer" + "".join(f" | N = {n}" for n in text.ALL_SIZES), body)


def memory(cells: Sequence[Record]) -> str:
    """A table of the peak memory of stages 3 and 5, their ratio, and the source's figures."""
    body = []
    for n in text.ALL_SIZES:
        three, five = text.both(cells, 3, 5, nk=n, h=1, precision="ieee", paired=False)
        source = SOURCE_4_2.get(n)
        said = f"{source[2]} / {source[3]} MB, {source[2] / source[3]:.0f}x" if source else "-"
        ratio = three["peak_bytes"] / five["peak_bytes"]
        body.append([n, said, *map(ratios.show_peak, (three, five)), f"{ratio:.0f}x"])
    return text.rows("N | source | #3 | #5 | #5 less", body)


def table_4_3() -> str:
    """A table of the errors of Lite and Online as N grows."""
    env, cells = read(text.GPU / "table-4.3.jsonl")
    body = []
    for n, said in SOURCE_4_3.items():
        found = [c for p in ("tf32", "ieee") for c in text.both(cells, 4, 5, nk=n, precision=p)]
        body.append([n, *said, *(ratios.show_error(c["err_f64_max"]) for c in found)])
    header = "N | source: Lite | Online | TF32: Lite | Online | IEEE: Lite | Online"
    note = "Max error against float64 (the source's: against PyTorch), d = 64, N(0, 1)."
    return text.part(header, body, note, env)


def source_intensity(n: int, d: int, softmax: bool = True) -> dict[str, float]:
    """FLOPs per byte as source 000 counts them (its table 4.4), for 'standard' and 'flash'.

    One head in float32: 4 N^2 d FLOPs, and 5 N^2 for the `softmax` (scale, max, exp, sum, divide),
    over 4 (4 N^2 + 4 N d) bytes and 4 (4 N d) bytes. Without the softmax it equals our count.
    """
    operations = 4 * n * n * d + (5 * n * n if softmax else 0)
    return {
        "standard": intensity(operations, 4 * (4 * n * n + 4 * n * d)),
        "flash": intensity(operations, 4 * 4 * n * d),
    }


def table_4_4() -> str:
    """A table of arithmetic intensity by the source's count and ours, and achieved rates."""
    env, cells = read(text.GPU / "table-4.4.jsonl")
    body = []
    for n in text.ALL_SIZES[:-1]:
        compared = text.both(cells, 3, 5, nk=n, paired=True)
        source = SOURCE_4_4.get(n, ("-", "-"))
        counted = source_intensity(n, 64)
        ours = [c["flops"] / c["hbm_bytes"] for c in compared]
        achieved = [c["flops"] / c["time_ms"] / 1e9 for c in compared]
        body.append([
            n, f"{source[0]} / {source[1]}",
            f"{significant(counted['standard'])} / {significant(counted['flash'], 4)}",
            f"{significant(ours[0])} / {significant(ours[1], 4)}",
            " / ".join(f"{x:.1f}" for x in achieved),
        ])  # fmt: skip
    header = "N | source | its count | ours: products alone | achieved TFLOP/s"
    note = "FLOP per byte of memory, stage 3 / stage 5; d = 64, float32 IEEE, one head."
    return text.part(header, body, note, env)


def occupancy() -> str:
    """A table of the number of stage 5's programs, which shows that one head is too few."""
    body = [[n, *(-(-n // 128) * h for h in (1, 32))] for n in text.ALL_SIZES]
    return text.rows("N | 1 head | 32 heads", body)


def traffic() -> str:
    """A table of the bytes that stages moved, measured by the profiler, and the prediction."""
    env, records = read(text.GPU / "io.jsonl", "io")
    labels = groups.labels(env)
    body = []
    for group in machine.by_stage(records):
        first = group[0]
        total, predicted = sum(map(machine.moved, group)), first["predicted_bytes"]
        body.append([
            f"{labels[stage_of(first)]}, N = {first['nk']}",
            len(group), show_bytes(total), show_bytes(predicted), f"{total / predicted:.2f}",
            f"{machine.traffic(group)[-1]} TB/s",
        ])  # fmt: skip
    header = "stage | kernels | DRAM moved | predicted | ratio | bandwidth"
    return text.part(header, body, f"{text.problem_but_n(first)}.", env)


def waits(name: str) -> str:
    """What the warps of each kernel wait for, and how busy some units are, by the profiler."""
    file = text.GPU / f"{name}.jsonl"
    env, records = read(file, "io") if file.exists() else ({}, [])
    if not records or not all(record["waits"] and record["units"] for record in records):
        return "Not measured yet: `ladder io`, on a GPU."
    n = max(record["nk"] for record in records)
    body = []
    for record in (record for record in records if record["nk"] == n):
        shares = [record["waits"].get(reason, 0) for reason in profile.WAITS]
        shares.append(sum(record["waits"].values()) - sum(shares))
        shares += [record["units"].get(unit, 0) for unit in profile.UNITS]
        kernel = machine.piece(record["kernel"])
        body.append([f"#{record['stage']}, {kernel}", *(f"{100 * share:.0f}%" for share in shares)])
    busy = (f"{unit} busy" for unit in profile.UNITS.values())
    header = " | ".join(["kernel", *profile.WAITS.values(), "the rest", *busy])
    note = (
        "Of a warp's time (the rest: it starts an instruction, or smaller waits); of a unit's "
        f"peak. {text.problem_but_n(record)}, N = {n}."
    )
    return text.part(header, body, note, env)


def launches(name: str) -> str:
    """How long Python takes to launch one call of each stage and peer, by d and mask."""
    file = text.GPU / f"{name}.jsonl"
    env, cells = read(file) if file.exists() else ({}, [])
    if not any(cell["launch_ms"] for cell in cells):
        return "Not measured yet: the command above, on a GPU."
    labels = groups.labels(env)
    columns = list(text.problems(sorted({cell["nk"] for cell in cells})))
    body = []
    for stage in stages_of(cells):
        times = (text.find(cells, name=stage[1], **at)["launch_ms"] for _, at in columns)
        body.append([labels[stage], *("-" if x is None else show_time(x) for x in times)])
    header = " | ".join(["", *(title for title, _ in columns)])
    note = "Until a call returns to Python: medians of up to 20 in a row; of five rows the fastest."
    return text.part(header, body, note, env)


def host_times() -> str:
    """How long Python takes for each call of a stage, and how many times cuDNN's."""
    env, records = read(text.GPU / "host.jsonl", "host")
    titles = {rung["stage"]: rung["title"] for rung in env["rungs"]}
    body: dict[tuple[str, int], dict[int, str]] = {}
    for each in records:
        ratio = f"{each['launch_ms'] / each['reference_ms']:.2f}x"
        row = body.setdefault((each["call"], each["b"]), {})
        row[each["stage"]] = f"{show_time(each['launch_ms'])} ({ratio})"
    header = " | ".join(["call | B", *(f"{stage} {title}" for stage, title in titles.items())])
    cells = [[*call, *(row.get(stage, "-") for stage in titles)] for call, row in body.items()]
    note = "Sequences of 256 keys, backward of 512. In brackets: how many times cuDNN's."
    return text.part(header, cells, note, env)


def model() -> str:
    """A table of MiniLM with its attention replaced: the effect on embedding and hidden states."""
    env, records = read(text.GPU / "model-float32.jsonl", "model")
    labels = groups.labels(env)
    body = [
        [
            f"{tokens} tokens, {labels[stage_of(cell)]}",
            f"{cell['cosine']:.4f}", ratios.show_error(cell["max_hidden_diff"]),
            cell["status"],
        ]
        for tokens in (64, 65, 128, 512) for cell in records if cell["tokens"] == tokens
    ]  # fmt: skip
    header = "text and stage | cosine of the embedding | largest hidden difference | status"
    return text.part(header, body, "Against SDPA, float32.", env)
