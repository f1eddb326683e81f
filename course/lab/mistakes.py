"""Compute what each known mistake would output, to recognise a wrong output by its numbers.

All in float64, however the code that made the mistake is written. A prediction holds NaN where the
value is unknown; infinity stands for any number that isn't finite.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from course.edits import replace_once
from course.lab.labs import source
from course.lab.layouts import stored
from harness.problems.directions import make_output_gradient
from harness.problems.inputs import make_inputs
from harness.problems.problem import Problem

Tensor = torch.Tensor
Prediction = dict[str, Tensor]  # o, dq, dk, dv, as far as a mistake changes them

TILES = (64, 32, 128, 16)  # keys; the ladder's own first
MERGED = 16 * 64  # keys of 16 parts of one tile each: stage 8 merges as many at once
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Asked:
    """A problem's tensors in float64: q, dO (b, h, nq, d), k, v (b, hk, nk, d); hidden: the mask.

    hidden (b, h, nq, nk), True where a row may not see a key; group: query heads of a key head.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dO: Tensor
    hidden: Tensor
    group: int

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)

    def spread(self) -> tuple[Tensor, Tensor]:
        """Return k and v with each head repeated for every query head that it serves."""
        return self.k.repeat_interleave(self.group, 1), self.v.repeat_interleave(self.group, 1)

    def scores(self) -> Tensor:
        """Scaled scores, -inf where hidden: (b, h, nq, nk)."""
        s = self.q @ self.spread()[0].mT * self.scale
        return s.masked_fill(self.hidden, -math.inf)


def ask(problem: Problem, layout: str) -> Asked:
    """Return the tensors that `problem` gives a stage, in `layout`."""
    q, k, v = stored((x.double() for x in make_inputs(problem)), layout)
    mask = torch.nn.functional.pad(hidden(problem), (0, k.shape[2] - problem.nk))
    return Asked(q, k, v, make_output_gradient(problem).double(), mask, problem.h // problem.hk)


def hidden(problem: Problem, shift: int | None = None, longer: int = 0) -> Tensor:
    """Return `problem`'s mask (b, h, nq, nk), maybe with another `shift` or `longer` lengths."""
    offs_m, offs_n = torch.arange(problem.nq)[:, None], torch.arange(problem.nk)[None, :]
    found = torch.zeros(problem.b, problem.h, problem.nq, problem.nk, dtype=torch.bool)
    if problem.causal:
        found |= offs_n > offs_m + (problem.nk - problem.nq if shift is None else shift)
    if problem.seqlens_k is not None:
        found |= offs_n >= torch.tensor(problem.seqlens_k)[:, None, None, None] + longer
    return found


def softmax(s: Tensor, v: Tensor) -> Tensor:
    """softmax(s) v; 0 for a row that sees no key."""
    return weights(s) @ v


def weights(s: Tensor) -> Tensor:
    """softmax(s); 0 for a row that sees no key."""
    p = exp_from(s, s.amax(-1, keepdim=True))
    return p / p.sum(-1, keepdim=True).clamp_min(1e-300)


def exp_from(s: Tensor, top: Tensor) -> Tensor:
    """exp(s - top), and 0 where s is -inf."""
    return torch.exp(s - top.masked_fill(top.isneginf(), 0.0))


# a mistake in the graph of Values -> stage 0's line, and the wrong line in its place
GRAPH = {
    "a product's derivatives are exchanged: that with respect to a factor is the other factor": (
        "(other.data, self.data))", "(self.data, other.data))",
    ),
    "a product's derivatives are 1, as a sum's: that with respect to a factor is the other factor":
        ("(other.data, self.data))", "(1.0, 1.0))"),
    "the derivative of a product with a number is not that number: d(ca)/da = c": (
        "(self,), (other,))", "(self,), (self.data,))",
    ),
    "a parent's gradient is set, not added to: several nodes may use one parent": (
        "parent.grad += ", "parent.grad = ",
    ),
    "node.grad is left out of the chain rule: a parent gets local_grad times node.grad": (
        "parent.grad += local_grad * node.grad", "parent.grad += local_grad",
    ),
    "local_grad is left out of the chain rule: a parent gets local_grad times node.grad": (
        "parent.grad += local_grad * node.grad", "parent.grad += node.grad",
    ),
}  # fmt: skip
SMALL = 1000  # multiplications of scores: a graph of Values is slow
Formulas = dict[str, Callable[..., Tensor]]
RIGHT: Formulas = {
    "p": lambda s, m_new: torch.exp(s - m_new),
    "l": lambda past, alpha, p: past * alpha + p.sum(-1, keepdim=True),
    "acc": lambda past, alpha, pv: past * alpha + pv,
    "m": lambda m, m_new: m_new,
}
NO_ALPHA: Formulas = {
    "l": lambda past, alpha, p: past + p.sum(-1, keepdim=True),
    "acc": lambda past, alpha, pv: past + pv,
}
# a mistake in the online softmax -> the formulas that have it
SLIPS: dict[str, Formulas] = {
    "no rescale: acc is not rescaled: multiply it by alpha before adding a tile": {
        "acc": NO_ALPHA["acc"]
    },
    "no rescale: l is not rescaled: multiply it by alpha before adding a tile's sum": {
        "l": NO_ALPHA["l"]
    },
    "no rescale: neither acc nor l is rescaled by alpha": NO_ALPHA,
    "rescaled too late: multiply acc by alpha before a tile is added, not after": {
        "acc": lambda past, alpha, pv: (past + pv) * alpha
    },
    "acc is set, not added to: at the end it has the last tile's keys alone": {
        "acc": lambda past, alpha, pv: pv
    },
    "l is set, not added to: at the end it is the last tile's sum alone": {
        "l": lambda past, alpha, p: p.sum(-1, keepdim=True)
    },
    "m_i keeps its first value, so that alpha is always 0: set it to m_new after each tile": {
        "m": lambda m, m_new: m
    },
    "no max: p is exp(s), but l and acc are under the max: exp(s - m_new)": {
        "p": lambda s, m_new: torch.exp(s)
    },
    "local softmax: p is divided by its tile's sum; divide once, at the end, by l": {
        "p": lambda s, m_new: weights(s)
    },
}

BLOCKS = tuple(itertools.product((32, 64, 128, 16), (64, 32)))  # rows and keys of stage 6's tiles


@dataclass(frozen=True)
class Bounds:
    """Stage 6's bounds, before they are cut off at 0 and the last valid key, and its mask.

    full, end: from a block's first row, its last row + 1 and Nk - Nq. whole: whether full is
    rounded down to whole tiles. shift: the mask's, from Nk - Nq.
    """

    full: Callable[[int, int, int], int] = lambda first, last, shift: first + shift + 1
    end: Callable[[int, int, int], int] = lambda first, last, shift: last + shift
    whole: bool = True
    shift: Callable[[int], int] = lambda shift: shift


def unshifted_full(first: int, last: int, shift: int) -> int:
    """Return `full` as where Nq and Nk are equal."""
    return first + 1


def unshifted_end(first: int, last: int, shift: int) -> int:
    """Return `end` as where Nq and Nk are equal."""
    return last


BOUNDS = {
    "causal mask without Nk - Nq: the last query must see the last key": Bounds(
        shift=lambda shift: 0
    ),
    "mask off by one: a row sees one key too many (< for <=, or a 1 too many)": Bounds(
        shift=lambda shift: shift + 1
    ),
    "mask off by one: a row misses the last key that it may see": Bounds(
        shift=lambda shift: shift - 1
    ),
    "end without Nk - Nq: a block's last row sees keys up to its own index + Nk - Nq": Bounds(
        end=unshifted_end
    ),
    "end is one too few: the block's last row sees the key at its index + Nk - Nq, too": Bounds(
        end=lambda first, last, shift: last + shift - 1
    ),
    "end is what the block's first row sees: its last one sees the most": Bounds(
        end=lambda first, last, shift: first + shift + 1
    ),
    "full without Nk - Nq: a block's first row sees keys up to its own index + Nk - Nq": Bounds(
        full=unshifted_full
    ),
    "full is one too many: the block's first row doesn't see that key": Bounds(
        full=lambda first, last, shift: first + shift + 2
    ),
    "full is what the block's last row sees: its first one sees the fewest": Bounds(
        full=lambda first, last, shift: last + shift
    ),
    "full and end without Nk - Nq: a row sees keys up to its own index + Nk - Nq": Bounds(
        unshifted_full, unshifted_end
    ),
    "full, end and mask without Nk - Nq: the last query must see the last key": Bounds(
        unshifted_full, unshifted_end, shift=lambda shift: 0
    ),
    "full is not in whole tiles: its last tile is seen twice, once unmasked": Bounds(whole=False),
}


def online(s: Tensor, v: Tensor, tile: int, wrong: Formulas) -> Tensor:
    """Compute the online softmax by tiles, with the formulas `wrong` in place of the right ones."""
    of = RIGHT | wrong
    m = torch.full_like(s[..., :1], -torch.finfo(torch.float32).max)
    total, acc = torch.zeros_like(m), torch.zeros(*s.shape[:-1], v.shape[-1], dtype=s.dtype)
    for part, v_tile in zip(s.split(tile, -1), v.split(tile, -2), strict=True):
        m_new = torch.maximum(m, part.amax(-1, keepdim=True))
        alpha, p = torch.exp(m - m_new), of["p"](part, m_new)
        total, acc = of["l"](total, alpha, p), of["acc"](acc, alpha, p @ v_tile)
        m = of["m"](m, m_new)
    return acc / total


def merged(s: Tensor, v: Tensor, tile: int, factor: float) -> Tensor:
    """Merge parts of `tile` keys, each worth exp(factor (m_s - m)); a factor of 1 is right."""
    parts = s.split(tile, -1)
    tops = [x.amax(-1, keepdim=True) for x in parts]
    top = s.amax(-1, keepdim=True)
    # a part that sees nothing is worth anything, its sums are 0
    worth = [torch.exp(factor * (m - top).masked_fill(m.isneginf(), 0.0)) for m in tops]
    p = [exp_from(x, m) * w for x, m, w in zip(parts, tops, worth, strict=True)]
    acc = sum(each @ values for each, values in zip(p, v.split(tile, -2), strict=True))
    total: Tensor = acc / sum(each.sum(-1, keepdim=True) for each in p)
    return total


def forward(problem: Problem, layout: str) -> Iterator[tuple[str, Prediction]]:
    """Yield each mistake of a forward pass, in words, and the output that it gives."""
    for says, o in outputs(problem, ask(problem, layout), layout):
        yield says, {"o": o[..., : problem.d]}


def outputs(problem: Problem, a: Asked, layout: str) -> Iterator[tuple[str, Tensor]]:
    """Yield what `forward` yields, with bare outputs."""
    (k, v), s, d, nk = a.spread(), a.scores(), a.q.shape[-1], problem.nk
    padded = max(16, 1 << (d - 1).bit_length())
    for factor, says in {
        nk**-0.5: "scaled by Nk ** -0.5: the scale is d ** -0.5",
        1.0: "the scores are not scaled: times d ** -0.5",
        1 / d: "scaled by 1/d, or twice: the scale is d ** -0.5, once",
        d**0.5: "scaled by d ** 0.5, the inverse: the scale is d ** -0.5",
        padded**-0.5: "scaled by the padded d (BLOCK_D): the scale is d ** -0.5, with the true d",
        a.scale / LOG2_E: "exp2 without log2(e): 2^x is exp(x ln 2), so fold log2(e) into scale",
        a.scale * LOG2_E: "log2(e) in the scale, but exp in place of exp2",
    }.items():
        if not math.isclose(factor, a.scale):
            yield f"wrong scale: {says}", softmax(s * (factor / a.scale), v)
    top = s.amax(-1, keepdim=True)
    yield (
        "no max: exp of a score past 88 overflows float32, and below -104 it is 0; subtract the "
        "row's max first",
        softmax(s, v).masked_fill((top > 88.72) | (top < -104) & top.isfinite(), math.inf),
    )
    for tile in (*TILES, MERGED) if nk > MERGED else TILES:
        starts = range(0, nk, tile)
        local = [softmax(s[..., i : i + tile], v[..., i : i + tile, :]) for i in starts]
        of = f"(tiles of {tile} keys)"
        yield (
            f"local softmax: each tile's weights sum to 1 by themselves {of}; divide once, at the "
            "end, by the sum over all keys", torch.stack(local).sum(0),
        )  # fmt: skip
        yield (
            f"merge without weights: a part's sums are under a max of its own {of}; each is worth "
            "2^((m_s - m) * qk_scale)", merged(s, v, tile, 0.0),
        )  # fmt: skip
        yield (
            f"weights without qk_scale: m_s isn't scaled {of}; a part is worth "
            "2^((m_s - m) * qk_scale)", merged(s, v, tile, math.log(2) / a.scale),
        )  # fmt: skip
        for says, wrong in SLIPS.items():
            yield f"{says} {of}", online(s, v, tile, wrong)
        if extra := -nk % tile:
            yield (
                f"ragged tail unmasked: keys past the last weigh something {of}; their score "
                "must be -inf, not 0", padded_keys(s, v, extra),
            )  # fmt: skip
    yield "not divided by l: acc is the output only after that", exp_from(s, top) @ v
    if nk == d:
        yield (
            "K not transposed: k is (keys, d), and s = q k^T; it fits only since there are as many "
            "keys as columns", softmax((a.q @ k * a.scale).masked_fill(a.hidden, -math.inf), v),
        )  # fmt: skip
    lower = 1 << (d.bit_length() - 1)
    if lower != d:
        o = softmax(a.q[..., :lower] @ k[..., :lower].mT * a.scale, v)
        for rest in (math.nan, 0.0):  # the columns past it may hold anything
            seen = torch.arange(d) < lower
            yield (
                f"d not a power of two: columns past {lower} are left out; take the next power of "
                "two and mask the columns past d", o.masked_fill(~seen, rest),
            )  # fmt: skip
    for axis, over in ((-2, "queries"), (1, "heads")):
        yield (
            f"softmax over the {over}: a row's weights sum to 1 over the keys, the last axis",
            torch.softmax(s, axis) @ v,
        )
    if problem.causal or problem.seqlens_k is not None:
        yield from masked(problem, a)
    elif nk > 1:
        yield (
            "mask off by one: a key past the last weighs something: the keys are 0 to Nk - 1, < Nk",
            padded_keys(s, v, 1),
        )
        yield (
            "mask off by one: the last key is left out: the keys are 0 to Nk - 1, < Nk",
            softmax(s[..., :-1], v[..., :-1, :]),
        )
    if a.group > 1:
        repeats = (1, a.group, 1, 1)
        other = replace(a, k=a.k.repeat(repeats), v=a.v.repeat(repeats), group=1)
        yield (
            "grouped heads in the wrong order: query head h reads key head h // group, not h % "
            "(key heads)", softmax(other.scores(), other.v),
        )  # fmt: skip
    if layout == "strided":
        yield from strides(a)


def padded_keys(s: Tensor, v: Tensor, extra: int) -> Tensor:
    """softmax(s) v with `extra` keys loaded as zeros, so that their score is 0."""
    pad = torch.nn.functional.pad
    return softmax(pad(s, (0, extra)), pad(v, (0, 0, 0, extra)))


def masked(problem: Problem, a: Asked) -> Iterator[tuple[str, Tensor]]:
    """Yield the mistakes of a mask."""
    right = problem.nk - problem.nq
    s, v = replace(a, hidden=torch.zeros_like(a.hidden)).scores(), a.spread()[1]
    for shift, longer, says in (
        (right + 1, 0, "mask off by one: a row sees one key too many (< for <=, or a 1 too many)"),
        (right - 1, 0, "mask off by one: a row misses the last key that it may see"),
        (right, 1, "mask off by one: each entry sees one key past its length"),
        (right, -1, "mask off by one: each entry misses its last valid key"),
        (0, 0, "causal mask without Nk - Nq: the last query must see the last key"),
        (problem.nk, 0, "the causal mask is missing"),
        (right, problem.nk, "the lengths seqlens_k are ignored"),
        (problem.nk, problem.nk, "neither mask is there"),
    ):
        seen = ~hidden(problem, shift, longer)
        blind = ~seen.any(-1, keepdim=True)  # a row that sees nothing may give anything
        yield says, softmax(s.masked_fill(~seen, -math.inf), v).masked_fill(blind, math.nan)
    yield from bounded(problem, s, v)
    blind = ~a.hidden.any(-1, keepdim=True)
    yield (
        "the mask is inverted: `hidden` is True where a row may not see a key",
        softmax(s.masked_fill(~a.hidden, -math.inf), v).masked_fill(blind, math.nan),
    )


def bounded(problem: Problem, s: Tensor, v: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the mistakes of stage 6, whose loops go to bounds. s: the scores without any mask.

    All rows of a block see the keys below `full`, unmasked; from there to `end` the mask holds.
    """
    shift = problem.nk - problem.nq
    seen = ~hidden(problem)
    blind = ~seen.any(-1, keepdim=True)  # a row that sees nothing may give anything
    lengths = problem.seqlens_k or (problem.nk,) * problem.b
    offs_n = torch.arange(problem.nk)
    for (says, of), (m, n) in itertools.product(BOUNDS.items(), BLOCKS):
        mask, times = ~hidden(problem, of.shift(shift)), torch.zeros_like(s)
        for (entry, valid), first in itertools.product(enumerate(lengths), range(0, problem.nq, m)):
            last = min(first + m, problem.nq)
            full, end = (
                min(max(bound(first, last, shift), 0), valid) if problem.causal else valid
                for bound in (of.full, of.end)
            )
            full = full // n * n if of.whole else full
            till = full + max(0, -(-(end - full) // n) * n)  # tiles are whole
            rows = (entry, slice(None), slice(first, last))
            times[rows] += (offs_n < -(-full // n) * n).double()
            times[rows] += (mask[rows] & (offs_n >= full) & (offs_n < till)).double()
        if not torch.equal(times, seen.double()):
            yield (
                f"{says} (tiles of {n} keys)",
                softmax(s + times.log(), v).masked_fill(blind, math.nan),
            )


def strides(a: Asked) -> Iterator[tuple[str, Tensor]]:
    """Yield the mistakes of assumed strides: NaN lies between elements, and infinity stands for it.

    A row of q or k with NaN makes all of an output NaN, so that those two look alike.
    """
    for names, last in (("qk", True), ("v", False), ("v", True)):
        given = {}
        for name in names:
            x = getattr(a, name)
            order = (*x.stride()[:3], 1) if last else torch.empty(x.shape, device="meta").stride()
            given[name] = x.as_strided(x.shape, order)
        other = replace(a, **given)
        read = "q or k, or both" if names == "qk" else "v, read as a contiguous (B, H, N, d)"
        read = "v, read as neighbouring columns" if names == "v" and last else read
        o = softmax(other.scores(), other.spread()[1])
        yield (
            f"stride assumed: of {read}; every address is index times stride, along each axis",
            o.masked_fill(o.isnan(), math.inf),
        )


def gradients(problem: Problem, layout: str) -> Iterator[tuple[str, Prediction]]:
    """Yield each mistake of a backward pass, in words, and the gradients that it gives."""
    a = ask(problem, layout)
    s, (k, v), root = a.scores(), a.spread(), 1 / a.scale
    right, lse = weights(s), s.logsumexp(-1, keepdim=True)
    for says, dO, p, delta_too, dq_factor, dk_factor in (
        ("gradient ignoring dO: it is as for a sum of all outputs", a.dO * 0 + 1, right, 1, 1, 1),
        ("delta is missing: ds = p (dp - delta)", a.dO, right, 0, 1, 1),
        ("delta is subtracted twice: dp - delta is there already", a.dO, right, 2, 1, 1),
        ("delta is added: ds = p (dp - delta)", a.dO, right, -1, 1, 1),
        ("dq is not scaled: s has the factor scale", a.dO, right, 1, root, 1),
        ("dk is not scaled: s has the factor scale", a.dO, right, 1, 1, root),
        ("dq and dk are not scaled: s has the factor scale", a.dO, right, 1, root, root),
        ("dq and dk are scaled twice", a.dO, right, 1, a.scale, a.scale),
        ("P is not divided by its sum: exp(s - lse), not exp(s - m)", a.dO,
         exp_from(s, s.amax(-1, keepdim=True)), 1, 1, 1),
        ("P is made by exp, but lse is in base 2: exp2", a.dO, right**LOG2_E, 1, 1, 1),
        ("P is made without lse: 2^(s qk_scale - lse)", a.dO, torch.exp(s), 1, 1, 1),
        ("P is made of scores that are not scaled: 2^(s qk_scale - lse)", a.dO,
         torch.exp2(s * root - lse * LOG2_E), 1, 1, 1),
    ):  # fmt: skip
        delta = ((right @ v) * dO).sum(-1, keepdim=True) * delta_too
        ds = p * (dO @ v.mT - delta) * a.scale
        dk, dv = (x.unflatten(1, (-1, a.group)).sum(2) for x in (ds.mT @ a.q, p.mT @ dO))
        yield says, {"dq": ds @ k * dq_factor, "dk": dk * dk_factor, "dv": dv}
    if problem.b * problem.h * problem.nq * problem.nk * problem.d <= SMALL:
        yield from graphs(a)


def graphs(a: Asked) -> Iterator[tuple[str, Prediction]]:
    """Yield the mistakes of GRAPH, and the gradients that stage 0 with that mistake gives."""
    text = source(0).read_text(encoding="utf-8")
    for says, (right, wrong) in GRAPH.items():
        mutant: dict[str, Any] = {"__name__": "stage 0 with a mistake"}
        made = replace_once(text, right, wrong, says)
        exec(compile(made, "stage 0 with a mistake", "exec"), mutant)
        given = [x.detach().requires_grad_() for x in (a.q, a.k, a.v)]
        grads = torch.autograd.grad(mutant["attend"](*given), given, a.dO)
        yield says, dict(zip(("dq", "dk", "dv"), grads, strict=True))


def likely(name: str, start: int, got: float, bounds: bool) -> str:
    """Say where to look, if `name` is the first state of the online softmax that is wrong.

    `start`: the first key of the tile after which it is. Each state needs those before it. bounds:
    of stage 6, where the mask and the bounds of the loops are the student's.
    """
    if bounds:
        return ": has each tile its mask, and one visit? look at the mask and the bounds"
    if name == "m_i" and start == 0:
        return ": look at s, its scale and its mask"
    if name == "m_i":
        return ": is m_new the larger of m_i and the tile's max, and has each tile its own keys?"
    if name == "l_i" and start == 0 and not math.isfinite(got):
        return (
            ": m_i began as the lowest number, so alpha must be exp(m_i - m_new), which is 0, and "
            "p exp(s - m_new); with m_i and m_new exchanged they overflow"
        )
    if name == "l_i":
        return ": m_i is right, so look at p, at alpha, and at the sum over the keys"
    return ": l_i is right, so look at acc alone, and at v: keys past the last are loaded as 0"
