"""Processes that are the ranks of a ring, started once and asked many times.

They come from a server that has torch imported, which saves two seconds for each.
"""

import contextlib
import itertools
import multiprocessing
import os
import threading
import traceback
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import fake_engine
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

import stages
from harness.isolation.lean_interpreter import make_lean
from harness.problems.directions import make_output_gradient
from harness.problems.inputs import make_inputs
from stages import s10_ring
from stages.common import tuner
from stages.s10_ring import agreement, copies, lanes, local

TIMEOUT = timedelta(seconds=60)  # of the process group
PATIENCE = 240.0  # seconds for an answer; only a hang takes so long


class RankFailed(Exception):
    """What a rank raised: the name of its type, its text, and where; or that the rank ended."""


class Ranks:
    """`world` processes in a process group; with NCCL, a GPU each."""

    def __init__(self, world, backend="gloo"):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["stages.s10_ring", "harness.problems.inputs"])
        # kept by this process, so that it outlives every rank
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT
        )
        self.processes, self.links = [], []
        for rank in range(world):
            link, theirs = context.Pipe()
            given = theirs, rank, world, self.store.port, backend
            self.processes.append(context.Process(target=serve, args=given, daemon=True))
            self.processes[-1].start()
            theirs.close()
            self.links.append(link)

    def all(self, task, *arguments, ranks=None):
        """What `task(*arguments)` returns on each of the first `ranks`; RankFailed for an error."""
        links = self.links[:ranks]
        for link in links:
            link.send((task, arguments))
        found = []
        for rank, link in enumerate(links):
            try:
                assert link.poll(PATIENCE), f"rank {rank} hangs in {task.__name__}"
                found.append(link.recv())
            except EOFError:
                found.append(RankFailed("ended", ""))
        return found

    def one(self, task, *arguments, ranks=None):
        """What rank 0 returns; raises the first error of any rank."""
        found = self.all(task, *arguments, ranks=ranks)
        for each in found:
            if isinstance(each, RankFailed):
                raise each
        return found[0]

    def end(self):
        for process in self.processes:
            process.kill()
            process.join()


def serve(link, rank, world, port, backend):
    """A rank: answers one task after the other."""
    torch.set_num_threads(1)
    if "nccl" in backend:
        torch.cuda.set_device(rank)
        # as in tests/gpu/conftest.py: to tune a kernel takes minutes
        tuner.choose = lambda kernel, candidates, *_, **__: candidates[0]
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    make_groups()
    while True:
        try:
            task, arguments = link.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = task(*arguments)
        except Exception as error:
            answer = RankFailed(type(error).__name__, str(error), traceback.format_exc())
        link.send(answer)


GROUPS = {}  # number of ranks -> their group, in a rank


def make_groups():
    """Groups of the first ranks; with other ones than before, if there were any."""
    world = dist.get_world_size()
    for members in range(1, world):
        GROUPS[members] = dist.new_group(range(members), timeout=TIMEOUT)
    GROUPS[world] = dist.group.WORLD


def stage_7(q):
    """Its kernels, which are interpreted here, in place of local.best."""
    s07 = stages.by_number(7)
    make_lean()
    return local.in_triton(s07, s07.launch)


# ---- tasks: what a rank does, and answers


def parts_of(problem, ring, group, zigzag, dtype=None):
    """This rank's q, k, v and dO of a problem."""
    made = *make_inputs(problem), make_output_gradient(problem)
    if dtype is not None:
        made = [x.to(getattr(torch, dtype)) for x in made]
    return [ring.shard(x, causal=problem.causal and zigzag, group=group) for x in made]


def leaves_of(problem, group, trains=True):
    """This rank's q, k and v of a problem, to have gradients if it `trains`, and its dO."""
    *inputs, dO = parts_of(problem, s10_ring, group, True)
    return [x.clone().requires_grad_(trains) for x in inputs], dO


def run(problem, world, options):
    """All outputs of a problem, put together: o and, where they are asked for, the gradients.

    options  of `ring`; `stage`, the folder of another one; `dtype`, instead of the problem's;
             `interpreted`, for stage 7's kernels as the attention of each rank
    """
    options = dict(options)
    if options.pop("interpreted", False):
        with patch.object(agreement, "best", stage_7):
            return run(problem, world, options)
    stage, dtype = options.pop("stage", None), options.pop("dtype", None)
    ring, group = s10_ring if stage is None else stages.load(stage), GROUPS[world]
    zigzag, trains = options.get("zigzag", True), problem.direction == "train"
    if problem.seqlens_k is not None:
        lengths = torch.tensor(problem.seqlens_k, dtype=torch.int32, device=problem.device)
        options["seqlens_k"] = lengths
    *inputs, dO = parts_of(problem, ring, group, zigzag, dtype)
    leaves = [x.clone().requires_grad_(trains) for x in inputs]
    o = ring.ring(*leaves, causal=problem.causal, group=group, **options)
    found = [o, *(torch.autograd.grad(o, leaves, dO) if trains else ())]
    for x, like in zip(found, [leaves[0], *leaves], strict=False):
        assert (x.shape, x.dtype) == (like.shape, like.dtype)
    assert all(map(torch.equal, leaves, inputs)), "an input was written to"
    in_order = problem.causal and zigzag
    whole = (ring.unshard(x, causal=in_order, group=group) for x in found)
    return [x.detach().double().cpu().numpy() for x in whole]


def of_minus_infinity(world, causal, interpreted):
    """The output, and the true one: row 5 has no scores but -inf, row 9 has such of some keys."""
    q, k, v = torch.randn(3, 1, 2, 16, 8, generator=torch.Generator().manual_seed(0))
    q[..., :2], k[..., :2] = 0.0, torch.tensor([1e20, 0.0])
    q[:, :, 5, 0] = q[:, :, 9, 1] = -1e20
    k[:, :, :8, 1] = 1e20  # of row 9 these scores are -inf
    group = GROUPS[world]
    parts = (s10_ring.shard(x, causal=causal, group=group) for x in (q, k, v))
    with patch.object(agreement, "best", stage_7 if interpreted else local.best):
        o = s10_ring.ring(*parts, causal=causal, group=group)
    whole = s10_ring.unshard(o, causal=causal, group=group)
    q, k, v = (x.double() for x in (q, k, v))
    return whole.numpy(), stages.by_number(3).attend(q, k, v, causal=causal).numpy()


def run_by_engine(problems, world, folder, late, overlap):
    """What `run` gives of each problem, in turn, by a copy engine that is made up."""
    with fake_engine.engine(folder, late):
        return [run(each, world, {"copies": "engine", "overlap": overlap}) for each in problems]


class Clocked:
    """A stream that is made up: it knows how much of each stream's work is done before its next."""

    def __init__(self):
        self.device, self.known = None, {self: 0}

    def work(self):
        self.known[self] += 1

    def wait_stream(self, other):
        for stream, done in other.known.items():
            self.known[stream] = max(self.known.get(stream, 0), done)


def unread_at_the_end(problem, world, folder):
    """How many pieces of gradients the other lane doesn't wait for, of how many, after a call."""
    caller, other = Clocked(), Clocked()
    now, plain, rounded = [caller], s10_ring.round_sums, []

    @contextlib.contextmanager
    def on(stream):
        now.append(stream)
        yield
        now.pop()

    def round_sums(*arguments):
        now[-1].work()
        rounded.append(now[-1])
        plain(*arguments)

    cuda = SimpleNamespace(stream=on, current_stream=lambda device: now[-1])
    made = lanes.Lanes(torch.device("cpu"), False)
    made.streams = [caller, other]
    with (
        fake_engine.engine(folder, False),
        patch.object(lanes, "torch", SimpleNamespace(cuda=cuda)),
        patch.object(agreement, "Lanes", lambda device, two: made),
        patch.object(s10_ring, "round_sums", round_sums),
    ):
        run(problem, world, {"copies": "engine"})
    assert rounded == [caller] * len(rounded)
    return caller.known[caller] - other.known.get(caller, 0), len(rounded)


def sent_is_there(problem, world, folder):
    """Whether what a backward pass sends first is there while it computes, of strided k and v."""
    *inputs, dO = parts_of(problem, s10_ring, GROUPS[world], True)
    leaves = [x.mT.contiguous().mT.requires_grad_() for x in inputs]
    post, round_sums, sent, there = copies.ByEngine.post, s10_ring.round_sums, [], []

    def posting(self, outgoing, shapes):
        sent.append([weakref.ref(x) for x in outgoing])
        post(self, outgoing, shapes)

    def rounding(*arguments):
        there.append(all(x() is not None for x in sent[0]))
        round_sums(*arguments)

    with (
        fake_engine.engine(folder, False),
        patch.object(copies.ByEngine, "post", posting),
        patch.object(s10_ring, "round_sums", rounding),
    ):
        o = s10_ring.ring(*leaves, causal=True, group=GROUPS[world], copies="engine")
        sent.clear()
        o.backward(dO)
    return there


def run_by_another_engine(problem, world, folder, moment):
    """What `run` gives by a copy engine, after and while rank 1 changes its GPU, also made up."""
    plain = s10_ring.Ring.backward

    def change():
        if dist.get_rank() == 1:
            copies.engines[GROUPS[world]].device = "another"

    def backward(*arguments):
        if moment == "backward":
            change()
        return plain(*arguments)

    options = {"copies": "engine"}
    with fake_engine.engine(folder, False), patch.object(s10_ring.Ring, "backward", backward):
        first = run(problem, world, options)
        if moment == "forward":
            change()
        second, third = (run(problem, world, options) for _ in range(2))
        mine = copies.engines[GROUPS[world]]
        return first, second, third, (mine.capacity, mine.turn)


def attends(problem):
    """Whether attend, which is given no group, computes what the ring of all ranks does."""
    q, k, v, _ = parts_of(problem, s10_ring, None, True)
    o = s10_ring.attend(q, k, v, causal=True)
    return torch.equal(o, s10_ring.ring(q, k, v, causal=True, group=dist.group.WORLD))


def some_gradients(problem, world):
    """The choices among q, k and v whose gradients differ from those that all three give."""
    *inputs, dO = parts_of(problem, s10_ring, GROUPS[world], True)

    def gradients(*wanted):
        leaves = [x.clone().requires_grad_(want) for x, want in zip(inputs, wanted, strict=True)]
        o = s10_ring.ring(*leaves, causal=problem.causal, group=GROUPS[world])
        o.backward(dO)
        return [x.grad for x in leaves]

    every, differ = gradients(True, True, True), []
    for wanted in itertools.product((False, True), repeat=3):
        if any(wanted):
            for x, y, want in zip(gradients(*wanted), every, wanted, strict=True):
                if (x is not None) != want or (want and not torch.equal(x, y)):
                    differ.append(wanted)
    return differ


def most_held(problem, world):
    """pass -> how much of what was received there is at once, the most, in parts of keys."""
    plain, alive, most = copies.ByGroup.post, weakref.WeakSet(), {}
    now = ["forward"]

    def post(self, *arguments):
        plain(self, *arguments)
        alive.update(self.incoming)
        held = sum(x.numel() for x in alive) / leaves[1].numel()
        most[now[0]] = max(most.get(now[0], 0), held)

    leaves, dO = leaves_of(problem, GROUPS[world])
    with patch.object(copies.ByGroup, "post", post):
        o = s10_ring.ring(*leaves, causal=True, group=GROUPS[world])
        now[0] = "backward"
        o.backward(dO)
    return most


class Alive(TorchDispatchMode):
    """`most`: the most bytes at once of what operations made of the tensors `given`."""

    def __init__(self, given):
        super().__init__()
        self.given = {x.data_ptr() for x in given}
        self.tensors, self.most = WeakTensorKeyDictionary(), 0

    def __torch_dispatch__(self, function, types, given=(), options=None):
        found = function(*given, **(options or {}))
        self.tensors.update((x, 0) for x in tree_leaves(found) if isinstance(x, torch.Tensor))
        storages = [x.untyped_storage() for x in self.tensors]
        # slots, which have names here, are no memory of the allocator
        sizes = {x.data_ptr(): x.nbytes() for x in storages if not x.filename}
        self.most = max(self.most, sum(sizes[x] for x in sizes.keys() - self.given))
        return found


def as_kernels_do(q):
    """The attention of each rank, by nothing but the memory that stage 9's launches take."""

    def forward(q, k, v, causal, seqlens_k):
        return torch.zeros_like(q), q.new_zeros(q.shape[:3], dtype=torch.float32)

    def backward(q, k, v, o, lse, do, causal, seqlens_k, wanted):
        _rows = q.new_zeros((*q.shape[:2], 2, q.shape[2]), dtype=torch.float32)
        _sums = torch.zeros_like(q, dtype=torch.float32)
        dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
        return torch.zeros_like(q, dtype=torch.float32), dk, dv

    return local.Local(stages.by_number(3), forward, backward)


def most_bytes(problem, world, copies, folder):
    """The most memory of each rank above its inputs, the less of two tries.

    A thread of gloo's may hold for a moment longer what was sent.
    """
    trains = problem.direction == "train"
    leaves, dO = leaves_of(problem, GROUPS[world], trains)
    engine = fake_engine.engine(folder, False) if copies == "engine" else contextlib.nullcontext()
    kernels = patch.object(agreement, "best", as_kernels_do)
    merging = patch.object(s10_ring, "merge", lambda *_: None)  # takes no memory on a GPU
    given, found = {"causal": problem.causal, "group": GROUPS[world], "copies": copies}, []
    with engine, kernels, merging:
        for _ in range(2):
            with Alive([*leaves, dO]) as alive:
                o = s10_ring.ring(*leaves, **given)
                if trains:
                    torch.autograd.grad(o, leaves, dO)
            found.append(alive.most)
    return min(found)


def refused(case, where, world):
    """What is raised, its type and text, where some ranks give another input than the others."""
    group = GROUPS[world]
    q, k, v = (s10_ring.shard(torch.ones(2, 2, 24, 16), causal=True, group=group) for _ in "qkv")
    options = {"causal": True, "group": group}
    changed = {
        "d": {"k": k[..., :8]},
        "no tensor": {"k": None},
        "dtype": {"q": q.double(), "k": k.double(), "v": v.double()},
        "heads": {"q": q[:, :1], "k": k[:, :1], "v": v[:, :1]},
        "causal": {"causal": False},
        "overlap": {"overlap": False},
        "gradients": {"k": k.clone().requires_grad_()},
        "rows": {"q": torch.ones(2, 2, 10, 16)},
        "keys": {"k": k[:, :, ::2], "v": v[:, :, ::2]},
        "engine": {"copies": "engine"},
        "copies": {"copies": "nvlink"},
        "zigzag": {"zigzag": 1},
        "group": {"group": "x"},
        "lengths": {"seqlens_k": torch.tensor([25, 1], dtype=torch.int32)},
        "other lengths": {"seqlens_k": torch.tensor([24, 1], dtype=torch.int32)},
    }
    given = {"q": q, "k": k, "v": v} | options
    if dist.get_rank() in where:
        given |= changed.get(case, {})
    try:
        if case == "another call" and dist.get_rank() in where:
            return s10_ring.unshard(q, causal=True, group=group).shape
        return s10_ring.ring(**given).shape
    except Exception as error:
        return type(error).__name__, str(error)


def captured(problem, world, folder):
    """What calls say while rank 1 captures a CUDA graph; then the gradients of one that doesn't."""
    group, here = GROUPS[world], dist.get_rank() == 1
    leaves, dO = leaves_of(problem, group)
    cuda = {"is_initialized": lambda: here, "is_current_stream_capturing": lambda: here}
    with fake_engine.engine(folder, False):
        call = partial(s10_ring.ring, *leaves, causal=True, group=group)
        o = call(copies="engine")
        back = partial(torch.autograd.grad, o, leaves, dO, retain_graph=True)
        with patch.multiple(torch.cuda, **cuda):
            calls = [partial(call, copies=how) for how in ("engine", "group")]
            calls += [back, partial(s10_ring.unshard, o, causal=True, group=group)]
            words = ["{}: {}".format(*said(each)) for each in calls]
        return words, [s10_ring.unshard(x, causal=True, group=group).numpy() for x in back()]


def shard(problem):
    """This rank's part of a problem's q."""
    return parts_of(problem, s10_ring, None, True)[0].shape


def twice(problem, world):
    """A gradient of a gradient."""
    leaves, dO = leaves_of(problem, GROUPS[world])
    o = s10_ring.ring(*leaves, causal=True, group=GROUPS[world])
    [dq] = torch.autograd.grad(o, leaves[:1], dO, create_graph=True)
    return torch.autograd.grad(dq.sum(), leaves[:1])


def in_other_orders(problem, world):
    """What is raised where rank 1 asks for the gradients of two calls in the other order."""
    group, asked = GROUPS[world], []
    for _ in range(2):
        leaves, dO = leaves_of(problem, group)
        asked.append((s10_ring.ring(*leaves, causal=True, group=group), leaves))
    if dist.get_rank() == 1:
        asked.reverse()
    try:
        for o, leaves in asked:
            torch.autograd.grad(o, leaves, dO)
    except ValueError as error:
        return str(error)


def brief():
    """A new group of all ranks, which doesn't wait for long."""
    return dist.new_group(timeout=timedelta(seconds=5))


@contextlib.contextmanager
def failing(where, hop, error):
    """The attention of this rank, unless it is `where`; there `error` is raised at the `hop`-th."""
    hops, plain = itertools.count(1), local.best

    def failing(passes):
        def attention(*arguments):
            if next(hops) == hop and dist.get_rank() == where:
                raise error("made up")
            return passes(*arguments)

        return attention

    def best(q):
        found = plain(q)
        return found._replace(forward=failing(found.forward), backward=failing(found.backward))

    with patch.object(agreement, "best", best):
        yield


def said(function, *arguments, **options):
    """What a call raises, its type and text, or '' and what it returns."""
    try:
        return "", function(*arguments, **options)
    except BaseException as error:
        return type(error).__name__, str(error)


def fails_amid(problem, hop, error):
    """What three calls say, of which rank 1 fails amid the first; `hop` counts both passes'."""
    group = brief()

    def call():
        leaves, dO = leaves_of(problem, group)
        o = s10_ring.ring(*leaves, causal=True, group=group)
        return [x.sum().item() for x in torch.autograd.grad(o, leaves, dO)]

    with failing(1, hop, error):
        return [said(call) for _ in range(3)]


def fails_to_reserve(problem, folder):
    """What two calls by a copy engine say, of which rank 1 gets no memory for its slots."""
    group, (*parts, _) = brief(), parts_of(problem, s10_ring, None, True)

    def call():
        return said(s10_ring.ring, *parts, causal=True, group=group, copies="engine")

    def empty(*_, **__):
        raise MemoryError("made up")

    with fake_engine.engine(folder, False):
        plain = fake_engine.symmetric.empty
        with patch.object(fake_engine.symmetric, "empty", empty if dist.get_rank() == 1 else plain):
            first = call()
        return first, call()


def comes_late(problem):
    """What two calls say, to the first of which rank 1 comes when the others have given up."""
    group, (*parts, _) = brief(), parts_of(problem, s10_ring, None, True)
    _get_process_group_store(group).set_timeout(timedelta(seconds=2))
    if dist.get_rank() == 1:
        _get_process_group_store(group).wait(["ring/1/0"], TIMEOUT)  # rank 0's, that it gives up
    return [said(s10_ring.ring, *parts, causal=True, group=group) for _ in range(2)]


def by_threads(problem):
    """What a call says while another thread's is under way, what that one says, and the next."""
    group, under_way, refused = brief(), threading.Event(), threading.Event()
    q, k, v, _ = parts_of(problem, s10_ring, group, True)
    plain = local.best

    def best(q):
        def forward(*arguments):
            under_way.set()
            refused.wait()
            return found.forward(*arguments)

        found = plain(q)
        return found._replace(forward=forward)

    def call():
        return said(s10_ring.ring, q, k, v, causal=True, group=group)

    with patch.object(agreement, "best", best), ThreadPoolExecutor(1) as pool:
        first = pool.submit(call)
        under_way.wait()
        second = call()
        refused.set()
        return first.result(), second, call()


def back_in_a_thread(problem, world):
    """Whether a backward pass in another thread has the gradients of one in this thread."""
    leaves, dO = leaves_of(problem, GROUPS[world])
    o = s10_ring.ring(*leaves, causal=True, group=GROUPS[world])
    here = torch.autograd.grad(o, leaves, dO, retain_graph=True)
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(torch.autograd.grad, o, leaves, dO).result()
    return all(map(torch.equal, here, there))


def ends(problem, when):
    """Two calls of the ring of all ranks. Rank 1 ends before the first, or amid it."""
    _get_process_group_store(dist.group.WORLD).set_timeout(timedelta(seconds=2))
    q, k, v, _ = parts_of(problem, s10_ring, None, True)
    plain, posted = copies.ByGroup.post, []

    def post(self, *arguments):
        posted.append(self)
        if len(posted) == 2:
            os._exit(1)
        plain(self, *arguments)

    if dist.get_rank() == 1:
        if when == "before":
            os._exit(1)
        copies.ByGroup.post = post
    # a rank that has got all it needs has an output of the first call
    return [s10_ring.attend(q, k, v, causal=True).shape for _ in range(2)]


# ---- on GPUs


def chosen(problem):
    """How K and V travel where nobody says how."""
    q, k, v, _ = parts_of(problem, s10_ring, None, True)
    return s10_ring.make_plan(
        s10_ring.STAGE, q, k, v, causal=problem.causal, seqlens_k=None, group=dist.group.WORLD,
        zigzag=True, overlap=True, copies=None,
    ).copies  # fmt: skip


def repeats(problem, how, launches):
    """How often o, dk and dv differ from those of the first launch, beside copies between GPUs."""
    leaves, dO = leaves_of(problem, dist.group.WORLD)
    noise, stream = torch.empty(1 << 26, dtype=torch.uint8, device="cuda"), torch.cuda.Stream()
    elsewhere = noise.to(f"cuda:{1 - dist.get_rank()}")
    first, differ = None, [0, 0, 0]
    for _ in range(launches):
        with torch.cuda.stream(stream):
            elsewhere.copy_(noise, non_blocking=True)
            noise.copy_(elsewhere, non_blocking=True)
        o = s10_ring.ring(*leaves, causal=problem.causal, copies=how)
        _, dk, dv = torch.autograd.grad(o, leaves, dO)
        found = [x.detach().clone() for x in (o, dk, dv)]
        first = first or found
        for i, (x, y) in enumerate(zip(found, first, strict=True)):
            differ[i] += not torch.equal(x, y)
    return differ


def merges_alike():
    """Whether the kernel merges as torch's operations do, but for rounding."""
    from stages.s10_ring import merge_kernel
    from stages.s10_ring.merge import merge

    generator = torch.Generator().manual_seed(0)
    o, part = torch.randn(2, 2, 3, 300, 72, generator=generator)
    lse, part_lse = torch.randn(2, 2, 3, 300, generator=generator) * 20
    kernel = [x.cuda() for x in (o, lse, part, part_lse)]
    merge(o, lse, part, part_lse)
    merge_kernel.launch(*kernel)
    u = torch.finfo(torch.float32).eps
    same = (kernel[0].cpu() - o).abs().max() <= 64 * u * 20 * o.abs().max()
    return bool(same and (kernel[1].cpu() - lse).abs().max() <= 4 * u * lse.abs().max())
