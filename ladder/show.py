"""`ladder show FILE...`: tables and pictures of records of any kind; nothing is measured.

The commands that measure show their records through this module, too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from attention_ladder.models import views
from attention_ladder.models.training import curves
from course.report import comparisons, profile
from harness.records.schema import Record
from harness.views import cell_tables, machine, roofline, table
from harness.views.plots import plot as cell_plots
from harness.views.table import Column, Table, Tables, make_page
from ladder import options
from ladder.measuring import note, open_results, writing
from ladder.options import UserError


@dataclass(frozen=True)
class Ceilings:
    """What `ladder ceilings` wrote: a file, its env line and its records; nothing by default."""

    file: Path | None = None
    env: Record | None = None
    records: Sequence[Record] = ()

    @classmethod
    def read(cls, file: Path | None) -> "Ceilings":
        """The ceilings in `file`, if there is one."""
        return cls() if file is None else cls(file, *open_results(file, "ceiling"))

    def check(self, env: Record) -> None:
        """Raise UserError where they were measured on another machine than the run of `env`."""
        for field in ("device", "device_name"):
            if self.env is not None and env[field] != self.env[field]:
                where = f"measured on {self.env[field]}, the run on {env[field]}"
                raise UserError(f"--ceilings: {self.file}: {where}")


def show_command(
    file: options.Shown,
    form: options.TableFormat = "rich",
    plot: options.Plot = None,
    under: options.RooflineFolder = None,
    ceilings: options.Ceilings = None,
    dark: options.Dark = False,
) -> int:
    """Show the records of any command again: tables, plots, roofline."""
    of_one = {"--plot": plot, "--roofline": under, f"--format {form}": form in ("csv", "json")}
    for option, given in of_one.items():
        if given and len(file) > 1:
            raise UserError(f"{option}: got {len(file)} files of records, expected one")
    if under is not None and ceilings is None:
        raise UserError("--roofline: expected --ceilings FILE, too: what `ladder ceilings` wrote")
    if dark and under is None:
        raise UserError("--dark: it is for --roofline; leave it away")
    roofs = Ceilings.read(ceilings)
    runs = [(path, *open_any(path)) for path in file]
    for _, env, _ in runs:
        roofs.check(env)
    for path, env, records in runs:
        panels = under and panels_of(path, env, records, roofs)  # before a line is printed
        drawn = plot and plotted(path, env, records, plot, "--plot", roofs)
        if len(file) > 1:
            make_page().print(Text(f"{path}\n", style="bold"), soft_wrap=True)
        print_records(env, records, roofs, form)
        if drawn:
            note("plots", ", ".join(map(str, drawn)))
        if under and panels:
            show_roofs(env, panels, under, dark, "--roofline")
    return 0


def open_any(file: Path) -> tuple[Record, list[Record]]:
    """The env line and the records of a file, of whatever kind they are; there is at least one.

    Raises UserError or BadRecord, which name the file, where it is none.
    """
    if file.exists() and not file.is_file() and not file.is_dir():  # a pipe might wait for ever
        raise UserError(f"{file}: got no regular file, expected a file of records")
    env, records = open_results(file, None)
    if not records:
        raise UserError(f"{file}: no record in it: nothing was measured to its end")
    return env, records


def timed(env: Record, cells: Sequence[Record], ceilings: Sequence[Record]) -> RenderableType:
    """The tables of times, and what the source of a suite reports of its own machine."""
    made = cell_tables.page(env, cells, ceilings)
    said = comparisons.SOURCES.get(str(env["arguments"].get("suite")))
    return Group(made, Text(said)) if said else made


def trained(env: Record, records: Sequence[Record], _: Sequence[Record]) -> RenderableType:
    """The table of a training; BadRecord where its records don't belong together."""
    curves.check(records)
    return views.in_terminal(env, records)


def written(env: Record, records: Sequence[Record], _: Sequence[Record]) -> RenderableType:
    """The table of `ladder generate`, and the last text."""
    return Group(views.generated_table(env, records), Text(f"written: {records[-1]['text']!r}"))


def fields(records: Sequence[Record]) -> Table:
    """A table of the fields that differ between the records; those that don't are its title.

    For the kinds that have no table of their own: what tools/ record.
    """
    texts = {name: [said(record[name]) for record in records] for name in records[0]}
    shared = {name: column[0] for name, column in texts.items() if len(set(column)) == 1}
    differ = {name: column for name, column in texts.items() if name not in shared}
    title = ", ".join(f"{name} {text}" for name, text in shared.items() if text and name != "kind")
    words = {name for name in differ if any(isinstance(each[name], str) for each in records)}
    columns = [
        Column(name, left=True, least=6, most=30) if name in words else Column(name)
        for name in differ
    ]
    rows = list(map(list, zip(*differ.values(), strict=True)))
    lists = [name for name, value in records[0].items() if isinstance(value, list)]
    notes = [f"Lists are left out: {', '.join(lists)}; --format json has them."] if lists else []
    return Table(columns, rows, f"{records[0]['kind']}: {title}", notes)


def said(value: object) -> str:
    """A field's value in one line, '' for what no table can hold."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {said(each)}" for name, each in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None or isinstance(value, list) else " ".join(str(value).split())


# kind -> its tables, from the env line, the records and the machine's ceilings
View = Callable[[Record, Sequence[Record], Sequence[Record]], RenderableType]
VIEWS: dict[str, View] = {
    "cell": timed,
    "train": trained,
    "generate": written,
    "model": lambda env, records, _: views.model_tables(env, records),
    "ceiling": lambda env, records, _: machine.ceilings_table(env, records),
    "io": lambda env, records, _: machine.traffic_table(env, records),
}


def print_records(
    env: Record, records: Sequence[Record], ceilings: Ceilings = Ceilings(), form: str = "rich"
) -> None:
    """Print records in one of the formats: 'rich' is for people, the others for programs."""
    page, kind = make_page(), records[0]["kind"]
    if form in ("csv", "json"):
        rows = cell_tables.flat_rows(env, records) if kind == "cell" else records
        page.file.write((table.as_csv if form == "csv" else table.as_json)(rows))
    elif kind == "cell" and form == "markdown":
        page.file.write(
            cell_tables.page(env, records, ceilings.records, brief=False).markdown() + "\n"
        )
    else:
        view = VIEWS.get(kind)
        shown = fields(records) if view is None else view(env, records, ceilings.records)
        if form == "rich":
            page.print(shown)
        else:
            text = views.markdown(env, records) if kind == "train" else markdown(shown)
            page.file.write(text + "\n")


def finish(
    path: Path, env: Record, records: Sequence[Record], ceilings: Ceilings = Ceilings()
) -> None:
    """Print the tables at the end of a command that measured, and the file of its records."""
    if records:
        print_records(env, records, ceilings)
    else:
        make_page().print(Text(f"{path}: nothing was measured"), soft_wrap=True)
    note("records", path)


def markdown(shown: object) -> str:
    """Tables for a terminal, with the text between them, in Markdown."""
    if isinstance(shown, (Table, Tables)):
        return shown.markdown()
    if isinstance(shown, Group):
        return "\n\n".join(text for each in shown.renderables if (text := markdown(each)))
    return str(shown)


def plotted(
    file: Path, env: Record, records: Sequence[Record], folder: Path, option: str,
    ceilings: Ceilings = Ceilings(),
) -> Sequence[Path]:  # fmt: skip
    """Plot records into a folder that `option` names; UserError where there is nothing to plot."""
    with writing(folder, option):
        drawn = plots(env, records, folder, ceilings)
    if not drawn:
        raise UserError(f"{file}: no {records[0]['kind']} in it has anything to plot")
    return drawn


def plots(
    env: Record, records: Sequence[Record], folder: Path, ceilings: Ceilings = Ceilings()
) -> Sequence[Path]:
    """Plot records, if there are any, into a folder; returns the files, none for some kinds."""
    kind = records[0]["kind"] if records else ""
    if kind == "cell":
        return cell_plots(env, records, folder, ceilings.records)
    by_kind: dict[str, tuple[str, Callable[[Path], object]]] = {
        "train": ("loss", partial(views.plot, env, records)),
        "generate": ("generate", partial(views.plot_generated, records)),
        "io": ("traffic", partial(machine.plot_traffic, env, records)),
        "timeline": ("timeline", partial(profile.plot_timeline, env, records)),
    }
    if kind not in by_kind:
        return []
    name, draw = by_kind[kind]
    path = folder / f"{name}.png"
    return [] if draw(path) is False else [path]


def panels_of(
    file: Path, env: Record, cells: Sequence[Record], ceilings: Ceilings
) -> list[roofline.Panel]:
    """The stages of a run under the roofs of its machine; UserError where none has a place."""
    ceilings.check(env)
    panels = roofline.panels(cells, ceilings.records) if cells[0]["kind"] == "cell" else []
    if not panels:
        raise UserError(f"{file}: no cell in it has a place under a roof: ok, and not interpreted")
    return panels


def show_roofs(
    env: Record, panels: Sequence[roofline.Panel], folder: Path, dark: bool, option: str
) -> None:
    """Print the roofline's table, and draw it into a folder that `option` names."""
    with writing(folder, option):
        picture = roofline.draw(env, panels, folder, dark)
    roofline.show(env, panels, make_page())
    note("plot", picture)
