"""Tables and a picture of attention over several GPUs: measured, and as the cost model has it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness.problems import ring_cost
from harness.problems.problem import ONE_GPU, Problem
from harness.problems.ring_cost import Machine
from harness.records.schema import Record
from harness.records.units import show_bytes, show_time, significant
from harness.views import groups, ratios
from harness.views.look import LIGHT, Look, picture
from harness.views.table import Column, Table, verdict_row

COLUMNS = (
    Column("#"), Column("", left=True, least=12, most=24), Column("time"), Column("x one"),
    Column("model"), Column("sent"), Column("of link"), Column("peak", gives_way=True),
    Column("max err"), Column("status", left=True),
)  # fmt: skip
LEGEND = (
    "time: of the slowest rank, in turns. x one: over one GPU with the whole sequence and the same "
    "kernels. model: predicted (docs/ring.md). sent: by a rank, at most. of link: the share of "
    "what one rank can send to the next at a time. peak: of a rank, above its inputs. max err: of "
    "long sequences, that of some heads."
)
DRAWN = ("ring", "ring_in_turn", "ring_in_order", "gather", "ulysses")
HATCHES = {"send": "//"}
HEIGHTS = {"send": 0.3, "compute": 0.0, "merge": 0.0}  # of a bar above its row

# ---- a cluster, on paper: data sheets, and assumptions that say so
RATE = 660e12  # FLOP/s of attention in RATED, an assumption: 2/3 of the data sheet of an H100
RATED = ("float16", "bfloat16")
LINKS = {  # bytes/s one way, and seconds of a message, which are assumptions
    "NVLink": (450e9, 10e-6),  # NVIDIA's data sheet of the H100 SXM: 900 GB/s both ways
    "network": (50e9, 30e-6),  # of the DGX H100: 400 Gb/s for each GPU
}
CLUSTERS = (8, 64, 1024)
ROWS = [1 << power for power in range(7, 21)]  # of one rank, at which Ulysses is compared


def machine_of(cells: Sequence[Record]) -> Machine | None:
    """The rates that the cells of one problem measured; None where they did not."""
    one = next((cell for cell in cells if cell["name"] == ONE_GPU), None)
    linked = next((cell for cell in cells if cell["link_gb_s"]), None)
    if one is None or linked is None or not ratios.comparable(one):
        return None
    rate = one["flops"] / (1e-3 * one["time_ms"])
    return Machine(rate, 1e9 * linked["link_gb_s"], 1e-6 * linked["link_us"])


def tables(env: Record, cells: Sequence[Record]) -> list[Table]:
    """A table for each problem, one row for each contestant."""
    return [table(env, group) for group in groups.by_problem(cells)]


def table(env: Record, cells: Sequence[Record]) -> Table:
    """The table of one problem; where nothing was timed, its notes say why."""
    names, machine, rows = groups.titles(env), machine_of(cells), []
    for cell in cells:
        problem, name, time = Problem.from_json(cell), cell["name"], cell["time_ms"]
        right = cell["status"] == "ok"  # else there is nothing that it sent
        modelled = right and machine is not None and name in ring_cost.WAYS
        sent = ring_cost.sent_bytes(problem, name) if right else None
        share = sent / (1e6 * time * cell["link_gb_s"]) if sent and time else None
        rows.append(verdict_row([
            str(cell["stage"]), names[groups.stage_of(cell)], show_time(time),
            f"{cell['x_one_gpu']:.2f}" if cell["x_one_gpu"] else "-",
            show_time(1e3 * ring_cost.seconds(problem, machine, name))
            if modelled and machine else "-",
            "-" if sent is None else show_bytes(sent),
            f"{100 * share:.0f}%" if share else "-", ratios.show_peak(cell),
            ratios.show_error(cell["err_f64_max"]), cell["status"],
        ]))  # fmt: skip
    given = Problem.from_json(cells[0])
    peaks = (show_bytes(ring_cost.peak_bytes(given, how)) for how in ("group", "engine"))
    notes = [f"peak of a ring by the formula: {' by process group, '.join(peaks)} by copy engine"]
    if machine is not None:
        notes.append(f"link: {significant(machine.link / 1e9)} GB/s one way")
    return Table(COLUMNS, rows, groups.title(cells), [*notes, *groups.reasons(cells)])


def cluster_table(problem: Problem) -> Table:
    """On paper: from how many rows of each GPU on a ring hides what it sends, and Ulysses' place.

    `problem` gives the heads, d and dtype, of a forward pass.
    """
    rows = []
    for name, (link, latency) in LINKS.items():
        machine = Machine(RATE, link, latency)
        for world in CLUSTERS:
            each = [replace(problem, world=world, causal=causal) for causal in (False, True)]
            hidden = [ring_cost.hidden_from(one, machine) for one in each]
            rows.append([
                name, str(world), *(significant(n, 2) for n in [*hidden, world * hidden[1]]),
                *(ulysses_up_to(one, machine) for one in each),
            ])  # fmt: skip
    said = ", ".join(f"{name} {link / 1e9:.0f} GB/s" for name, (link, _) in LINKS.items())
    heads = ("GPUs", "no mask", "causal", "causal N", "Ulysses", "Ulysses, causal")
    notes = [
        "no mask, causal: rows of each GPU from which on a hop hides what the ring sends, forward; "
        "causal N: the whole sequence there. Ulysses: faster than a ring up to so many rows of "
        "each GPU; it needs a key head for each.",
        f"Data sheets: {said}, one way. Assumed: {RATE / 1e12:.0f} TFLOP/s, and "
        f"{' and '.join(f'{1e6 * late:.0f} us' for _, late in LINKS.values())} for a message.",
    ]
    title = f"{problem.h} heads, {problem.hk} of keys, d = {problem.d}, {problem.dtype}"
    return Table([Column("link", left=True), *map(Column, heads)], rows, title, notes)


def ulysses_up_to(problem: Problem, machine: Machine) -> str:
    """The most rows of each GPU, among ROWS, at which Ulysses is faster; or 'any', 'none'."""
    if problem.hk % problem.world:
        return "-"
    found = 0
    for n in ROWS:
        one = replace(problem, nq=n * problem.world, nk=n * problem.world)
        ulysses, ring = (ring_cost.seconds(one, machine, way) for way in ("ulysses", "ring"))
        found = n if ulysses < ring else found
    return "any" if found == ROWS[-1] else str(found) if found else "none"


def plot(env: Record, cells: Sequence[Record], folder: Path, look: Look = LIGHT) -> list[Path]:
    """Draw when the slowest rank computes and sends, by the cost model with measured rates.

    A mark is the measured time. One panel for each problem whose link was measured, else no file;
    in it, those that were timed.
    """
    timed = [cell for cell in cells if ratios.comparable(cell)]
    shown = [group for group in groups.by_problem(timed) if machine_of(group)]
    if not shown:
        return []
    path, names = folder / f"ring{look.suffix}.png", groups.titles(env)
    colours = {"compute": look.blue, "merge": look.soft, "send": look.orange}
    with picture(path, look, len(shown), 2, 4.8, 2.6) as (figure, axes):
        from matplotlib.patches import Patch

        for axis, group in zip(axes, shown, strict=True):
            drawn = [cell for cell in group if cell["name"] in DRAWN]
            machine = machine_of(group)
            for row, cell in enumerate(drawn):
                problem = Problem.from_json(cell)
                for span in ring_cost.schedule(problem, machine, cell["name"]) if machine else ():
                    bar = 1e3 * span.start, 1e3 * (span.end - span.start)
                    low = row - 0.35 + HEIGHTS[span.what]
                    axis.broken_barh(
                        [bar], (low, 0.3), facecolor=colours[span.what], edgecolor=look.ground,
                        hatch=HATCHES.get(span.what),
                    )  # fmt: skip
                axis.plot([cell["time_ms"]] * 2, [row - 0.4, row + 0.4], color=look.ink)
            labels = [names[groups.stage_of(cell)] for cell in drawn]
            axis.set_yticks(range(len(drawn)), labels, fontsize=8)
            axis.invert_yaxis()
            axis.set_xlabel("ms, by the cost model; line: measured", fontsize=8)
            first = group[0]
            masked = ", causal" * first["causal"]
            said = f"{first['direction']}, N = {first['nk']}, {first['world']} ranks{masked}"
            axis.set_title(said, fontsize=9)
        handles = [
            Patch(facecolor=colour, edgecolor=look.ground, hatch=HATCHES.get(what), label=what)
            for what, colour in colours.items()
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=9)
    return [path]
