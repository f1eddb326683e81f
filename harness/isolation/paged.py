"""A contestant that reads keys and values from a paged cache of its own, filled beforehand."""

import random
from types import ModuleType
from typing import Any

from harness.problems.problem import Problem


class PagedCall:
    """The call that is measured: `attend_paged` of a stage's module, which returns (o,).

    The cache is full of the problem's k and v before it is called. Its pages are handed out in an
    order shuffled by the problem's seed, as in a cache where sequences have come and gone.
    """

    def __init__(self, module: ModuleType, problem: Problem, q: Any, k: Any, v: Any) -> None:
        pages = problem.b * -(-problem.nk // int(problem.page_size or 1))
        self.module, self.problem, self.given = module, problem, (q, k, v)
        self.cache = module.PagedCache(
            pages, problem.page_size, problem.hk, problem.d, k.dtype, k.device, sequences=problem.b
        )
        random.Random(problem.seed).shuffle(self.cache.free_pages)
        self.sequences: list[int] = []
        self.rebuild()

    def rebuild(self) -> None:
        """Fill the cache anew, from k and v as they are now."""
        while self.sequences:
            self.cache.free(self.sequences.pop())
        for b in range(self.problem.b):
            self.cache.append(b, self.given[1][b], self.given[2][b])
            self.sequences.append(b)

    def __call__(self) -> tuple[Any]:
        q = self.given[0]
        causal = self.problem.causal
        return (self.module.attend_paged(q, self.cache, self.sequences, causal=causal),)
