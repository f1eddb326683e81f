"""What `ladder train` and `ladder model` show: tables, and loss.png, from records alone.

The first panel of loss.png has each contestant's loss against the step, averaged over windows as
harness/training/curves.py has it; the second how far each is from the mean of SDPA's backends from
the same seed, beside their spread and twice it: what the first can't show, since right curves lie
on top of each other.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from harness.records import units
from harness.training import curves
from harness.training.curves import Verdict
from harness.views import cell_tables, table
from harness.views.look import LIGHT, Look, in_look, legend, marks, new_figure, note_below
from harness.views.table import Column, Table, Tables

Record = Mapping[str, Any]

LEGEND = (
    f"Losses: nats a character, means over the seeds; final: of the last window of about "
    f"{curves.WINDOW} steps; held out: on text that was not trained on. off by: how far a curve is "
    "from the mean of SDPA's backends of the same seed, at the window where that is largest beside "
    f"what is allowed: {curves.FACTOR:g} times the largest difference among the backends up to "
    "there, over all seeds. ok: allowed at each window of each seed. tokens/s: as Python drives "
    "the training, each in a process of its own; only of what is ok."
)
SHORT_LEGEND = f"Losses: nats per character. ok: off by no more than allowed. {cell_tables.MORE}"
COLUMNS = (
    Column("#"), Column("attention", left=True, least=15, most=22), Column("final"),
    Column("held out", gives_way=True), Column("off by"), Column("allowed"), Column("at step"),
    Column("tokens/s"), Column("status", left=True),
)  # fmt: skip
STYLES = cell_tables.STYLES | {curves.NOT_JUDGED: "yellow"}
MARK_EVERY = 4  # windows, so that a curve stays a curve
MODEL_LEGEND = f"Differences from SDPA's outputs; vs SDPA: in turns. {cell_tables.MORE}"
MODEL_COLUMNS = (
    Column("#"), Column("stage", left=True, least=15, most=22), Column("cosine"),
    Column("max diff"), Column("rel diff", gives_way=True), Column("time"), Column("SDPA"),
    Column("vs SDPA"), Column("status", left=True),
)  # fmt: skip


def row(verdict: Verdict, title: str) -> list[str]:
    """The texts of one row, in the order of COLUMNS."""
    speed = verdict.tokens_per_s
    return [
        str(verdict.stage),
        title,
        show_loss(verdict.final),
        show_loss(verdict.val_loss),
        cell_tables.show_error(verdict.deviation),
        cell_tables.show_error(verdict.allowed),
        "-" if verdict.step is None else str(verdict.step),
        "-" if speed is None else units.significant(speed),
        verdict.status,
    ]


def show_loss(loss: float | None) -> str:
    """A loss, four digits after the point: backends in bfloat16 differ by about the last."""
    return "-" if loss is None else f"{loss:.4f}"


def title_line(records: Sequence[Record]) -> str:
    """What all contestants of a run were trained on, in a line."""
    first = records[0]
    sizes = [record["parameters"] for record in records if record["parameters"] is not None]
    parameters = f" ({units.significant(sizes[0] / 1e6)} M parameters)" if sizes else ""
    seeds = len({record["seed"] for record in records})
    return (
        f"GPT, {first['size']}{parameters}, {first['steps']} steps, {seeds} "
        f"seed{'s' if seeds > 1 else ''}, {first['dtype']}, {first['device']}"
    )


def make_table(env: Record, records: Sequence[Record]) -> Table:
    """One row per contestant; the reasons of what isn't ok are the notes."""
    titles = cell_tables.titles(env)
    interpreted = {(r["stage"], r["name"]) for r in records if r["mode"] == "interpreted"}
    rows, notes = [], []
    for verdict in curves.judge(records):
        texts = row(verdict, titles[verdict.stage, verdict.name])
        dim = "dim" if (verdict.stage, verdict.name) in interpreted else ""
        styles = [dim] * (len(texts) - 1) + [STYLES.get(verdict.status, "bold red")]
        rows.append([Text(*styled) for styled in zip(texts, styles, strict=True)])
        if verdict.reason:
            notes.append(f"  {verdict.status} #{verdict.stage}: {verdict.reason}")
    return Table(COLUMNS, rows, title_line(records), notes)


def in_terminal(env: Record, records: Sequence[Record]) -> Tables:
    """The table, its legend in one line."""
    return Tables([make_table(env, records)], SHORT_LEGEND)


def markdown(env: Record, records: Sequence[Record]) -> str:
    """The table in Markdown, the reasons of what isn't ok below it, the legend at the end."""
    made = make_table(env, records)
    return table.markdown([made], *(note.strip() for note in made.notes), LEGEND)


def plot(env: Record, records: Sequence[Record], path: Path, look: Look = LIGHT) -> bool:
    """Write the plot to the file `path`; False, and nothing written, where there is no curve.

    Raises ImportError where matplotlib is missing, OSError where the file can't be written.
    """
    if not any(record["losses"] for record in records):
        return False
    with in_look(look):
        figure = new_figure(11, 5)
        left, right = figure.subplots(1, 2)
        draw_losses(left, env, records)
        draw_deviations(right, env, records, look)
        figure.suptitle(title_line(records), fontsize=10)
        for axis in (left, right):
            axis.set_xlabel("step")
            axis.grid(True, which="major")
        legend(figure, (left,))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    return True


def draw_losses(axis: Any, env: Record, records: Sequence[Record]) -> None:
    """Each contestant's curves, one line per seed; what was cut short as far as it goes."""
    for record, style, label in styled(env, records):
        if losses := record["losses"]:
            mode = ", interpreted" if record["mode"] == "interpreted" else ""
            axis.plot(
                curves.ends(len(losses)), curves.averages(losses), label=label and label + mode,
                **style,
            )  # fmt: skip
    axis.set_ylabel("loss (nats a character)")
    axis.set_title(f"loss, averaged over {curves.WINDOW} steps; a line a seed", fontsize=9)


def draw_deviations(axis: Any, env: Record, records: Sequence[Record], look: Look) -> None:
    """How far the curves are from the mean of SDPA's, the spread as a band, and what is allowed."""
    steps = curves.ends(records[0]["steps"])
    judged = curves.why_not_judged(records) is None
    limits = curves.allowed(records) if judged else None
    if (wide := curves.spread(records)) is not None:
        edges = [0, *steps]  # what holds at a window holds from the end of the one before
        axis.fill_between(
            edges, 0, [wide[0], *wide], step="pre", color=look.faint, alpha=0.6, linewidth=0
        )
        note = "grey: the spread of SDPA's backends so far"
        if limits is not None:
            axis.step(edges, [limits[0], *limits], where="pre", color=look.soft, linewidth=1.4)
            note += "; above it: allowed"
        else:
            note += "; too few to judge by"
        note_below(axis, [note])
    found: list[float] = []
    for record, style, _ in styled(env, records):
        deviations = curves.deviations(record, records)
        if deviations is not None:
            axis.plot(steps, deviations, **style)
            found += deviations
    if any(shown := [*found, *(limits or ())]):
        axis.set_yscale("symlog", linthresh=least(shown))
        axis.set_ylim(bottom=0, top=3 * max(shown))
    axis.set_ylabel("|loss - mean of SDPA's backends| (nats)")
    axis.set_title("the difference from SDPA, same seed, same batches", fontsize=9)


def least(values: Sequence[float]) -> float:
    """Where a logarithmic axis that has a 0 becomes linear: below nearly all of the values."""
    positive = sorted(value for value in values if value > 0)
    return positive[len(positive) // 20]


def styled(
    env: Record, records: Sequence[Record]
) -> list[tuple[Record, dict[str, Any], str | None]]:
    """The records in the order in which they are drawn, each with its line's style, and a label
    where it is the first of its contestant: stages wide, SDPA's backends thin on top of them."""
    titles = cell_tables.titles(env)
    keys = sorted({(r["reference"], r["stage"], r["name"]) for r in records})
    looks = marks(key[1:] for key in keys)
    found, labelled = [], set()
    for record in sorted(records, key=lambda r: (r["reference"], r["stage"], r["seed"])):
        key = (record["reference"], record["stage"], record["name"])
        label = None
        if key not in labelled and record["losses"]:
            labelled.add(key)
            label = f"{record['stage']} {titles[record['stage'], record['name']]}"
        thin = record["reference"]
        style = {
            **looks[key[1:]].line,
            "markevery": (keys.index(key) % MARK_EVERY, MARK_EVERY),
            "markersize": 4.5 if thin else 7,
            "linewidth": 1.0 if thin else 2.6,
            "alpha": 1.0 if thin else 0.7,
        }
        found.append((record, style, label))
    return found


def model_ratio(record: Record) -> float | None:
    """How many times faster a pass is with the stage than with SDPA; None where none is fair."""
    if not cell_tables.comparable(record) or record["sdpa_time_ms"] is None:
        return None
    return float(record["sdpa_time_ms"] / record["time_ms"])


def model_row(record: Record, title: str) -> list[str]:
    """The texts of one row, in the order of MODEL_COLUMNS."""
    interpreted = record["mode"] == "interpreted" and record["time_ms"] is not None
    return [
        str(record["stage"]),
        title,
        "-" if record["cosine"] is None else f"{record['cosine']:.6f}",
        cell_tables.show_error(record["max_hidden_diff"]),
        cell_tables.show_error(record["rel_hidden_diff"]),
        units.show_time(record["time_ms"]),
        units.show_time(record["sdpa_time_ms"]),
        "interpreted" if interpreted else cell_tables.show_ratio(model_ratio(record), paired=True),
        record["status"],
    ]


def model_tables(env: Record, records: Sequence[Record]) -> Tables:
    """One table per text, one row per stage, the reasons of what isn't ok below it."""
    titles = cell_tables.titles(env)
    made = []
    for tokens in sorted({record["tokens"] for record in records}):
        group = [record for record in records if record["tokens"] == tokens]
        group.sort(key=lambda record: (record["stage"], record["name"]))
        rows = []
        for record in group:
            texts = model_row(record, titles[record["stage"], record["name"]])
            dim = "dim" if record["mode"] == "interpreted" else ""
            styles = [dim] * (len(texts) - 1)
            styles.append(cell_tables.STYLES.get(record["status"], "bold red"))
            rows.append([Text(*styled) for styled in zip(texts, styles, strict=True)])
        title = f"MiniLM, {tokens} tokens, {group[0]['dtype']}, {group[0]['device']}"
        made.append(Table(MODEL_COLUMNS, rows, title, cell_tables.reasons(group)))
    return Tables(made, MODEL_LEGEND)
