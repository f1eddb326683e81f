"""The common style of all pictures: colours, one colour and marker per stage, panels.

A picture of docs/figures is drawn twice, NAME.png for light pages and NAME-dark.png for dark ones.
A notebook can't choose between two, so its pictures are drawn in EITHER: grey ink on a transparent
background. Nothing is distinguished by colour alone: there is also hatching, a marker, a dash or a
position.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.problems.problem import PEERS_FROM
from harness.records.files import whole

DPI = 110
HOLLOW = "hollow: wrong by design"
NOTHING = "none"  # matplotlib's word for a colour that isn't drawn

# One for each of stages 0 to 10, then again from the first. Each has a contrast of 3 or more to
# white and to near-black; they are distinct also for people who see no red, no green or no blue.
COLOURS = (
    "#885588", "#9966FF", "#BB77AA", "#808080", "#D55E00", "#1E84CC", "#22AA33", "#9933FF",
    "#AA6644", "#DD00BB", "#669966",
)  # fmt: skip
# their number has no divisor in common with the number of colours, so that pairs repeat late
MARKERS: tuple[Any, ...] = ("h", "p", "*", "o", "s", "^", "D", "v", "P", "X")
PEER_MARKERS: tuple[Any, ...] = ("<", ">", "d", (4, 1, 0), (6, 1, 0), (3, 1, 0), "8")
DASHES: tuple[Any, ...] = (
    "-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (7, 2, 1, 2)),
)  # fmt: skip
FIRST_SPARE = 99  # marks from here downwards are for further files with the same stage number

# backgrounds of a removed and an added line of code (course/lessons/side_by_side.py); text in INK
GOES, COMES, INK = "#FFE3E0", "#DDF4E0", "#1A1A1A"


@dataclass(frozen=True)
class Look:
    """The colours of a picture; `suffix` is added to its file's name."""

    suffix: str
    ink: str
    soft: str  # text and lines of less weight
    faint: str  # grids and what is past
    ground: str
    blue: str = COLOURS[5]  # right, or measured: stage 5's colour
    orange: str = "#D08A00"  # a caution, or cited and not measured
    red: str = COLOURS[4]  # wrong: stage 4's colour


LIGHT = Look("", INK, "#5A5A5A", "#D5D5D5", "#FFFFFF")
DARK = Look("-dark", "#E6E6E6", "#A8A8A8", "#454B52", "#0D1117")
EITHER = Look("", "#7C7C7C", "#7C7C7C", "#7C7C7C60", NOTHING)
LOOKS = (LIGHT, DARK)


@dataclass(frozen=True)
class Mark:
    """How one stage or peer is drawn in every picture."""

    colour: str
    marker: Any
    dash: Any

    @property
    def line(self) -> dict[str, Any]:
        """Matplotlib's options for a line of it."""
        return {"color": self.colour, "marker": self.marker, "linestyle": self.dash}


Style = Mapping[tuple[int, str], Mark]  # by number and name of a stage or peer


def mark(number: int) -> Mark:
    """The mark of the stage or peer with that number.

    No two stages below 100, and no stage and peer, have both colour and marker in common.
    """
    colour = place = dash = number
    if peer := number >= PEERS_FROM:
        place -= PEERS_FROM
        colour, dash = place + len(COLOURS) - 1, place + 1  # a stage's that is seldom near
    markers = PEER_MARKERS if peer else MARKERS
    return Mark(
        COLOURS[colour % len(COLOURS)], markers[place % len(markers)], DASHES[dash % len(DASHES)]
    )


def marks(keys: Iterable[tuple[int, str]]) -> dict[tuple[int, str], Mark]:
    """Map (number, name) to a mark; further files with the same number get spare marks."""
    ordered = sorted(set(keys))
    numbers = {number for number, _ in ordered}
    spare = (number for number in range(FIRST_SPARE, -1, -1) if number not in numbers)
    found: dict[tuple[int, str], Mark] = {}
    for number, name in ordered:
        second = any(number == other for other, _ in found)
        found[number, name] = mark(next(spare) if second else number)
    return found


@contextmanager
def in_look(look: Look) -> Iterator[None]:
    """Use Matplotlib's defaults with the look's colours, whatever the user's settings are."""
    from matplotlib import style

    inks = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    grounds = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    settings = {
        **dict.fromkeys(inks, look.ink),
        **dict.fromkeys(grounds, look.ground),
        "font.size": 9,
        "axes.titlesize": 9.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": look.faint,
        "grid.linewidth": 0.6,
        "axes.axisbelow": True,
        "legend.frameon": False,
        "hatch.linewidth": 0.7,
        "figure.dpi": DPI,
        "savefig.dpi": DPI,
    }
    with style.context(["default", settings]):
        yield


def new_figure(width: float, height: float) -> Any:
    """An empty Figure, sizes in inches; made without pyplot, which would keep it in memory."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plain(look: Look) -> dict[str, Any]:
    """Options of a plain box behind text, so that no line runs through it."""
    return {"facecolor": look.ground, "edgecolor": "none", "pad": 1.0}


def halo(look: Look) -> list[Any]:
    """An outline of text in the background's colour, where the look has a background."""
    from matplotlib.patheffects import withStroke

    return [] if look.ground == NOTHING else [withStroke(linewidth=2, foreground=look.ground)]


@contextmanager
def picture(
    path: Path, look: Look, count: int, columns: int, width: float, height: float, **options: Any
) -> Iterator[tuple[Any, list[Any]]]:
    """Make a figure with `count` axes, sizes in inches each; written to `path` at the end.

    `options` are those of matplotlib's Figure.subplots.
    """
    columns = min(columns, count)
    rows = -(-count // columns)
    with in_look(look):
        figure = new_figure(width * columns + 0.4, height * rows + 0.3)
        axes = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
        for axis in axes[count:]:
            axis.set_visible(False)
        yield figure, axes[:count]
        with whole(path) as draft:
            figure.savefig(draft)


def draw_lines(
    axis: Any, found: Mapping[tuple[int, str], Sequence[tuple[float, float, bool]]],
    labels: Mapping[tuple[int, str], str], style: Style, look: Look,
    aside: Mapping[tuple[int, str], float] = {},
) -> None:  # fmt: skip
    """Draw one line per stage of `style` through its points (x, y, ok); not ok is hollow.

    The first lines are the widest, so that they stay visible under those drawn on top of them.
    `aside`: how far right of its points a stage is drawn, in points of type.
    """
    from matplotlib.transforms import ScaledTranslation

    for index, (stage, mark) in enumerate(style.items()):
        points = found.get(stage)
        if not points:
            continue
        down = index / max(1, len(style) - 1)
        place: dict[str, Any] = {"markersize": 8.5 if aside else 8.5 - 3.0 * down}
        if stage in aside:
            right = ScaledTranslation(aside[stage] / 72, 0, axis.figure.dpi_scale_trans)
            place["transform"] = axis.transData + right
        axis.plot(
            [x for x, _, _ in points], [y for _, y, _ in points], label=labels[stage],
            markevery=[i for i, (_, _, ok) in enumerate(points) if ok],
            linewidth=1.4 if aside else 2.8 - 1.4 * down, **place, **mark.line,
        )  # fmt: skip
        for x, y in [(x, y) for x, y, ok in points if not ok]:
            axis.plot(
                x, y, color=mark.colour, marker=mark.marker, linestyle="none",
                markerfacecolor=look.ground, **place,
            )  # fmt: skip


def n_axis(axis: Any, sizes: Iterable[int], label: str = "N") -> None:
    """Set a logarithmic N axis with a tick for each of `sizes` that has room, and a grid."""
    shown: list[int] = []
    for size in sorted(set(sizes)):
        if not shown or size > 1.1 * shown[-1]:  # there is no room for 65 beside 64
            shown.append(size)
    axis.set_xscale("log", base=2)
    axis.set_xticks(shown, [str(size) for size in shown])
    axis.set_xticks([], minor=True)
    axis.set_xlabel(label)
    axis.grid(True, which="major")


def note_below(axis: Any, lines: Sequence[str]) -> None:
    """Write small text below an axis's label, where there is no data."""
    if lines:
        axis.annotate(
            "\n".join(lines), (0, 0), xycoords="axes fraction", xytext=(0, -32),
            textcoords="offset points", fontsize=7.5, va="top",
        )  # fmt: skip


def legend(figure: Any, axes: Sequence[Any]) -> None:
    """Draw one legend below all panels, sorted by the number that each label begins with."""
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    ordered = sorted(handles, key=lambda label: int(label.split()[0]))
    columns = min(4, len(ordered), int(figure.get_figwidth() / 1.9))
    place = {"loc": "outside lower center", "ncols": columns}
    shown = figure.legend([handles[label] for label in ordered], ordered, fontsize=9, **place)
    for text in shown.get_texts():
        text.set_parse_math(False)  # a stage's title is no formula
