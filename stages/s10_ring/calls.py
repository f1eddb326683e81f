"""Calls on one process group: one at a time, and none after one that failed midway.

What ranks send is paired in the order in which they send it, without a name. Two threads that used
a group at once could pair the keys of one call with the queries of another. So could a call after
one that failed on some rank: what others sent it then is still under way. Each would give a wrong
number, and so both are refused.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .agreement import SAID, give_up

Agreed = TypeVar("Agreed")
ANEW = "start all ranks again, or give `ring` another group (torch.distributed.new_group)"


class Calls:
    """Those of one group: whether one is under way, and why there can't be any more."""

    def __init__(self) -> None:
        self.one = threading.Lock()
        self.failed = ""


of_group: "WeakKeyDictionary[dist.ProcessGroup, Calls]" = WeakKeyDictionary()


@contextmanager
def call_on(group: dist.ProcessGroup, agree: Callable[[], Agreed]) -> Iterator[Agreed]:
    """Have what follows be one call on `group`, which begins with what `agree` gives.

    A ValueError of `agree` refuses this call, on all ranks. After any other error, there or later,
    ranks may be at different points: all that use the group then get a RuntimeError that names the
    rank that failed. Raises RuntimeError, too, in two threads that make calls at once.
    """
    calls = of_group.setdefault(group, Calls())
    name = f"rank {dist.get_rank(group)} of {group.size()}"
    if not (calls.failed or calls.one.acquire(blocking=False)):
        calls.failed = f"{SAID}two threads of {name} called it on one process group at once"
    if calls.failed:
        raise RuntimeError(f"{calls.failed}. It can't use that group any more: {ANEW}")
    refused = True
    try:
        agreed = agree()
        refused = False
        yield agreed
        if calls.failed:
            raise RuntimeError(calls.failed)
    except BaseException as error:
        if refused and isinstance(error, ValueError):
            raise
        why = str(error)
        if not why.startswith(SAID):
            why = f"{SAID}{name} failed amid a call: {type(error).__name__}: {error}"
        calls.failed = give_up(group, why)
        if calls.failed != why and type(error) is RuntimeError:  # another rank failed before
            raise RuntimeError(calls.failed) from error
        raise
    finally:
        calls.one.release()
