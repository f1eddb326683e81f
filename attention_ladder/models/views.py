"""Tables and plots of `ladder train`, `ladder generate` and `ladder model`."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from attention_ladder.models.training import curves
from attention_ladder.models.training.curves import Verdict
from harness.records.schema import Record
from harness.records.units import show_bytes, show_time, significant
from harness.views import groups, ratios
from harness.views.cell_tables import MORE
from harness.views.groups import labels, stage_of, titles
from harness.views.look import LIGHT, Look, legend, marks, n_axis, note_below, picture
from harness.views.ratios import show_error
from harness.views.table import Column, Table, Tables, verdict_row

LEGEND = (
    f"Losses: nats per character, means over the seeds; final: of the last window of about "
    f"{curves.WINDOW} steps; held out: on text that was not trained on. off by: how far a curve is "
    "from the mean of SDPA's backends of the same seed, at the window where that is largest beside "
    f"what is allowed: {curves.FACTOR:g} times the largest difference among the backends up to "
    "there, over all seeds. ok: allowed at each window of each seed. tokens/s: as Python drives "
    "the training, each in its own process; only where ok."
)
SHORT_LEGEND = "Losses: nats per character. ok: off by no more than allowed. docs/training.md"
COLUMNS = (
    Column("#"), Column("attention", left=True, least=15, most=22), Column("final"),
    Column("held out", gives_way=True), Column("off by"), Column("allowed"), Column("at step"),
    Column("tokens/s"), Column("status", left=True),
)  # fmt: skip
EVERY = range(len(COLUMNS))
MARK_EVERY = 4  # windows between two markers, so that the curve stays visible
MODEL_LEGEND = f"Differences from SDPA's outputs; vs SDPA: in turns. {MORE}"
MODEL_COLUMNS = (
    Column("#"), Column("stage", left=True, least=15, most=22), Column("cosine"),
    Column("max diff"), Column("rel diff", gives_way=True), Column("time"), Column("SDPA"),
    Column("vs SDPA"), Column("status", left=True),
)  # fmt: skip
# of `ladder generate`
CACHES = {"": "no cache", "cached_": "cache", "graph_": "cache, CUDA graph"}
MEASURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "tokens_per_s": ("tokens/s", significant), "bytes_per_token": ("bytes/token", show_bytes),
}  # fmt: skip
GENERATED_NOTE = (
    "Bytes: counted, the weights once and q, k, v, o in each layer. Tokens: the likeliest each."
)
NO_GRAPH = "Not by replays of a CUDA graph: that takes a GPU, and a stage that keeps pages."


def row(verdict: Verdict, title: str) -> list[str]:
    """The texts of one row, in the order of COLUMNS."""
    speed = verdict.tokens_per_s
    return [
        str(verdict.stage),
        title,
        show_loss(verdict.final),
        show_loss(verdict.val_loss),
        show_error(verdict.deviation),
        show_error(verdict.allowed),
        "-" if verdict.step is None else str(verdict.step),
        "-" if speed is None else significant(speed),
        verdict.status,
    ]


def show_loss(loss: float | None) -> str:
    """A loss, four digits after the point: bfloat16 backends differ by about the last digit."""
    return "-" if loss is None else f"{loss:.4f}"


def title_line(records: Sequence[Record]) -> str:
    """The training of a run in one line: model, steps, seeds, dtype and device."""
    first = records[0]
    sizes = [record["parameters"] for record in records if record["parameters"] is not None]
    parameters = f" ({significant(sizes[0] / 1e6)} M parameters)" if sizes else ""
    seeds = len({record["seed"] for record in records})
    return (
        f"GPT, {first['size']}{parameters}, {first['steps']} steps, {seeds} "
        f"seed{'s' if seeds > 1 else ''}, {first['dtype']}, {first['device']}"
    )


def make_table(env: Record, records: Sequence[Record]) -> Table:
    """The table of `ladder train`: one row per stage or backend; its notes are the reasons."""
    names = titles(env)
    interpreted = {stage_of(record) for record in records if record["mode"] == "interpreted"}
    rows, notes = [], []
    for verdict in curves.judge(records):
        stage = verdict.stage, verdict.name
        rows.append(verdict_row(row(verdict, names[stage]), EVERY if stage in interpreted else ()))
        if verdict.reason:
            notes.append(f"  {verdict.status} #{verdict.stage}: {verdict.reason}")
    return Table(COLUMNS, rows, title_line(records), notes)


def in_terminal(env: Record, records: Sequence[Record]) -> Tables:
    """The table with a legend of one line."""
    return Tables([make_table(env, records)], SHORT_LEGEND)


def markdown(env: Record, records: Sequence[Record], *below: str) -> str:
    """The table in Markdown, with its notes, then LEGEND or `below`."""
    return "\n\n".join([make_table(env, records).markdown(), *(below or [LEGEND])])


def plot(env: Record, records: Sequence[Record], path: Path, look: Look = LIGHT) -> bool:
    """Write the plot to the file `path`; False, without a file, where there is no curve.

    Raises ImportError where matplotlib is missing, OSError where the file can't be written.
    """
    if not any(record["losses"] for record in records):
        return False
    with picture(path, look, 2, 2, 5.3, 4.7) as (figure, (left, right)):
        draw_losses(left, env, records)
        draw_deviations(right, env, records, look)
        figure.suptitle(title_line(records), fontsize=10)
        for axis in (left, right):
            axis.set_xlabel("step")
            axis.grid(True, which="major")
        legend(figure, (left,))
    return True


def draw_losses(axis: Any, env: Record, records: Sequence[Record]) -> None:
    """Draw the loss curves, one line per stage or backend and seed; also incomplete curves."""
    for record, style in styled(env, records):
        if losses := record["losses"]:
            axis.plot(curves.ends(len(losses)), curves.averages(losses), **style)
    axis.set_ylabel("loss (nats per character)")
    axis.set_title(f"loss, averaged over {curves.WINDOW} steps; one line per seed", fontsize=9)


def draw_deviations(axis: Any, env: Record, records: Sequence[Record], look: Look) -> None:
    """Draw the deviations from the mean of SDPA's curves, the spread as a band, and the bound.

    The plot of losses can't show deviations: right curves lie on top of each other.
    """
    steps = curves.ends(records[0]["steps"])
    judged = curves.why_not_judged(records) is None
    limits = curves.allowed(records) if judged else None
    if (wide := curves.spread(records)) is not None:
        edges = [0, *steps]  # a window's value applies from the end of the window before
        axis.fill_between(
            edges, 0, [wide[0], *wide], step="pre", color=look.faint, alpha=0.6, linewidth=0
        )
        if limits is not None:
            axis.step(edges, [limits[0], *limits], where="pre", color=look.soft, linewidth=1.4)
        rest = "above it: allowed" if limits is not None else "too few to judge by"
        note_below(axis, [f"grey: the spread of SDPA's backends so far; {rest}"])
    shown = list(limits or ())
    for record, style in styled(env, records):
        deviations = curves.deviations(record, records)
        if deviations is not None:
            axis.plot(steps, deviations, **style)
            shown += deviations
    if positive := sorted(value for value in shown if value > 0):
        # symlog, since there are zeros; linear only below nearly all of the values
        axis.set_yscale("symlog", linthresh=positive[len(positive) // 20])
        axis.set_ylim(bottom=0, top=3 * positive[-1])
    axis.set_ylabel("|loss - mean of SDPA's backends| (nats)")
    axis.set_title("the difference from SDPA, same seed, same batches", fontsize=9)


def styled(env: Record, records: Sequence[Record]) -> Iterator[tuple[Record, dict[str, Any]]]:
    """Yield the records in drawing order, with the options of their lines.

    SDPA's backends are thin lines on top. The first line of each stage or backend has the label.
    """
    names = labels(env)
    keys = sorted({(r["reference"], *stage_of(r)) for r in records})
    style = marks(key[1:] for key in keys)
    labelled = set()
    for record in sorted(records, key=lambda r: (r["reference"], r["stage"], r["seed"])):
        thin, stage = record["reference"], stage_of(record)
        label = None
        if stage not in labelled and record["losses"]:
            labelled.add(stage)
            label = names[stage] + (", interpreted" if record["mode"] == "interpreted" else "")
        yield (
            record,
            {
                **style[stage].line,
                "label": label,
                "markevery": (keys.index((thin, *stage)) % MARK_EVERY, MARK_EVERY),
                "markersize": 4.5 if thin else 7,
                "linewidth": 1.0 if thin else 2.6,
                "alpha": 1.0 if thin else 0.7,
            },
        )


def model_row(record: Record, title: str) -> list[str]:
    """The texts of one row, in the order of MODEL_COLUMNS."""
    time, sdpa_time = record["time_ms"], record["sdpa_time_ms"]
    fair = ratios.comparable(record) and sdpa_time is not None
    ratio = ratios.show_ratio(sdpa_time / time if fair else None, paired=True)
    return [
        str(record["stage"]),
        title,
        "-" if record["cosine"] is None else f"{record['cosine']:.6f}",
        show_error(record["max_hidden_diff"]),
        show_error(record["rel_hidden_diff"]),
        show_time(time),
        show_time(sdpa_time),
        "interpreted" if record["mode"] == "interpreted" and time is not None else ratio,
        record["status"],
    ]


def model_tables(env: Record, records: Sequence[Record]) -> Tables:
    """The tables of `ladder model`: one per text, with one row per stage; notes are the reasons."""
    names = titles(env)
    made = []
    for tokens in sorted({record["tokens"] for record in records}):
        group = sorted((r for r in records if r["tokens"] == tokens), key=stage_of)
        rows = [
            verdict_row(
                model_row(record, names[stage_of(record)]),
                EVERY if record["mode"] == "interpreted" else (),
            )
            for record in group
        ]
        title = f"MiniLM, {tokens} tokens, {group[0]['dtype']}, {group[0]['device']}"
        made.append(Table(MODEL_COLUMNS, rows, title, groups.reasons(group)))
    return Tables(made, MODEL_LEGEND)


def generated_table(env: Record, records: Sequence[Record]) -> Table:
    """The table of `ladder generate`: one row per context; no speed of an interpreted stage."""
    first, heads = records[0], ["context"]
    rows = [[str(record["context"])] for record in records]
    for name, (title, show) in MEASURES.items():
        for prefix, what in CACHES.items() if first[name] else ():
            if first.get(prefix + name) is None:
                continue
            heads.append(f"{title}, {what}")
            for row, record in zip(rows, records, strict=True):
                row.append(show(record[prefix + name] or 0))
    rows = [[*row, "yes" if r["same"] else "NO"] for row, r in zip(rows, records, strict=True)]
    cache = f"pages of {first['page_size']}" if first["page_size"] else "contiguous"
    title = f"{labels(env)[stage_of(first)]}, {first['device']}, {first['mode']}; cache: {cache}"
    replays = first["device"] == "cuda" and first["page_size"]
    notes = [GENERATED_NOTE] if replays else [GENERATED_NOTE, NO_GRAPH]
    widths = {head: max(map(len, ["CUDA graph", *head.split()])) for head in heads}
    widths["same tokens"] = len("tokens")  # headings have several lines, and fit 80 columns
    columns = [Column(head, least=n, most=n, wraps=True) for head, n in widths.items()]
    return Table(columns, rows, title, notes, gap=2)


def plot_generated(records: Sequence[Record], path: Path) -> list[Path]:
    """Plot the values of the table of `ladder generate` against the context, into `path`."""
    shown, lengths = [x for x in MEASURES if records[0][x]], [r["context"] for r in records]
    with picture(path, LIGHT, len(shown), 2, 5.0, 4.0) as (_, axes):
        for axis, name in zip(axes, shown, strict=True):
            for (prefix, what), style in zip(CACHES.items(), ("o--", "s-", "^-"), strict=True):
                values = [record.get(prefix + name) for record in records]
                if None not in values:
                    axis.plot(lengths, values, style, label=what)
            n_axis(axis, lengths, "context (tokens)")
            axis.set(ylabel=MEASURES[name][0], yscale="log")
            axis.legend()
    return [path]
