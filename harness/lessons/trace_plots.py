"""Pictures of a walk through the online softmax: one with a column per tile, and a moving one.

In each column: the scores with the running max m_i; the weights exp(s - m_i), whose sum is l_i, and
in outline what the past's were before alpha shrank them; the output so far of Online and of Lite,
against the truth.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.lessons.trace import Array, Step, max_error
from harness.views.look import LIGHT, Look, in_look, mark, new_figure, plain

MOST_TILES = 8  # columns that can still be read
MOST_KEYS = 64
MOVE_MS, STAND_MS, END_MS = 1600, 2200, 4000  # how long a frame of the moving picture stays
COLOURS = 48  # of the moving picture: letters keep their soft edges


class TooMuch(ValueError):
    """More than a picture of this kind can show; the message says what, and how much it can."""


def still(steps: Sequence[Step], truth: Array, look: Look = LIGHT) -> Any:
    """A matplotlib Figure of one row's walk, one column per tile, as `trace.walk` gave it.

    `truth` is (d,), as `trace.attention` gives it. Raises TooMuch where there is no step, more than
    MOST_TILES, more than MOST_KEYS keys, or more than one row; ImportError without matplotlib.
    """
    check(steps)
    with in_look(look):
        figure = new_figure(0.8 + 2.35 * max(2, len(steps)), 6.6)
        grid = figure.subplots(3, len(steps), squeeze=False, sharey="row")
        for index in range(len(steps)):
            column = grid[:, index]
            draw_scores(column[0], steps, index, look)
            draw_weights(column[1], steps, index, look)
            draw_outputs(column[2], steps, index, truth, look)
            column[0].set_title(title(steps[index]), fontweight="bold")
        for axis, label in zip(grid[:, 0], LABELS, strict=True):
            axis.set_ylabel(label)
        handles = grid[2][0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=4)
    return figure


LABELS = ("scores s", "weights exp(s - m_i)", "output so far")


def moving(
    steps: Sequence[Step], truth: Array, path: Path, look: Look = LIGHT, comment: str = ""
) -> Path:
    """Write the walk to `path`, .gif or .webp: each tile's scores come, then what they change.

    A GIF has no half-clear edges of letters, so EITHER needs WebP. `comment` goes into a GIF.
    Arguments and errors as `still`'s.
    """
    from PIL import Image

    check(steps)
    frames, stays = [], []
    with in_look(look):
        for index in range(len(steps)):
            for done in (False, True):
                figure = frame(steps, index, done, truth, look)
                figure.canvas.draw()
                frames.append(Image.fromarray(np.array(figure.canvas.buffer_rgba())))
                stays.append(STAND_MS if done else MOVE_MS)
    stays[-1] = END_MS
    # the end first: it is what a still preview shows, and in a loop it still comes last
    frames, stays = [frames[-1], *frames[:-1]], [stays[-1], *stays[:-1]]
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".webp":
        frames[0].save(
            path, save_all=True, append_images=frames[1:], duration=stays, loop=0, lossless=True
        )
        return path
    frames = [pixels.convert("RGB") for pixels in frames]
    # one palette for all, so that only what moves is stored; the usual one of most pixels would
    # leave out the few of a marker's colour
    palette = frames[0].quantize(COLOURS, method=Image.Quantize.FASTOCTREE)
    shown = [pixels.quantize(palette=palette, dither=Image.Dither.NONE) for pixels in frames]
    shown[0].save(
        path, save_all=True, append_images=shown[1:], duration=stays, loop=0, optimize=True,
        comment=comment,
    )  # fmt: skip
    return path


def check(steps: Sequence[Step]) -> None:
    """Raise TooMuch where a picture couldn't be read, or there is nothing to draw."""
    if not steps:
        raise TooMuch("steps: got none, expected a row that sees a key")
    if np.ndim(steps[0].m_i):
        raise TooMuch(f"steps: got rows {np.shape(steps[0].m_i)}, expected those of one row")
    if len(steps) > MOST_TILES or steps[-1].stop > MOST_KEYS:
        raise TooMuch(
            f"steps: got {len(steps)} tiles of {steps[-1].stop} keys, expected up to {MOST_TILES} "
            f"tiles and {MOST_KEYS} keys"
        )


def frame(steps: Sequence[Step], index: int, done: bool, truth: Array, look: Look) -> Any:
    """One frame: tile `index` is scored, and with `done` rescaled and added too."""
    figure = new_figure(7.2, 3.3)
    left, middle, right = figure.subplots(1, 3)
    draw_scores(left, steps, index, look)
    shown = index if done else index - 1
    draw_weights(middle, steps, shown, look)
    draw_outputs(right, steps, shown, truth, look)
    for axis, label in zip((left, middle, right), LABELS, strict=True):
        axis.set_title(label)
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=3)
    figure.suptitle(caption(steps, index, done), fontsize=9.5, x=0.02, ha="left")
    return figure


def title(step: Step) -> str:
    """Which keys a tile holds."""
    last = step.stop - 1
    return f"key {last}" if step.start == last else f"keys {step.start} to {last}"


def caption(steps: Sequence[Step], index: int, done: bool) -> str:
    """What happens in a frame, two lines."""
    step = steps[index]
    head = f"tile {index}, {title(step)}"
    if done and index == len(steps) - 1:
        return f"{head}: o = acc / l_i is the truth;\nLite's weights sum to {step.lite_weight:.0f}"
    if index == 0:
        what = (
            "there is no past yet,\nonly the tile's own weights" if done else "the first scores,\n"
        )
        return f"{head}: {what}" if done else f"{head}: {what}m_i = {step.m_i:.3g}"
    if done:
        past = f"shrinks by alpha = {step.alpha:.3g}" if step.alpha < 1 else "stays what it was"
        return f"{head}: the past {past},\nthe tile's own weights come to it"
    old = steps[index - 1].m_i
    moved = f"m_i rises from {old:.3g} to {step.m_i:.3g}" if step.m_i > old else "m_i stays"
    return f"{head}: new scores,\n{moved}, alpha = {step.alpha:.3g}"


def scores_to(steps: Sequence[Step], index: int) -> Array:
    """The scores of all keys up to tile `index`."""
    return np.concatenate([step.s for step in steps[: index + 1]])


def draw_scores(axis: Any, steps: Sequence[Step], index: int, look: Look) -> None:
    """Bars of the scores so far, the tile's own filled; m_i, and m_old where it was another."""
    step = steps[index]
    s = scores_to(steps, index)
    finite = np.isfinite(s)
    keys = np.arange(len(s))
    new = keys >= step.start
    axis.axhline(0, color=look.soft, linewidth=0.6)
    axis.bar(keys[finite & ~new], s[finite & ~new], 0.8, color=look.faint, edgecolor=look.soft)
    axis.bar(keys[finite & new], s[finite & new], 0.8, color=look.blue, edgecolor=look.ink)
    for key in keys[~finite]:
        axis.text(key, 0, "-inf", ha="center", va="bottom", fontsize=7, color=look.soft)
    if index and steps[index - 1].m_i < step.m_i:
        axis.axhline(steps[index - 1].m_i, color=look.soft, linestyle=(0, (4, 3)), linewidth=1.2)
    axis.axhline(step.m_i, color=look.ink, linewidth=1.6)
    axis.set_ylim(*room([steps_s for step in steps for steps_s in finite_of(step.s)] + [0.0]))
    axis.annotate(
        f"m_i = {step.m_i:.3g}", (1, float(step.m_i)), xycoords=("axes fraction", "data"),
        xytext=(0, 3), textcoords="offset points", ha="right", va="bottom", fontsize=8.5,
        bbox=plain(look),
    )  # fmt: skip
    key_axis(axis, steps, look)


def finite_of(s: Array) -> list[float]:
    return [float(x) for x in s if np.isfinite(x)]


def room(values: Sequence[float]) -> tuple[float, float]:
    """Limits with some room above and below."""
    low, high = min(values), max(values)
    some = 0.16 * (high - low or 1.0)
    return low - some * (low < 0), high + 1.6 * some


def draw_weights(axis: Any, steps: Sequence[Step], index: int, look: Look) -> None:
    """Bars of exp(s - m_i) for all keys so far; outlines of what alpha shrank. -1: nothing yet."""
    axis.set_ylim(0, 1.35)
    key_axis(axis, steps, look)
    if index < 0:
        return
    step = steps[index]
    p = np.exp(scores_to(steps, index) - step.m_i)
    keys = np.arange(len(p))
    new = keys >= step.start
    axis.bar(keys[~new], p[~new], 0.8, color=look.faint, edgecolor=look.soft)
    axis.bar(keys[new], p[new], 0.8, color=look.blue, edgecolor=look.ink)
    if index and step.alpha < 1:
        before = np.exp(scores_to(steps, index - 1) - steps[index - 1].m_i)
        axis.bar(
            keys[: step.start], before, 0.8, fill=False, edgecolor=look.soft, linestyle=(0, (2, 2))
        )
    axis.text(
        0.5, 0.99, f"alpha = {step.alpha:.3g},  l_i = {step.l_i:.3g}", ha="center", va="top",
        transform=axis.transAxes, fontsize=8.5, bbox=plain(look),
    )  # fmt: skip


def draw_outputs(axis: Any, steps: Sequence[Step], index: int, truth: Array, look: Look) -> None:
    """The truth as levels, Online's o and Lite's in their marks; -1: neither has any yet."""
    dims = np.arange(len(truth))
    axis.axhline(0, color=look.soft, linewidth=0.6)
    axis.hlines(truth, dims - 0.38, dims + 0.38, color=look.ink, linewidth=2.2, label="truth")
    lite, online = mark(4), mark(5)
    # what has no place yet is drawn outside, so that the legend is the same in every frame
    at = steps[index] if index >= 0 else None
    nowhere = np.full(len(truth), np.nan)
    axis.plot(
        dims - 0.12, nowhere if at is None else at.o, online.marker, color=online.colour,
        markersize=6,
        markeredgecolor=look.ink, label="Online",
    )  # fmt: skip
    axis.plot(
        dims + 0.12, nowhere if at is None else at.lite, lite.marker, color=lite.colour,
        markersize=5.5,
        markeredgecolor=look.ink, markeredgewidth=0.6, label="Lite",
    )  # fmt: skip
    values = [truth, *(x for step in steps for x in (step.o, step.lite))]
    axis.set_ylim(*room([float(x) for some in values for x in some]))
    if at is not None:
        errors = [max_error(o, truth) for o in (at.o, at.lite)]
        axis.text(
            0.5, 0.99, "off by: Online {:.2g},  Lite {:.2g}".format(*errors), ha="center",
            va="top", transform=axis.transAxes, fontsize=8,
        )  # fmt: skip
    axis.set_xlim(-0.6, len(truth) - 0.4)
    axis.set_xticks(dims if len(truth) <= 8 else dims[:: len(truth) // 4])
    axis.set_xlabel("dimension")


def key_axis(axis: Any, steps: Sequence[Step], look: Look) -> None:
    """The keys across, one tick each where there are few, and lines between tiles."""
    n = steps[-1].stop
    axis.set_xlim(-0.6, n - 0.4)
    axis.set_xticks(range(0, n, 1 if n <= 16 else n // 8))
    for step in steps[1:]:
        axis.axvline(step.start - 0.5, color=look.soft, linewidth=0.6, linestyle=":", zorder=0)
    axis.set_xlabel("key")
