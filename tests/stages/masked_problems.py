"""Problems with every mask of the contract, made by hypothesis, and tiles small enough for them.

An interpreted tile costs the same at any size, so small ones show more of what tiles can do: the
kernels have to be right in whatever tiles they are launched with.
"""

import math
import mmap
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from hypothesis import strategies as st
from stage_checks import hidden_keys, in_nan, normal, options_of

from harness.problems.problem import Problem
from stages import s06_triton_flash2, s07_triton_training

TILES = ((16, 16), (16, 32), (32, 16), (64, 16), (16, 64))  # BLOCK_M, BLOCK_N
MOST_TILES = 24  # of (16, 16), in a problem

# nq, nk, d, the stride of a row, that of a column: the last element lies past 2^31. "tiles": so do
# tiles, but none is that large by itself
FAR = {
    "tiles": (200, 330, 16, 16_000_000, 1),
    "rows": (40, 130, 16, (1 << 31) // 64 + 64, 1),
    "columns": (40, 70, 20, 1, (1 << 31) // 19 + 64),
}

sizes = st.one_of(st.sampled_from([1, 15, 16, 17, 31, 32, 33]), st.integers(1, 50))
orders = st.permutations(range(4)).map(tuple)
steps = st.tuples(*[st.sampled_from([1, 1, 2])] * 4)
layouts = st.tuples(orders, steps)


def interpreted_tiles(problem):
    """How many 16 x 16 tiles of scores there are."""
    return problem.b * problem.h * math.ceil(problem.nq / 16) * math.ceil(problem.nk / 16)


@st.composite
def any_problem(draw):
    """A problem of any options."""
    b, hk, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    nq, nk, d = draw(sizes), draw(sizes), draw(st.sampled_from([1, 5, 16, 17, 32, 40]))
    length = st.one_of(st.sampled_from([0, nk, nk // 16 * 16]), st.integers(0, nk))
    return Problem(
        inputs="normal", seed=draw(st.integers(0, 2**32 - 1)), b=b, h=hk * group, hk=hk, nq=nq,
        nk=nk, d=d, dtype=draw(st.sampled_from(["float32", "float16"])), precision="ieee",
        causal=draw(st.booleans()), seqlens_k=draw(st.none() | st.tuples(*[length] * b)),
        device="cpu",
    )  # fmt: skip


problems = any_problem().filter(lambda problem: interpreted_tiles(problem) <= MOST_TILES)


def tensors(problem, laid=(None,) * 4):
    """q, k, v, dO ~ N(0, 1) of a problem, in a storage of NaN, each in its layout."""
    dtype = getattr(torch, problem.dtype)
    shape = (problem.b, problem.h, problem.nq, problem.nk, problem.d)
    q, k, v, dO = normal(shape, problem.seed, dtype, problem.device)
    k, v = (x[:, : problem.hk] for x in (k, v))
    layouts = (layout or () for layout in laid)
    return tuple(in_nan(x, *layout) for x, layout in zip((q, k, v, dO), layouts, strict=True))


def masks(problem):
    """The options of a problem's attend, and its mask, True where a key is not seen."""
    return options_of(problem), hidden_keys(problem)


@contextmanager
def in_tiles(tile, *more):
    """Stages 6 and 7, and `more` modules, in tiles of BLOCK_M x BLOCK_N, all of their kernels."""

    def only(candidates):
        def one(*asked):
            return [{**candidates(*asked)[0], "BLOCK_M": tile[0], "BLOCK_N": tile[1]}]

        return one

    with ExitStack() as stack:
        for module in {s06_triton_flash2, s07_triton_training, *more}:
            stack.enter_context(patch.object(module, "candidates", only(module.candidates)))
        yield


def skipped_by_definition(hidden, heads, tile):
    """(b, heads, q blocks) int32: the KV tiles of each q block that no row of it sees any of."""
    M, N = tile
    b, _, nq, nk = hidden.shape
    blocks, tiles = math.ceil(nq / M), math.ceil(nk / N)
    count = torch.zeros(b, 1, blocks, dtype=torch.int32)
    for block in range(blocks):
        for j in range(tiles):
            pairs = hidden[:, :, block * M : (block + 1) * M, j * N : (j + 1) * N]
            count[:, :, block] += pairs.all(-1).all(-1)
    return count.expand(b, heads, blocks)


def far_away(x, stride_n, stride_d):
    """(1, 1, n, d) float16 `x`, its elements gigabytes apart, in memory that is lent, not held.

    There is as much before it: an offset that wraps reads 0 there, and crashes nothing.
    """
    (n, d), before = x.shape[2:], 1 << 31
    size = x.element_size() * (before + (n - 1) * stride_n + (d - 1) * stride_d + 1)
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's; older Pythons have no name
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    storage = torch.frombuffer(memory, dtype=x.dtype)
    return storage.as_strided((1, 1, n, d), (0, 0, stride_n, stride_d), before).copy_(x)
