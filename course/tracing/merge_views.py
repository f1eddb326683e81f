"""The merge of one row's parts for people: in 80 columns, as JSON, and as a picture."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from course.tracing.merge import Merged, Part, split
from course.tracing.trace import Array, Trace, max_error
from course.tracing.trace_plots import MOST_KEYS, TooMuch, room
from course.tracing.trace_text import aside, head, in_json, number, numbers, remark
from harness.views.look import LIGHT, Look, in_look, new_figure, plain
from harness.views.ratios import show_error

GLOSSARY = """\
  s            this row's scores of the part's keys: q k^T * scale
  m_s          the largest of them
  l_s, acc_s   the sums of exp(s - m_s) and of exp(s - m_s) v, not yet divided
  w_s          exp(m_s - m_i): what the part is worth beside the others
  unweighted   the mistake: sum acc_s / sum l_s, as if all had one max

Stage 8 keeps m_s and m_i not scaled: sqrt(d) times what stands here."""
COLOURS = ("blue", "orange", "red")  # of a Look, for the parts in turn; dashed lines part them, too


def merged(trace: Trace, splits: int) -> Merged:
    """The row of a trace, its keys in `splits` parts."""
    return split(trace.q, trace.k, trace.v, trace.tile, splits, trace.visible)


def to_text(trace: Trace, splits: int) -> str:
    """The parts and their merge as text, no line of it longer than 80 columns."""
    found = merged(trace, splits)
    parts = [part_lines(trace, found, index) for index in range(splits)]
    title = [*head(trace), f"Stage 8: the keys in {splits} part{'s' * (splits > 1)}, then merged"]
    blocks = [title, [GLOSSARY], *parts, merge_lines(found), end(trace, found), cost(found)]
    return "\n\n".join("\n".join(block) for block in blocks)


def keys_of(part: Part) -> str:
    """Which keys a part has: 'keys 0 to 3', 'no key'."""
    return f"keys {part.start} to {part.stop - 1}" if part.stop > part.start else "no key"


def part_lines(trace: Trace, found: Merged, index: int) -> Iterator[str]:
    """What one part leaves, one quantity per line."""
    part = found.parts[index]
    tiles = -(-(part.stop - part.start) // trace.tile)
    yield f"part {index}, {keys_of(part)}: {tiles} tile{'s' * (tiles != 1)}, walked by itself"
    yield from numbers("s", part.s)
    if hidden := int(np.isneginf(part.s).sum()):
        yield aside(f"-inf: hidden by the causal mask, so its weight is 0 ({hidden} here)")
    yield remark("m_s", part.m_s, "" if part.l_s else "the row sees no key here").rstrip()
    yield remark("l_s", part.l_s, "").rstrip()
    yield from numbers("acc_s", part.acc_s)


def merge_lines(found: Merged) -> Iterator[str]:
    """How the parts become one: the max, what each is worth, the sums."""
    yield "the merge, in the order of the parts"
    everyone = ", ".join(number(part.m_s) for part in found.parts)
    yield remark("m_i", found.m_i, f"max({everyone})" if len(everyone) < 50 else "the largest m_s")
    for index, (part, weight) in enumerate(zip(found.parts, found.w, strict=True)):
        why = f"exp({number(part.m_s)} - {number(found.m_i)})"
        why += ": it has the max" if weight == 1 else ": it counts nothing" if not weight else ""
        yield remark(f"w_{index}", weight, why)
    pairs = zip(found.w, found.parts, strict=True)
    sums = " + ".join(f"{number(weight)} * {number(part.l_s)}" for weight, part in pairs)
    yield remark("l_i", found.l_i, sums if len(sums) < 55 else "the sum of w_s l_s")
    yield from numbers("acc", found.acc)


def end(trace: Trace, found: Merged) -> Iterator[str]:
    """The truth, what the merge gives for it, and what it would without the weights."""
    truth = trace.truth()
    yield f"After all {trace.visible} keys that the row sees, against softmax over all at once"
    yield from numbers("truth", truth)
    for name, o, why in (
        ("acc / l_i", found.o, "rounding in float32"),
        ("unweighted", found.unweighted, "each part's sums are under a max of its own"),
    ):
        yield from numbers(name, o)
        same = name == "unweighted" and all(weight in (0, 1) for weight in found.w)
        reason = "here all parts that count have one max" if same else why
        yield aside(f"max error {show_error(max_error(o, truth))}: {reason}")


def cost(found: Merged) -> Iterator[str]:
    """What the parts cost in memory traffic."""
    count, d = len(found.parts), found.acc.shape[-1]
    if count == 1:
        yield "One part: o is written at once, and nothing is merged."
        return
    moved = 2 * 4 * count * (d + 2)
    yield f"Bytes of the parts: {count} x (d + 2) floats, written and read: {moved}"


def to_json(trace: Trace, splits: int) -> str:
    """Every number of the parts and of their merge. -inf is null."""
    found, truth = merged(trace, splits), trace.truth()
    data = {
        "n": len(trace.k), "d": len(trace.q), "tile": trace.tile, "row": trace.row,
        "inputs": trace.inputs, "seed": trace.seed, "causal": trace.causal,
        "visible": trace.visible, "splits": splits,
        "parts": [
            {name: in_json(x) for name, x in vars(part).items()} | {"w": in_json(weight)}
            for part, weight in zip(found.parts, found.w, strict=True)
        ],
        "m_i": in_json(found.m_i), "l_i": in_json(found.l_i), "acc": in_json(found.acc),
        "truth": truth.tolist(),
        "outputs": {
            name: {"o": o.tolist(), "max_error": max_error(o, truth)}
            for name, o in (("merged", found.o), ("unweighted", found.unweighted))
        },
    }  # fmt: skip
    return json.dumps(data, indent=1, allow_nan=False)


def picture(found: Merged, truth: Array, look: Look = LIGHT) -> Any:
    """A matplotlib Figure of one row's merge: scores, weights, outputs; `truth` is (d,).

    Raises TooMuch where there are several rows, more than MOST_KEYS keys, or more than three parts
    with a key; ImportError without matplotlib.
    """
    parts = [
        (part, w) for part, w in zip(found.parts, found.w, strict=True) if part.stop > part.start
    ]
    if (
        np.ndim(found.m_i)
        or not parts
        or len(parts) > len(COLOURS)
        or parts[-1][0].stop > MOST_KEYS
    ):
        raise TooMuch(
            f"parts: got {len(parts)} of rows {np.shape(found.m_i)}, expected 1 to {len(COLOURS)} "
            f"of one row, with up to {MOST_KEYS} keys"
        )
    with in_look(look):
        figure = new_figure(9.6, 3.3)
        scores, weights, outputs = figure.subplots(1, 3)
        draw_keys(scores, weights, parts, found, look)
        draw_outputs(outputs, parts, found, truth, look)
        figure.legend(*outputs.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def draw_keys(
    scores: Any, weights: Any, parts: Sequence[tuple[Part, Array]], found: Merged, look: Look
) -> None:
    """Bars of the scores under each part's max; of the weights before (outlines) and after."""
    scores.set_title("scores s, and each part's m_s")
    weights.set_title("weights: exp(s - m_s), filled: times w_s")
    for index, (part, weight) in enumerate(parts):
        keys, colour = np.arange(part.start, part.stop), getattr(look, COLOURS[index])
        seen = np.isfinite(part.s)
        scores.bar(keys[seen], part.s[seen], 0.8, color=colour, edgecolor=look.ink)
        if part.l_s:
            scores.hlines(
                part.m_s, part.start - 0.5, part.stop - 0.5, color=look.ink, linewidth=1.6
            )
            before = np.exp(part.s - part.m_s)
            style = {"fill": False, "edgecolor": look.soft, "linestyle": (0, (2, 2))}
            weights.bar(keys, before, 0.8, **style)
            weights.bar(keys, weight * before, 0.8, color=colour, edgecolor=look.ink)
        weights.text(
            (part.start + part.stop - 1) / 2, 1.12, f"w_{index} = {weight:.3g}", ha="center",
            fontsize=8.5, bbox=plain(look),
        )  # fmt: skip
        for axis in (scores, weights) if index else ():
            axis.axvline(part.start - 0.5, color=look.soft, linewidth=0.8, linestyle="--")
    scores.axhline(0, color=look.soft, linewidth=0.6)
    scores.set_ylim(*room(*(part.s for part, _ in parts), [0.0]))
    weights.set_ylim(0, 1.3)
    for axis in (scores, weights):
        axis.set_xlabel("key")
        axis.set_xlim(-0.6, parts[-1][0].stop - 0.4)


def draw_outputs(
    axis: Any, parts: Sequence[tuple[Part, Array]], found: Merged, truth: Array, look: Look
) -> None:
    """The truth as levels; in marks the merge, each part alone, and what is unweighted."""
    axis.set_title("output")
    dims = np.arange(len(truth))
    axis.hlines(truth, dims - 0.38, dims + 0.38, color=look.ink, linewidth=2.2, label="truth")
    shown = [("merged", found.o, "D", look.blue), ("unweighted", found.unweighted, "X", look.red)]
    for index, (part, _) in enumerate(parts):
        colour = getattr(look, COLOURS[index])
        shown.append((f"part {index} alone", part.o, "<>v"[index], colour))
    for place, (label, o, marker, colour) in enumerate(shown):
        across = dims + 0.14 * (place - (len(shown) - 1) / 2)
        axis.plot(
            across, o, marker, color=colour, markersize=6, markeredgecolor=look.ink,
            markeredgewidth=0.6, label=label,
        )  # fmt: skip
    axis.set_ylim(*room(truth, *(o for _, o, _, _ in shown)))
    axis.set_xticks(dims)
    axis.set_xlabel("dimension")
