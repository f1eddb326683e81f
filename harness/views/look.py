"""What every picture looks like: inks and grounds, and one colour and one marker for each stage.

A picture of docs/figures is drawn twice, NAME.png with dark ink on white and NAME-dark.png with
light ink on near-black, both opaque, so that whichever file stands on whichever page can be read; a
page shows the one that fits. A notebook can't choose, so its pictures are drawn in EITHER: ink of a
middle tone, no ground. The colours of stages and peers stand out from white and from near-black
alike, so they are the same in all of them.

No two things are told apart by colour alone: hatching, marker, dash or position tells them apart,
too.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

DPI = 110
NOTHING = "none"  # matplotlib's word for a colour that isn't drawn
PEERS_FROM = 100  # harness/isolation/roster.py, which starts processes: no import of a picture

# One for each of stages 0 to 10, then again from the first. Each has a contrast of 3 or more with
# white and with near-black; they were searched for so that any two are as far apart as can be, also
# for people who see no red, no green or no blue.
COLOURS = (
    "#885588", "#9966FF", "#BB77AA", "#808080", "#D55E00", "#1E84CC", "#22AA33", "#9933FF",
    "#AA6644", "#DD00BB", "#669966",
)  # fmt: skip
# as many as have no divisor in common with the colours, so that pairs repeat late
MARKERS: tuple[Any, ...] = ("h", "p", "*", "o", "s", "^", "D", "v", "P", "X")
PEER_MARKERS: tuple[Any, ...] = ("<", ">", "d", (4, 1, 0), (6, 1, 0), (3, 1, 0), "8")
DASHES: tuple[Any, ...] = (
    "-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (7, 2, 1, 2)),
)  # fmt: skip
FIRST_SPARE = 99  # marks from here downwards are for a second file with a stage's number

# behind a line of code that goes, and one that comes (harness/lessons/side_by_side.py), under INK
GOES, COMES, INK = "#FFE3E0", "#DDF4E0", "#1A1A1A"


@dataclass(frozen=True)
class Look:
    """The colours of a picture; `suffix` is what its file's name ends with."""

    suffix: str
    ink: str
    soft: str  # words and lines of less weight
    faint: str  # grids and what is past
    ground: str
    blue: str = COLOURS[5]  # what is right, or measured: stage 5's
    orange: str = "#D08A00"  # what takes care, or is merely cited
    red: str = COLOURS[4]  # what is wrong: stage 4's


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


def mark(number: int) -> Mark:
    """The mark of the stage or peer with that number.

    No two stages below 100, and no stage and peer, have colour and marker in common.
    """
    if number < PEERS_FROM:
        pick = number, number, number
        markers = MARKERS
    else:
        peer = number - PEERS_FROM  # its colour is that of a stage it is seldom drawn beside
        pick = peer + len(COLOURS) - 1, peer, peer + 1
        markers = PEER_MARKERS
    colour, marker, dash = pick
    return Mark(
        COLOURS[colour % len(COLOURS)], markers[marker % len(markers)], DASHES[dash % len(DASHES)]
    )


def marks(keys: Iterable[tuple[int, str]]) -> dict[tuple[int, str], Mark]:
    """(number, name) -> its mark; of several files with one number, the others get spare marks."""
    ordered = sorted(set(keys))
    numbers = {number for number, _ in ordered}
    spare = (number for number in range(FIRST_SPARE, -1, -1) if number not in numbers)
    found: dict[tuple[int, str], Mark] = {}
    for number, name in ordered:
        second = any(number == other for other, _ in found)
        found[number, name] = mark(next(spare) if second else number)
    return found


def layer(index: int, count: int) -> dict[str, float]:
    """Widths of the `index`-th of `count` lines that may lie on each other: the first is widest.

    So what lies below shows at both sides of what lies on it.
    """
    down = index / max(1, count - 1)
    return {"linewidth": 2.8 - 1.4 * down, "markersize": 8.5 - 3.0 * down}


@contextmanager
def in_look(look: Look) -> Iterator[None]:
    """Matplotlib's own defaults with the look's colours, whatever the user's settings are."""
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
    """An empty Figure of so many inches; pyplot, which keeps what it makes, has no part in it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plain(look: Look) -> dict[str, Any]:
    """A bare ground behind words, so that no line runs through them."""
    return {"facecolor": look.ground, "edgecolor": "none", "pad": 1.0}


def halo(look: Look) -> list[Any]:
    """Ground around letters, where the look has one."""
    from matplotlib.patheffects import withStroke

    return [] if look.ground == NOTHING else [withStroke(linewidth=2, foreground=look.ground)]


def note_below(axis: Any, lines: Sequence[str]) -> None:
    """Small words below an axis's own, where no data can be."""
    if lines:
        axis.annotate(
            "\n".join(lines), (0, 0), xycoords="axes fraction", xytext=(0, -32),
            textcoords="offset points", fontsize=7.5, va="top",
        )  # fmt: skip


def legend(figure: Any, axes: Sequence[Any]) -> None:
    """One legend for all panels, below them: by number, each label beginning with one."""
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    ordered = sorted(handles, key=lambda label: int(label.split()[0]))
    shown = figure.legend(
        [handles[label] for label in ordered],
        ordered,
        loc="outside lower center",
        ncols=min(4, len(ordered)),
        fontsize=9,
    )
    for text in shown.get_texts():
        text.set_parse_math(False)  # a title is no formula, whoever wrote it
