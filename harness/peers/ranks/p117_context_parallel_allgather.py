"""Peer of several ranks: torch's context_parallel, rotation allgather."""

from functools import partial

from harness.peers.ranks.context import attend_by, declare
from harness.peers.ranks.parts import shard, unshard

__all__ = ["STAGE", "attend", "shard", "unshard"]

STAGE = declare(117, "context_parallel_allgather", "context_parallel, allgather")
attend = partial(attend_by, "allgather")
