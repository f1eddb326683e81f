"""Query rows that stage 9 computes again, with care: 0 * NaN is NaN, and 0 * inf too.

A value that is hidden from a row weighs nothing, yet it spoils the row if it isn't a finite number.
Looking at V first would hold up every tile. So under a causal mask a consumer looks at its result
only: 64 rows with a NaN among them are not written but noted, and walked again when the CTA is done
with all its tiles. Without one no hidden value is loaded (`start` in stages/hopper_problem.py).
"""

from stages.gluon_names import (
    aggregate,
    async_load,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
)
from stages.hopper_rings import number_at, put_number


@aggregate
class Notes:
    """The rows that each consumer of a CTA has left, as a list: each entry leads to the one before.

    An entry is a block's number (Problem.number), of which a consumer has 64 rows; -1 is the end.
    """

    latest: gl.shared_memory_descriptor  # (consumers, 1) int32
    before_ptr: gl.tensor  # (consumers, tiles) int32
    tiles: gl.tensor

    @gluon.constexpr_function
    def __init__(self, latest, before_ptr, tiles):
        self.latest = latest
        self.before_ptr = before_ptr
        self.tiles = tiles

    @gluon.jit
    def add(self, c: gl.constexpr, entry, latest, pred):
        """Note `entry` after `latest`, if `pred`; return what is the latest now."""
        gl.store(self.before_ptr + c * self.tiles + entry, latest, mask=pred)
        return gl.where(pred, entry, latest)

    @gluon.jit
    def leave(self, c: gl.constexpr, latest):
        put_number(self.latest.index(c), latest)

    @gluon.jit
    def latest_of(self, c):
        return number_at(self.latest.index(c))

    @gluon.jit
    def before(self, c, entry):
        return gl.load(self.before_ptr + c * self.tiles + entry)


@gluon.jit
def make_notes(before_ptr, tiles, consumers: gl.constexpr):
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return Notes(gl.allocate_shared_memory(gl.int32, [consumers, 1], plain), before_ptr, tiles)


@gluon.jit
def fetch(desc, coordinates, tile, bar, use):
    """Have a tile copied, and wait for it; `use` counts the uses of `bar`, from 0."""
    mbarrier.expect(bar, desc.block_type.nbytes)
    async_load(desc, coordinates, bar, tile)
    mbarrier.wait(bar, use & 1)


@gluon.jit
def take_out(v, start_n, first_smem):
    """Write 0 over every infinite or NaN value of `v` (BLOCK_N, BLOCK_D), of the keys from start_n
    on, and note in `first_smem` (BLOCK_D,) the first such key of each column.

    PART keys and SIDE columns at a time, for few registers.
    """
    PART: gl.constexpr = 4 * gl.num_warps()
    SIDE: gl.constexpr = 64
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    for side in gl.static_range(v.shape[1] // SIDE):
        first = gl.full([PART, SIDE], 0x7FFFFFFF, gl.int32, L)
        for i in gl.static_range(v.shape[0] // PART):
            part = v.slice(i * PART, PART, 0).slice(side * SIDE, SIDE, 1)
            values = part.load(L).to(gl.float32)  # (PART, SIDE)
            finite = gl.abs(values) < float("inf")
            keys = start_n + i * PART + gl.arange(0, PART, layout=gl.SliceLayout(1, L))
            first = gl.where(finite, first, gl.minimum(first, keys[:, None]))
            part.store(gl.where(finite, values, 0.0).to(v.dtype))
        noted = first_smem.slice(side * SIDE, SIDE, 0)
        noted.store(gl.minimum(noted.load(gl.SliceLayout(0, L)), gl.min(first, 0)))
    fence_async_shared()  # the matrix unit reads what threads wrote
    barrier()
