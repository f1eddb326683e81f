"""Peer of several ranks: stage 10 without overlap, each rank computes and sends in turn."""

from functools import partial

from stages.s10_ring import ring, shard, unshard

from harness.peers.ranks.parts import declare

__all__ = ["STAGE", "attend", "shard", "unshard"]

STAGE = declare(111, "ring_in_turn", "ring, no overlap")
attend = partial(ring, overlap=False)
