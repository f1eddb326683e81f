"""The inputs of a problem, q, k and v: made from its seed, the same for every stage."""

import math
from typing import Final

import torch

from harness.problems import real_inputs
from harness.problems.problem import Problem

TILE: Final = 64  # keys; the dominant keys of peaky inputs are spread over all tiles of this size

STEPS: Final = 2, 3, 4, 1  # of q, k, v and dO, where they are strided: none as another

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_inputs(problem: Problem) -> Tensors:
    """Make q (b, h, nq, d), k and v (b, hk, nk, d) in the problem's dtype, on its device.

    They are drawn on the CPU in float32, so that all devices and dtypes get the same numbers up to
    rounding. Raises ValueError where the real inputs don't have that shape.
    """
    make = {"normal": normal, "peaky": peaky, "real": real}[problem.inputs]
    dtype = getattr(torch, problem.dtype)
    q, k, v = (x.to(device=problem.device, dtype=dtype) for x in make(problem))
    return q, k, v


def normal(problem: Problem) -> Tensors:
    """q, k, v ~ N(0, 1)."""
    generator = torch.Generator().manual_seed(problem.seed)
    q_shape = (problem.b, problem.h, problem.nq, problem.d)
    kv_shape = (problem.b, problem.hk, problem.nk, problem.d)
    q = torch.randn(q_shape, generator=generator)
    k = torch.randn(kv_shape, generator=generator)
    v = torch.randn(kv_shape, generator=generator)
    return q, k, v


def peaky(problem: Problem) -> Tensors:
    """q, k, v whose softmax is sharp, so that a mistake in a kernel gives visibly wrong results.

    - Each row has a dominant key with a logit of 105 to 140, past exp's overflow in float32, so
      that a forgotten max shows. Dominant keys are spread over every tile of 64 keys, so that a
      forgotten rescale shows, whichever tile it skips.
    - Every fourth row has two dominant keys, in different tiles, less than 0.5 apart.
    - q and k themselves are bounded: |k| < 1.2 sqrt(d), and q is as long as the logits need.
    """
    generator = torch.Generator().manual_seed(problem.seed)
    b, h, hk, nq, nk, d = (getattr(problem, name) for name in ("b", "h", "hk", "nq", "nk", "d"))
    k = torch.randn((b, hk, nk, d), generator=generator)
    length = 0.9 + 0.2 * torch.rand((b, hk, nk, 1), generator=generator)
    # keys of nearly the same length: a query then scores the key that it points at best
    k = k / k.norm(dim=-1, keepdim=True).clamp_min(1e-6) * length * math.sqrt(d)
    v = torch.randn((b, hk, nk, d), generator=generator)

    tiles = math.ceil(nk / TILE)
    rows = torch.arange(nq)
    first = spread_key(rows, tiles, nk, generator)  # (nq,)
    second = spread_key(rows + max(1, tiles // 2), tiles, nk, generator)  # (nq,)
    logit = 105 + 35 * torch.rand((b, h, nq), generator=generator)
    gap = 0.5 * torch.rand((b, h, nq), generator=generator)

    keys = k.double().repeat_interleave(h // hk, dim=1)  # (b, h, nk, d)
    k1, k2 = keys[:, :, first], keys[:, :, second]  # (b, h, nq, d)
    s1 = logit.double() * math.sqrt(d)  # q . k1 before the scale
    s2 = (logit - gap).double() * math.sqrt(d)
    k11, k12, k22 = (k1 * k1).sum(-1), (k1 * k2).sum(-1), (k2 * k2).sum(-1)
    q = (s1 / k11)[..., None] * k1
    # the shortest q with q . k1 = s1 and q . k2 = s2; where the keys are nearly parallel (or d = 1)
    # there is none of moderate length, and the row keeps its one dominant key
    determinant = k11 * k22 - k12 * k12
    tied = (rows % 4 == 0) & (determinant > 0.5 * k11 * k22)
    safe = torch.where(tied, determinant, torch.ones_like(determinant))
    alpha = ((k22 * s1 - k12 * s2) / safe)[..., None]
    beta = ((k11 * s2 - k12 * s1) / safe)[..., None]
    q = torch.where(tied[..., None], alpha * k1 + beta * k2, q)
    return q.float(), k, v


def spread_key(rows: torch.Tensor, tiles: int, nk: int, generator: torch.Generator) -> torch.Tensor:
    """A key index for each row, (nq,), going through the tiles from the last to the first."""
    tile = (tiles - 1 - rows) % tiles
    size = torch.minimum(torch.full_like(tile, TILE), nk - tile * TILE)
    return tile * TILE + (torch.rand(rows.shape, generator=generator) * size).long()


def real(problem: Problem) -> Tensors:
    """q, k, v of a real transformer on real text (harness/data/README.md), whatever the seed."""
    if problem.d != real_inputs.D or problem.hk != problem.h:
        raise ValueError(
            f"real inputs: got d = {problem.d}, {problem.hk} key heads for {problem.h} heads; "
            f"expected d = {real_inputs.D} and as many key heads as heads"
        )
    q, k, v = real_inputs.load(problem.b, problem.h, problem.nq, problem.nk)
    return torch.from_numpy(q), torch.from_numpy(k), torch.from_numpy(v)


def strided(x: torch.Tensor, step: int) -> torch.Tensor:
    """`x` (B, H, N, d) stored as (B, N, H, d + 4, step), NaN between its columns and after them."""
    B, H, N, d = x.shape
    stored = x.new_full((B, N, H, d + 4, step), torch.nan)
    stored[..., :d, 0] = x.transpose(1, 2)
    return stored.transpose(1, 2)[..., :d, 0]
