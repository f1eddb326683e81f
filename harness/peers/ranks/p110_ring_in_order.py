"""Peer of several ranks: stage 10 without zigzag, so that the last rank has most to do."""

from functools import partial

from harness.peers.ranks.parts import declare
from harness.peers.ranks.parts import shard_in_order as shard
from harness.peers.ranks.parts import unshard_in_order as unshard
from stages.s10_ring import ring

__all__ = ["STAGE", "attend", "shard", "unshard"]

STAGE = declare(110, "ring_in_order", "ring, no zigzag")
attend = partial(ring, zigzag=False)
