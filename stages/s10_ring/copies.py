"""How keys, values and their gradients get from one rank to the next: post, then wait.

    exchange.post(tensors, shapes)    to the next rank; of these shapes from the rank before
    ... compute ...                   meanwhile
    tensors = exchange.wait()         those that came

ByGroup sends and receives as the process group does, whatever it runs on: NCCL on GPUs, gloo on
CPUs. NCCL's copies are kernels: stage 9 leaves them no multiprocessor, so that they may wait until
it ends.

ByEngine has the GPU's copy engines write into the memory of the next rank's GPU, which needs no
multiprocessor; where all GPUs are in one host and reach each other's memory. Each rank has three
slots to receive in. Of exchange t = 0, 1, 2, ...

    post    the side stream waits for all that was computed, then copies into slot t % 3 of the next
    wait    this stream waits for the copy; then all ranks meet at a barrier on their GPUs

After barrier t all copies of exchange t have arrived. And what came with it may be read, and copied
on, until barrier t + 2: exchange t + 3, which is posted after that, writes over it. So one barrier
per exchange covers both.
"""

import functools
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from stages.common.contract import wrong

Shapes = Sequence[tuple[int, ...]]
ALIGNED = 256  # bytes, of each tensor in a slot
SLOTS = 3


def aligned(size: int) -> int:
    """The bytes that a tensor of `size` bytes takes in a slot."""
    return -(-size // ALIGNED) * ALIGNED


class Exchange(Protocol):
    """One exchange at a time, of any number of contiguous tensors."""

    def post(self, outgoing: Sequence[Tensor], shapes: Shapes) -> None:
        """Start sending to the next rank, and receiving tensors of `shapes` and the same dtypes."""

    def wait(self) -> list[Tensor]:
        """Return what came, as soon as it can be read: until two more exchanges are over.

        What was sent may be written then.
        """


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long a rank waits for the others: the `timeout` that the group was made with."""
    found: timedelta = group._get_backend(device).options._timeout
    return found


class ByGroup:
    """Exchanges by the process group's own send and receive."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.world = dist.get_rank(group), group.size()

    def post(self, outgoing: Sequence[Tensor], shapes: Shapes) -> None:
        after, before = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        self.incoming = [x.new_empty(shape) for x, shape in zip(outgoing, shapes, strict=True)]
        send = [
            dist.P2POp(dist.isend, x, group=self.group, group_peer=after, tag=tag)
            for tag, x in enumerate(outgoing)
        ]
        receive = [
            dist.P2POp(dist.irecv, x, group=self.group, group_peer=before, tag=tag)
            for tag, x in enumerate(self.incoming)
        ]
        with self.naming():
            self.works = dist.batch_isend_irecv(send + receive)

    def wait(self) -> list[Tensor]:
        with self.naming():
            for work in self.works:
                work.wait()
        self.works.clear()  # gloo's hold what was sent
        return self.incoming

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Have an error of torch.distributed name the ranks that may be its cause."""
        try:
            yield
        except RuntimeError as failed:
            before, after = (self.rank - 1) % self.world, (self.rank + 1) % self.world
            silent = timeout_of(self.group, self.incoming[0].device).total_seconds()
            raise RuntimeError(
                f"ring attention: rank {self.rank} lost rank {before}, which it receives from, or "
                f"rank {after}, which it sends to: it has ended, or was silent for {silent:g} s "
                f"({failed})"
            ) from failed


class AtOnce:
    """Exchanges that are over before anything else is computed, to see what overlap is worth."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def post(self, outgoing: Sequence[Tensor], shapes: Shapes) -> None:
        self.exchange.post(outgoing, shapes)
        self.incoming = self.exchange.wait()

    def wait(self) -> list[Tensor]:
        return self.incoming


class ByEngine:
    """Exchanges by the GPUs' copy engines. One for each group: its slots are kept between calls."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        # not the group itself, which would never be forgotten then
        self.rank, self.device = dist.get_rank(group), device
        self.after = (self.rank + 1) % group.size()
        self.side = torch.cuda.Stream(device)
        self.patience = int(timeout_of(group, device).total_seconds() * 1000)  # ms
        self.turn = self.capacity = 0  # exchanges so far; bytes of a slot
        self.memory: Any = None
        self.handle: Any = None
        self.last = torch.cuda.current_stream(device)

    def reserve(self, group: dist.ProcessGroup, needed: int) -> "ByEngine":
        """Have slots of `needed` bytes, the same number on all ranks, all of which call this.

        Smaller ones are given back before: every exchange has been waited for. A call on another
        stream than the last one's begins after that, whose slots it takes.
        """
        now = torch.cuda.current_stream(self.device)
        now.wait_stream(self.last)
        self.last = now
        if needed > self.capacity:
            self.give_back()
            # multicast, which the barrier would use, doesn't work on every machine
            os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
            from torch.distributed import _symmetric_memory as symmetric

            self.memory = symmetric.empty(SLOTS * needed, dtype=torch.uint8, device=self.device)
            self.handle = symmetric.rendezvous(self.memory, group)
            self.capacity = needed
        return self

    def give_back(self) -> None:
        """Have no slots any more, as at the beginning."""
        torch.cuda.synchronize(self.device)  # what is queued may still read the old ones
        self.memory = self.handle = None
        self.turn = self.capacity = 0

    def slot(self, rank: int, like: Sequence[Tensor], shapes: Shapes) -> list[Tensor]:
        """Tensors of `shapes` in the current slot of `rank`, with the dtypes of `like`.

        Sender and receiver name the same shapes, and so the same places.
        """
        start, found = self.turn % SLOTS * self.capacity, []
        for x, shape in zip(like, shapes, strict=True):
            width = x.element_size()
            found.append(self.handle.get_buffer(rank, shape, x.dtype, start // width))
            start += aligned(prod(shape) * width)
        return found

    def post(self, outgoing: Sequence[Tensor], shapes: Shapes) -> None:
        places = self.slot(self.after, outgoing, [x.shape for x in outgoing])
        self.side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.side):
            for x, place in zip(outgoing, places, strict=True):
                place.copy_(x, non_blocking=True)
        self.incoming = self.slot(self.rank, outgoing, shapes)

    def wait(self) -> list[Tensor]:
        torch.cuda.current_stream(self.device).wait_stream(self.side)
        self.handle.barrier(channel=0, timeout_ms=self.patience)
        self.turn += 1
        return self.incoming


engines: "WeakKeyDictionary[dist.ProcessGroup, ByEngine]" = WeakKeyDictionary()


def slots_of(group: dist.ProcessGroup, device: torch.device) -> dict[str, list[int]]:
    """What the others must know of the slots that this rank has for `group` on `device`."""
    kept = engines.get(group)
    if kept is None or kept.device != device:
        return {"slots": [0, 0]}
    return {"slots": [kept.capacity, kept.turn]}


def keep_alike(group: dist.ProcessGroup, told: Sequence[dict[str, Any]]) -> None:
    """Give the slots back unless all ranks told the same of theirs: all have none then.

    Else a rank that changed its GPU would reserve some, and wait in vain for the others to do so.
    """
    kept = engines.get(group)
    if kept is not None and any(each["slots"] != told[0]["slots"] for each in told):
        kept.give_back()


@functools.cache
def reach(device: torch.device) -> dict[str, str]:
    """What the others must know of this rank's GPU: its host, and its name if it reaches all."""
    if device.type != "cuda" or torch.version.cuda is None:
        return {"host": "", "gpu": ""}
    booted = Path("/proc/sys/kernel/random/boot_id")  # hosts may have the same name
    host = socket.gethostname() + (booted.read_text() if booted.exists() else "")
    others = [x for x in range(torch.cuda.device_count()) if x != device.index]
    reached = [torch.cuda.can_device_access_peer(device.index, x) for x in others]
    name = str(torch.cuda.get_device_properties(device).uuid)
    return {"host": host, "gpu": name if reached and all(reached) else ""}


def choose(copies: str | None, told: Sequence[dict[str, Any]]) -> str:
    """'engine' or 'group', by what all ranks told of `reach`; or a ValueError, on all of them."""
    gpus = {each["gpu"] for each in told} - {""}
    possible = len(gpus) == len(told) and len({each["host"] for each in told}) == 1
    if copies == "engine" and not possible:
        few = "'group' or None: an engine copies between GPUs of one host that reach each other's"
        raise wrong("copies", "'engine'", f"{few} memory, one for each rank")
    return copies or ("engine" if possible else "group")


def make_exchange(
    copies: str, overlap: bool, group: dist.ProcessGroup, device: torch.device, needed: int
) -> Exchange:
    """An Exchange of up to `needed` bytes at once, as `aligned` counts them. All ranks call."""
    exchange: Exchange = ByGroup(group)
    if copies == "engine":
        kept = engines.get(group)
        if kept is None or kept.device != device:
            if kept is not None:
                kept.give_back()
            kept = engines[group] = ByEngine(group, device)
        exchange = kept.reserve(group, needed)
    return exchange if overlap else AtOnce(exchange)
