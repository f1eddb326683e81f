"""Which rank holds which part of the sequence, and what it has to compute at each hop.

Plain Python: no tensor, no process. The sequence is cut into chunks, and rank r of W holds

    contiguous   chunk r of W
    zigzag       chunks r and 2W - 1 - r of 2W, one after the other: an early and a late one

Under a causal mask a chunk of queries sees all of an earlier chunk of keys, a triangle of its own
and nothing of a later one. With contiguous chunks rank 0 has its triangle and then nothing, while
rank W - 1 has a whole square at each further hop: all wait for it. With zigzag, here for W = 2
(x: seen, t: a triangle of it),

                               keys of rank 0      keys of rank 1
                               chunk 0  chunk 3    chunk 1  chunk 2
    queries of rank 0  chunk 0    t        .          .        .
                       chunk 3    x        t          x        x
    queries of rank 1  chunk 1    x        .          t        .
                       chunk 2    x        .          x        t

each rank has one triangle over both of its chunks, and then at each hop half a square: all rows and
the early chunk's keys, or the late chunk's rows and all keys. Each is one call of an ordinary
attention, and all ranks have the same work. Zigzag is from 2024,
https://github.com/zhuzilin/ring-flash-attention/issues/2; Striped Attention (Brandon et al. 2023,
https://arxiv.org/abs/2311.09431) balances by single positions.
"""

import itertools
from typing import NamedTuple

Span = tuple[int, int]  # positions in the whole sequence: from, and up to but without


class Hop(NamedTuple):
    """What a rank computes at one hop: `rows` of its queries with the keys of some `spans`."""

    owner: int
    rows: slice
    spans: tuple[Span, ...]  # the first of the owner's, or all of them
    causal: bool  # a triangle: the rank's own keys under a causal mask

    @property
    def keys(self) -> slice:
        """Which of the owner's keys these are."""
        return slice(0, length(self.spans))

    @property
    def empty(self) -> bool:
        """Whether no query sees a key."""
        return self.rows.start == self.rows.stop or self.keys.stop == 0


def spans(n: int, world: int, zigzag: bool) -> list[tuple[Span, ...]]:
    """For each rank the spans of a sequence of `n` that it holds, in the order it holds them in.

    No rank has more than one position more than another, and none has none, if n >= world.
    """
    count = 2 * world if zigzag else world
    least, more = divmod(n, count)  # the first `more` chunks are longer by one
    start = [c * least + min(c, more) for c in range(count + 1)]
    chunk = [*itertools.pairwise(start)]
    if zigzag:
        return [(chunk[r], chunk[count - 1 - r]) for r in range(world)]
    return [(each,) for each in chunk]


def length(held: tuple[Span, ...]) -> int:
    """How many positions some spans have."""
    return sum(end - start for start, end in held)


def hop(
    rank: int, step: int, q_spans: list[tuple[Span, ...]], k_spans: list[tuple[Span, ...]],
    causal: bool,
) -> Hop:  # fmt: skip
    """What `rank` computes at hop `step`, for parts as `spans` gives them."""
    owner = (rank - step) % len(k_spans)
    held, every = k_spans[owner], slice(0, length(q_spans[rank]))
    if not causal or owner == rank:
        return Hop(owner, every, held, causal)
    if len(held) == 1:  # contiguous: an earlier part is seen whole, a later one not at all
        return Hop(owner, every, held if owner < rank else (), False)
    if owner < rank:  # all rows see the owner's early chunk, none its late one
        return Hop(owner, every, held[:1], False)
    early = length(q_spans[rank][:1])  # these rows see nothing, those of the late chunk everything
    return Hop(owner, slice(early, every.stop), held, False)
