"""Peer of several ranks: all of K and V gathered first, then the attention of one GPU."""

import torch
from torch import distributed

from harness.peers.ranks.parts import Gather, declare, shard, unshard
from stages.s10_ring import alone

__all__ = ["STAGE", "attend", "shard", "unshard"]

STAGE = declare(114, "gather", "all-gather of K and V")


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False
) -> torch.Tensor:
    """q (B, H, n, d), k and v (B, Hk, n, d), this rank's parts -> its part of o, (B, H, n, d).

    Under a causal mask each of the two chunks of q sees the keys up to its own last one.
    """
    rank, world = distributed.get_rank(), distributed.get_world_size()
    k, v = (Gather.apply(x, causal) for x in (k, v))  # (B, Hk, N, d)
    if not causal:
        return alone(q, k, v, False, None)
    rows = q.shape[2] // 2
    seen = (rank + 1) * rows, (2 * world - rank) * rows
    chunks = zip(q.chunk(2, dim=2), seen, strict=True)
    found = [alone(x, k[:, :, :n], v[:, :, :n], True, None) for x, n in chunks]
    return torch.cat(found, dim=2)
