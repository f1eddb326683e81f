"""The measured call of a stage that reads keys and values from its own paged cache."""

import random
from types import ModuleType
from typing import Any

from harness.problems.problem import Problem


class PagedCall:
    """The measured call: `attend_paged` of a stage's module; returns (o,).

    The cache contains the problem's k and v before the call. Pages are allocated in an order
    shuffled by the problem's seed, as in a cache where sequences were added and removed.
    """

    def __init__(self, module: ModuleType, problem: Problem, q: Any, k: Any, v: Any) -> None:
        pages = problem.b * -(-problem.nk // int(problem.page_size or 1))
        self.module, self.problem, self.inputs = module, problem, (q, k, v)
        self.cache = module.PagedCache(
            pages, problem.page_size, problem.hk, problem.d, k.dtype, k.device, sequences=problem.b
        )
        random.Random(problem.seed).shuffle(self.cache.free_pages)
        self.sequences: list[int] = []
        self.rebuild()

    def rebuild(self) -> None:
        """Fill the cache again from the present k and v."""
        while self.sequences:
            self.cache.free(self.sequences.pop())
        for b in range(self.problem.b):
            self.cache.append(b, self.inputs[1][b], self.inputs[2][b])
            self.sequences.append(b)

    def __call__(self) -> tuple[Any]:
        q = self.inputs[0]
        causal = self.problem.causal
        return (self.module.attend_paged(q, self.cache, self.sequences, causal=causal),)
