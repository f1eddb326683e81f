"""A Hopper GPU in Python: run a warp-specialised Gluon kernel without one, and see what it forgot.

    with emulated(9, seed=3) as stage:  # or the path of a stage's file, first.py for instance
        o = stage.forward(q, k, v, False, None)  # its own code; q, k and v are on the CPU

The stage's own code runs, with this machine in the place of stages/common/gluon.py and
no_triton.py: the names of Gluon and of Triton that stages import are functions here.

    on the GPU                              here
    a role: a warp, or a warpgroup          a thread, `Role`; one of them runs at a time
    registers                               a tensor
    a tile in shared memory                 a tensor that begins as NaN, `Tile`
    the copy engine, an asynchronous        something begun, to be done at some later time
    product on the matrix unit
    mbarrier, named barrier                 a counter, for which roles wait

A kernel that lacks a wait may still be right by luck: on a GPU what it should have waited for is
mostly done in time. Here the luck is drawn by `seed`: after each step the machine draws which role
runs next, and which copy or product is done, among all that may happen. Some are swift and some are
slow, so that under a few seeds what isn't waited for comes too late. Three things tell of it:

    a wrong number     a slot was filled while a product still read it, say
    Stuck              every role waits, and nothing that was begun is left to be done
    Misuse             the machine saw what a GPU would not report: a product used before it is
                       done, shared memory read by the copy engine without a fence, a pointer that
                       leads out of its tensor, too many arrivals at a barrier

To see it, leave out a line of the stage: `emulated(9, changes=[(text, "")])` runs the stage without
`text`, which must be found once in its files. All CTAs of a launch run at the same time, but in
kernels of Triton one after another: those have no roles.

Not modelled: how a warpgroup's four warps lie among each other, layouts of registers and of shared
memory, how many registers there are, time, and the rounding of the real units. What a GPU does with
those only a GPU can tell (tests/gpu).
"""

import bisect
import contextlib
import ctypes
import inspect
import itertools
import math
import random
import sys
import tempfile
import threading
from collections import defaultdict
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

import stages.s09_gluon_hopper  # first with the real Triton, and so all that it imports
from course.edits import write_changed
from stages import common

CTAS = 2  # multiprocessors
LAST = 1e-9  # the pace of what is done when nothing else may happen


class Stuck(Exception):
    """No role can go on, and nothing that was begun is left to be done."""


class Misuse(Exception):
    """What a GPU would not report, or not like this; the message says what was done."""


class Abandoned(BaseException):
    """Ends the threads of a machine that has stopped."""


# ---- who runs


def always():
    return True


class Role:
    """A warp or a warpgroup: a thread that runs when the machine lets it."""

    def __init__(self, machine, cta, threads, work):
        self.cta, self.threads, self.machine = cta, threads, machine
        self.may_run, self.done = always, False
        self.go: SimpleQueue[None] = SimpleQueue()
        self.products, self.copies = [], []  # begun and not done
        self.pace: dict[str, float] = defaultdict(machine.draw_pace)  # of itself, and of those
        self.stores = 0  # of the copies
        self.unfenced, self.made = set(), []  # what it wrote to shared memory, and mbarriers
        self.thread = threading.Thread(target=self.run, args=(work,), daemon=True)
        self.thread.start()

    def run(self, work):
        try:
            self.wait_for_turn()
            with torch.no_grad():  # each thread has its own
                work()
            if self.stores:
                raise Misuse("a role ends while copies of its own read shared memory")
            self.done = True
            self.machine.go_on()
        except Abandoned:
            return
        except BaseException as error:
            self.machine.ended.put(error)

    def wait_for_turn(self):
        self.go.get()
        if self.machine.stopped:
            raise Abandoned

    def pause(self, until=always):
        """Let others run, and go on at some time when `until` says so."""
        self.may_run = until
        self.machine.go_on()
        self.wait_for_turn()


class Machine:
    """All CTAs of a launch, and what they have begun."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        # whether the copy engine stores only when nothing else may happen
        self.late = self.draw.random() < 1 / 3
        self.roles, self.stopped = [], False
        self.ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def run(self):
        try:
            self.go_on()
            if error := self.ended.get():
                raise error
        finally:
            self.stopped = True
            for role in self.roles:
                role.go.put(None)
                role.thread.join()

    def draw_pace(self):
        """Some are swift and some are slow: who is early by far finds what isn't waited for."""
        return self.draw.choice((0.02, 1.0, 50.0))

    def go_on(self):
        """Do one thing after another that may happen now, until it is a role's turn, or the end.

        The thread that pauses does so itself: where its own role is drawn, it need not wait.
        """
        while True:
            acts: list[Any] = [
                (role.pace["role"], role, None)
                for role in self.roles
                if not role.done and (role.may_run is always or role.may_run())
            ]
            for role in self.roles:
                if role.products:  # in their order
                    acts.append((role.pace["products"], role, role.products))
                if role.copies:  # in any order
                    pace = LAST if self.late and role.stores else role.pace["copies"]
                    acts.append((pace, role, role.copies))
            if not acts:
                break
            # as random.choices draws, without its checks: this is done at each step
            sums = [*itertools.accumulate([pace for pace, _, _ in acts])]
            drawn = bisect.bisect(sums, self.draw.random() * sums[-1], 0, len(acts) - 1)
            _, role, begun = acts[drawn]
            if begun is None:
                self.now = role
                role.go.put(None)
                return
            place = self.draw.randrange(len(begun)) if begun is role.copies else 0
            begun.pop(place)()
        if not all(role.done for role in self.roles):
            raise Stuck("every role waits")
        self.ended.put(None)


machine: Machine  # the one that runs


def me():
    return machine.now


# ---- numbers


class Layout:
    """Where registers hold a tensor is not modelled."""

    def __init__(self, *_, **__):
        self.parent = self


class Type:
    """A tensor's `type`: torch's method, which has a layout, too, as Gluon's types have."""

    def __init__(self, method):
        self.method, self.layout = method, Layout()

    def __get__(self, x, owner):
        bound: Any = partial(self.method, x)
        bound.layout = self.layout
        return bound


def number(x):
    return x if isinstance(x, torch.Tensor) else torch.tensor(x)


class Pointer:
    """Into a tensor in global memory."""

    def __init__(self, flat, offset=0):
        self.flat, self.offset = flat, offset
        self.dtype = SimpleNamespace(element_ty=flat.dtype)

    def __add__(self, more):
        return Pointer(self.flat, self.offset + more)

    def at(self, mask):
        """The places that are read or written, 0 for the others, and which of them."""
        place, shown = number(self.offset), number(True if mask is None else mask)
        place, shown = torch.broadcast_tensors(place, shown)
        if not shown.all():
            place = torch.where(shown, place, 0)
        least, most = place.aminmax()
        if least < 0 or most >= len(self.flat):
            raise Misuse("a pointer leads out of its tensor")
        return place, shown


class Tile:
    """Numbers in shared memory, or a part of them."""

    def __init__(self, data):
        self.data, self.shape, self.dtype = data, [*data.shape], data.dtype

    def index(self, i):
        return Tile(self.data[int(i)])

    def slice(self, start, length, dim):
        return Tile(self.data.narrow(dim, start, length))

    def reshape(self, shape):
        return Tile(self.data.view(shape))

    def permute(self, order):
        return Tile(self.data.permute(order))

    def load(self, layout=None):
        return self.data.clone()

    def store(self, x):
        me().unfenced.add(self.span())
        self.data.copy_(x)

    def span(self):
        """From which address to which."""
        last = sum((n - 1) * step for n, step in zip(self.shape, self.data.stride(), strict=True))
        start = self.data.data_ptr()
        return start, start + (last + 1) * self.data.element_size()

    def check_fenced(self):
        """Raise Misuse where threads wrote here: others see that only behind a fence."""
        start, end = self.span()
        if any(a < end and start < b for role in machine.roles for a, b in role.unfenced):
            raise Misuse("read by a copy or a product, but written without a fence")

    def _keep_alive(self):
        pass


# ---- barriers


class Bar:
    """An mbarrier: opens at its last arrival, if all bytes that it expects are there."""

    def __init__(self, count):
        self.count = self.missing = count
        self.bytes = self.rounds = 0
        self.fenced = False

    def change(self, arrivals=0, bytes=0):
        self.missing -= arrivals
        self.bytes += bytes
        if self.missing < 0:
            raise Misuse("more arrivals at an mbarrier than it counts")
        if self.missing == self.bytes == 0:
            self.missing, self.rounds = self.count, self.rounds + 1


class Bars:
    """mbarriers in shared memory."""

    def __init__(self, count):
        self.all = [None] * count

    def index(self, i):
        return self, int(i)

    def _keep_alive(self):
        pass


def bar_of(place):
    bars, i = place
    return bars.all[i]


class mbarrier:
    MBarrierLayout = Layout

    @staticmethod
    def init(place, count):
        bars, i = place
        bars.all[i] = Bar(count)
        me().made.append(bars.all[i])

    @staticmethod
    def expect(place, bytes):
        bar_of(place).change(1, bytes)
        me().pause()

    @staticmethod
    def arrive(place, count=1, pred=True):
        if pred:
            bar_of(place).change(count)
        me().pause()

    @staticmethod
    def wait(place, phase):
        bar, phase = bar_of(place), int(phase)
        me().pause(lambda: bar.rounds % 2 != phase)


def named_barrier(number, threads, waits):
    """bar.sync or bar.arrive of all threads of a role."""
    bar = me().cta.named.setdefault(number, SimpleNamespace(threads=threads, rounds=0, roles=[]))
    if not bar.roles:
        bar.threads = threads
    if me() in bar.roles:
        raise Misuse(f"named barrier {number}: a role arrives for the second time in a round")
    bar.roles.append(me())
    count = sum(role.threads for role in bar.roles)
    if bar.threads != threads or count > threads:
        raise Misuse(f"named barrier {number}: {count} threads where {threads} were expected")
    before = bar.rounds
    if count == threads:
        bar.roles, bar.rounds = [], bar.rounds + 1
    me().pause((lambda: bar.rounds > before) if waits else always)


def barrier():
    """Of a role's own threads, which run together here."""
    me().pause()


def fence_async_shared():
    me().unfenced.clear()
    for bar in me().made:
        bar.fenced = True


# ---- the copy engine


class TensorDescriptor:
    """What the copy engine knows of a tensor."""

    def __init__(self, base, shape, strides, block_shape, layout):
        span = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1
        self.dtype = base.dtype
        memory = (ctypes.c_char * (span * self.dtype.itemsize)).from_address(base.data_ptr())
        self.tensor = torch.frombuffer(memory, dtype=self.dtype).as_strided(shape, strides)
        self.block_shape, self.layout = [*block_shape], layout
        self.block_type = SimpleNamespace(nbytes=math.prod(block_shape) * self.dtype.itemsize)

    def inside(self, coordinates):
        """Of a block: its part of the tensor, and that part's place in the block."""
        ours, theirs = [], []
        sizes = zip(map(int, coordinates), self.block_shape, self.tensor.shape, strict=True)
        for start, length, size in sizes:
            first = max(start, 0)
            last = max(min(start + length, size), first)
            ours.append(slice(first, last))
            theirs.append(slice(first - start, last - start))
        return self.tensor[tuple(ours)], tuple(theirs)


def async_load(desc, coordinates, place, tile):
    def copy():
        tile.data.zero_()
        part, where = desc.inside(coordinates)
        tile.data[where] = part
        bar_of(place).change(bytes=-desc.block_type.nbytes)

    if not bar_of(place).fenced:
        raise Misuse("the copy engine is to arrive at an mbarrier that was made without a fence")
    me().copies.append(copy)
    me().pause()


def begin_store(desc, coordinates, tile, write):
    tile.check_fenced()
    if min(map(int, coordinates)) < 0:
        raise Misuse("the copy engine writes before a tensor's start")

    def copy():
        part, where = desc.inside(coordinates)
        write(part, tile.data.reshape(desc.block_shape)[where])
        role.stores -= 1

    role = me()
    role.stores += 1
    role.copies.append(copy)
    role.pause()


def async_store(desc, coordinates, tile):
    begin_store(desc, coordinates, tile, torch.Tensor.copy_)


def reduce_add(desc, coordinates, tile):
    begin_store(desc, coordinates, tile, torch.Tensor.add_)


def store_wait(most):
    role = me()
    role.pause(lambda: role.stores <= most)


# ---- the matrix unit


class Product:
    """acc + a b, which was begun; its number is there when it is done."""

    def __init__(self, a, b, acc, use_acc):
        self.a, self.b, self.acc = a, b, acc if use_acc else None
        self.value: Any = None
        for operand in (a, b):
            if isinstance(operand, Tile):
                operand.check_fenced()

    def __call__(self):
        a, b = (x.data if isinstance(x, Tile) else x for x in (self.a, self.b))
        value = torch.mm(a.float(), b.float())
        if self.acc is not None:
            value = value + (self.acc.value if isinstance(self.acc, Product) else self.acc)
        self.value = value


def warpgroup_mma(a, b, acc, *, use_acc=True, is_async=False):
    product = Product(a, b, acc, use_acc)
    me().products.append(product)
    me().pause()
    return product if is_async else warpgroup_mma_wait(0, deps=[product])


def warpgroup_mma_wait(most, deps):
    role = me()
    role.pause(lambda: len(role.products) <= most)
    if any(isinstance(x, Product) and x.value is None for x in deps):
        raise Misuse("a product is used that was not waited for")
    values = [x.value if isinstance(x, Product) else x for x in deps]
    return values[0] if len(values) == 1 else tuple(values)


# ---- the language


def allocate_shared_memory(dtype, shape, layout):
    if dtype == torch.int64:  # barriers
        return Bars(shape[0])
    rubbish = math.nan if dtype.is_floating_point else -77
    return Tile(torch.full(shape, rubbish, dtype=dtype))


def load(pointer, mask=None, other=0):
    place, shown = pointer.at(mask)
    return torch.where(shown, pointer.flat[place], other)


def store(pointer, x, mask=None):
    place, shown = pointer.at(mask)
    x = torch.broadcast_to(number(x).to(pointer.flat.dtype), shown.shape)
    pointer.flat[place[shown]] = x[shown]
    me().pause()


def atomic_add(pointer, x, sem="acq_rel"):
    place, _ = pointer.at(None)
    before = pointer.flat[place].clone()
    pointer.flat[place] += x
    me().pause()
    return before


def inline_asm_elementwise(text, constraints, args, dtype, is_pure, pack):
    """PTX, known by its words: a named barrier, exponentials in whatever way, rescale_if_needed."""
    if "bar." in text:
        which, threads, pred = map(int, args)
        if pred:
            named_barrier(which, threads, "bar.sync" in text)
        return None
    if "ex2" in text:
        return torch.exp2(args[0])
    acc, alpha = args
    return acc * alpha


def warp_specialize(parts, warps, registers):
    """The first part runs in the CTA's own warps, the others beside it; all end together."""
    (first, args), *others = parts
    started = []
    for (work, given), count in zip(others, warps, strict=True):
        role = Role(machine, me().cta, 32 * count, partial(work, *given))
        machine.roles.append(role)
        started.append(role)
    first(*args)
    me().pause(lambda: all(role.done for role in started))


def where(condition, x, y):
    x, y = (number(z) if isinstance(z, bool | int) else z for z in (x, y))
    return torch.where(number(condition), x, y)


def full(shape, x, dtype, layout=None):
    return torch.full(shape, x.item() if isinstance(x, torch.Tensor) else x, dtype=dtype)


gl = SimpleNamespace(
    constexpr=lambda x: x, tensor=torch.Tensor, shared_memory_descriptor=Tile, static_range=range,
    float32=torch.float32, int32=torch.int32, int64=torch.int64,
    SliceLayout=Layout, BlockedLayout=Layout, NVMMADistributedLayout=Layout,
    DotOperandLayout=Layout, SwizzledSharedLayout=Layout, NVMMASharedLayout=Layout,
    program_id=lambda axis: number(me().cta.index[axis]),
    num_programs=lambda axis: me().cta.grid[axis],
    num_warps=lambda: me().threads // 32,
    allocate_shared_memory=allocate_shared_memory, load=load, store=store, atomic_add=atomic_add,
    inline_asm_elementwise=inline_asm_elementwise, warp_specialize=warp_specialize,
    convert_layout=lambda x, layout: x, to_tensor=number,
    arange=lambda start, end, layout=None: torch.arange(start, end),
    full=full, zeros=lambda shape, dtype, layout=None: full(shape, 0, dtype),
    zeros_like=torch.zeros_like, where=where,
    minimum=lambda x, y: torch.minimum(number(x), number(y)),
    maximum=lambda x, y: torch.maximum(number(x), number(y)),
    cdiv=lambda x, y: number(x).add(y - 1).div(y, rounding_mode="trunc"),  # towards 0, as on a GPU
    sum=lambda x, axis: torch.sum(x, axis, dtype=x.dtype), max=torch.amax, min=torch.amin,
    exp2=torch.exp2, log2=torch.log2, abs=torch.abs, reshape=torch.reshape, permute=torch.permute,
    split=lambda x: torch.unbind(x, -1), broadcast=torch.broadcast_tensors,
)  # fmt: skip


def in_memory(x):
    """From a tensor's first number to its last, whatever lies between them: a pointer knows no
    stride."""
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((last + 1,), (1,))


class Kernel:
    """A kernel, launched as Triton's are: kernel[grid](...), and again by what that returns."""

    seed = 0  # of the next launch

    def __init__(self, function, together):
        self.function, self.together = function, together

    def __getitem__(self, grid):
        return lambda *args, num_warps=4, maxnreg=None, **named: self.launch(grid, args, named)

    def launch(self, grid, args, named):
        global machine
        given = inspect.signature(self.function).bind(*args, **named).arguments
        given = {
            name: Pointer(in_memory(x)) if isinstance(x, torch.Tensor) else x
            for name, x in given.items()
        }
        machine = Machine(Kernel.seed)
        places = itertools.product(*map(range, grid))
        ctas = [SimpleNamespace(index=index, grid=grid, named={}) for index in places]

        def work(ctas):
            for cta in ctas:
                me().cta = cta
                self.function(**given)

        for some in [[cta] for cta in ctas] if self.together else [ctas]:
            machine.roles.append(Role(machine, None, 128, partial(work, some)))
        machine.run()
        return self


def jit(function=None, *, together=True, **options):
    """`together`: all CTAs of a launch run at the same time, else one after another."""
    if function is None:
        return partial(jit, together=together)
    return Kernel(function, together) if function.__name__.endswith("_kernel") else function


def aggregate(cls):
    """As stages/common/gluon.py's: a class whose instances are made of the fields in order."""

    def __init__(self, *values):
        for name, value in zip(cls.__annotations__, values, strict=True):
            setattr(self, name, value)

    if "__init__" not in vars(cls):
        cls.__init__ = __init__
    return cls


def stand_ins():
    """This machine in the place of stages/common/gluon.py and no_triton.py: their modules."""
    fake, fake_triton = (ModuleType(x.__name__) for x in (common.gluon, common.no_triton))
    triton = SimpleNamespace(**{**vars(common.no_triton.triton), "jit": jit(together=False)})
    vars(fake_triton).update(triton=triton, tl=gl)
    named = (
        mbarrier, barrier, fence_async_shared, async_load, async_store, store_wait, reduce_add,
        warpgroup_mma, warpgroup_mma_wait, TensorDescriptor,
    )  # fmt: skip
    vars(fake).update({each.__name__: each for each in named})
    vars(fake).update(
        gl=gl, aggregate=aggregate,
        gluon=SimpleNamespace(jit=jit, constexpr_function=lambda function: function),
        reinterpret=lambda tile, dtype, shape, layout: Tile(tile.data.view(dtype).view(shape)),
        driver=SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda index: 0)),
    )  # fmt: skip
    return fake, fake_triton


@contextlib.contextmanager
def emulated(stage=9, changes=(), seed=0):
    """A stage in Gluon on this machine: the module, whose kernels are launched under `seed`.

    stage: the number of a built-in one, or the path of anyone's. changes: (old, new) texts, each
    old one found once in the stage's files. `Kernel.seed` is that of the next launch.
    """
    Kernel.seed, threads = seed, torch.get_num_threads()
    gpu = SimpleNamespace(multi_processor_count=CTAS)
    fakes = {fake.__name__: fake for fake in stand_ins()}
    reals = {name: sys.modules[name] for name in fakes}
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.multiple(common, **{name.rpartition(".")[2]: fakes[name] for name in fakes}),
        patch.object(torch.Tensor, "type", Type(torch.Tensor.type)),
        patch.object(torch.cuda, "get_device_properties", lambda device: gpu),
        patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
    ):
        # a copy, under a name of its own: it is none of the operators that torch knows
        path = write_changed(stage, changes, Path(folder), "emulated")
        before = {*sys.modules}
        sys.modules.update(fakes)
        torch.set_num_threads(1)  # others would wait, busily, for work of microseconds
        try:
            yield stages.load(path, alone=True)
        finally:
            torch.set_num_threads(threads)
            sys.modules.update(reals)
            for name in {*sys.modules} - before:
                if name.startswith("stage_emulated"):
                    del sys.modules[name]
