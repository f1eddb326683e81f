"""The online softmax in NumPy: the state of stage 5's kernel after each tile of keys.

    m_i = -inf, l_i = 0, acc = 0
    for each tile of keys:
        s = q k^T * scale
        m_new = max(m_i, max s)
        alpha = exp(m_i - m_new)         rescales the past to the new max
        p = exp(s - m_new)
        l_i = l_i * alpha + sum p
        acc = acc * alpha + p v
    o = acc / l_i

After every tile, o is the exact attention over the keys so far: l_i and acc are the sums of
exp(s - m_i) and exp(s - m_i) v over all of them, since multiplying by alpha turns exp(s - m_old) of
any key into exp(s - m_new). (Milakov and Gimelshein 2018, algorithm 3; FlashAttention, Dao et al.
2022, algorithm 1.) Two other methods are traced as well: source 002's form, normalised at every
step, and stage 4's mistake. tests/stages/test_states.py compares the Triton stages' m_i, l_i and
acc with these.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.problems.problem import Problem

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Step:
    """The values computed for one tile of keys, and the state after it.

    All fields have q's leading dimensions, written (...): () where q is one row. All but the counts
    are arrays of one dtype, float32 or float64; s and m_i are scaled scores, for exp (not exp2).
    """

    start: int  # the keys of the tile are start to stop - 1
    stop: int
    bytes_loaded: int  # of k and v: the whole tile, also where a mask hides a part of it
    s: Array  # (..., keys): scaled scores, -inf where the row doesn't see the key
    m_i: Array  # (...): the largest score so far
    alpha: Array  # (...): exp(m_old - m_i); 0 at the first tile, where there is no past
    p: Array  # (..., keys): exp(s - m_i)
    l_i: Array  # (...): the sum of exp(s - m_i) so far
    acc: Array  # (..., d): the sum of exp(s - m_i) v so far
    o: Array  # (..., d): acc / l_i, the output if there were no more keys
    keep: Array  # (...): pre_sum / cur_sum, by which source 002's form scales its old result
    normalised: Array  # (..., d): source 002's form of o: old * keep + p v / cur_sum
    lite_p: Array  # (..., keys): softmax of this tile's scores alone, as stage 4 has it
    lite: Array  # (..., d): the sum of lite_p v so far
    lite_weight: Array  # (...): the sum of lite_p so far; 1 would be right


def walk(q: Array, k: Array, v: Array, tile: int, visible: Any = None) -> list[Step]:
    """Go through the keys, `tile` of them at a time, and return the state after each tile.

    q is one row (d,), or rows (..., M, d); k and v are (Nk, d), or have q's leading dimensions
    before M: (..., Nk, d). `visible` is how many keys, counted from the first, each row sees: a
    number for all, an array (...) for each of q's rows, or None for Nk. Tiles that no row sees are
    skipped, so there may be none. Computed in float64 if any input is, else in float32.

    Raises ValueError where shapes don't fit, `tile` is below 1, or `visible` is outside 0 to Nk.
    """
    q, k, v = (np.asarray(x) for x in (q, k, v))
    seen = check(q, k, v, tile, visible)
    size = k.itemsize + v.itemsize
    dtype = np.result_type(q, k, v, np.float32)
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    scale = dtype.type(q.shape[-1] ** -0.5)

    rows = q.shape[:-1]
    m_i = np.full(rows, -np.inf, dtype)  # (...)
    l_i = lite_weight = np.zeros(rows, dtype)  # (...)
    acc = normalised = lite = np.zeros(q.shape, dtype)  # (..., d)
    steps = []
    for start in range(0, int(seen.max()), tile):
        stop = min(start + tile, k.shape[-2])
        k_tile, v_tile = k[..., start:stop, :], v[..., start:stop, :]  # (..., keys, d)
        s = q @ np.swapaxes(k_tile, -1, -2) * scale  # (..., keys)
        s = np.where(np.arange(start, stop) < seen[..., None], s, dtype.type(-np.inf))
        m_new = np.maximum(m_i, s.max(-1))  # (...)
        alpha = exp_from(m_i, m_new)  # (...)
        p = exp_from(s, m_new[..., None])  # (..., keys)
        pre_sum = l_i * alpha  # (...)
        cur_sum = pre_sum + p.sum(-1)  # (...)
        acc = acc * alpha[..., None] + p @ v_tile  # (..., d)
        m_i, l_i = m_new, cur_sum

        keep = divided(pre_sum, cur_sum)  # (...)
        normalised = normalised * keep[..., None] + divided(p @ v_tile, cur_sum[..., None])

        lite_p = exp_from(s, s.max(-1)[..., None])  # (..., keys)
        lite_p = divided(lite_p, lite_p.sum(-1)[..., None])
        lite = lite + lite_p @ v_tile
        lite_weight = lite_weight + lite_p.sum(-1)

        steps.append(
            Step(
                start, stop, k_tile.size * size, s, m_i, alpha, p, l_i, acc,
                divided(acc, l_i[..., None]), keep, normalised, lite_p, lite, lite_weight,
            )
        )  # fmt: skip
    return steps


def exp_from(x: Array, top: Array) -> Array:
    """exp(x - top), and 0 where top is -inf: no key is seen yet, and -inf - -inf would be NaN."""
    return np.exp(x - np.where(np.isneginf(top), top.dtype.type(0), top))


def divided(x: Array, total: Array) -> Array:
    """x / total, and 0 where the total is 0: a row that sees no key gives 0."""
    return x / np.where(total == 0, total.dtype.type(1), total)


def attention(q: Array, k: Array, v: Array, visible: Any = None) -> Array:
    """The truth: softmax over all the keys at once, in float64. Arguments and errors as `walk`'s.

    Returns (..., d) float64.
    """
    q, k, v = (np.asarray(x) for x in (q, k, v))
    seen = check(q, k, v, 1, visible)
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    s = q @ np.swapaxes(k, -1, -2) * q.shape[-1] ** -0.5  # (..., Nk)
    s = np.where(np.arange(k.shape[-2]) < seen[..., None], s, -np.inf)
    p = exp_from(s, s.max(-1)[..., None])  # (..., Nk)
    return np.asarray(divided(p, p.sum(-1)[..., None]) @ v)


def causal_keys(row: int, nq: int, nk: int) -> int:
    """How many keys query `row` sees under a causal mask: those up to row + Nk - Nq."""
    return max(0, row + nk - nq + 1)


def max_error(o: Array, truth: Array) -> float:
    """The largest |o - truth|."""
    return float(np.abs(o.astype(np.float64) - truth).max())


def check(q: Array, k: Array, v: Array, tile: int, visible: Any) -> Array:
    """How many keys each row sees, (...) or (); ValueError where the arguments don't fit."""
    if q.ndim < 1 or k.ndim < 2 or q.shape[-1] != k.shape[-1] or not q.size:
        raise ValueError(f"q, k: got {q.shape} and {k.shape}, expected (..., d) and (Nk, d)")
    if v.shape != k.shape or k.shape[-2] < 1:
        raise ValueError(f"k, v: got {k.shape} and {v.shape}, expected one shape, of 1 key or more")
    if k.ndim > 2 and k.shape[:-2] != q.shape[:-2]:
        raise ValueError(f"k: got {k.shape}, expected {q.shape[:-2]} before its keys, as in q")
    if tile < 1:
        raise ValueError(f"tile: got {tile}, expected 1 key or more")
    nk = k.shape[-2]
    seen = np.asarray(nk if visible is None else visible)
    if seen.shape not in ((), q.shape[:-1]):
        raise ValueError(f"visible: got {seen.shape}, expected a number, or {q.shape[:-1]}")
    if seen.min() < 0 or seen.max() > nk:
        raise ValueError(f"visible: got {seen.min()} to {seen.max()}, expected 0 to {nk} keys")
    return seen


@dataclass(frozen=True)
class Trace:
    """The inputs of a trace of one query row.

    q (d,), k and v (n, d), all float32; `row` of n queries; `inputs` and `seed` as in Problem.
    """

    row: int
    tile: int
    inputs: str
    seed: int
    causal: bool
    q: Array
    k: Array
    v: Array

    @property
    def visible(self) -> int:
        """How many keys the row sees."""
        n = len(self.k)
        return causal_keys(self.row, n, n) if self.causal else n

    @property
    def tiles(self) -> int:
        """The number of tiles, including those never loaded."""
        return -(-len(self.k) // self.tile)

    def steps(self) -> list[Step]:
        """The state after each tile, in float32 as the stages compute."""
        return walk(self.q, self.k, self.v, self.tile, self.visible)

    def truth(self) -> Array:
        """The exact output, (d,) float64."""
        return attention(self.q, self.k, self.v, self.visible)


def title(step: Step) -> str:
    """The keys of a tile: 'keys 2 to 3', 'key 8'."""
    last = step.stop - 1
    return f"key {last}" if step.start == last else f"keys {step.start} to {last}"


def outputs(step: Step) -> Sequence[tuple[str, Array]]:
    """The outputs after a step, (..., d), each with the name of its method."""
    return (("online", step.o), ("normalised", step.normalised), ("lite", step.lite))


def make_trace(
    n: int, d: int, tile: int, row: int, *, inputs: str = "normal", seed: int = 0,
    causal: bool = False,
) -> Trace:  # fmt: skip
    """Make a trace of query `row` of n queries and n keys, one head, float32, as in `ladder run`.

    `inputs` is 'normal' or 'peaky'.
    """
    from harness.problems.inputs import make_inputs  # torch comes with it

    problem = Problem(inputs, seed, 1, 1, 1, n, n, d, "float32", "ieee", causal, None, "cpu")
    q, k, v = (x[0, 0].numpy() for x in make_inputs(problem))
    return Trace(row, tile, inputs, seed, causal, q[row], k, v)
