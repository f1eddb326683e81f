"""Peer of several ranks: stage 10 with copies by the copy engine alone."""

from functools import partial

from harness.peers.ranks.parts import declare
from stages.s10_ring import ring, shard, unshard

__all__ = ["STAGE", "attend", "shard", "unshard"]

STAGE = declare(112, "ring_engine", "ring, copy engine", on_gpus=True)
attend = partial(ring, copies="engine")
