"""What all ranks must know of each other before any of them sends: else none of them does.

A rank that sends what its neighbour doesn't expect makes both wait for ever, or gives a wrong
number. So each call begins with one message per rank through the group's store, the small server
that torch.distributed's processes met at. That passes through CPUs alone, so that no rank waits for
its GPU: three or four round trips, which a GPU that still has work doesn't notice. They can't be
left out for what was agreed on before: another rank may call for something else now. The store
answers W ranks with W messages each, which is little for the GPUs of a few hosts. Each rank then
decides by the same list of messages, and what one rank finds wrong is raised by all. A backward
pass begins with such a message, too: ranks may not go back through their calls in another order. A
rank that fails amid a call says why in place of its next message (calls.py).
"""

import contextlib
import itertools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_process_group_store

from stages.common.contract import Stage, StageUnavailable, wrong
from stages.common.inputs import check_seqlens, dtype_name
from stages.common.operators import wanted_of
from stages.contract import check_inputs

from . import copies as ways
from .lanes import Lanes
from .local import Local, best, wide
from .schedule import Hop, Span, hop, length, spans

SAID = "ring attention: "  # how an error begins that names the rank that failed
Counts = WeakKeyDictionary[dist.ProcessGroup, "itertools.count[int]"]
messages: Counts = WeakKeyDictionary()
plans: Counts = WeakKeyDictionary()
Parts = list[tuple[Span, ...]]  # by rank


class Plan(NamedTuple):
    """What all ranks have agreed on for one call."""

    call: int  # the number of it, on all ranks
    group: dist.ProcessGroup
    rank: int
    q_spans: Parts
    k_spans: Parts
    causal: bool
    overlap: bool
    copies: str  # 'engine' or 'group'
    wanted: tuple[bool, bool, bool]  # of which of q, k and v there will be gradients
    local: Local

    @property
    def world(self) -> int:
        return len(self.k_spans)

    def hop(self, step: int) -> Hop:
        """What this rank computes at hop `step`."""
        return hop(self.rank, step, self.q_spans, self.k_spans, self.causal)

    def shape(self, step: int, k: Tensor) -> tuple[int, ...]:
        """The shape of the keys (B, Hk, Nk, d) that this rank has at hop `step`."""
        owner = (self.rank - step) % self.world
        return (*k.shape[:2], length(self.k_spans[owner]), k.shape[3])

    def sums_shape(self, step: int, k: Tensor) -> tuple[int, ...]:
        """The shape of dK's sums that come to this rank with the keys of hop `step`, or come home.

        They are of the first keys, as many as a rank has seen so far; of all where none saw any.
        """
        owner = (self.rank - step) % self.world
        hops = (
            hop((owner + i) % self.world, i, self.q_spans, self.k_spans, self.causal)
            for i in range(1, step)
        )
        seen = max((0 if x.empty else x.keys.stop for x in hops), default=0)
        return (*k.shape[:2], seen or length(self.k_spans[owner]), k.shape[3])

    def agree_again(self, device: torch.device) -> None:
        """Agree with the other ranks that what follows is this call's backward pass."""
        shared = {"call": f"the backward pass of call {self.call}"}
        ways.keep_alike(self.group, agree(self.group, shared, ways.slots_of(self.group, device)))

    def lanes(self, device: torch.device) -> Lanes:
        """The streams of the hops: two where copy engines bring K and V to slots that stay."""
        return Lanes(device, two=self.copies == "engine" and self.overlap)

    def exchange(self, k: Tensor) -> ways.Exchange:
        """How K and V travel and, where there will be gradients, dK and dV in float32."""
        most = k[:, :, 0].numel() * max(map(length, self.k_spans))
        needed = 2 * ways.aligned(most * k.element_size())
        if any(self.wanted):
            needed += 2 * ways.aligned(most * wide(k.dtype).itemsize)
        return ways.make_exchange(self.copies, self.overlap, self.group, k.device, needed)


def make_plan(
    stage: Stage, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, seqlens_k: Tensor | None,
    group: dist.ProcessGroup, zigzag: bool, overlap: bool, copies: str | None,
) -> Plan:  # fmt: skip
    """Agree with the other ranks on one call. Raises the same ValueError on all of them."""
    error = ""
    shared: dict[str, Any] = {}
    own: dict[str, Any] = {}
    try:
        check_inputs(stage, q, k, v, causal=causal)
        check_inputs(best(q).stage.STAGE, q, k, v, causal=causal)
        for name, x in (("zigzag", zigzag), ("overlap", overlap)):
            if not isinstance(x, bool):
                raise wrong(name, repr(x), "True or False")
        if copies not in (None, "engine", "group"):
            raise wrong("copies", repr(copies), "'engine', 'group' or None")
        if seqlens_k is not None:
            check_seqlens(seqlens_k, q.shape[0], torch.iinfo(torch.int32).max, q.device)
        shared = {
            "call": "attend",
            "q": f"(B, H, d) = {(*q.shape[:2], q.shape[3])}, {dtype_name(q.dtype)}",
            "device": q.device.type,
            "k": f"{k.shape[1]} heads",
            "causal": causal, "zigzag": zigzag, "overlap": overlap, "copies": copies,
            # on a GPU the values stay unread: looking would wait for it at each call
            "seqlens_k": seqlens_k.tolist() if seqlens_k is not None and not q.is_cuda else None,
            "seqlens_k given": seqlens_k is not None,
            "requires_grad of q, k, v": [wanted_of(x) for x in (q, k, v)],
        }  # fmt: skip
        own = {
            "q": q.shape[2], "k": k.shape[2], **ways.reach(q.device),
            **ways.slots_of(group, q.device),
        }  # fmt: skip
    except (ValueError, StageUnavailable) as found:
        error = str(found)
    told = agree(group, shared, own, error)
    ways.keep_alike(group, told)
    q_spans, k_spans = (cut_as_told(name, told, zigzag and causal) for name in ("q", "k"))
    queries, keys = (sum(map(length, held)) for held in (q_spans, k_spans))
    if causal and queries != keys:
        raise wrong("causal", f"True, {queries} queries and {keys} keys in all", "as many of both")
    if seqlens_k is not None and not q.is_cuda and max(shared["seqlens_k"]) > keys:
        raise wrong("seqlens_k", shared["seqlens_k"], f"each in 0..{keys}, the number of all keys")
    wants_q, wants_k, wants_v = shared["requires_grad of q, k, v"]
    call = next(plans.setdefault(group, itertools.count()))
    return Plan(
        call, group, dist.get_rank(group), q_spans, k_spans, causal, overlap,
        ways.choose(copies, told), (wants_q, wants_k, wants_v), best(q),
    )  # fmt: skip


def cut_as_told(name: str, told: list[dict[str, Any]], zigzag: bool) -> Parts:
    """The spans of all ranks' parts, whose lengths they told. Raises ValueError for other parts."""
    lengths = [each[name] for each in told]
    parts = spans(sum(lengths), len(told), zigzag)
    if lengths != (expected := [*map(length, parts)]):
        raise wrong(name, f"{lengths} rows, by rank", f"{expected}, as shard cuts {sum(lengths)}")
    return parts


def agree(
    group: dist.ProcessGroup, shared: Mapping[str, Any], own: Mapping[str, Any], error: str = ""
) -> list[dict[str, Any]]:
    """Tell all ranks `own`, and return what each of them told, by rank.

    shared  what has to be the same on all ranks, by name
    own     what may differ
    error   what is wrong with this rank's arguments

    All of it as JSON has it. Raises ValueError where a rank has an error, captures a CUDA graph, or
    `shared` differs, in the same words on every rank; RuntimeError that names those which don't
    answer in time, or gave up.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        # replays would have no agreement, and all write to the slots of the captured exchanges
        outside = "one outside: a replay leaves out what the CPUs of all ranks do at each call"
        error = str(wrong("call", "one that a CUDA graph captures", outside))
    store, rank, world = _get_process_group_store(group), dist.get_rank(group), group.size()
    number, keys = next_keys(group)
    try:
        store.set(keys[rank], json.dumps([error, dict(shared), dict(own)]))
        told = [json.loads(x) for x in store.multi_get(keys)]
        if number:  # all have sent this one, and so have read the last one
            store.delete_key(f"ring/{number - 1}/{rank}")
    except RuntimeError as failed:  # some stores raise no DistError
        raise RuntimeError(f"{SAID}{who_is_missing(store, keys)} ({failed})") from failed
    for why, *others in told:
        if not others:
            raise RuntimeError(why)
    for r, (found, _, _) in enumerate(told):
        if found:
            raise ValueError(f"rank {r} of {world}: {found}")
    for name in shared:
        values = [each.get(name) for _, each, _ in told]
        if any(value != values[0] for value in values):
            by_rank = ", ".join(f"{value} on rank {r}" for r, value in enumerate(values))
            raise wrong(name, by_rank, "the same on all ranks")
    return [each for _, _, each in told]


def next_keys(group: dist.ProcessGroup) -> tuple[int, list[str]]:
    """The number of the next messages, and all ranks' keys of them in the group's store."""
    number = next(messages.setdefault(group, itertools.count()))
    return number, [f"ring/{number}/{r}" for r in range(group.size())]


def give_up(group: dist.ProcessGroup, why: str) -> str:
    """Send `why` in place of this rank's next message, or what another rank sent so before.

    Returns what was sent. All ranks that come to their next call get it there.
    """
    with contextlib.suppress(RuntimeError):  # the store may be what is lost
        store, (_, keys) = _get_process_group_store(group), next_keys(group)
        for key in keys:
            if store.check([key]) and len(told := json.loads(store.get(key))) == 1:
                [why] = told
                break
        store.set(keys[dist.get_rank(group)], json.dumps([why]))
    return why


def who_is_missing(store: dist.Store, keys: list[str]) -> str:
    """Which ranks have sent no message, in words."""
    try:
        missing = [str(r) for r, key in enumerate(keys) if not store.check([key])]
    except RuntimeError:
        return "the group's store is gone: the process that keeps it, often rank 0, has ended"
    return f"no answer from rank {', '.join(missing)}: it has ended, or does something else"
