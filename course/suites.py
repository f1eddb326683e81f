"""Named suites: the problems of the sources' tables and pictures, all sized for a GPU.

For `ladder run --suite NAME`:

table-4.1   every stage at d = 16, full work and one query row (the source's Python columns are
            one row, its GPU columns all rows)
table-4.2   time and memory at d = 64, one head as in the source, and 32; precision matched
table-4.3   the error of Lite and Online as N grows, in IEEE and TF32
table-4.4   arithmetic intensity of three kernels and of one fused kernel

For `ladder bench --suite NAME`, in float16, with and without the mask:

001-forward, 001-train, 001-memory   the shapes of source 001
004                                  the shapes of source 004: 16384 tokens, 2048 hidden

in bfloat16, with and without:

001-train-bf16, 004-bf16             the same shapes

and in bfloat16, without (SDPA's backends refuse a causal mask where Nq != Nk):

decode          few query rows against thousands of cached keys, on some shapes in pages too
decode-masks    stage 8 alone, eight rows on some of those shapes: no mask, causal, key lengths

and in bfloat16, with and without:

hopper-odd      stage 9 alone: N that fits its tiles, N that doesn't, grouped heads, key lengths
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Final

from harness.isolation.roster import StageInfo
from harness.problems.problem import PEERS_FROM, Problem
from harness.runs.plan import Cell, Sizes, Takes, fits, make_problems, plan_grid

IEEE, TF32, HALF = ("float32", "ieee"), ("float32", "tf32"), ("float16", "float16")
BF16, DIRECTIONS = "bfloat16", ("fwd", "bwd", "train")
SOURCE_001: Final = Sizes(tokens=0, hidden=0, b=2, h=4)
SOURCE_004: Final = Sizes(tokens=16384, hidden=2048)
SHORT, LONG = (512, 1024, 2048, 4096, 8192), (512, 1024, 2048, 4096, 8192, 16384)
# decode: (b, h, hk, nk, d), the sizes of pages
CACHED: Final = (
    ((1, 32, 32, 8192, 128), ()),
    ((1, 32, 8, 8192, 128), (16, 64, 256)),
    ((16, 32, 8, 8192, 128), (16, 64, 256)),
    ((64, 32, 8, 8192, 128), (16, 64)),
    ((128, 32, 8, 4096, 128), ()),
    ((1, 32, 8, 131072, 128), (16, 64)),
    ((16, 16, 1, 8192, 128), ()),
    ((8, 64, 8, 16384, 64), (16, 64)),
)
ROWS, MORE_ROWS = (1, 8), (2, 4, 16)  # numbers of queries: for all shapes; for two shapes only
# stages 6 and 8, without and with split keys, and the fused peers; those of COMPILED, which compile
# for each shape, are left out for MORE_ROWS
DECODERS, COMPILED = (6, 8, 100, 101, 102, 103, 106, 108), (103, 106)


@dataclass(frozen=True)
class Suite:
    """A suite of `command`: its problems, the stages measured on them, and whether in turns.

    Where `takes` is None, they are the ladder's own stages, for `ladder bench` its default ones.
    """

    command: str
    problems: Callable[[Problem], list[Problem]]  # from a problem with the inputs, seed and device
    takes: Takes | None = None
    paired: bool = True

    def cells(self, stages: Sequence[StageInfo], base: Problem) -> list[Cell]:
        """The cells of the stages that take part; `base` gives seed and device."""
        takes = self.takes or only(*range(PEERS_FROM))
        cells = plan_grid(stages, self.problems(base), self.paired)
        return [cell for cell in cells if takes(cell.stage, cell.problem)]


def only(*numbers: int) -> Takes:
    """Accept the stages with these numbers, on any problem."""
    return lambda stage, _: stage.number in numbers


def like_for_like(stage: StageInfo, problem: Problem) -> bool:
    """Table 4.2: 3 and 5; 8 for one head, which leaves most of a GPU idle; peers at that precision.

    No fused peer follows torch's TF32 switch, so that the one that takes float32 computes the same
    with it and without. SDPA's math backend follows it, but it is torch's own products, as stage 3
    is, and is measured in IEEE only.
    """
    if stage.number < PEERS_FROM:
        return stage.number in ((3, 5, 8) if problem.h == 1 else (3, 5))
    able = stage.why_skip(problem) is None and not stage.few_queries
    return able and problem.precision != "tf32"


def decodes(stage: StageInfo, problem: Problem) -> bool:
    """Whether a stage is measured on a problem of the decode suite."""
    left_out = problem.nq in MORE_ROWS and stage.number in COMPILED
    return stage.number in DECODERS and not left_out and fits(stage, problem)


def sized(
    base: Problem, ns: Sequence[int], d: int = 64, nqs: Sequence[int | None] = (None,),
    hs: Sequence[int] = (1,), dtypes: Sequence[tuple[str, str]] = (IEEE,),
) -> list[Problem]:  # fmt: skip
    """`base` with each number of heads, dtype and precision, nq (None: N), and N."""
    return [
        replace(base, nq=nq or n, nk=n, d=d, h=h, hk=h, dtype=dtype, precision=precision)
        for h, (dtype, precision), nq, n in product(hs, dtypes, nqs, ns)
    ]


def halves(
    directions: Sequence[str], ds: Sequence[int], ns: Sequence[int], sizes: Sizes, base: Problem,
    dtype: str = "float16",
) -> list[Problem]:  # fmt: skip
    """`base` in a 16-bit dtype, in each direction, with and without the mask, at each d and N."""
    half = replace(base, dtype=dtype, precision=dtype)
    return make_problems(half, directions, (False, True), ds, ns, sizes)


def cached(base: Problem) -> list[Problem]:
    """Problems of few query rows, ROWS first; keys contiguous (page size None) and in pages."""
    bf16 = replace(base, dtype="bfloat16", precision="bfloat16")
    return [
        replace(bf16, b=b, h=h, hk=hk, nq=nq, nk=nk, d=d, page_size=page_size)
        for shapes, rows in ((CACHED, ROWS), (CACHED[1:3], MORE_ROWS))
        for ((b, h, hk, nk, d), pages), nq in product(shapes, rows)
        for page_size in (None, *pages)
    ]


def masked(base: Problem) -> list[Problem]:
    """Eight query rows against as many keys without a mask, causal, with all lengths, with both."""
    bf16 = replace(base, dtype="bfloat16", precision="bfloat16", nq=8)
    return [
        replace(bf16, b=b, h=h, hk=hk, nk=nk, d=d, causal=causal, seqlens_k=lengths)
        for b, h, hk, nk, d in (shape for shape, pages in CACHED if pages)
        for causal in (False, True)
        for lengths in (None, (nk,) * b)
    ]


EVEN_AND_ODD: Final = (
    (1024, 1000),
    (4096, 4095),
)  # N that tiles divide, and one that they don't


def odd(base: Problem) -> list[Problem]:
    """Shapes of source 004, each also with an odd N, with grouped heads, with key lengths."""
    bf16 = replace(base, dtype="bfloat16", precision="bfloat16")
    problems = []
    for d, causal, (n, ragged) in product((64, 128), (False, True), EVEN_AND_ODD):
        b, h = SOURCE_004.of(n, d)
        even = replace(bf16, b=b, h=h, hk=h, nq=n, nk=n, d=d, causal=causal)
        problems += [even, replace(even, nq=ragged, nk=ragged)]
        problems.append(replace(even, hk=h // 4))
        problems += [replace(even, seqlens_k=(length,) * b) for length in (n, ragged)]
    return problems


SUITES: Final = {
    "table-4.1": Suite("run", partial(sized, ns=(8, 16, 32, 64), d=16, nqs=(None, 1))),
    "table-4.2": Suite(
        "run", partial(sized, ns=LONG[1:], hs=(1, 32), dtypes=(IEEE, TF32, HALF)), like_for_like
    ),
    "table-4.3": Suite(
        "run", partial(sized, ns=(64, 128, 256, 512, 1024), dtypes=(IEEE, TF32)), only(3, 4, 5),
        paired=False,
    ),
    "table-4.4": Suite("run", partial(sized, ns=SHORT[1:]), only(3, 5)),
    "001-forward": Suite("bench", partial(halves, ("fwd",), (64,), SHORT, SOURCE_001)),
    "001-train": Suite("bench", partial(halves, DIRECTIONS, (64,), SHORT, SOURCE_001)),
    "001-train-bf16": Suite(
        "bench", partial(halves, DIRECTIONS, (64,), SHORT, SOURCE_001, dtype=BF16)
    ),
    "001-memory": Suite("bench", partial(halves, ("fwd", "train"), (64,), SHORT, SOURCE_001)),
    "004": Suite("bench", partial(halves, ("fwd",), (64, 128), LONG, SOURCE_004)),
    "004-bf16": Suite("bench", partial(halves, ("fwd",), (64, 128), LONG, SOURCE_004, dtype=BF16)),
    "decode": Suite("bench", cached, decodes),
    "decode-masks": Suite("bench", masked, only(8)),
    "hopper-odd": Suite("bench", odd, only(9)),
}  # fmt: skip


def names(command: str) -> list[str]:
    """The suites of `command`."""
    return [name for name, suite in SUITES.items() if suite.command == command]
