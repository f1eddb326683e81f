"""Peer of several ranks: torch's context_parallel, rotation alltoall."""

from functools import partial

from harness.peers.ranks.context import attend_by, declare
from harness.peers.ranks.parts import shard, unshard

__all__ = ["STAGE", "attend", "shard", "unshard"]

STAGE = declare(118, "context_parallel_alltoall", "context_parallel, alltoall")
attend = partial(attend_by, "alltoall")
