"""The picture of where Lite breaks: Lite's and Online's error against N and score sharpness.

Both are computed in NumPy (course/tracing/trace.py, with which tests/stages/test_states.py compares
the kernels of stages 4 and 5), in float32, with stage 4's tile of 64 keys and N(0, 1) inputs. An
error is the largest |o - truth| over ROWS query rows and all of d, the truth in float64; the figure
shows the median over SEEDS draws.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from course.tracing.trace import Array, attention, max_error, walk
from harness.views.look import Look, in_look, new_figure, plain

TILE = 64  # keys, as in stages 4 and 5
D, ROWS, SEEDS = 64, 32, 7
MOST_N = 5 * TILE
SHARPNESS_N = (65, 128, 256)
SHARPNESS = tuple(float(x) for x in np.geomspace(0.01, 100, 33))
DASHES = {65: ":", 128: "-", 256: "--"}


class Errors(NamedTuple):
    """Lite's and Online's errors at each of `x`."""

    x: tuple[float, ...]
    lite: tuple[float, ...]
    online: tuple[float, ...]


def inputs(seed: int, n: int) -> tuple[Array, Array, Array]:
    """q (ROWS, D), k and v (n, D), all N(0, 1) and float32.

    A longer draw starts with the keys of a shorter one. RandomState is used since its stream never
    changes (NEP 19).
    """
    q_state, k_state, v_state = (np.random.RandomState([seed, part]) for part in range(3))
    shapes = ((q_state, ROWS), (k_state, n), (v_state, n))
    q, k, v = (state.standard_normal((rows, D)).astype(np.float32) for state, rows in shapes)
    return q, k, v


def errors(q: Array, k: Array, v: Array) -> tuple[float, float]:
    """Lite's and Online's largest error."""
    truth = attention(q, k, v)
    last = walk(q, k, v, TILE)[-1]
    return max_error(last.lite, truth), max_error(last.o, truth)


def medians(x: Sequence[float], cases: Iterable[Iterable[tuple[Array, Array, Array]]]) -> Errors:
    """The median errors at each of `x`, over its draws of q, k and v in `cases`."""
    found = [[errors(*draw) for draw in draws] for draws in cases]  # (x, SEEDS, 2)
    lite, online = np.median(np.array(found), axis=1).T
    return Errors(tuple(x), tuple(lite.tolist()), tuple(online.tolist()))


def against_n(most: int = MOST_N) -> Errors:
    """The errors at every N from 1 to `most`."""
    draws = [inputs(seed, most) for seed in range(SEEDS)]
    sizes = range(1, most + 1)
    return medians(sizes, ([(q, k[:n], v[:n]) for q, k, v in draws] for n in sizes))


def against_sharpness(n: int) -> Errors:
    """The errors at `n` keys, with q multiplied by each of SHARPNESS.

    With q and k ~ N(0, 1) the scaled scores of a row have a standard deviation of about 1, so that
    x is the standard deviation of the scores.
    """
    draws = [inputs(seed, n) for seed in range(SEEDS)]
    sharp = ([(np.float32(by) * q, k, v) for q, k, v in draws] for by in SHARPNESS)
    return medians(SHARPNESS, sharp)


class Breaks(NamedTuple):
    """The data of the picture: errors against N, and for some N against sharpness."""

    by_n: Errors
    by_sharpness: dict[int, Errors]


@functools.cache
def measure() -> Breaks:
    """Compute the data of the picture, in a few seconds of NumPy."""
    return Breaks(against_n(), {n: against_sharpness(n) for n in SHARPNESS_N})


def figure(found: Breaks, look: Look) -> Any:
    """Draw Lite's errors above, on a linear scale, and Online's below, on a logarithmic one."""
    with in_look(look):
        picture = new_figure(10.6, 5.4)
        grid = picture.subplots(2, 2, sharex="col", height_ratios=(2.2, 1))
        draw_n(grid[:, 0], found.by_n, look)
        draw_sharpness(grid[:, 1], found.by_sharpness, look)
        grid[0][0].set_ylabel("stage 4, Lite: max error")
        grid[1][0].set_ylabel("stage 5, Online:\nmax error, log scale")
        for above, below in grid.T:
            above.set_ylim(bottom=0)
            below.set_yscale("log")
            below.set_ylim(1e-8, 1e-3)
        for axis in grid.flat:
            axis.grid(True, axis="y")
        picture.supxlabel(
            f"d = {D}, N(0, 1), float32, {ROWS} query rows, tiles of {TILE} keys; median of "
            f"{SEEDS} draws; against float64",
            fontsize=8, color=look.soft,
        )  # fmt: skip
    return picture


def lines(column: Any, found: Errors, look: Look, **style: Any) -> None:
    """Draw Lite's errors above and Online's below, where errors of 0 are left out."""
    above, below = column
    above.plot(found.x, found.lite, color=look.red, linewidth=1.8, **style)
    online = [x or np.nan for x in found.online]
    below.plot(found.x, online, color=look.blue, linewidth=1.4, **style)


def draw_n(column: Any, found: Errors, look: Look) -> None:
    """Draw both errors against N, which gives a sawtooth."""
    above, below = column
    lines(column, found, look)
    for axis in column:
        for edge in range(TILE, MOST_N, TILE):
            axis.axvline(edge + 0.5, color=look.soft, linewidth=0.7, linestyle=":")
    below.set_xticks([1, *range(TILE, MOST_N + 1, TILE)])
    below.set_xlabel("N (keys); dotted: where a new tile begins")
    above.set_title("against N: a sawtooth")
    top = 1.25 * max(found.lite)
    above.annotate(
        "the 65th key is alone in its tile,\nso its weight there is 1",
        (TILE + 1, found.lite[TILE]), xytext=(TILE + 14, 0.94 * top), fontsize=8.5, va="center",
        arrowprops={"arrowstyle": "->", "color": look.ink}, bbox=plain(look),
    )  # fmt: skip
    above.text(TILE / 2, 0.03 * top, "one tile:\nexact", fontsize=8.5, ha="center")
    above.set_ylim(top=top)


def draw_sharpness(column: Any, found: dict[int, Errors], look: Look) -> None:
    """Draw both errors against the scores' standard deviation, one line per N."""
    above, below = column
    for n, one in found.items():
        lines(column, one, look, linestyle=DASHES[n], label=f"N = {n}")
    above.set_xscale("log")
    above.set_title("against how sharp the scores are")
    above.legend(loc="upper left")
    below.set_xlabel("standard deviation of the scaled scores")
