"""What all ranks must know of each other before any of them sends: or none of them does.

A rank that sends what its neighbour doesn't expect makes both wait for ever, or gives a wrong
number. So each call of the ring begins with one message per rank through the group's store, the
small server that torch.distributed's processes met at. It passes through the CPU only, so that it
waits for no kernel: two to four round trips to the store. Each rank then decides by the same list
of messages, and what one rank finds wrong is raised by all, in the same words.
"""

import itertools
import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

calls: dict[str, "itertools.count[int]"] = {}  # by group: which call it is


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long a rank waits for the others: what init_process_group was given as `timeout`."""
    found: timedelta = _get_process_group_store(group).timeout
    return found


def agree(
    group: dist.ProcessGroup, shared: Mapping[str, Any], own: Mapping[str, Any], error: str = ""
) -> list[dict[str, Any]]:
    """Tell all ranks `own`, and return what each of them told, by rank.

    shared  what has to be the same on all ranks, by the name of the argument
    own     what may differ
    error   what is wrong with this rank's arguments

    All of it as JSON has it. Raises ValueError where a rank has an error, or `shared` differs, with
    the same words on every rank; RuntimeError that names the ranks which don't answer in time.
    """
    store, rank, world = _get_process_group_store(group), dist.get_rank(group), group.size()
    call = next(calls.setdefault(group.group_name, itertools.count()))
    keys = [f"ring/{call}/{r}" for r in range(world)]
    try:
        store.set(keys[rank], json.dumps([error, dict(shared), dict(own)]))
        told = [json.loads(x) for x in store.multi_get(keys)]
        if call:  # all have asked for this call's messages, and so have read the last call's
            store.delete_key(f"ring/{call - 1}/{rank}")
    except dist.DistError as failed:
        raise RuntimeError(f"ring attention: {who_is_missing(store, keys)} ({failed})") from failed
    for r, (wrong, _, _) in enumerate(told):
        if wrong:
            raise ValueError(f"rank {r} of {world}: {wrong}")
    for name in shared:
        values = [each[name] for _, each, _ in told]
        if any(value != values[0] for value in values):
            by_rank = ", ".join(f"{value} on rank {r}" for r, value in enumerate(values))
            raise ValueError(f"{name}: got {by_rank}; expected the same on all ranks")
    return [each for _, _, each in told]


def who_is_missing(store: dist.Store, keys: list[str]) -> str:
    """Which ranks have sent no message, in words."""
    try:
        missing = [str(r) for r, key in enumerate(keys) if not store.check([key])]
    except dist.DistError:
        return "the group's store is gone: the process that keeps it, often rank 0, has ended"
    return f"no answer from rank {', '.join(missing)}: it has ended, or does something else"
