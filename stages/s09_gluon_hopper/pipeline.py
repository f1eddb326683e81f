"""How the roles of stage 9 hand tiles to each other: pipelines of slots in shared memory.

A pipeline has a few slots, each with room for a tile and with two barriers. `count` says how many
tiles went through the pipeline before this one, which is in slot count % slots:

    producer    producer_load       waits until the slot is empty, then has a tile copied to it
    consumer    consumer_wait       waits until the slot is full, and returns the tile
                consumer_release    says that this consumer is done with the tile

    full     an mbarrier. The producer arrives by `expect`, which says how many bytes will come; the
             phase ends when the copy engine (TMA) has also written them all, and consumers wait for
             that. The phase is the parity of count // slots
    empty    a named barrier, which slots that are released together share. A consumer's threads
             arrive there and go on; the producer waits

A CTA has 16 named barriers in hardware. They have no phase: the hardware resets one when all have
come. No consumer can arrive twice in a round, for in between it waits at `full`, and the producer
has the slot filled only after its own wait. If `empty` were an mbarrier, one thread would arrive
for its warpgroup, and the four warps would wait for each other at every release.
"""

from stages.common.gluon import aggregate, async_load, gl, gluon, mbarrier


@gluon.jit
def named_barrier(instruction: gl.constexpr, number, threads: gl.constexpr, pred=True):
    """Arrive at a named barrier (bar.arrive), or also wait (bar.sync), if pred.

    number   5 to 15: the compiler uses those before
    threads  that arrive in all, those that wait among them
    """
    text: gl.constexpr = (
        "{ .reg .pred p; setp.ne.u32 p, $3, 0; @p " + instruction + " $1, $2; mov.u32 $0, $1; }"
    )
    operands = [gl.to_tensor(number), gl.to_tensor(threads), gl.to_tensor(pred).to(gl.int32)]
    gl.inline_asm_elementwise(text, "=r,r,r,r", operands, gl.int32, False, 1)


@gluon.jit
def make_mbarriers(number: gl.constexpr, arrivals: gl.constexpr):
    """`number` mbarriers, whose phase ends at the `arrivals`-th arrival."""
    bars = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


@aggregate
class Pipeline:
    """Tiles in shared memory, on their way from the producer to the consumers."""

    tiles: gl.shared_memory_descriptor  # (slots, 1, 1, rows, BLOCK_D)
    full: gl.shared_memory_descriptor  # (slots, 1) mbarriers: consumers wait for the copy engine
    first_empty: gl.constexpr  # the number of the first named barrier; the others follow
    threads: gl.constexpr  # of all consumers and the producer, which meet there
    TOGETHER: gl.constexpr  # how many slots, one after another, are released at once

    @gluon.jit
    def empty(self, count):
        """The number of the slot's named barrier; slots that are released together share it."""
        return count % self.tiles.shape[0] // self.TOGETHER + self.first_empty

    @gluon.jit
    def producer_acquire(self, count):
        """Wait until the slot has been released; in the first round it is empty."""
        slots: gl.constexpr = self.tiles.shape[0]
        named_barrier("bar.sync", self.empty(count), self.threads, count >= slots)

    @gluon.jit
    def producer_load(self, desc, coordinates, count, ACQUIRED: gl.constexpr = False):
        """Have a tile copied to its slot, as soon as that is empty; ACQUIRED: it is."""
        slot = count % self.tiles.shape[0]
        if not ACQUIRED:
            self.producer_acquire(count)
        mbarrier.expect(self.full.index(slot), desc.block_type.nbytes)
        async_load(desc, coordinates, self.full.index(slot), self.tiles.index(slot))

    @gluon.jit
    def consumer_wait(self, count):
        """The tile (rows, BLOCK_D), as soon as the copy engine has written it."""
        slots: gl.constexpr = self.tiles.shape[0]
        slot = count % slots
        mbarrier.wait(self.full.index(slot), (count // slots) & 1)
        return self.tile(slot)

    @gluon.jit
    def tile(self, slot):
        """The tile (rows, BLOCK_D) of a slot that was waited for."""
        shape: gl.constexpr = [self.tiles.shape[3], self.tiles.shape[4]]
        return self.tiles.index(slot).reshape(shape)

    @gluon.jit
    def consumer_release(self, count, pred=True):
        """Say that this consumer is done with the tile, if pred."""
        named_barrier("bar.arrive", self.empty(count), self.threads, pred)

    @gluon.jit
    def keep_alive(self):
        """The compiler may reuse the memory of a barrier that no later line names: name it here."""
        self.full._keep_alive()


@gluon.jit
def make_pipeline(
    desc, slots: gl.constexpr, consumers: gl.constexpr, first_empty: gl.constexpr,
    TOGETHER: gl.constexpr = 1,
):  # fmt: skip
    """A pipeline of `slots` tiles; first_empty: the number of its first named barrier."""
    shape: gl.constexpr = [slots, 1, 1, desc.block_shape[2], desc.block_shape[3]]
    tiles = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
    return Pipeline(tiles, make_mbarriers(slots, 1), first_empty, 128 * consumers + 32, TOGETHER)
