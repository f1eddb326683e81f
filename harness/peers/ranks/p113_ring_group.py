"""Peer of several ranks: stage 10 with copies by the process group, NCCL or gloo."""

from functools import partial

from harness.peers.ranks.parts import declare
from stages.s10_ring import ring, shard, unshard

__all__ = ["STAGE", "attend", "shard", "unshard"]

STAGE = declare(113, "ring_group", "ring, process group")
attend = partial(ring, copies="group")
