"""A picture of a trace through the online softmax, with one column per tile.

Each column has the scores with the running max m_i; the weights exp(s - m_i), whose sum is l_i, and
in outline the earlier weights before alpha scaled them down; and the output so far of Online and of
Lite, with the truth.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from course.tracing.trace import Array, Step, max_error, title
from harness.views.look import LIGHT, Look, in_look, mark, new_figure, plain

MOST_TILES = 8  # more columns are too small to read
MOST_KEYS = 64
LABELS = ("scores s", "weights exp(s - m_i)", "output so far")


class TooMuch(ValueError):
    """The trace is too large for a picture; the message says what is too large, and the limit."""


def still(steps: Sequence[Step], truth: Array, look: Look = LIGHT) -> Any:
    """Draw one row's trace, from `trace.walk`, as a matplotlib Figure with one column per tile.

    `truth` (d,) is from `trace.attention`. Raises TooMuch where there is no step, more than
    MOST_TILES, more than MOST_KEYS keys, or more than one row; ImportError without matplotlib.
    """
    check(steps)
    with in_look(look):
        figure = new_figure(0.8 + 2.35 * max(2, len(steps)), 6.6)
        grid = figure.subplots(3, len(steps), squeeze=False, sharey="row")
        for index, step in enumerate(steps):
            draw(grid[:, index], steps, index, truth, look)
            grid[0, index].set_title(title(step), fontweight="bold")
        for axis, label in zip(grid[:, 0], LABELS, strict=True):
            axis.set_ylabel(label)
        handles = grid[2, 0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=4)
    return figure


def check(steps: Sequence[Step]) -> None:
    """Raise TooMuch where a picture would be unreadable, or there is nothing to draw."""
    if not steps:
        raise TooMuch("steps: got none, expected a row that sees a key")
    if np.ndim(steps[0].m_i):
        raise TooMuch(f"steps: got rows {np.shape(steps[0].m_i)}, expected those of one row")
    if len(steps) > MOST_TILES or steps[-1].stop > MOST_KEYS:
        raise TooMuch(
            f"steps: got {len(steps)} tiles of {steps[-1].stop} keys, expected up to {MOST_TILES} "
            f"tiles and {MOST_KEYS} keys"
        )


def draw(axes: Any, steps: Sequence[Step], index: int, truth: Array, look: Look) -> None:
    """Draw scores, weights and outputs up to tile `index`, on 3 axes."""
    scores, weights, outputs = axes
    draw_scores(scores, steps, index, look)
    draw_weights(weights, steps, index, look)
    draw_outputs(outputs, steps, index, truth, look)
    n = steps[-1].stop
    for axis in (scores, weights):
        axis.set_xlim(-0.6, n - 0.4)
        axis.set_xticks(range(0, n, 1 if n <= 16 else n // 8))
        for step in steps[1:]:
            axis.axvline(step.start - 0.5, color=look.soft, linewidth=0.6, linestyle=":", zorder=0)
        axis.set_xlabel("key")


def draw_scores(axis: Any, steps: Sequence[Step], index: int, look: Look) -> None:
    """Draw the scores so far as bars, the tile's in colour; m_i, and m_old where it differs."""
    step, s = steps[index], scores_to(steps, index)
    axis.axhline(0, color=look.soft, linewidth=0.6)
    bars(axis, s, step.start, look)
    for key in np.flatnonzero(np.isinf(s)):
        axis.text(key, 0, "-inf", ha="center", va="bottom", fontsize=7, color=look.soft)
    if index and steps[index - 1].m_i < step.m_i:
        axis.axhline(steps[index - 1].m_i, color=look.soft, linestyle=(0, (4, 3)), linewidth=1.2)
    axis.axhline(step.m_i, color=look.ink, linewidth=1.6)
    axis.set_ylim(*room(scores_to(steps, len(steps)), [0.0]))
    axis.annotate(
        f"m_i = {step.m_i:.3g}", (1, float(step.m_i)), xycoords=("axes fraction", "data"),
        xytext=(0, 3), textcoords="offset points", ha="right", va="bottom", fontsize=8.5,
        bbox=plain(look),
    )  # fmt: skip


def draw_weights(axis: Any, steps: Sequence[Step], index: int, look: Look) -> None:
    """Draw exp(s - m_i) of all keys so far as bars, earlier values in outline."""
    axis.set_ylim(0, 1.35)
    step = steps[index]
    bars(axis, np.exp(scores_to(steps, index) - step.m_i), step.start, look)
    if index and step.alpha < 1:
        before = np.exp(scores_to(steps, index - 1) - steps[index - 1].m_i)
        style = {"fill": False, "edgecolor": look.soft, "linestyle": (0, (2, 2))}
        axis.bar(np.arange(step.start), before, 0.8, **style)
    axis.text(
        0.5, 0.99, f"alpha = {step.alpha:.3g},  l_i = {step.l_i:.3g}", ha="center", va="top",
        transform=axis.transAxes, fontsize=8.5, bbox=plain(look),
    )  # fmt: skip


def draw_outputs(axis: Any, steps: Sequence[Step], index: int, truth: Array, look: Look) -> None:
    """Draw the truth as levels, Online's and Lite's o with their markers."""
    dims = np.arange(len(truth))
    axis.axhline(0, color=look.soft, linewidth=0.6)
    axis.hlines(truth, dims - 0.38, dims + 0.38, color=look.ink, linewidth=2.2, label="truth")
    online, lite = steps[index].o, steps[index].lite
    for o, label, stage, shift, size, edge in (
        (online, "Online", 5, -0.12, 6, 1.0),
        (lite, "Lite", 4, 0.12, 5.5, 0.6),
    ):
        axis.plot(
            dims + shift, o, mark(stage).marker, color=mark(stage).colour, markersize=size,
            markeredgecolor=look.ink, markeredgewidth=edge, label=label,
        )  # fmt: skip
    axis.set_ylim(*room(truth, *(x for step in steps for x in (step.o, step.lite))))
    errors = f"Online {max_error(online, truth):.2g},  Lite {max_error(lite, truth):.2g}"
    axis.text(
        0.5, 0.99, f"off by: {errors}", ha="center", va="top", transform=axis.transAxes, fontsize=8
    )
    axis.set_xlim(-0.6, len(truth) - 0.4)
    axis.set_xticks(dims if len(truth) <= 8 else dims[:: len(truth) // 4])
    axis.set_xlabel("dimension")


def scores_to(steps: Sequence[Step], index: int) -> Array:
    """The scores of all keys up to tile `index`."""
    return np.concatenate([step.s for step in steps[: index + 1]])


def bars(axis: Any, heights: Array, start: int, look: Look) -> None:
    """Draw one bar per key with a finite height, in the newest tile's colour from `start` on."""
    keys = np.flatnonzero(np.isfinite(heights))
    for chosen, colour, edge in (
        (keys[keys < start], look.faint, look.soft),
        (keys[keys >= start], look.blue, look.ink),
    ):
        axis.bar(chosen, heights[chosen], 0.8, color=colour, edgecolor=edge)


def room(*values: Any) -> tuple[float, float]:
    """Axis limits around the finite values, with some room above and below."""
    every = np.concatenate(values)
    finite = every[np.isfinite(every)].astype(float)
    low, high = finite.min(), finite.max()
    some = 0.16 * (high - low or 1.0)
    return low - some * (low < 0), high + 1.6 * some
