"""Merge what two hops found for the same rows: (o, lse) and (o, lse) of other keys, in float32.

    m   = max(lse, part_lse)
    w   = 2^(lse - m),  part_w = 2^(part_lse - m)      the larger is 1: nothing overflows
    o   = (w o + part_w part) / (w + part_w)
    lse = m + log2(w + part_w)

lse is in base 2: the log2 of a row's sum of exp(s). A hop whose keys a row doesn't see has lse =
-inf there, and counts for nothing; a row that saw none at all keeps o = 0 and lse = -inf. So stage 8
merges splits, whose sums aren't divided yet (FlashAttention-2, Dao 2023, section 2.3).
"""

import torch
from torch import Tensor


def merge(o: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge `part` into `o`, both (B, H, N, d), and their lse (B, H, N), in place.

    Computed in float32, or in float64 where lse is; rounded to o's dtype at the end.
    """
    m = torch.maximum(lse, part_lse)
    m = m.masked_fill(m == -torch.inf, 0.0)  # -inf - -inf would be NaN
    w, part_w = torch.exp2(lse - m), torch.exp2(part_lse - m)  # (B, H, N)
    total = w + part_w
    blind = total == 0
    share, part_share = (x / total.masked_fill(blind, 1.0) for x in (w, part_w))
    # a share of 0 counts for nothing, whatever the part holds
    merged = (o * share[..., None]).masked_fill(share[..., None] == 0, 0.0)
    merged += (part * part_share[..., None]).masked_fill(part_share[..., None] == 0, 0.0)
    o.copy_(merged)
    lse.copy_(m + torch.log2(total))
