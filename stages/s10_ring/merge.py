"""Merge what two hops found for the same rows: (o, lse) and (o, lse) of other keys, in float32.

    m   = max(lse, part_lse)
    w   = 2^(lse - m),  part_w = 2^(part_lse - m)      the larger is 1: nothing overflows
    o   = (w o + part_w part) / (w + part_w)
    lse = m + log2(w + part_w)

lse is in base 2: the log2 of a row's sum of exp(s). A hop whose keys a row doesn't see has o = 0
and lse = -inf there; one whose scores are all -inf has o = NaN and lse = -inf. Both count for
nothing beside another. Where neither side has a weight, o + part is what the contract asks for: 0
if no key was seen, else NaN. Stage 8 merges splits so, before they are divided by their sums.

o stays in float32 between hops: rounded to 16 bits after each, it would lose as much again at every
hop. The parts come from kernels that round each once, and a weighted mean of roundings is no larger
than the largest of them.
"""

import torch
from torch import Tensor


def merge(o: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge `part` into `o`, both (B, H, N, d), and part_lse into lse (B, H, N), in place.

    Computed in lse's dtype, float32 or float64, and rounded to o's at the end.
    """
    if o.is_cuda and lse.dtype == torch.float32:
        from .merge_kernel import launch, there

        if there:
            return launch(o, lse, part, part_lse)
    m = torch.maximum(lse, part_lse)
    m = m.masked_fill(m == -torch.inf, 0.0)  # -inf - -inf would be NaN
    w, part_w = torch.exp2(lse - m), torch.exp2(part_lse - m)  # (B, H, N)
    total = w + part_w  # 0 where the row has seen nothing but scores of -inf, else 1 to 2
    lse.copy_(m + torch.log2(total))
    share, part_share = (torch.where(total == 0, 1.0, x / total) for x in (w, part_w))
    merged = weighted(share, o) + weighted(part_share, part)
    o.copy_(merged)
    return None


def weighted(share: Tensor, o: Tensor) -> Tensor:
    """share (B, H, N) times o (B, H, N, d); 0 where the share is, whatever o is there."""
    share = share[..., None]
    return (share * o).masked_fill(share == 0, 0.0)
