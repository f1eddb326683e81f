"""Who computes what in stage 9: sizes and masks, and which work tile a CTA takes next.

A work tile is what one CTA computes at a time: BLOCK_M query rows of a head in the forward pass,
BLOCK_N keys of a key head in the backward pass. A CTA stays on its multiprocessor and takes one
work tile after another. Its producer asks a counter in global memory for the next one, and
publishes it to the consumers in shared memory, which has two places for it.
"""

from stages.common.gluon import aggregate, barrier, gl, gluon, mbarrier

from .pipeline import make_mbarriers


@aggregate
class Problem:
    """Sizes and masks, the same for all roles of either pass."""

    seqlens_ptr: gl.tensor
    H: gl.tensor
    group: gl.tensor  # query heads per key head
    Nq: gl.tensor
    Nk: gl.tensor
    CAUSAL: gl.constexpr
    HAS_SEQLENS: gl.constexpr
    EDGE: gl.constexpr  # the last valid key needs care: forward moves a tile, backward clears keys
    MASKED_TILES: gl.constexpr  # forward: how many KV tiles of a consumer may need a mask, up to 2
    LSE: gl.constexpr  # forward: whether lse is wanted
    DQ: gl.constexpr  # backward: whether dQ is wanted
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    D: gl.constexpr  # how many columns are computed, d and its padding
    PARTS: gl.constexpr  # in how many parts those go
    OVERLAP: gl.constexpr  # forward: whether S of a KV tile is started before P V of the one before

    @gluon.jit
    def valid_keys(self, b):
        """How many keys of batch entry b are valid."""
        Nk_valid = self.Nk
        if self.HAS_SEQLENS:
            Nk_valid = gl.minimum(gl.maximum(gl.load(self.seqlens_ptr + b), 0), self.Nk)
        return Nk_valid

    @gluon.jit
    def kv_tiles(self, start_m, Nk_valid):
        """Forward: how many KV tiles the rows from start_m on see, at least one.

        Rows that see no key are computed like any other, and their output becomes 0.
        """
        end = Nk_valid
        if self.CAUSAL:
            end = gl.minimum(start_m + self.BLOCK_M, self.Nq) + self.Nk - self.Nq
            end = gl.maximum(gl.minimum(end, Nk_valid), 0)
        return gl.maximum(gl.cdiv(end, self.BLOCK_N), 1)

    @gluon.jit
    def first_key(self, j, n_tiles, Nk_valid):
        """Forward: where the j-th KV tile begins; j = 0 is the last of the n_tiles.

        With EDGE the last tile is moved back to end at the last valid key, so no value past it is
        loaded (0 * NaN is NaN). Keys that it shares with the tile read next count only there; what
        lies before key 0 is loaded as zeros. Both are masked.
        """
        start_n = (n_tiles - 1 - j) * self.BLOCK_N
        if self.EDGE:
            start_n = gl.minimum(start_n, Nk_valid - self.BLOCK_N)
        return start_n

    @gluon.jit
    def visible_keys(self, rows, Nk_valid):
        """Forward: how many keys each of `rows` sees, counted from the first; may be negative."""
        visible = gl.zeros_like(rows) + Nk_valid
        if self.CAUSAL:
            visible = gl.minimum(visible, rows + (self.Nk - self.Nq + 1))
        return visible

    @gluon.jit
    def skipped_tiles(self, first_row, Nk_valid, n_tiles):
        """Forward: how many KV tiles, from the last one back, none of a consumer's 64 rows sees.

        At least one is left, and only one for rows past Nq.
        """
        end = Nk_valid
        if self.CAUSAL:
            end = gl.minimum(end, first_row + 64 + self.Nk - self.Nq)
        end = gl.where(first_row < self.Nq, end, 0)
        return n_tiles - gl.maximum(gl.cdiv(end, self.BLOCK_N), 1)

    @gluon.jit
    def query_tiles(self, start_n, Nk_valid):
        """Backward: the query tiles that see the keys from start_n on, as (first, full, end).

        Those from `full` on need no mask.
        """
        shift = self.Nk - self.Nq  # row i sees keys up to i + shift
        first = 0
        end = gl.cdiv(self.Nq, self.BLOCK_M)
        if self.CAUSAL:
            first = gl.maximum(start_n - shift, 0) // self.BLOCK_M
        if self.HAS_SEQLENS:
            end = gl.where(start_n < Nk_valid, end, first)
        full = first
        if self.CAUSAL:
            full = gl.cdiv(gl.maximum(start_n + (self.BLOCK_N - 1) - shift, 0), self.BLOCK_M)
        if self.EDGE:
            full = gl.where(start_n + self.BLOCK_N > Nk_valid, end, full)
        if self.CAUSAL or self.EDGE:
            # one at least: ptxas 12.8 miscompiles an empty first loop (docs/hopper.md, Traps)
            full = gl.minimum(gl.maximum(full, first + 1), end)
        return first, full, end


@gluon.jit
def write_number(place, x):
    """Write the int32 x to `place`, shared memory (1,)."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    place.store(gl.full([1], x, gl.int32, one))


@gluon.jit
def read_number(place):
    """Read what `write_number` wrote."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.sum(place.load(one), 0)  # the sum of one number: a scalar


@aggregate
class TileScheduler:
    """Which work tile is next; `count` says how many this CTA has had before it."""

    numbers: gl.shared_memory_descriptor  # (10, 1) int32: two work tiles
    full: gl.shared_memory_descriptor  # (2, 1) mbarriers: consumers wait for the producer
    empty: gl.shared_memory_descriptor  # (2, 1) mbarriers: the producer waits for all consumers
    problem: Problem
    blocks: gl.tensor  # work tiles of a head
    all_heads: gl.tensor  # of all batch entries together
    section: gl.tensor  # heads whose work tiles are taken in turn
    tiles: gl.tensor  # blocks * all_heads

    @gluon.jit
    def fetch(self, counter_ptr):
        """Producer: how many fetches of all CTAs came before this one.

        The caller adds num_programs, the work tiles with which CTAs begin. All CTAs together fetch
        once per work tile, and the last fetch sets the counter back to 0.
        """
        fetched = gl.atomic_add(counter_ptr, 1)
        gl.store(counter_ptr, 0, mask=fetched == self.tiles - 1)
        return fetched

    @gluon.jit
    def place(self, tile, heads_per_batch, LAST_FIRST: gl.constexpr):
        """Batch entry, head and block of a work tile.

        Per section of heads: block 0 of each, then block 1 of each, ...; LAST_FIRST: from the last.
        """
        part = tile // (self.section * self.blocks)
        rest = tile - part * self.section * self.blocks
        width = gl.minimum(self.section, self.all_heads - part * self.section)
        block = rest // width
        head = part * self.section + rest - block * width
        if LAST_FIRST:
            block = self.blocks - 1 - block
        b = head // heads_per_batch
        return b, head - b * heads_per_batch, block

    @gluon.jit
    def publish(self, work_tile, count):
        """Producer: tell the consumers the five numbers that `next_work_tile` returns."""
        slot = count % 2
        mbarrier.wait(self.empty.index(slot), (count // 2 + 1) & 1)
        for i in gl.static_range(len(work_tile)):
            write_number(self.numbers.index(slot * len(work_tile) + i), work_tile[i])
        barrier()  # among the producer's threads
        mbarrier.arrive(self.full.index(slot))

    @gluon.jit
    def next_work_tile(self, count):
        """Consumer: batch entry, head, first row (or key), valid keys, KV tiles (0: no more)."""
        slot = count % 2
        mbarrier.wait(self.full.index(slot), (count // 2) & 1)
        first = slot * 5
        b, h = read_number(self.numbers.index(first)), read_number(self.numbers.index(first + 1))
        start = read_number(self.numbers.index(first + 2))
        Nk_valid = read_number(self.numbers.index(first + 3))
        n_tiles = read_number(self.numbers.index(first + 4))
        mbarrier.arrive(self.empty.index(slot))
        return b, h, start, Nk_valid, n_tiles

    @gluon.jit
    def keep_alive(self):
        self.full._keep_alive()
        self.empty._keep_alive()


@gluon.jit
def make_scheduler(problem, blocks, all_heads, section, tiles, consumers: gl.constexpr):
    numbers = gl.allocate_shared_memory(gl.int32, [10, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full, empty = make_mbarriers(2, 1), make_mbarriers(2, consumers)
    return TileScheduler(numbers, full, empty, problem, blocks, all_heads, section, tiles)
