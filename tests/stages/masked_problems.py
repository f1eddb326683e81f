"""The problems that all stages are asked: any size, mask, length, layout and dtype, from a seed.

And tiles small enough for them: an interpreted tile costs the same at any size, so small ones show
more of what tiles can do: the kernels have to be right in whatever tiles they are launched with.
"""

import math
import mmap
import random
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from marks import quickly
from stage_checks import (
    bearable,
    device_of,
    gradients,
    guarded_outputs,
    hidden_keys,
    in_nan,
    most_keys,
    options_of,
    without_collector,
)

from harness.problems.directions import make_output_gradient
from harness.problems.inputs import make_inputs
from harness.problems.problem import Problem
from stages import s06_triton_flash2, s07_triton_training
from stages.common.contract import why_not_dtype

TILES = ((16, 16), (16, 32), (32, 16), (64, 16), (16, 64))  # BLOCK_M, BLOCK_N
TILED = (6, 7, 8)  # stages that can be asked in such tiles
MOST_TILES = 24  # of (16, 16), in a problem

# nq, nk, d, the stride of a row, that of a column: the last element lies past 2^31. "tiles": so do
# tiles, but none is that large by itself
FAR = {
    "tiles": (200, 330, 16, 16_000_000, 1),
    "rows": (40, 130, 16, (1 << 31) // 64 + 64, 1),
    "columns": (40, 70, 20, 1, (1 << 31) // 19 + 64),
}

SIZES = (1, 2, 7, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 127, 200)
HALF = ("float16", "bfloat16")
DIMS = (1, 5, 8, 16, 17, 32, 40, 59, 64, 200, 256)
SPLITS = (1, 2, 3, 7, 18)  # more parts than tiles, too, and than are merged at once
EXAMPLES = quickly(5, range(24))


@dataclass(frozen=True)
class Case:
    """A problem for a stage, how its tensors lie, and in which tiles and parts it is asked."""

    problem: Problem
    layouts: tuple  # of q, k, v and dO: the order of the axes, and the step along each
    tile: tuple[int, int]
    splits: int

    def tensors(self):
        """q, k, v, dO, in a storage of NaN, each in its layout."""
        made = *make_inputs(self.problem), make_output_gradient(self.problem)
        return tuple(in_nan(x, *at) for x, at in zip(made, self.layouts, strict=True))


def can_bear(stage, problem):
    """Whether this takes `stage` no longer than a test should; it does no more than it is for."""
    shape = (problem.b, problem.h, problem.nq, problem.nk, problem.d)
    if problem.nk != most_keys(stage, problem.nk):
        return False
    if stage.STAGE.number not in TILED or stage.STAGE.mode(problem.device) != "interpreted":
        return bearable(stage, problem.device, shape)
    tiles = problem.b * problem.h * math.ceil(problem.nq / 16) * math.ceil(problem.nk / 16)
    return tiles <= MOST_TILES


def make_case(stage, seed, where=lambda problem: True, **fixed):
    """The case of `stage` that `seed` makes: sizes that it can bear, options and dtypes it takes.

    `fixed` are fields of the problem that don't vary.
    """
    number, device = stage.STAGE.number, device_of(stage)
    drawn = random.Random(f"{number} {seed}")
    dtypes = [
        name
        for name in ("float32", "float64", *HALF)
        if not why_not_dtype(stage.STAGE, name, device)
    ]
    takes = stage.STAGE.options
    for _ in range(10_000):
        inputs = drawn.choice(["normal", "peaky", "real"])
        most = 2 if inputs == "real" else 3  # it has one d, and heads that share no keys
        b, hk = drawn.randint(1, most), drawn.randint(1, 2)
        nk, dtype = drawn.choice(SIZES), drawn.choice(dtypes)
        some = [0, nk, nk // 16 * 16, drawn.randint(0, nk)]
        lengths = tuple(drawn.choice(some) for _ in range(b))
        fields = {
            "inputs": inputs, "seed": drawn.randrange(2**31),
            "b": b, "h": hk * (drawn.randint(1, 3) if "gqa" in takes else 1), "hk": hk,
            "nq": drawn.choice(SIZES), "nk": nk, "d": drawn.choice(DIMS), "dtype": dtype,
            "precision": "ieee" if dtype == "float32" else dtype,
            "causal": "causal" in takes and drawn.random() < 0.5,
            "seqlens_k": lengths if "seqlens_k" in takes and drawn.random() < 0.5 else None,
            "direction": "train" if stage.STAGE.gradients else "fwd", "device": device,
        } | fixed  # fmt: skip
        if fields["inputs"] == "real":
            fields |= {"d": 32, "h": fields["hk"]}
        problem = Problem(**fields)
        layouts = tuple(
            (tuple(drawn.sample(range(4), 4)), tuple(drawn.choice([1, 1, 2]) for _ in range(4)))
            for _ in range(4)
        )
        case = Case(problem, layouts, drawn.choice(TILES), drawn.choice(SPLITS))
        if can_bear(stage, problem) and where(problem):
            return case
    raise AssertionError(f"no such problem that stage {number} can bear")


# inputs, b, h, hk, nq, nk, d, causal, seqlens_k, the tile, and the parts: tiles begin and end one
# key or row before and after what a mask lets be seen, and right there; blocks within a group
BORDERS = [
    ("normal", 1, 1, 1, 70, 5, 8, False, None, (64, 16), 1),  # delta's own tiles have 64 rows
    ("normal", 2, 1, 1, 17, 33, 8, True, (0, 20), (32, 16), 1),
    ("normal", 1, 1, 1, 33, 50, 8, True, None, (16, 16), 2),
    ("normal", 1, 1, 1, 33, 47, 16, True, None, (16, 16), 5),
    ("normal", 1, 4, 2, 40, 9, 16, True, None, (16, 16), 1),
    ("normal", 1, 3, 1, 15, 32, 8, True, None, (16, 16), 1),  # a group's rows fill several blocks
    ("normal", 2, 2, 1, 32, 40, 8, False, (33, 16), (16, 16), 2),
    # more parts than are merged at once, and a max that rises in the last of them
    ("peaky", 1, 1, 1, 2, 280, 64, False, None, (16, 16), 18),
    ("normal", 1, 3, 1, 7, 100, 8, False, None, (32, 16), 2),
]


def border_case(stage, index):
    """The case of BORDERS[index], laid out in some way; dO so that kernels read it as it lies."""
    *sizes, causal, seqlens_k, tile, splits = BORDERS[index]
    fields = dict(zip(("inputs", "b", "h", "hk", "nq", "nk", "d"), sizes, strict=True))
    case = make_case(
        stage, index, dtype="float32", precision="ieee", causal=causal,
        seqlens_k=seqlens_k, **fields,
    )  # fmt: skip
    layouts = *case.layouts[:3], ((2, 0, 1, 3), (1, 1, 2, 1))  # with neighbouring columns
    return replace(case, layouts=layouts, tile=tile, splits=splits)


def ask(stage, case, tensors, lse=True):
    """{"o": ..., and "lse" and "dq", "dk", "dv" where the stage has them} of a case's tensors."""
    (*qkv, dO), options = tensors, options_of(case.problem)
    tiled = [stage] if hasattr(stage, "candidates") else []
    with in_tiles(case.tile, *tiled), guarded_outputs(), without_collector():
        if stage.STAGE.gradients:
            return dict(zip(("o", "dq", "dk", "dv"), gradients(stage, *qkv, dO, **options)))
        if stage.STAGE.number == 6 and lse:
            return dict(zip(("o", "lse"), stage.attend_with_lse(*qkv, **options)))
        if stage.STAGE.number == 8:
            return in_parts(stage, *qkv, case, lse, **options)
        return {"o": stage.attend(*qkv, **options)}


def in_parts(stage, q, k, v, case, lse, causal=False, seqlens_k=None):
    """o and, if asked for, the lse in base e, of stage 8, in the parts and the tiles of a case."""
    found = torch.empty(q.shape[:3], device=q.device) if lse else None  # NaN, guarded by `ask`
    config = a_tile(*case.tile, q.shape[3])
    o = stage.forward(q, k, v, causal, seqlens_k, found, splits=case.splits, config=config)
    return {"o": o, "lse": found * math.log(2)} if lse else {"o": o}


def a_tile(M, N, d=16):
    """A launch configuration of stage 8, of BLOCK_M x BLOCK_N."""
    BLOCK_D = max(16, 1 << (d - 1).bit_length())
    return {"BLOCK_M": M, "BLOCK_N": N, "BLOCK_D": BLOCK_D, "num_warps": 4, "num_stages": 2}


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
