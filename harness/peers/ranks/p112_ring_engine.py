"""Peer of several ranks: stage 10 with copies by the copy engine alone."""

from functools import partial

from stages.s10_ring import ring, shard, unshard

from harness.peers.ranks.parts import declare

__all__ = ["STAGE", "attend", "shard", "unshard"]

STAGE = declare(112, "ring_engine", "ring, copy engine", on_gpus=True)
attend = partial(ring, copies="engine")
