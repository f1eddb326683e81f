"""What `ladder train` shows, from records alone: a table of verdicts, and loss.png.

The plot's first panel has each contestant's loss against the step, averaged over windows as
harness/training/curves.py has it; the second how far each is from the mean of SDPA's backends from
the same seed, beside their spread and twice it: what the first can't show, since right curves lie
on top of each other.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness.records import units
from harness.training import curves
from harness.training.curves import Verdict
from harness.views import cell_tables
from harness.views.look import LIGHT, Look, in_look, legend, marks, new_figure, note_below

Record = Mapping[str, Any]

LEGEND = (
    f"Losses: nats a character, means over the seeds; final: of the last window of about "
    f"{curves.WINDOW} steps; held out: on text that was not trained on. off by: how far a curve is "
    "from the mean of SDPA's backends of the same seed, at the window where that is largest beside "
    f"what is allowed: {curves.FACTOR:g} times the largest difference among the backends up to "
    "there, over all seeds. ok: allowed at each window of each seed. tokens/s: as Python drives "
    "the training, each in a process of its own; only of what is ok."
)
HEADERS = ("#", "attention", "final", "held out", "off by", "allowed", "at step", "tokens/s",
           "status")  # fmt: skip
FULL_WIDTH = 92  # columns that a whole row takes
STYLES = cell_tables.STYLES | {curves.NOT_JUDGED: "yellow"}
MARK_EVERY = 4  # windows, so that a curve stays a curve


def row(verdict: Verdict, title: str) -> list[str]:
    """The texts of one row, in the order of HEADERS."""
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


def rich_table(env: Record, records: Sequence[Record], width: int) -> RenderableType:
    """A row a contestant, the reasons of what isn't ok below, the legend at the end.

    Below 92 columns the loss on held-out text gives way.
    """
    titles = cell_tables.titles(env)
    verdicts = curves.judge(records)
    rows = [row(verdict, titles[verdict.stage, verdict.name]) for verdict in verdicts]
    interpreted = {(r["stage"], r["name"]) for r in records if r["mode"] == "interpreted"}
    narrow = width < FULL_WIDTH
    shown = [index for index, header in enumerate(HEADERS) if not (narrow and header == "held out")]
    page = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="underline")
    for index in shown:
        header = HEADERS[index]
        longest = max(len(texts[index]) for texts in [list(HEADERS), *rows])
        page.add_column(
            header,
            justify="left" if header in ("attention", "status") else "right",
            no_wrap=True,
            width=min(longest, 15 if narrow else 22) if header == "attention" else longest,
        )
    for verdict, texts in zip(verdicts, rows, strict=True):
        dim = "dim" if (verdict.stage, verdict.name) in interpreted else ""
        styles = [dim] * (len(texts) - 1) + [STYLES.get(verdict.status, "bold red")]
        page.add_row(*(Text(texts[index], style=styles[index]) for index in shown))
    reasons = [
        Text(f"  {verdict.status} #{verdict.stage}: {verdict.reason}", style="dim")
        for verdict in verdicts
        if verdict.reason
    ]
    title = Text(title_line(records), style="bold")
    return Group(title, page, *reasons, Text(""), Text(LEGEND, style="dim"))


def markdown(env: Record, records: Sequence[Record]) -> str:
    """The table in Markdown, the reasons of what isn't ok below it, the legend at the end."""
    titles = cell_tables.titles(env)
    verdicts = curves.judge(records)
    marks = ["---" if header in ("attention", "status") else "---:" for header in HEADERS]
    lines = [f"**{title_line(records)}**", ""]
    lines += [f"| {' | '.join(HEADERS)} |", f"| {' | '.join(marks)} |"]
    for verdict in verdicts:
        texts = row(verdict, titles[verdict.stage, verdict.name])
        lines.append(cell_tables.markdown_row(texts))
    reasons = [f"{v.status} #{v.stage}: {v.reason}" for v in verdicts if v.reason]
    return "\n\n".join(["\n".join(lines), *reasons, LEGEND])


def plot(env: Record, records: Sequence[Record], path: Path, look: Look = LIGHT) -> bool:
    """Write the plot to the file `path`; False, and nothing written, where no curve is there.

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
    """Each contestant's curves, a line a seed; what was cut short as far as it goes."""
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
