"""How the roles of stage 9 hand tiles and numbers to each other: rings in shared memory.

A ring has slots, each with two barriers. A wait names the use of the ring that it is for: use u is
slot u % slots, in round u // slots.

    full     an mbarrier: the copy engine arrives when the slot is filled, and the readers wait.
             The parity of the round is its phase
    empty    a named barrier: each reader's threads arrive when they are done with the slot, and go
             on; the writer waits

A CTA has 16 named barriers in hardware. At an mbarrier one thread arrives for its warpgroup, so the
four warps would have to wait for each other each time that they give back a slot.
"""

from stages.common.gluon import aggregate, async_load, barrier, gl, gluon, mbarrier


@gluon.jit
def named_barrier(what: gl.constexpr, number, threads: gl.constexpr, pred=True):
    """PTX's bar.arrive or bar.sync, for `threads` threads in all, if pred.

    number  5 to 15: those before are the compiler's
    """
    text: gl.constexpr = (
        "{ .reg .pred p; setp.ne.u32 p, $3, 0; @p " + what + " $1, $2; mov.u32 $0, $1; }"
    )
    operands = [gl.to_tensor(number), gl.to_tensor(threads), gl.to_tensor(pred).to(gl.int32)]
    gl.inline_asm_elementwise(text, "=r,r,r,r", operands, gl.int32, False, 1)


@aggregate
class Empties:
    """Named barriers, one for each slot of a ring: the producer waits for consumers."""

    first: gl.constexpr  # the number of the first
    slots: gl.constexpr
    threads: gl.constexpr  # of all consumers and the producer

    @gluon.constexpr_function
    def __init__(self, first, slots, consumers):
        self.first = gl.constexpr(first)
        self.slots = gl.constexpr(slots)
        self.threads = gl.constexpr(128 * consumers + 32)

    @gluon.jit
    def wait(self, use):
        """Producer: wait until the slot has been given back; in the first round it is free."""
        named_barrier("bar.sync", use % self.slots + self.first, self.threads, use >= self.slots)

    @gluon.jit
    def arrive(self, use, pred=True):
        """Consumer: give back the slot, if pred."""
        named_barrier("bar.arrive", use % self.slots + self.first, self.threads, pred)


@aggregate
class Ring:
    """Tiles in shared memory, slot after slot; use u of the ring is slot u % slots."""

    tiles: gl.shared_memory_descriptor  # (slots, 1, 1, rows, BLOCK_D)
    full: gl.shared_memory_descriptor  # (slots, 1) mbarriers: consumers wait for the copy engine
    empty: Empties  # the producer waits for consumers

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty):
        self.tiles = tiles
        self.full = full
        self.empty = empty

    @gluon.jit
    def fill(self, desc, coordinates, use):
        """Producer: have a tile copied, as soon as every consumer has given back the slot."""
        slots: gl.constexpr = self.tiles.shape[0]
        slot = use % slots
        self.empty.wait(use)
        mbarrier.expect(self.full.index(slot), desc.block_type.nbytes)
        async_load(desc, coordinates, self.full.index(slot), self.tiles.index(slot))

    @gluon.jit
    def take(self, use):
        """Consumer: the tile (rows, BLOCK_D), as soon as the copy engine has written it."""
        slots: gl.constexpr = self.tiles.shape[0]
        rows: gl.constexpr = self.tiles.shape[3]
        columns: gl.constexpr = self.tiles.shape[4]
        slot = use % slots
        mbarrier.wait(self.full.index(slot), (use // slots) & 1)
        return self.tiles.index(slot).reshape([rows, columns])

    @gluon.jit
    def give_back(self, use, pred=True):
        """Consumer: this one is done with the tile."""
        self.empty.arrive(use, pred)

    @gluon.jit
    def keep_alive(self):
        self.full._keep_alive()


@gluon.jit
def barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """`count` mbarriers, each of which opens at its `arrivals`-th arrival."""
    bars = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


@gluon.jit
def make_ring(desc, slots: gl.constexpr, consumers: gl.constexpr, first: gl.constexpr):
    """A ring of `slots` tiles, whose empty barriers are the named ones from number `first` on."""
    shape: gl.constexpr = [slots, 1, 1, desc.block_shape[2], desc.block_shape[3]]
    tiles = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
    return Ring(tiles, barriers(slots, 1), Empties(first, slots, consumers))


@gluon.jit
def put_number(place, x):
    """Write the int32 x to `place`, shared memory (1,)."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    place.store(gl.full([1], x, gl.int32, one))


@gluon.jit
def number_at(place):
    """Read what `put_number` wrote."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.sum(place.load(one), 0)


@aggregate
class Board:
    """Where the producer posts what comes next: two places of five numbers each."""

    numbers: gl.shared_memory_descriptor  # (10, 1) int32
    full: gl.shared_memory_descriptor  # (2, 1) mbarriers: consumers wait for the producer
    empty: gl.shared_memory_descriptor  # (2, 1) mbarriers: the producer waits for all consumers

    @gluon.constexpr_function
    def __init__(self, numbers, full, empty):
        self.numbers = numbers
        self.full = full
        self.empty = empty

    @gluon.jit
    def post(self, numbers, turn):
        slot = turn % 2
        mbarrier.wait(self.empty.index(slot), (turn // 2 + 1) & 1)
        for i in gl.static_range(len(numbers)):
            put_number(self.numbers.index(slot * len(numbers) + i), numbers[i])
        barrier()
        mbarrier.arrive(self.full.index(slot))

    @gluon.jit
    def number(self, slot, i: gl.constexpr):
        return number_at(self.numbers.index(slot * (self.numbers.shape[0] // 2) + i))

    @gluon.jit
    def read(self, turn):
        slot = turn % 2
        mbarrier.wait(self.full.index(slot), (turn // 2) & 1)
        b, h, start_m = self.number(slot, 0), self.number(slot, 1), self.number(slot, 2)
        Nk_valid, steps = self.number(slot, 3), self.number(slot, 4)
        mbarrier.arrive(self.empty.index(slot))
        return b, h, start_m, Nk_valid, steps

    @gluon.jit
    def keep_alive(self):
        self.full._keep_alive()
        self.empty._keep_alive()


@gluon.jit
def make_board(consumers: gl.constexpr):
    numbers = gl.allocate_shared_memory(gl.int32, [10, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Board(numbers, barriers(2, 1), barriers(2, consumers))
