"""README's generated parts: the first table, the ladder with its gains, the top on a GPU."""

from course.report import text
from course.report.comparisons import PEERS, rate
from harness.problems.problem import PEERS_FROM
from harness.records.code import built_in_files, read_declared
from harness.records.jsonl import read
from harness.records.schema import Record
from harness.records.units import show_time
from harness.views import cell_tables, groups, ratios
from harness.views.groups import stages_of

HOW = text.READING.format("docs/")
GAINS = (  # what shows a stage's gain, the stages that it is used for
    (text.CPU / "steps.jsonl", (0, 1, 2, 3)),
    (text.GPU / "table-4.2.jsonl", (3, 5)),
    (text.GPU / "tour.jsonl", (4,)),
    (text.GPU / "bench-steps.jsonl", (5, 6)),
    (text.GPU / "bench-train.jsonl", (3, 7)),
    (text.GPU / "decode.jsonl", (6, 8)),
    (text.GPU / "hopper-float16.jsonl", (6, 9)),
    (text.RESULTS / "h200-x4" / "ring.jsonl", (10, 116)),
)


def first_table() -> str:
    """README's first table: all stages at N = 64 on a CPU."""
    env, cells = read(text.CPU / "steps.jsonl")
    cells = [cell for cell in cells if cell["nk"] == 64]
    labels, body = groups.labels(env), []
    for cell in cell_tables.rows_of(cells):
        timed = cell_tables.in_turns(cells, cell) or cell
        interpreted = cell["mode"] == "interpreted"
        body.append([
            labels[groups.stage_of(cell)],
            "interpreted" if interpreted else show_time(timed["time_ms"]),
            ratios.show_peak(cell), ratios.show_error(cell["err_f64_max"]),
            cell["status"],
        ])  # fmt: skip
    note = f"{groups.title([cells[0]])}; errors against float64: {HOW}."
    return text.part("stage | time | peak | max err | status", body, note, env)


def on_a_cpu() -> str:
    """README's second table: what runs natively on a CPU, at the tour's largest N."""
    env, cells = read(text.CPU / "tour.jsonl")
    largest = max(cell["nk"] for cell in cells)
    shown = [c for c in cells if c["nk"] == largest and c["time_ms"] is not None]
    labels = groups.labels(env)
    rows = [
        cell_tables.row(shown, cell, labels[groups.stage_of(cell)])
        for cell in cell_tables.rows_of(shown)
    ]
    body = [
        [label, time, over_3, peak, status] for _, label, time, _, over_3, peak, *_, status in rows
    ]
    note = f"{groups.title(shown)}; one core; not in turns."
    return text.part("stage | time | over #3 | peak | status", body, note, env)


def gains() -> tuple[dict[int, str], list[Record]]:
    """Each stage's gain over the last stage before it that is comparable; and the env lines.

    The plan of an env line is that of the stages whose records were used.
    """
    runs = [(*read(file), stages) for file, stages in GAINS]
    cpu, gpu, tour, bench, train, decode, hopper, four = (cells for _, cells, _ in runs)
    at = {"nk": 4096, "h": 32, "precision": "float16"}
    long = {"nk": 4096, "d": 64, "causal": False}
    five, six = text.both(bench, 5, 6, **long)
    causal = text.find(bench, stage=6, **(long | {"causal": True}))
    more = ratios.show_ratio(ratios.times_faster(six, causal), paired=False)
    trained = text.both(train, 3, 7, **long)
    alone = text.both(gpu, 3, 5, paired=False, **at)
    one_row = {"b": 1, "hk": 8, "nq": 1, "nk": 8192, "page_size": None}
    far = {"nk": 65536, "causal": False, "direction": "fwd"}
    less = [
        f"{old['peak_bytes'] / new['peak_bytes']:.0f}x less memory" for old, new in (alone, trained)
    ]
    found = {
        1: text.factor(cpu, 0, 1, nk=64),
        2: text.factor(cpu, 1, 2, nk=64),
        3: text.factor(cpu, 2, 3, nk=256),
        4: text.find(tour, stage=4, nk=4096, d=64)["status"],
        5: f"{text.factor(gpu, 3, 5, **at)} over #3, {less[0]}",
        6: f"{ratios.show_step(five, six)}; causal {more} more",
        7: f"{ratios.show_step(*trained)} over #3, {less[1]}",
        8: f"{ratios.show_step(*text.both(decode, 6, 8, **one_row))} over #6",
        9: f"{ratios.show_step(*text.both(hopper, 6, 9, **long))} over #6",
        10: f"{ratios.show_step(*text.both(four, 116, 10, **far))} with four GPUs",
    }
    return found, [
        env | {"plan": [entry for entry in env["plan"] if entry["stage"] in stages]}
        for env, _, stages in runs
    ]


def takes() -> str:
    """A table of what each stage takes, as it declares itself: machine, dtypes, masks, passes."""
    rows = []
    for path in built_in_files():
        stage = read_declared(path)
        devices, options = stage.get("devices", ("cpu", "cuda")), stage.get("options", ())
        if major := stage.get("only_major"):
            where = f"GPU of compute capability {major}.x"
        elif "triton" in stage.get("needs", ()):
            where = "GPU; CPU: interpreted"
        else:
            where = ", ".join({"cpu": "CPU", "cuda": "GPU"}[device] for device in devices)
        dtypes = ", ".join(stage.get("dtypes", ("all",)))
        exact = stage.get("exact_up_to")
        rows.append([
            f"{stage['number']} {stage['title']}", where, dtypes, ", ".join(options) or "-",
            "yes" if stage.get("gradients") else "-", "any" if exact is None else f"up to {exact}",
        ])  # fmt: skip
    header = "stage | runs on | dtypes | masks, layouts | backward | exact for N"
    return text.rows(header, rows, mark="---")


def ladder() -> str:
    """A table of the stages as they declare themselves, with their measured gains."""
    found, envs = gains()
    body = []
    for path in built_in_files():
        stage = read_declared(path)
        number = stage["number"]
        body.append([
            f"[{number} {stage['title']}]({path.relative_to(text.ROOT).as_posix()})", stage["idea"],
            found.get(number, "-"), stage.get("still_hurts", ""),
        ])  # fmt: skip
    note = (
        "Gains: over the stage before, or the one named; timed in turns. Brackets: quartiles. "
        "[Sizes](docs/results.md#the-ladder); " + HOW + "."
    )
    table = text.rows("stage | the one idea | gain | still hurts", body, mark="---")
    return "\n\n".join([table, note, text.machine(*envs)])


def top() -> str:
    """A table of our fastest kernels and the peers at the largest N, forward and training."""
    forward_env, forward = read(text.GPU / "hopper-float16.jsonl")
    train_env, train = read(text.GPU / "hopper-train-float16.jsonl")
    envs = forward_env, train_env
    labels = {key: label for env in envs for key, label in groups.labels(env).items()}
    body = []
    for stage, name in stages_of([*forward, *train]):
        if stage >= PEERS_FROM and name not in PEERS:
            continue
        figures = []
        for direction, cells in (("fwd", forward), ("train", train)):
            mine = [c for c in cells if (c["stage"], c["direction"]) == (stage, direction)]
            for d in (64, 128):
                at = [{"nk": 16384, "d": d, "causal": causal} for causal in text.MASKS if mine]
                figures.append(" / ".join(rate(text.find(mine, **each)) for each in at) or "-")
        body.append([labels[stage, name], *figures])
    header = "TFLOP/s | forward, d = 64 | d = 128 | training, d = 64 | d = 128"
    note = (
        "Each field: no mask / causal. N = 16384, fp16. -: not measured. FlexAttention isn't "
        "tuned: [more](docs/results.md)."
    )
    return text.part(header, body, note, *envs)
