"""Compute what each known mistake would output, to recognise a wrong output by its numbers.

All in float64, however the code that made the mistake is written. A prediction holds NaN where the
value is unknown; infinity stands for any number that isn't finite.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch

from course.lab.layouts import stored
from harness.problems.directions import make_output_gradient
from harness.problems.inputs import make_inputs
from harness.problems.problem import Problem

Tensor = torch.Tensor
Prediction = dict[str, Tensor]  # o, dq, dk, dv, as far as a mistake changes them

TILES = (64, 32, 128, 16)  # keys; the ladder's own first
MERGED = 16 * 64  # keys of as many parts as stage 8 merges at once, each one tile
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
    return Asked(
        q, k, v, make_output_gradient(problem).double(), hidden(problem), problem.h // problem.hk
    )


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
    p = exp_from(s, s.amax(-1, keepdim=True))
    return p @ v / p.sum(-1, keepdim=True).clamp_min(1e-300)


def exp_from(s: Tensor, top: Tensor) -> Tensor:
    """exp(s - top), and 0 where s is -inf."""
    return torch.exp(s - top.masked_fill(top.isneginf(), 0.0))


def online(s: Tensor, v: Tensor, tile: int, acc_too: bool = True, l_too: bool = True) -> Tensor:
    """Compute the online softmax by tiles; acc, l or both may miss their rescale."""
    m = torch.full_like(s[..., :1], -torch.finfo(torch.float32).max)
    total, acc = torch.zeros_like(m), torch.zeros(*s.shape[:-1], v.shape[-1], dtype=s.dtype)
    for start in range(0, s.shape[-1], tile):
        part = s[..., start : start + tile]
        m_new = torch.maximum(m, part.amax(-1, keepdim=True))
        alpha, p = torch.exp(m - m_new), torch.exp(part - m_new)
        total = (total * alpha if l_too else total) + p.sum(-1, keepdim=True)
        acc = (acc * alpha if acc_too else acc) + p @ v[..., start : start + tile, :]
        m = m_new
    return acc / total


def unweighted(s: Tensor, v: Tensor, tile: int) -> Tensor:
    """Merge parts of `tile` keys as if all of them had the same max."""
    parts = [exp_from(x, x.amax(-1, keepdim=True)) for x in s.split(tile, -1)]
    acc = sum(p @ each for p, each in zip(parts, v.split(tile, -2), strict=True))
    total: Tensor = acc / sum(p.sum(-1, keepdim=True) for p in parts)
    return total


def forward(problem: Problem, layout: str) -> Iterator[tuple[str, Prediction]]:
    """Yield each mistake of a forward pass, in words, and the output that it gives."""
    for says, o in outputs(problem, ask(problem, layout), layout):
        yield says, {"o": o}


def outputs(problem: Problem, a: Asked, layout: str) -> Iterator[tuple[str, Tensor]]:
    """Yield what `forward` yields, with bare outputs."""
    (k, v), s, d, nk = a.spread(), a.scores(), problem.d, problem.nk
    padded = max(16, 1 << (d - 1).bit_length())
    for factor, says in {
        1.0: "the scores are not scaled: times d ** -0.5",
        1 / d: "scaled by 1/d, or twice: the scale is d ** -0.5, once",
        d**0.5: "scaled by d ** 0.5, the inverse: the scale is d ** -0.5",
        padded**-0.5: "scaled by the padded d (BLOCK_D): the scale is d ** -0.5, with the true d",
        a.scale / LOG2_E: "exp2 without log2(e): 2^x is exp(x ln 2), so fold log2(e) into scale",
        a.scale * LOG2_E: "log2(e) in the scale, but exp in place of exp2",
    }.items():
        if not math.isclose(factor, a.scale):
            yield f"wrong scale: {says}", softmax(s * (factor / a.scale), v)
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
            "2^(m_s - m)", unweighted(s, v, tile),
        )  # fmt: skip
        for acc_too, l_too, says in (
            (False, True, "acc is not rescaled: multiply it by alpha before adding a tile"),
            (True, False, "l is not rescaled: multiply it by alpha before adding a tile's sum"),
            (False, False, "neither acc nor l is rescaled by alpha"),
        ):
            yield f"no rescale: {says} {of}", online(s, v, tile, acc_too, l_too)
        if extra := -nk % tile:  # padded keys: loaded as zeros, so that their score is 0
            zeros = s.new_zeros(*s.shape[:-1], extra), v.new_zeros(*v.shape[:-2], extra, d)
            yield (
                f"ragged tail unmasked: keys past the last weigh something {of}; their score "
                "must be -inf, not 0",
                softmax(torch.cat((s, zeros[0]), -1), torch.cat((v, zeros[1]), -2)),
            )
    largest = torch.finfo(torch.float32).max
    over = (s.amax(-1, keepdim=True) > math.log(largest)).expand_as(a.q)
    yield (
        "no max: exp of a score past 88 overflows float32; subtract the row's max first",
        softmax(s, v).masked_fill(over, math.inf),
    )
    top = s.amax(-1, keepdim=True)
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
    if problem.causal or problem.seqlens_k is not None:
        yield from masked(problem, a)
    if a.group > 1:
        repeats = (1, a.group, 1, 1)
        other = replace(a, k=a.k.repeat(repeats), v=a.v.repeat(repeats), group=1)
        yield (
            "grouped heads in the wrong order: query head h reads key head h // group, not h % "
            "(key heads)", softmax(other.scores(), other.v),
        )  # fmt: skip
    if layout == "strided":
        yield from strides(a)


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


def strides(a: Asked) -> Iterator[tuple[str, Tensor]]:
    """Yield the mistakes of assumed strides, for one tensor or all."""
    for names, last in product(("qkv", "q", "k", "v"), (False, True)):
        given = {}
        for name in names:
            x = getattr(a, name)
            order = (*x.stride()[:3], 1) if last else torch.empty(x.shape, device="meta").stride()
            given[name] = x.as_strided(x.shape, order)
        other, what = replace(a, **given), "q, k and v" if names == "qkv" else names
        says = "neighbouring columns" if last else "a contiguous (B, H, N, d)"
        yield (
            f"stride assumed: {what} read as {says}; every address is index times stride",
            softmax(other.scores(), other.spread()[1]),
        )


def gradients(problem: Problem, layout: str) -> Iterator[tuple[str, Prediction]]:
    """Yield each mistake of a backward pass, in words, and the gradients that it gives."""
    a = ask(problem, layout)
    once, root = 1.0, 1 / a.scale
    for says, dO, delta_too, dq_factor, dk_factor, divided in (
        ("gradient ignoring dO: it is as for a sum of all outputs", a.dO * 0 + 1, 1, once, once, 1),
        ("delta is missing: ds = p (dp - delta)", a.dO, 0, once, once, 1),
        ("dq is not scaled: s has the factor scale", a.dO, 1, root, once, 1),
        ("dk is not scaled: s has the factor scale", a.dO, 1, once, root, 1),
        ("dq and dk are not scaled: s has the factor scale", a.dO, 1, root, root, 1),
        ("dq and dk are scaled twice", a.dO, 1, a.scale, a.scale, 1),
        ("P is not divided by its sum: exp(s - lse), not exp(s - m)", a.dO, 1, once, once, 0),
    ):
        s, (k, v) = a.scores(), a.spread()
        p = exp_from(s, s.amax(-1, keepdim=True))
        right = p / p.sum(-1, keepdim=True).clamp_min(1e-300)
        delta = ((right @ v) * dO).sum(-1, keepdim=True) * delta_too
        p = right if divided else p
        ds = p * (dO @ v.mT - delta) * a.scale
        dk, dv = (x.unflatten(1, (-1, a.group)).sum(2) for x in (ds.mT @ a.q, p.mT @ dO))
        yield says, {"dq": ds @ k * dq_factor, "dk": dk * dk_factor, "dv": dv}
