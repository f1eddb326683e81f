"""How the peers in this folder cut a sequence over the ranks, and what ranks give each other.

Not a stage itself. Each peer is a row of `ladder ring`, beside stage 10. Of x (B, H, N, d) each of
W ranks has a part (B, H, N / W, d): rows in order, or in `zigzag` the chunks r and 2 W - 1 - r of
2 W, so that each rank has as much to do under a causal mask.
"""

from functools import partial
from typing import Any

import torch
from torch import distributed

from stages.contract import Stage

# its name from torch 2.13 on
all_gather = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)


def declare(number: int, name: str, title: str, on_gpus: bool = False, **more: Any) -> Stage:
    """What a peer here says of itself. `on_gpus`: it runs on nothing else."""
    where: dict[str, Any] = {"needs": ("cuda",), "devices": ("cuda",)} if on_gpus else {}
    usual = {"options": ("causal", "gqa", "world"), "gradients": True, "idea": title, **where}
    return Stage(number=number, name=name, title=title, **{**usual, **more})


def cut(x: torch.Tensor, zigzag: bool) -> torch.Tensor:
    """Cut x (B, H, N, d) into the parts (W, B, H, N / W, d) of all ranks."""
    W, chunks = distributed.get_world_size(), distributed.get_world_size() * (2 if zigzag else 1)
    if x.shape[2] % chunks:
        raise ValueError(f"N: got {x.shape[2]}, expected a multiple of {chunks} for {W} ranks")
    each = x.chunk(chunks, dim=2)
    if zigzag:
        each = tuple(torch.cat((each[r], each[-1 - r]), dim=2) for r in range(W))
    return torch.stack(each)


def join(parts: torch.Tensor, zigzag: bool) -> torch.Tensor:
    """Join the parts (W, B, H, n, d) of all ranks to the whole (B, H, W n, d)."""
    if not zigzag:
        return torch.cat([*parts], dim=2)
    W, B, H, n, d = parts.shape
    whole = parts.new_empty((B, H, 2 * W, n // 2, d))
    for r, part in enumerate(parts):  # copied once: to turn the late chunks round is another copy
        whole[:, :, r], whole[:, :, -1 - r] = part.chunk(2, dim=2)
    return whole.flatten(2, 3)


def gather(x: torch.Tensor) -> torch.Tensor:
    """Gather the parts x (B, H, n, d) of all ranks: (W, B, H, n, d)."""
    parts = x.new_empty((distributed.get_world_size(), *x.shape))
    all_gather(parts.flatten(0, 1), x.contiguous())
    return parts


def shard(x: torch.Tensor, *, causal: bool, zigzag: bool = True) -> torch.Tensor:
    """Return this rank's part of x; in zigzag only under a causal mask."""
    return cut(x, zigzag and causal)[distributed.get_rank()]


def unshard(x: torch.Tensor, *, causal: bool, zigzag: bool = True) -> torch.Tensor:
    """Return the whole of which `x` is this rank's part."""
    return join(gather(x), zigzag and causal)


shard_in_order, unshard_in_order = (partial(each, zigzag=False) for each in (shard, unshard))


class Gather(torch.autograd.Function):
    """All ranks' parts of k or v, whole and in order. Gradients of a part are summed in float32.

    apply(x (B, H, n, d), zigzag) -> (B, H, W n, d)
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, zigzag: bool) -> torch.Tensor:
        ctx.zigzag = zigzag
        return join(gather(x), zigzag)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> Any:
        mine = exchange(cut(dx, ctx.zigzag))  # (W, B, H, n, d): of this rank's part, by each rank
        return mine.sum(0, dtype=torch.float32).to(dx.dtype), None


def exchange(parts: torch.Tensor) -> torch.Tensor:
    """Send parts[r] of (W, ...) to rank r; returns what each rank sent to this one, (W, ...)."""
    received = torch.empty_like(parts)
    distributed.all_to_all_single(received, parts)
    return received


class Exchange(torch.autograd.Function):
    """`exchange`, whose backward pass is one, too."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor) -> torch.Tensor:
        return exchange(parts.contiguous())

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> Any:
        return exchange(dx.contiguous())
