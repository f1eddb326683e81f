"""Peer of several ranks: stage 10 without overlap, each rank computes and sends in turn."""

from functools import partial

from harness.peers.ranks.parts import declare
from stages.s10_ring import ring, shard, unshard

__all__ = ["STAGE", "attend", "shard", "unshard"]

STAGE = declare(111, "ring_in_turn", "ring, no overlap")
attend = partial(ring, overlap=False)
