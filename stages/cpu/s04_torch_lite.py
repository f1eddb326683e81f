"""Stage 4 on a CPU, torch "Lite": softmax inside each tile, native, tile by tile.

    one block: BLOCK_M query rows of one head       a program of the kernel; here one after another
    q  stays in the cache
    for each tile of 64 keys:
        s = q k^T * scale        (BLOCK_M, 64), never leaves the cache
        p = softmax(s)           over these 64 keys alone  <-- the mistake
        acc += p v
    o = acc

Cost: 4 B H Nq Nk d FLOPs; s and p take BLOCK_M * 64 numbers each, which a CPU's cache holds, in
place of the Nq Nk of stage 3, which memory has to; some eight calls of torch per tile.
What it bought: stage 4's numbers and its lesson, with a time, where there is no GPU.
Still hurts: every tile's weights sum to 1, so T tiles' weights sum to T. It is right only while
one tile holds all the keys (Nk <= 64): wrong above, on purpose. Stage 5 mends it.
"""

import torch

from stages.contract import Stage, check_inputs

STAGE = Stage(
    number=4,
    name="torch_lite",
    title="torch Lite",
    idea="fuse: S and P never leave the cache",
    still_hurts="softmax per tile: wrong for N > 64, on purpose",
    devices=("cpu",),
    exact_up_to=64,
)

BLOCK_M, BLOCK_N = 1024, 64  # query rows, and keys per tile


def attend_block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, scale: float
) -> None:
    """One block of one head: q (rows, d), k and v (Nk, d) -> o (rows, d), of whatever dtype."""
    (rows, d), Nk = q.shape, len(k)
    acc = q.new_zeros(rows, d)

    # exercise tiles: q (rows, d), k and v (Nk, d) -> acc (rows, d)
    for start_n in range(0, Nk, BLOCK_N):
        k_tile = k[start_n : start_n + BLOCK_N]  # (keys, d), fewer keys in the last tile
        v_tile = v[start_n : start_n + BLOCK_N]  # (keys, d)
        # step s: scaled scores; q (rows, d), k_tile (keys, d) -> (rows, keys)
        s = q @ k_tile.T * scale  # (rows, keys)
        # step p: exponentials under the max, none above 1; s -> (rows, keys)
        p = torch.exp(s - s.amax(1)[:, None])  # (rows, keys)
        # step weights: each row divided by its sum; p -> (rows, keys)
        p = p / p.sum(1)[:, None]
        # step acc: this tile's share of the output; p, v_tile (keys, d) -> (rows, d)
        acc += p @ v_tile  # (rows, d)
    # end of tiles
    o.copy_(acc)


@torch.no_grad()
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention with softmax per 64-key tile, in torch on a CPU: wrong above Nk = 64. Forward only.

    q (B, H, Nq, d), k and v (B, H, Nk, d), any float dtype -> (B, H, Nq, d) in q's dtype, computed
    in float32, from float64 in float64.
    Raises ValueError on input that breaks the contract (stages/contract.py).
    """
    check_inputs(STAGE, q, k, v)
    B, H, Nq, d = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    o = q.new_empty((B, H, Nq, d))
    for b in range(B):
        for h in range(H):
            k_head, v_head = k[b, h].to(wide), v[b, h].to(wide)  # (Nk, d)
            for start_m in range(0, Nq, BLOCK_M):
                block = slice(start_m, start_m + BLOCK_M)
                attend_block(q[b, h, block].to(wide), k_head, v_head, o[b, h, block], d**-0.5)
    return o
