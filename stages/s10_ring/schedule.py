"""Which rank holds which part of the sequence, and what it has to compute at each hop.

Plain Python: no tensor, no process. The sequence is cut into chunks whose lengths differ by 1 at
most, and rank r of W holds

    contiguous  chunk r of W
    zigzag      chunks r and 2W - 1 - r of 2W, one after the other: an early and a late one

At hop s it has the keys of rank r - s, its owner. Under a causal mask a chunk of queries sees all
of an earlier chunk of keys, a triangle of its own, and nothing of a later one. Zigzag makes of that
one block per hop, and two thirds as much as without a mask is the most that anybody waits for:

    W = 2, zigzag; x seen       keys of rank 0    keys of rank 1
                                chunk 0   3       chunk 1   2
    queries of rank 0  chunk 0     \\      .             .   .
                             3     x      \\             x   x      rows: the later half
    queries of rank 1  chunk 1     x      .             \\   .      keys: the earlier half
                             2     x      .             x   \\

Rank 0 computes a triangle, then a rectangle of half the rows and all keys; rank 1 a triangle, then
all rows and half the keys: as many pairs. With contiguous chunks rank 0 is done after its triangle,
while rank W - 1 goes on for W - 1 whole hops.
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
