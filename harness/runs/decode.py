"""`ladder bench --suite decode`: a few query rows against thousands of cached keys, in bfloat16.

Eight shapes with 1 and 8 query rows, and on two of them 2, 4 and 16. Beside the keys in one piece
stand, on some, the same keys in a paged cache: a problem each, which plan.plan_comparisons puts
into one comparison with the first, so that the ratio is of times taken in turns. No mask: SDPA's
backends refuse the causal one where Nq != Nk.
"""

from collections.abc import Iterator
from dataclasses import replace

from harness.problems.problem import Problem

# who is compared unless told: the ladder before and after its keys are split, and the fused peers
STAGES = (6, 8, 100, 101, 102, 103, 106)
ALL_PAGES, ENDS = (16, 64, 256), (16, 64)
# (b, h, hk, nk, d), page sizes, numbers of query rows
SHAPES = (
    ((1, 32, 32, 8192, 128), (), (1, 8)),
    ((1, 32, 8, 8192, 128), ALL_PAGES, (1, 2, 4, 8, 16)),
    ((16, 32, 8, 8192, 128), ALL_PAGES, (1, 2, 4, 8, 16)),
    ((64, 32, 8, 8192, 128), ENDS, (1, 8)),
    ((128, 32, 8, 4096, 128), (), (1, 8)),
    ((1, 32, 8, 131072, 128), ENDS, (1, 8)),
    ((16, 16, 1, 8192, 128), (), (1, 8)),
    ((8, 64, 8, 16384, 64), ENDS, (1, 8)),
)


def problems(base: Problem) -> Iterator[Problem]:
    """The problems of the suite; `base` gives inputs, seed and device."""
    for (b, h, hk, nk, d), page_sizes, rows in SHAPES:
        for nq in rows:
            for page_size in (None, *page_sizes):
                yield replace(
                    base, b=b, h=h, hk=hk, nq=nq, nk=nk, d=d, dtype="bfloat16",
                    precision="bfloat16", page_size=page_size,
                )  # fmt: skip
