"""The ranks of a world: processes that compute one attention together, a part of the sequence each.

`Ranks` is the parent's side: it speaks with all of them as a Session speaks with one. A rank that
fails leaves others waiting for it, so all are ended then, within PATIENCE, and the reason names it.
The rest runs in a rank.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from harness.isolation.child import START_LIMIT, ChildFailed
from harness.isolation.messages import Link, Loads, Order, Out, Ready
from harness.isolation.session import LATE, Session
from harness.measures.samples import ONE_CALL
from harness.records.files import write

PATIENCE: Final = 5.0  # seconds for the others' answers after a failure, or after their time is up
MEETING: Final = 2 * START_LIMIT  # seconds; the parent, which knows who is late, gives up before
LARGEST: Final = ("time_ms", "late", "first_call_ms", "call_ms", "peak_bytes", "launch_ms",
                  "small_ms")  # fields of which the largest among the ranks counts  # fmt: skip
BACKENDS: Final = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
LINK_BYTES: Final = {"cpu": 1 << 16, "cuda": 1 << 28}  # as K and V of 32768 tokens of 16 heads
LINK_SAMPLES: Final = 9
HERE: Final = "127.0.0.1"  # all ranks are on one machine
MOMENT: Final = 0.01  # seconds between two looks for the first rank's port


class Ranks:
    """One process for each rank, all of which get each message; the slowest one's answer counts."""

    def __init__(
        self, target: Callable[..., None], orders: Sequence[Order], memory: int, load: float
    ) -> None:
        self.sessions = [Session(target, order, memory=memory, load=load) for order in orders]
        self.load = min(START_LIMIT, load)

    def next_message(self, rank: int, *kinds: type) -> Any:
        """A rank's next message, or None; where the rank fails, end all ranks, and name it."""
        try:
            return self.sessions[rank].next_message(*kinds)
        except ChildFailed as error:
            self.end()
            raise ChildFailed(error.status, f"rank {rank}: {error.reason}") from None

    def ready(self) -> None:
        """Wait until all ranks are ready. They wait for each other before they load a stage."""
        self.start()
        if any(session.greeted is None for session in self.sessions):
            for greeting, seconds in ((Loads, START_LIMIT), (Ready, self.load)):
                self.receive(greeting, seconds=seconds, late=LATE.format(seconds))

    def is_ready(self) -> bool:
        """Whether the ranks are ready: they are waited for, since they wait for each other."""
        self.ready()
        return True

    def start(self) -> None:
        """Start the ranks that aren't running."""
        for session in self.sessions:
            session.start()

    def send(self, message: object) -> None:
        """Send a message to all ranks."""
        for session in self.sessions:
            session.send(message)

    def ask(self, message: object, *kinds: type, seconds: float, late: str) -> Any:
        """Send `message` to all ranks once they are ready; returns their answer."""
        self.ready()
        self.send(message)
        return self.receive(*kinds, seconds=seconds, late=late)

    def receive(self, *kinds: type, seconds: float, late: str) -> Any:
        """Wait for the next message of each rank; returns one with the largest figures of all.

        Out where all ranks refuse the problem, or say that they can't run here. Raises ChildFailed,
        which names the rank, where one ends, reports an error, or sends nothing within `seconds`.
        The others have PATIENCE more: those that waited for that rank may give up when the time is
        over, and aren't blamed.
        """
        answers: dict[int, Any] = {}
        failed: list[int] = []  # ranks that reported an error in time, the first one first
        over = time.monotonic() + seconds
        until = over + PATIENCE
        while len(answers) < len(self.sessions) and time.monotonic() < until:
            for rank in self.silent(answers):
                answer = self.next_message(rank, *kinds)
                if answer is not None:
                    answers[rank] = answer
                if isinstance(answer, Out) and time.monotonic() < over:
                    failed.append(rank)
                    until = min(until, time.monotonic() + PATIENCE)
        silent = self.silent(answers)
        outs = {rank: answer for rank, answer in answers.items() if isinstance(answer, Out)}
        if not silent and not outs:
            return largest([*answers.values()])
        alike = all(out.refused or out.status == "skipped" for out in outs.values())
        if len(outs) == len(self.sessions) and alike:
            return answers[0]
        self.end()
        if failed or not silent:
            first = (failed or [*outs])[0]
            raise ChildFailed(outs[first].status, f"rank {first}: {outs[first].reason}")
        who = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}"
        raise ChildFailed("timeout", f"{who}: {late}")

    def silent(self, answers: Collection[int]) -> list[int]:
        """The ranks that aren't among those with `answers`."""
        return [rank for rank in range(len(self.sessions)) if rank not in answers]

    def printed(self) -> str:
        """The output of all ranks since the last call."""
        return "".join(session.printed() for session in self.sessions)

    def end(self) -> None:
        """End all ranks, the first one last: NCCL's threads in the others print that it's gone."""
        for session in reversed(self.sessions):
            session.end()


def largest(answers: Sequence[Any]) -> Any:
    """The first of messages of one kind, with the largest of all for each of LARGEST."""
    found = {}
    for name in LARGEST:
        figures = [getattr(answer, name, None) for answer in answers]
        known = [figure for figure in figures if figure is not None]
        if len(known) == len(answers):
            found[name] = max(known)
    return replace(answers[0], **found)


# ---- in a rank


def join(order: Order) -> None:
    """Make this process a rank of its world; returns when all of them are there.

    Rank r has the GPU r. Raises StageUnavailable where there are too few. The first rank takes any
    free port and writes it to a file, so that two commands at a time don't get into each other's.
    """
    import torch
    from torch import distributed

    from stages.contract import StageUnavailable

    world, device = order.problem.world, order.problem.device
    patience = order.patience
    if device == "cuda":
        have = torch.cuda.device_count()
        if have < world:
            raise StageUnavailable(f"{world} ranks need as many GPUs; this machine has {have}")
        torch.cuda.set_device(order.rank)
        # else a rank that is ended beside others prints that it can't reach them
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        patience *= 10  # NCCL would end the process at that time, and the wrong one be blamed
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host's name may have no address
    # ranks may start seconds apart where a machine is busy: that is not the group's patience
    limit, meeting = timedelta(seconds=MEETING), Path(order.meeting)
    if order.rank == 0:
        store = distributed.TCPStore(HERE, 0, world, True, limit, wait_for_workers=False)
        write(meeting, str(store.port))
    else:
        while not meeting.exists():
            time.sleep(MOMENT)
        store = distributed.TCPStore(HERE, int(meeting.read_text()), world, False, limit)
    meet(store, order.rank, world, "at the store")
    limit = timedelta(seconds=patience)
    distributed.init_process_group(
        BACKENDS[device], store=store, rank=order.rank, world_size=world, timeout=limit
    )
    # a rank that fails while it loads a stage would make others fail that still make their group
    meet(store, order.rank, world, "in the group")
    store.set_timeout(limit)  # of what a stage asks the group's store


def meet(store: Any, rank: int, world: int, where: str) -> None:
    """Return when all ranks are `where`; the first one, which keeps the store, returns last."""
    store.set(f"{rank} is {where}", "")
    store.wait([f"{each} is {where}" for each in range(world)])
    store.set(f"{rank} was {where}", "")
    if rank == 0:
        store.wait([f"{each} was {where}" for each in range(world)])


def aligner(device: str) -> Callable[[], object]:
    """A call after which all ranks go on at the same time; on GPUs, in their streams."""
    import torch
    from torch import distributed

    one = torch.zeros(1, device=device)
    return lambda: distributed.all_reduce(one)


def measure_link(device: str) -> Link:
    """Measure how long each rank takes to send to the next one, while the previous one sends to it.

    By torch.distributed, in the samples that stages are timed with.
    """
    import torch
    from torch import distributed

    from harness.measures.timing import sampler

    rank, world = distributed.get_rank(), distributed.get_world_size()

    def measured(size: int) -> float:
        x, y = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
        to = distributed.P2POp(distributed.isend, x, (rank + 1) % world)
        of = distributed.P2POp(distributed.irecv, y, (rank - 1) % world)

        def exchange() -> None:
            for work in distributed.batch_isend_irecv([to, of]):
                work.wait()

        take = sampler(exchange, device, aligner(device))
        times = [take(ONE_CALL).time_ms for _ in range(2 * LINK_SAMPLES)]
        return statistics.median(times[LINK_SAMPLES:])  # the first half warms up

    size = LINK_BYTES[device]
    return Link(size, measured(size), measured(1))
