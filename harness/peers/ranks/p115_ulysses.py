"""Peer of several ranks: Ulysses, an all-to-all that gives each rank some heads of all rows.

DeepSpeed Ulysses (Jacobs et al. 2023), https://arxiv.org/abs/2309.14509.
"""

import torch
from torch import distributed

from harness.peers.ranks.parts import Exchange, declare
from harness.peers.ranks.parts import shard_in_order as shard
from harness.peers.ranks.parts import unshard_in_order as unshard
from stages.s10_ring import alone

__all__ = ["STAGE", "attend", "shard", "unshard"]

STAGE = declare(115, "ulysses", "Ulysses")


def to_heads(x: torch.Tensor) -> torch.Tensor:
    """Of a part (B, H, n, d) of each rank, all rows of this rank's heads: (B, H / W, W n, d)."""
    parts = x.unflatten(1, (distributed.get_world_size(), -1)).movedim(1, 0)
    return Exchange.apply(parts).movedim(0, 2).flatten(2, 3)


def to_rows(x: torch.Tensor) -> torch.Tensor:
    """The reverse: (B, H / W, W n, d) -> (B, H, n, d)."""
    parts = x.unflatten(2, (distributed.get_world_size(), -1)).movedim(2, 0)
    return Exchange.apply(parts).movedim(0, 1).flatten(1, 2)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False
) -> torch.Tensor:
    """q (B, H, n, d), k and v (B, Hk, n, d), this rank's parts -> its part of o, (B, H, n, d)."""
    world = distributed.get_world_size()
    if k.shape[1] % world:
        raise ValueError(f"k: got {k.shape[1]} heads, expected a multiple of the {world} ranks")
    q, k, v = (to_heads(x) for x in (q, k, v))
    return to_rows(alone(q, k, v, causal, None))
