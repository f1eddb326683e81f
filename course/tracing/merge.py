"""The merge of stage 8 in NumPy: what each part of the keys leaves, and what all of it comes to.

    each part s, by itself, over its own tiles of keys, as `trace.walk`:
        m_s, l_s, acc_s              acc_s is not divided by l_s
    m_i = max m_s
    w_s = exp(m_s - m_i)             what a part is worth beside the others: the correction
    o = sum w_s acc_s / sum w_s l_s

It is stage 5's correction, made once at the end instead of at each tile. (Flash-Decoding, Dao et
al. 2023.) Stage 8 keeps m of scores that are not scaled. The Triton stage's own parts are
held to these (tests/stages/test_states.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from course.tracing.trace import Array, check, divided, exp_from, walk


@dataclass(frozen=True)
class Part:
    """What one part of the keys leaves; q's leading dimensions, here (...), are every field's."""

    start: int  # the part holds the keys from start to stop - 1: whole tiles, or none
    stop: int
    s: Array  # (..., keys): scaled scores, -inf where the row doesn't see the key
    m_s: Array  # (...): the largest of them, -inf where the row sees no key of the part
    l_s: Array  # (...): the sum of exp(s - m_s)
    acc_s: Array  # (..., d): the sum of exp(s - m_s) v

    @property
    def o(self) -> Array:
        """(..., d): the output if there were no other part."""
        return divided(self.acc_s, self.l_s[..., None])


@dataclass(frozen=True)
class Merged:
    """The parts of a row, and what they come to."""

    parts: Sequence[Part]
    m_i: Array  # (...): the largest m_s
    w: Sequence[Array]  # (...) each: exp(m_s - m_i), what a part is worth
    l_i: Array  # (...): the sum of w_s l_s
    acc: Array  # (..., d): the sum of w_s acc_s
    unweighted: Array  # (..., d): the mistake, sum acc_s / sum l_s

    @property
    def o(self) -> Array:
        """(..., d): the output."""
        return divided(self.acc, self.l_i[..., None])


def shares(tiles: int, splits: int) -> Iterator[tuple[int, int]]:
    """The first and the last tile + 1 of each part: whole tiles, shared out evenly, in order."""
    for split in range(splits):
        start = split * (tiles // splits) + min(split, tiles % splits)
        yield start, start + tiles // splits + (split < tiles % splits)


def split(q: Array, k: Array, v: Array, tile: int, splits: int, visible: Any = None) -> Merged:
    """Walk each of `splits` parts of the keys by itself, and merge them.

    q, k, v, tile and visible as in `trace.walk`. The tiles that any row sees are shared out; where
    there are fewer than parts, the last parts are empty. Raises ValueError as `walk` does, and
    where there is no part.
    """
    q, k, v = (np.asarray(x) for x in (q, k, v))
    seen = np.broadcast_to(check(q, k, v, tile, visible), q.shape[:-1])
    if splits < 1:
        raise ValueError(f"splits: got {splits}, expected 1 part or more")
    dtype = np.result_type(q, k, v, np.float32)
    last, parts = int(seen.max()), []
    for first_tile, end_tile in shares(-(-last // tile), splits):
        start, stop = (min(at * tile, k.shape[-2]) for at in (first_tile, end_tile))
        keys, values = k[..., start:stop, :], v[..., start:stop, :]
        here = np.clip(seen - start, 0, stop - start)
        steps = walk(q, keys, values, tile, here) if stop > start else []
        s = np.concatenate([np.zeros((*seen.shape, 0), dtype), *(step.s for step in steps)], -1)
        m_s, l_s = np.full(seen.shape, -np.inf, dtype), np.zeros(seen.shape, dtype)
        state = (m_s, l_s, np.zeros(q.shape, dtype))
        if steps:
            state = (steps[-1].m_i, steps[-1].l_i, steps[-1].acc)
        parts.append(Part(start, stop, s, *state))
    return merge(parts)


def merge(parts: Sequence[Part]) -> Merged:
    """What the parts of a row come to."""
    m_i = np.max([part.m_s for part in parts], 0)
    w = [exp_from(part.m_s, m_i) for part in parts]
    l_i, acc = np.zeros_like(parts[0].l_s), np.zeros_like(parts[0].acc_s)
    for part, weight in zip(parts, w, strict=True):
        l_i, acc = l_i + weight * part.l_s, acc + weight[..., None] * part.acc_s
    accs, sums = (sum(x) for x in zip(*((part.acc_s, part.l_s) for part in parts), strict=True))
    return Merged(parts, m_i, w, l_i, acc, divided(accs, np.asarray(sums)[..., None]))
