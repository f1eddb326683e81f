"""A trace as text of 80 columns, and as JSON."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from course.tracing.trace import Array, Step, Trace, max_error, outputs, title
from harness.views.ratios import show_error

WIDTH = 80
LABEL = 12  # columns before the numbers
COLUMN = 11  # columns of a number
PER_LINE = (WIDTH - LABEL) // COLUMN
REMARK = 2  # columns between a number and the remark about it

NAMES = {"online": "Online", "normalised": "source 002", "lite": "Lite"}
GLOSSARY = """\
  s           this row's scores of the tile's keys: q k^T * scale
  m_i         the largest score so far
  alpha       exp(m_old - m_i): what the past is worth under the new max
  p           exp(s - m_i): the keys' weights, not yet divided by their sum
  l_i         the sum of the weights so far: l_old * alpha + sum p
  acc         the weighted sum of v so far: acc_old * alpha + p v
  acc / l_i   Online's output, if there were no more keys
  source 002  the same, normalised at each tile, as in the notes on
              FlashAttention-1 with NumPy (docs/glossary.md#bibliography):
              old * (pre_sum / cur_sum) + p v / cur_sum
  Lite        stage 4's output: softmax of each tile alone, the outputs summed"""


def to_text(trace: Trace) -> str:
    """The whole trace as text, with lines of at most WIDTH characters."""
    steps = trace.steps()
    tiles = [tile(steps, index) for index in range(len(steps))]
    blocks = [head(trace), [GLOSSARY], *tiles, end(trace, steps[-1]), traffic(trace, steps)]
    return "\n\n".join("\n".join(block) for block in blocks)


def head(trace: Trace) -> Iterator[str]:
    """The lines that say what is traced."""
    n, d = trace.k.shape
    walked = f"Query row {trace.row} of 0 to {n - 1} through the online softmax"
    yield f"{walked}: {n} keys, {trace.tile} per tile"
    given = f"{trace.inputs} input, seed {trace.seed}{', causal' if trace.causal else ''}"
    yield f"d = {d}, scale = 1/sqrt(d) = {number(d**-0.5)}, float32, {given}"


def tile(steps: list[Step], index: int) -> Iterator[str]:
    """The values of one tile, one quantity per line."""
    step = steps[index]
    before = steps[index - 1] if index else None
    m_old, l_old = (before.m_i, before.l_i) if before else (-np.inf, 0.0)
    yield f"tile {index}, {title(step)}: k and v loaded, {step.bytes_loaded} bytes"
    yield from numbers("s", step.s)
    if hidden := int(np.isneginf(step.s).sum()):
        yield aside(f"-inf: hidden by the causal mask, so its weight is 0 ({hidden} here)")
    moved = f"was {number(m_old)}" if step.m_i > m_old else "stays: no larger score here"
    yield remark("m_i", step.m_i, moved)
    yield remark("alpha", step.alpha, worth(step.alpha, before))
    yield from numbers("p", step.p)
    total = f"{number(l_old)} * {number(step.alpha)} + {number(step.p.sum())}"
    yield remark("l_i", step.l_i, total)
    yield from numbers("acc", step.acc)
    yield from numbers("acc / l_i", step.o)
    yield from numbers("source 002", step.normalised)
    pre_sum = number(l_old * step.alpha)
    yield aside(f"old * {number(step.keep)}: pre_sum / cur_sum = {pre_sum} / {number(step.l_i)}")
    yield from numbers("Lite", step.lite)
    yield aside(f"its weights so far sum to {number(step.lite_weight)}, and should to 1")


def worth(alpha: Array, before: Step | None) -> str:
    """Say what alpha does to the past."""
    if before is None:
        return "there is no past yet: exp(-inf)"
    if alpha == 1:
        return "the max stays, so the past is worth what it was"
    if alpha == 0:
        return "the past is worth less than float32 can tell"
    return "l_old and acc_old shrink by it"


def end(trace: Trace, last: Step) -> Iterator[str]:
    """The truth, the outputs of the three methods, and the causes of their errors."""
    truth = trace.truth()
    yield f"After all {trace.visible} keys that the row sees, against softmax over all at once"
    yield from numbers("truth", truth)
    for name, o in outputs(last):
        why = "rounding in float32"
        if name == "lite":
            why = f"its weights sum to {number(last.lite_weight)}, 1 for each tile"
            if last.start == 0:
                why = "one tile holds all the keys, so Lite is right"
        yield from numbers(NAMES[name], o)
        yield aside(f"max error {show_error(max_error(o, truth))}: {why}")


def traffic(trace: Trace, steps: list[Step]) -> Iterator[str]:
    """The bytes that were moved."""
    row = trace.q.nbytes
    total = sum(step.bytes_loaded for step in steps)
    tiles = f"{len(steps)} tile{'s' if len(steps) > 1 else ''}"
    yield f"Bytes: {total} of k and v in {tiles}, {row} of q, {row} of o: {total + 2 * row}"
    if skipped := trace.tiles - len(steps):
        never = "tile has" if skipped == 1 else "tiles have"
        yield f"{skipped} {never} no key that the row may see: never loaded (stage 6 does so)"
    yield "A kernel loads a tile once for all the rows of its q block, not once per row."


def number(x: Any) -> str:
    """A number with four decimals, or an exponent where those don't suffice; 0 and -inf."""
    x = float(x)
    if x == 0:
        return "0"
    return f"{x:.4f}" if np.isinf(x) or 1e-3 <= abs(x) < 1e4 else f"{x:.2e}"


def numbers(label: str, values: Array) -> Iterator[str]:
    """A vector after its label, on as many lines as needed."""
    for start in range(0, len(values), PER_LINE):
        cells = "".join(f"{number(x):>{COLUMN}}" for x in values[start : start + PER_LINE])
        yield f"  {label if start == 0 else '':<{LABEL - 2}}{cells}"


def remark(label: str, value: Any, said: str) -> str:
    """A number with its label and a remark."""
    return f"  {label:<{LABEL - 2}}{number(value):>{COLUMN}}{' ' * REMARK}{said}"


def aside(said: str) -> str:
    """A line about the numbers above it."""
    return " " * (LABEL + REMARK) + said


def to_json(trace: Trace) -> str:
    """Every number of the trace as JSON. The score of a hidden key, -inf, is null."""
    steps, truth = trace.steps(), trace.truth()
    n, d = trace.k.shape
    moved = sum(step.bytes_loaded for step in steps)
    data = {
        "n": n, "d": d, "tile": trace.tile, "row": trace.row, "inputs": trace.inputs,
        "seed": trace.seed, "causal": trace.causal, "dtype": str(trace.q.dtype),
        "visible": trace.visible, "scale": d**-0.5, "q": trace.q.tolist(),
        "tiles": [{name: in_json(x) for name, x in vars(step).items()} for step in steps],
        "tiles_skipped": trace.tiles - len(steps), "truth": truth.tolist(),
        "outputs": {
            name: {"o": o.tolist(), "max_error": max_error(o, truth)}
            for name, o in outputs(steps[-1])
        },
        "bytes": {"k_and_v": moved, "q": trace.q.nbytes, "o": trace.q.nbytes},
    }  # fmt: skip
    return json.dumps(data, indent=1, allow_nan=False)


def in_json(value: Any) -> Any:
    """A number, or an array as a list of them; -inf is null."""
    if np.ndim(value):
        return [in_json(x) for x in value]
    return None if np.isneginf(value) else np.asarray(value).item()
