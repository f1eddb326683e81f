# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # From stage 5 to stage 6: skip the tiles that no row sees
#
# Stage 5 is exact, but it knows no mask. A language model needs one: a token may look at the tokens
# before it, and not at those after it. And texts in a batch differ in length, so the shorter ones
# are padded. Stage 6 takes both masks, and they *save* time: tiles that no row sees are never
# loaded. This is FlashAttention-2's forward pass.

# %%
# Not found? Type `%pip install -e "..[notebooks]"` in a cell, restart the kernel, and come back.
import course.notebook as nb

# %% [markdown]
# ## What hurts in stage 5
#
# Ask it for a [causal mask](../docs/glossary.md#causal):

# %%
nb.measure(stages="3,5,6", n="64,200", d=16, causal=True)

# %% [markdown]
# Stage 5 refuses. Stage 3 takes the mask, but it computes all of $S$ first and then throws half of
# it away: the mask costs it time, where it should save some.
#
# ## Count
#
# The first prediction of [stage 6's page](../docs/walkthrough/6-triton-flash2.md#predict): the
# shares of all (q block, key tile) pairs, by the formula.

# %%
import numpy as np


def tiles(n, block_m, block_n):
    """Which tiles each block visits, and which of them with a mask: both (blocks, tiles)."""
    first = np.arange(0, n, block_m)[:, None]  # this row of a block sees the fewest keys: first + 1
    last = np.minimum(first + block_m, n) - 1
    start = np.arange(0, n, block_n)  # of the tiles
    visited = start <= last
    return visited, visited & (start + block_n > first + 1)


visited, masked = tiles(4096, block_m=128, block_n=64)
print(f"{(visited & ~masked).mean():6.1%}  visited, no mask: every row sees every key")
print(f"{masked.mean():6.1%}  visited with a mask: some pairs are hidden")
print(f"{(~visited).mean():6.1%}  never loaded: no row sees a key")
print(f"of those visited, {masked.sum() / visited.sum():.1%} need the mask")

# %% [markdown]
# Nearly half is never loaded, and nearly all of the rest needs no mask: only tiles on the diagonal
# do. A small case, a block of queries in each line, where `x` is a tile without a mask and `m` one
# with it ([the page](../docs/report.html#masks) draws other sizes):

# %%
for kinds in np.add(*map(np.int8, tiles(512, block_m=128, block_n=64))):
    print(" ".join(".xm"[kind] for kind in kinds))

# %% [markdown]
# Does the kernel really skip them? It can count, as it runs, the tiles that it never visits.
# Compare its own count with the formula, here and in a record from a GPU:

# %%
import torch

from stages import s06_triton_flash2 as stage_6

bench = nb.recorded("h200/bench-004.jsonl")
found = bench.one(stage=6, nk=4096, d=64, causal=True, h=32)
print(f"on the GPU: {found['skip_ratio']:.1%} never visited, N = 4096. {bench.said}")
if nb.runs(6):
    N, d = nb.here(cpu=256, gpu=4096), 16
    device = nb.here(cpu="cpu", gpu="cuda")
    q, k, v = (torch.randn(1, 1, N, d, device=device) for _ in range(3))
    config = stage_6.launch_config(d, q.dtype, "ieee")
    blocks = {"block_m": config["BLOCK_M"], "block_n": config["BLOCK_N"]}
    counted = stage_6.skip_ratio(q, k, v, causal=True)
    formula = (~tiles(N, **blocks)[0]).mean()
    print(f"here: {counted:.1%} never visited, by the formula {formula:.1%}; N = {N}, {blocks}")
    assert counted == formula

# %% [markdown]
# ## Both stages, side by side
#
# Stage 5's kernel at the left. At the right the loop of stage 6, a function now, because it is
# called twice: once without a mask (`MASKED` is a compile-time constant, so the mask's code is not
# even there), once for the few tiles that need one.

# %%
nb.side_by_side(nb.code(5, "attention_kernel"), nb.code(6, "visit_tiles"), context=None)

# %% [markdown]
# What is new in it: `exp2` and `qk_scale`, and loads without a mask. [Stage 6's
# page](../docs/walkthrough/6-triton-flash2.md#explain) says why each is there.
#
# Where each walk begins and ends is worked out before. All the saving is in these lines:

# %%
kernel = nb.code(6, "attention_kernel").lines
start = next(i for i, line in enumerate(kernel) if line.strip().startswith("Nk_valid = "))
print("\n".join(kernel[start : start + 7]))

# %% [markdown]
# ## Measure
#
# Padding first, by hand: two texts in a batch, of 40 and 100 tokens. What lies beyond the 40th key
# of the first must not be read at all. Put NaN there, which would spoil everything that it
# touches:

# %%
if nb.runs(6):
    q, k, v = (torch.randn(2, 1, 100, 16, device=device) for _ in range(3))
    k[0, :, 40:], v[0, :, 40:] = float("nan"), float("nan")
    lengths = torch.tensor([40, 100], dtype=torch.int32, device=device)
    padded = stage_6.attend(q, k, v, seqlens_k=lengths)
    alone = stage_6.attend(q[:1], k[:1, :, :40], v[:1, :, :40])
    print(f"NaN in the output: {bool(padded.isnan().any())}")
    print(f"largest difference from the short text alone: {(padded[:1] - alone).abs().max():.1e}")

# %% [markdown]
# Now the harness, at two more sizes; and the FLOPs that it counts, with the mask and without it.

# %%
sizes = nb.here(cpu=(128, 256), gpu=(1024, 4096, 8192))
asked = ",".join(map(str, sizes))
causal = nb.measure(stages="3,6", n=asked, d=64, causal=True, **nb.full_load())
causal

# %%
from harness.problems import cost

for n in sizes:
    full, half = (cost.flops(nb.problem(n, 64, causal=masked)) for masked in (False, True))
    print(f"N = {n}: {full:,} FLOPs, causal {half:,}: {half / full:.1%}")
nb.plot(causal, "error")

# %% [markdown]
# ## On a GPU
#
# The second prediction of the page. One problem with the mask and without it, all contestants in
# turns (float16):

# %%
body = []
for n in (1024, 4096, 16384):
    for stage, name in ((3, "torch, three GEMMs"), (6, "Triton Flash 2"), (100, "SDPA, flash")):
        of = bench.only(stage=stage, nk=n, d=64)
        full, half = of.one(causal=False), of.one(causal=True)
        change = half["time_ms"] / full["time_ms"]
        times = f"{full['time_ms']:.3g}", f"{half['time_ms']:.3g}", f"{change:.2f} x"
        body.append((n, f"{stage} {name}", *times, f"{nb.tflops(half):.0f}"))
header = ("N", "contestant", "full, ms", "causal, ms", "causal / full", "TFLOP/s, causal")
shape = f"d = 64, float16, {full['h']} heads, {full['b'] * n:,} tokens in all"
nb.rows(header, body, shape, bench.said, left=2)

# %% [markdown]
# ## What was bought, what still hurts
#
# - Bought: masks that save time instead of costing it; padding that is not even read.
# - Bought: on request the *log-sum-exp* of each row, one number: all that a backward pass needs to
#   know of $S$.
# - Still hurts: forward only. [Stage 7](06_to_07.ipynb) goes back.
#
# ## Exercises
#
# **1.** Why does the causal kernel start the *last* q block first?
#
# <details><summary>Answer</summary>
#
# Under a causal mask the last block has the most tiles to visit, the first one has one or two.
# Programs start in order, and when all the multiprocessors are busy the others wait. If a long one
# starts last, the whole card waits for it alone; if the short ones are last, they fill the gaps.
#
# </details>
#
# **2.** Compute with `tiling.kinds` the share of tiles that is never visited, for $N = 256, 512,
# \dots, 16384$ and blocks of 128 by 64. What does it tend to, and why is it less at small $N$?
#
# <details><summary>Answer</summary>
#
# It tends to one half, from below: the triangle above the diagonal is half of the square, but tiles
# that the diagonal cuts must be visited, and their share is larger the fewer tiles there are.
#
# </details>
#
# **3.** `nb.measure(stages="5,6", n="256", d=64)`: are the two stages' errors equal, to the last
# bit? Should they be?
#
# <details><summary>Answer</summary>
#
# Both are `ok`, and a last bit may differ: $2^{x \log_2 e}$ rounds elsewhere than $e^x$, and the
# tiles may have another size, so that sums are added up in another order. The harness's rule
# allows just that, and no more: it follows from float32, not from taste.
#
# </details>
