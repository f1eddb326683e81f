"""Copy engines and memory that all GPUs of a host reach, for processes on a CPU.

A rank's memory is a file that the others map. Copies are made at the earliest or at the latest time
at which streams would let them be made, so that a slot which isn't free yet, or is read too early,
shows. A slot that is free is filled with NaN, so that one which is read too late shows, too.
"""

import contextlib
import itertools
import random
import time
from math import prod
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric

from stages.s10_ring import copies


class Stream:
    """A stream of copies that are made when they are asked for, or when they are waited for."""

    def __init__(self, late):
        self.late, self.left = late, []

    def wait_stream(self, other):
        for copy in other.left:
            copy()
        other.left.clear()


class Handle:
    """What rendezvous gives: everybody's memory, and a barrier of all."""

    def __init__(self, memories, group, rank):
        self.memories, self.group, self.drawn = memories, group, random.Random(rank)
        self.own, self.over = memories[rank].view(copies.SLOTS, -1), 0

    def get_buffer(self, rank, sizes, dtype, storage_offset=0):
        whole = self.memories[rank].view(dtype)
        return whole[storage_offset : storage_offset + prod(sizes)].view(sizes)

    def barrier(self, channel=0, timeout_ms=0):
        dist.barrier(self.group)
        self.over += 1  # exchanges; what came with the last two may still be read
        if self.over >= copies.SLOTS:
            self.own[self.over % copies.SLOTS] = 255
            dist.barrier(self.group)  # the next one may be received there now
        time.sleep(self.drawn.random() / 100)  # ranks are not in step after it


@contextlib.contextmanager
def engine(folder, late):
    """`copies='engine'` works in this process; `folder`: for the memories of all ranks."""
    rank, count, made = dist.get_rank(), itertools.count(), []

    def path(of, number):
        return str(Path(folder) / f"{number}-{of}")

    def empty(size, dtype, device):
        made.append((next(count), size))
        return torch.from_file(path(rank, made[-1][0]), shared=True, size=size, dtype=dtype)

    def rendezvous(memory, group):
        memory.fill_(255)  # NaN in every dtype
        dist.barrier(group)
        number, size = made[-1]
        of = [dist.get_global_rank(group, r) for r in range(group.size())]
        mapped = [
            torch.from_file(path(r, number), shared=True, size=size, dtype=torch.uint8) for r in of
        ]
        return Handle(mapped, group, rank)

    main, side = Stream(late), Stream(late)
    plain = torch.Tensor.copy_

    def copy(place, x, non_blocking=False):
        if non_blocking and late:
            side.left.append(lambda: plain(place, x))
            return place
        return plain(place, x)

    cuda = SimpleNamespace(
        Stream=lambda device: side, current_stream=lambda device: main,
        stream=lambda stream: contextlib.nullcontext(), synchronize=lambda device: None,
    )  # fmt: skip
    with (
        patch.object(symmetric, "empty", empty),
        patch.object(symmetric, "rendezvous", rendezvous),
        patch.object(torch.Tensor, "copy_", copy),
        patch.object(copies, "torch", SimpleNamespace(cuda=cuda, uint8=torch.uint8)),
        patch.object(copies, "reach", lambda device: {"host": "this", "gpu": str(rank)}),
        patch.object(copies, "engines", {}),
    ):
        yield
