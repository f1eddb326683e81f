"""What the explaining pictures look like: on a light page, on a dark one, and printed in grey.

Each picture is drawn twice, NAME.png with dark ink on white and NAME-dark.png with light ink on
near-black, both opaque: whichever file stands on whichever page can be read. No two things are told
apart by colour alone: hatching, marker, dash or position tells them apart, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

DPI = 110


@dataclass(frozen=True)
class Look:
    """The colours of a picture; `suffix` is what its file's name ends with."""

    suffix: str
    ink: str
    soft: str  # words and lines of less weight
    faint: str  # grids and what is past
    ground: str
    blue: str  # what is right, or measured
    orange: str  # what takes care, or is merely cited
    red: str  # what is wrong


# Okabe and Ito's colours, which the colour-blind tell apart; blue in a lighter one on dark
LIGHT = Look("", "#1A1A1A", "#5A5A5A", "#D5D5D5", "#FFFFFF", "#0072B2", "#E69F00", "#D55E00")
DARK = Look("-dark", "#E6E6E6", "#A8A8A8", "#454B52", "#16191D", "#56B4E9", "#E69F00", "#FF7F3F")
LOOKS = (LIGHT, DARK)


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
