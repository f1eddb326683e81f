"""How keys, values and their gradients get from one rank to the next: post, then wait.

    exchange.post(tensors, shapes)    to the next rank; of these shapes from the rank before
    ... compute ...                   meanwhile
    tensors = exchange.wait()         those that came

ByGroup sends and receives as the process group does, whatever it runs on: NCCL on GPUs, gloo on
CPUs. NCCL's copies are kernels: stage 9 leaves them no multiprocessor, so that they may wait until
it ends.

ByEngine has the GPU's copy engines write into the memory of the next rank's GPU, which needs no
multiprocessor; where all GPUs are in one host and reach each other's memory. Two slots to receive
in, s = 0, 1, 0, ...; of exchange t

    post    the side stream waits for all that was computed, then copies into slot t % 2 of the next
    wait    this stream waits for the copy; then all ranks meet at a barrier on their GPUs

After the barrier all copies of exchange t have arrived. And a slot is free when it is written
again: exchange t + 2 is posted after barrier t + 1, which each rank reaches when it has computed
with, and copied on, what came in exchange t. One barrier per exchange covers both.
"""

import os
import socket
from collections.abc import Sequence
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import timeout_of

Shapes = Sequence[tuple[int, ...]]
ALIGNED = 256  # bytes, of each tensor in a slot


class Exchange(Protocol):
    """One exchange at a time, of any number of contiguous tensors."""

    def post(self, outgoing: Sequence[Tensor], shapes: Shapes) -> None:
        """Start sending to the next rank, and receiving tensors of `shapes` and the same dtypes."""

    def wait(self) -> list[Tensor]:
        """Return what came, as soon as it can be read; what was sent may be written then."""


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
        self.works = dist.batch_isend_irecv(send + receive)

    def wait(self) -> list[Tensor]:
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as failed:
            before, after = (self.rank - 1) % self.world, (self.rank + 1) % self.world
            raise RuntimeError(
                f"ring attention: rank {self.rank} lost rank {before}, which it receives from, or "
                f"rank {after}, which it sends to: one of them has ended, or was silent for "
                f"{timeout_of(self.group)} ({failed})"
            ) from failed
        return self.incoming


class ByEngine:
    """Exchanges by the GPUs' copy engines. One for each group: its slots are kept between calls."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.after = (dist.get_rank(group) + 1) % group.size()
        self.side = torch.cuda.Stream(device)
        self.patience = int(timeout_of(group).total_seconds() * 1000)  # ms
        self.turn = self.capacity = self.most = 0

    def reserve(self, most: int, widths: Sequence[int]) -> "ByEngine":
        """Have room for tensors of up to `most` elements, of `widths` bytes each. All ranks call.

        What was there before is given back: every exchange has been waited for.
        """
        self.most = most
        needed = sum(self.bytes(width) for width in widths)
        if needed > self.capacity:
            # its barrier would use it, and machines differ in whether it works
            os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
            from torch.distributed import _symmetric_memory as symmetric

            memory = symmetric.empty(2 * needed, dtype=torch.uint8, device=self.device)
            self.handle = symmetric.rendezvous(memory, self.group)
            self.memory, self.capacity = memory, needed
        return self

    def bytes(self, width: int) -> int:
        """The place that a tensor has in a slot: by the longest part, the same on all ranks."""
        return -(-self.most * width // ALIGNED) * ALIGNED

    def slot(self, rank: int, like: Sequence[Tensor], shapes: Shapes) -> list[Tensor]:
        """Tensors of `shapes` in the current slot of `rank`, with the dtypes of `like`."""
        start, found = self.turn % 2 * self.capacity, []
        for x, shape in zip(like, shapes, strict=True):
            width = x.element_size()
            found.append(self.handle.get_buffer(rank, shape, x.dtype, start // width))
            start += self.bytes(width)
        return found

    def post(self, outgoing: Sequence[Tensor], shapes: Shapes) -> None:
        self.side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.side):
            for x, place in zip(
                outgoing, self.slot(self.after, outgoing, [x.shape for x in outgoing]), strict=True
            ):
                place.copy_(x, non_blocking=True)
        self.incoming = self.slot(dist.get_rank(self.group), outgoing, shapes)

    def wait(self) -> list[Tensor]:
        torch.cuda.current_stream(self.device).wait_stream(self.side)
        self.handle.barrier(channel=0, timeout_ms=self.patience)
        self.turn += 1
        return self.incoming


engines: dict[tuple[str, torch.device], ByEngine] = {}


def reach(device: torch.device) -> dict[str, Any]:
    """What the other ranks must know of this rank's GPU, to see whether engines can be used."""
    if device.type != "cuda" or torch.version.cuda is None:
        return {"host": "", "gpu": ""}
    others = [x for x in range(torch.cuda.device_count()) if x != device.index]
    if not others or not all(torch.cuda.can_device_access_peer(device.index, x) for x in others):
        return {"host": socket.gethostname(), "gpu": ""}
    uuid = torch.cuda.get_device_properties(device).uuid
    return {"host": socket.gethostname(), "gpu": str(uuid)}


def choose(copies: str | None, told: Sequence[dict[str, Any]]) -> str:
    """'engine' or 'group', by what all ranks told of `reach`. Raises ValueError as all others do."""
    gpus = {each["gpu"] for each in told}
    possible = len({each["host"] for each in told}) == 1 and len(gpus - {""}) == len(told)
    if copies == "engine" and not possible:
        raise ValueError(
            "copies: got 'engine', expected 'group' or None: an engine copies between GPUs of one "
            "host that reach each other's memory, one for each rank"
        )
    return copies or ("engine" if possible else "group")


def make_exchange(
    copies: str, group: dist.ProcessGroup, device: torch.device, most: int, widths: Sequence[int]
) -> Exchange:
    """An Exchange of tensors of up to `most` elements, of `widths` bytes each; all ranks call."""
    if copies == "group":
        return ByGroup(group)
    key = group.group_name, device
    if key not in engines:
        engines[key] = ByEngine(group, device)
    return engines[key].reserve(most, widths)
