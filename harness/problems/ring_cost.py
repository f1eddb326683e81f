"""The cost of attention over several GPUs, on paper: what each computes and sends, and when.

W ranks have n = N / W rows each. KV = 2 b hk n d e are the bytes of a rank's k and v, Q = b h n d e
those of its q, with elements of e bytes; dK and dV travel in float32, D = 2 b hk n d 4 bytes.

    time       compute  4 b h d x pairs of a query and a key / rate + launch; backward 2.5 times
               send     latency + bytes / link
               merge    M / hbm + launch: o read and written, that of the hop read. With two ranks
                        M = 3 Q, with more o is in float32 between hops; backward dq, dk and dv are
                        added up in float32, and each hop after the own keys' reads o and dO and
                        clears, reads and writes dq's sums once more than one GPU does
    pairs      without a mask n^2 at each of the W hops; causal n (n + 1) / 2 at the first, then
               n^2 / 2 in zigzag, n^2 on the last rank in order
    ring       at each hop max(compute + merge, send), backward max(compute, send) + merge, or
               their sum without overlap; it sends KV at all hops but the last, and backward D at
               all but the first two, and D home while the second half of the own keys is computed
    gather     send (W - 1) KV, put W KV together, compute all; backward the reverse
    Ulysses    send (W - 1) / W (2 Q + KV), some of it before and some after computing all; cut and
               put together 2 Q + KV, at the same times

A ring hides what it sends where n^2 4 b h d / rate >= latency + KV / link: from some n on, which
doesn't depend on W. Ulysses sends less than a ring, by W, and hides nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from harness.problems.cost import flops
from harness.problems.problem import ITEMSIZE, ONE_GPU, Problem

KERNELS: Final = 3  # of a backward pass: before the products, the products, after them
GRADIENT_SIZE: Final = 4  # bytes: dK and dV travel, and parts of o are merged, in float32
# direction -> the FLOPs of its passes, by those of the forward pass
PASSES: Final = {"fwd": (1.0,), "bwd": (2.5,), "train": (1.0, 2.5)}
# contestant (harness/peers/ranks) -> how it works; torch's context_parallel isn't modelled
RING: Final = {  # zigzag, overlap
    "ring": (True, True), "ring_in_order": (False, True), "ring_in_turn": (True, False),
    # NCCL's copies are kernels, and wait until the attention's leave them a multiprocessor
    "ring_engine": (True, True), "ring_group": (True, False),
}  # fmt: skip
WAYS: Final = (*RING, "gather", "ulysses", ONE_GPU)


@dataclass(frozen=True)
class Machine:
    """One of the GPUs: FLOP/s of its kernels, bytes/s to another one and to its memory, seconds."""

    rate: float
    link: float
    latency: float  # of a message
    hbm: float = 3.35e12  # NVIDIA's data sheet of the H100 SXM; of the H200 4.8e12
    launch: float = 5e-6  # a kernel's start after another one's end, an assumption


@dataclass(frozen=True)
class Span:
    """What a rank does from `start` to `end`, in seconds: 'compute', 'merge' or 'send'."""

    what: str
    start: float
    end: float
    sent: float = 0.0  # bytes


def schedule(problem: Problem, machine: Machine, way: str) -> list[Span]:
    """What the slowest rank of `way`, one of WAYS, does in a call, in the order of beginning."""
    spans: list[Span] = []
    for factor in PASSES[problem.direction]:
        begun = max((span.end for span in spans), default=0.0)
        if way in RING:
            spans += ring_pass(problem, machine, *RING[way], factor, begun)
        else:
            spans += other_pass(problem, machine, way, factor, begun)
    return spans


def seconds(problem: Problem, machine: Machine, way: str) -> float:
    """How long a call takes."""
    return max(span.end for span in schedule(problem, machine, way))


def sent_bytes(problem: Problem, way: str) -> int | None:
    """The bytes that the rank which sends most does in a call; None where `way` isn't modelled."""
    if way not in WAYS:
        return None
    return round(sum(span.sent for span in schedule(problem, Machine(1.0, 1.0, 0.0), way)))


def part_bytes(problem: Problem) -> tuple[float, float]:
    """Q and KV: the bytes of a rank's q, and of its k and v."""
    row = problem.b * problem.d * ITEMSIZE[problem.dtype] * problem.nk / problem.world
    return problem.h * row, 2 * problem.hk * row


def pairs(problem: Problem, zigzag: bool) -> list[float]:
    """How many pairs of a query and a key the slowest rank computes at each hop, of one head."""
    n = problem.nk / problem.world
    if not problem.causal:
        return [n * n] * problem.world
    return [n * (n + 1) / 2] + [n * n / 2 if zigzag else n * n] * (problem.world - 1)


def ring_pass(
    problem: Problem, machine: Machine, zigzag: bool, overlap: bool, factor: float, now: float
) -> Iterator[Span]:
    """One pass round the ring, from the time `now` on."""
    each = 4 * problem.b * problem.h * problem.d * factor / machine.rate
    hops = backward_hops(problem, zigzag) if factor > 1 else forward_hops(problem, zigzag)
    for seen, sent, moved in hops:
        arrived = now + (machine.latency + sent / machine.link if sent else 0.0)
        if sent:
            yield Span("send", now, arrived, sent)
        begun = now if overlap else arrived
        now = begun
        if seen:
            now += each * seen + machine.launch * (KERNELS if factor > 1 else 1)
            yield Span("compute", begun, now)
        if factor > 1:  # what arrives is added to
            now = max(now, arrived)
        if moved:
            begun, now = now, now + moved / machine.hbm + machine.launch
            yield Span("merge", begun, now)
        now = max(now, arrived)


def forward_hops(problem: Problem, zigzag: bool) -> list[tuple[float, float, float]]:
    """Of each hop: pairs that are computed, bytes that are sent, bytes that merging moves."""
    q, kv = part_bytes(problem)
    wide = q / ITEMSIZE[problem.dtype] * GRADIENT_SIZE
    merge = 2 * (wide if problem.world > 2 else q) + q
    last = problem.world - 1
    return [
        (seen, kv * (hop < last), merge * (hop > 0))
        for hop, seen in enumerate(pairs(problem, zigzag))
    ]


def backward_hops(problem: Problem, zigzag: bool) -> list[tuple[float, float, float]]:
    """The same: a quarter of the own keys, one rank's beside a quarter, all others', a half."""
    q, kv = part_bytes(problem)
    wide, gradients = (x / ITEMSIZE[problem.dtype] * GRADIENT_SIZE for x in (q, kv))
    own, *others = pairs(problem, zigzag)
    count = problem.b if problem.b > 1 else problem.hk  # of fewer than 4 the first quarter is none
    middle = (count // 2 or count) / count
    first = count // 4 / count or middle
    hops = [(own * first, kv, 0.0)]
    again = 2 * q + 3 * wide  # o, dO; dq's sums
    for hop, seen in enumerate(others, 1):
        sent = kv * (hop < problem.world - 1) + gradients * (hop > 1)
        seen += own * (middle - first) * (hop == 1)
        hops.append((seen, sent, again + 3 * (wide + gradients) * (hop > 1)))
    hops.append((own * (1 - middle), gradients, 2 * (wide + gradients) + q + kv))
    return hops


def other_pass(
    problem: Problem, machine: Machine, way: str, factor: float, now: float
) -> Iterator[Span]:
    """One pass of gather, Ulysses or a single GPU, from the time `now` on."""
    q, kv = part_bytes(problem)
    ranks = 1 if way == ONE_GPU else problem.world
    others = ranks - 1
    share = others / ranks
    nothing = 0.0, 0.0
    before, after = {  # the bytes sent, and those read and written to cut and to put together
        "gather": ((others * kv, 2 * ranks * kv), nothing),
        "ulysses": ((share * (q + kv), 4 * (q + kv)), (share * q, 4 * q)),
    }.get(way, (nothing, nothing))
    if factor > 1:  # gradients go back the same way
        before, after = after, before
    forward = flops(replace(problem, direction="fwd"))
    steps = [
        ("send", machine.latency + before[0] / machine.link, before[0]),
        ("merge", machine.launch + before[1] / machine.hbm, before[1]),
        ("compute", machine.launch + factor * forward / ranks / machine.rate, forward),
        ("merge", machine.launch + after[1] / machine.hbm, after[1]),
        ("send", machine.latency + after[0] / machine.link, after[0]),
    ]
    for what, took, amount in steps:
        if amount:
            yield Span(what, now, now + took, amount if what == "send" else 0.0)
            now += took


def hidden_from(problem: Problem, machine: Machine) -> float:
    """The least n, rows of each rank, at which a hop of the forward pass hides what it sends."""
    one = replace(problem, nq=problem.world, nk=problem.world)  # n = 1
    each = 4 * one.b * one.h * one.d * pairs(one, True)[1] / machine.rate  # times n^2
    kv = part_bytes(one)[1] / machine.link  # times n
    return (kv + (kv * kv + 4 * each * machine.latency) ** 0.5) / (2 * each)


def peak_bytes(problem: Problem, copies: str = "group") -> int:
    """The most memory that stage 10 takes on a rank, above its inputs and with its outputs, bytes.

    Forward: received K and V, of two hops at the most; o so far, in float32 where more than two
    ranks merge; o of one hop; two lse. Backward, in float32: half of what the own keys add, dq so
    far, dK and dV that go round; what stage 9's kernels take for a hop and give, dq's sums and dq,
    dK and dV, two rows of numbers; o and lse; by process group what comes meanwhile. What copy
    engines receive is no part of the allocator's memory.
    """
    q, kv = part_bytes(problem)
    size, world = ITEMSIZE[problem.dtype], problem.world
    wide, gradients = q / size * GRADIENT_SIZE, kv / size * GRADIENT_SIZE
    lse = wide / problem.d
    by_group = copies == "group"
    forward = by_group * min(world - 1, 2) * kv + (wide if world > 2 else q) + q + 2 * lse
    if problem.direction == "fwd":
        return round(forward)
    cut = 2 if problem.b * problem.hk > 1 else 1
    held = q + lse + (wide + gradients) / cut  # at each hop but the first
    whole = hop = 2 * wide + gradients
    arriving = by_group * gradients
    # of the ranks that take most: dq so far, sums that are sent, the hop or nothing, what arrives
    third, fourth = wide + gradients + whole + arriving, 0.0
    home = wide + gradients + arriving
    if problem.causal:
        late, early = wide + gradients, 2 * wide + gradients / 2  # chunk's rows, or keys; all else
        hop = max(late, early)
        third = max(
            wide / 2 + gradients + late + arriving / 2,  # rank 0, which has late rows alone
            wide + gradients / 2 + late + arriving,  # rank 1
            wide + gradients / 2 + early + arriving / 2,  # a later one
        )
        fourth = wide + late + 2 * arriving
        middle = gradients / 2 if world == 2 else arriving
        home = max(wide / 2 + gradients + arriving / 2, wide + middle + arriving)
    # at each hop what arrives of K and V, too, as long as they go on
    hops = [hop + by_group * kv * min(world - 1, 2)]
    hops += [third + by_group * kv * (1 + (world > 3))] * (world > 2)
    hops += [fourth + by_group * kv * (1 + (world > 4))] * (world > 3)
    last = held + home + ((whole + 2 * lse) / 2 if cut == 2 else 0.0)
    end = 2 * q + lse + kv + 2 * wide + gradients + by_group * gradients  # all, and rounded
    return round(max(forward, held + 2 * lse + max(hops), last, end))
