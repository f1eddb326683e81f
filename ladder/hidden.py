"""The old words for `ladder show FILE`: they work as before, and no help shows them."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ladder import bench, generate, measuring, options, show, train
from ladder.options import UserError, option

File = Annotated[Path, typer.Argument(help="a file of records")]
Folder = Annotated[Path, option("the folder of the pictures", None, "--out")]
Roofs = Annotated[Path, option("what `ladder ceilings` wrote", None, "--ceilings")]
Records = Annotated[Path, option("a file of records", None, "--show")]
Table = Annotated[Path | None, option("the table in a file, CSV")]
Plots = Annotated[Path | None, option("the folder of the pictures", None, "--plots", "--plot")]


def table_command(file: File, form: options.TableFormat = "rich") -> int:
    """`ladder show FILE`."""
    return show.show_command([file], form)


def plot_command(file: File, out: Folder) -> int:
    """`ladder show FILE --plot FOLDER`, without its tables."""
    for path in show.plotted(file, *show.open_any(file), out, "--out"):
        print(path)
    return 0


def roofline_command(file: File, ceilings: Roofs, out: Folder, dark: options.Dark = False) -> int:
    """`ladder show FILE --roofline FOLDER --ceilings FILE`, without its other tables."""
    env, cells = show.open_any(file)
    panels = show.panels_of(file, env, cells, show.Ceilings.read(ceilings))
    show.show_roofs(env, panels, out, dark, "--out")
    return 0


def bench_command(
    file: Records,
    out: Table = None,
    plot: Plots = None,
    ceilings: options.Ceilings = None,
) -> int:
    """`ladder show FILE --plot FOLDER --ceilings FILE`, and its CSV."""
    if out is not None and out.suffix != ".csv":
        raise UserError(f"--out: got {out}, expected a name in .csv: --show writes nothing else")
    measuring.check_out(out)
    bench.View("bench", plot, ceilings).show(file, out)
    return 0


def train_command(file: Records) -> int:
    """`ladder show FILE --plot FOLDER`, with 1 where a training failed."""
    return int(train.finish(file))


def generate_command(file: Records) -> int:
    """`ladder show FILE --plot FOLDER`, with 1 where the cache changes a text."""
    return int(generate.finish(file))


HIDDEN: dict[str, Callable[..., int]] = {
    "table": table_command, "plot": plot_command, "roofline": roofline_command,
    "bench --show": bench_command, "train --show": train_command,
    "generate --show": generate_command,
}  # fmt: skip
