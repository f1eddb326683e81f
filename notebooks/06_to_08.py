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
# # From stage 6 to stage 8: split the keys too
#
# A model that writes text asks for attention once per new token and layer: one query row against
# all the keys of the tokens before it, which are kept in a *cache*. Stage 6 gives each block of
# query rows a program. One row is one program per head, however many keys there are. (Stage 7 goes
# the same way forward; it is about gradients.)

# %%
# Not found? Type `%pip install -e "..[notebooks]"` in a cell, restart the kernel, and come back.
import course.notebook as nb

# %% [markdown]
# ## What hurts in stage 6
#
# For each token, nearly all of the work is reading the cache. So the figure is in TB/s, beside the
# most that the GPU reads:

# %%
from harness.views.ratios import bandwidth

bench = nb.recorded("h200/decode.jsonl")
read_tb = max(x["value"] for x in nb.recorded("h200/ceilings.jsonl", "ceiling").only(what="read"))
DECODED = ("b", "h", "hk", "nk", "d")
whole = bench.only(page_size=None)
shapes = list(dict.fromkeys(tuple(cell[name] for name in DECODED) for cell in whole.only(nq=1)))


def times(stage, nq, page_size=None):
    """Shape -> the record of a stage there."""
    found = bench.only(stage=stage, nq=nq, page_size=page_size, status="ok")
    return {tuple(cell[name] for name in DECODED): cell for cell in found}


body = []
for shape, cell in times(6, 1).items():
    time, rate = f"{1e3 * cell['time_ms']:.0f} us", bandwidth(cell)
    body.append((", ".join(map(str, shape)), time, f"{rate:.2f}", f"{rate / read_tb:.0%}"))
shape = f"stage 6, one query row, bfloat16; the card reads {read_tb:.2f} TB/s"
nb.rows(("B, H, Hk, N, d", "time per layer", "TB/s", "of reading"), body, shape, bench.said)

# %% [markdown]
# With one text in the batch, most of the GPU's memory rate is left unused.
#
# ## Count
#
# The first prediction of [stage 8's page](../docs/walkthrough/8-split-kv.md#predict). How many
# programs does stage 6 start, and how long does each walk, when a text of $N$ tokens gets one more?
# An H200 has 132 multiprocessors.

# %%
import torch

from stages import s06_triton_flash2 as stage_6
from stages import s08_triton_split_kv as stage_8

SMS = 132
B, H, Hk, d = 1, 32, 8, 128
tile = stage_6.launch_config(d, torch.bfloat16, "bfloat16")["BLOCK_N"]
body = [(N, B * H, f"{1 - B * H / SMS:.0%}", N // tile) for N in (1024, 8192, 131072)]
header = ("N", "programs", "of the multiprocessors idle", "tiles, one after another")
nb.rows(header, body, f"stage 6, one query row, B = {B}, {H} heads, tiles of {tile} keys")

# %% [markdown]
# The number of programs stays the same, and the walk of each grows with $N$: so does the time per
# token.
#
# ## How many parts? The cost model in the open
#
# Stage 8 cuts the keys into parts with a program each. It also packs the rows of all heads that
# share keys into one block, so that there are $B \cdot H_k$ programs before the split, not $B \cdot
# H$. **Predict:** into how many parts would you split the keys, on the GPU above: with 8 programs,
# with 32, with 128?
#
# More parts fill the GPU; each costs a write and a read of its results. Stage 8 adds that up:

# %%
print("\n".join(nb.code(8, "choose_splits").lines))

# %% [markdown]
# The same sum by hand, for 64 tiles ($N = 8192$, tiles of 128 keys). The unit is the time of a tile
# while all multiprocessors read:


# %%
def cost(splits, programs, tiles=64):
    waves = -(-programs * splits // SMS)  # of programs over the multiprocessors
    each = -(-tiles // splits) * max(programs * splits / SMS, stage_8.ALONE * waves)
    merge = stage_8.MERGE + stage_8.PART * splits if splits > 1 else 0
    return each + stage_8.WAVE * waves + merge


body = []
for programs in (8, 32, 128):
    best = min(range(1, 65), key=lambda splits: cost(splits, programs))
    assert best == stage_8.choose_splits(programs, 64, SMS)
    figures = [f"{cost(splits, programs):.1f}" for splits in (1, 4, 16, 64)]
    body.append((programs, *figures, best, f"{best * programs} of {SMS}"))
header = ("programs", "1 part", "4", "16", "64", "the cheapest", "programs then")
print(nb.rows(header, body, "what the parts would cost, in tiles"))


def draw(axis, look):
    for programs, marker in ((8, "o"), (32, "s"), (128, "D")):
        splits = range(1, 65)
        costs = [cost(each, programs) for each in splits]
        axis.plot(splits, costs, "-", marker=marker, markersize=3, label=f"{programs} programs")
    axis.set_xscale("log", base=2)
    axis.set_ylim(0, 90)
    axis.set_xticks([1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64"])
    axis.set_xlabel("parts of the keys")
    axis.set_ylabel("cost, in tiles")
    axis.legend()


nb.drawn(
    draw,
    "The model's cost against the number of parts, three curves: with 8 programs it falls up to 16 "
    "parts and then jumps, with 32 it falls up to 4, with 128 it only rises.",
)

# %% [markdown]
# The model chooses enough programs to keep the memory busy: where there are tiles enough, more than
# half the number of multiprocessors, and never slightly more than that number, since the few left
# over would be a second wave. How far the model is from measured times is in
# [results](../docs/results.md#how-many-parts).
#
# ## The merge on paper
#
# Two parts of one row leave a maximum $m$ (of scores, scaled and in base 2), a sum $l$, and an
# output $acc$ that is not divided by $l$. **Do it on paper first:** what is $o$?
#
# | part | $m$ | $l$ | $acc$ |
# |---|---:|---:|---:|
# | 0 | 3 | 2 | (2, 4) |
# | 1 | 5 | 1.5 | (3, 0) |
#
# <details><summary>On paper</summary>
#
# The larger maximum is 5. Part 0 is worth $2^{3-5} = 1/4$ under it, part 1 is worth 1.
# $l = 1/4 \cdot 2 + 1 \cdot 1.5 = 2$. $acc = 1/4 \cdot (2, 4) + 1 \cdot (3, 0) = (3.5, 1)$.
# $o = acc / l = (1.75, 0.5)$.
#
# </details>

# %%
m, l_s = torch.tensor([3.0, 5.0]), torch.tensor([2.0, 1.5])
acc = torch.tensor([[2.0, 4.0], [3.0, 0.0]])  # one row per part, d = 2
w = torch.exp2(m - m.max())
print("w =", w.tolist(), " o =", ((w[:, None] * acc).sum(0) / (w * l_s).sum()).tolist())
print("without w:", (acc.sum(0) / l_s.sum()).tolist(), "which is wrong")

# %% [markdown]
# It is the correction of stage 5, made once at the end instead of at each tile. The same for a row
# of the harness's inputs (`ladder trace --n 8 --tile 2 --row 1 --splits 2` prints all its numbers,
# in natural units):

# %%
from course.tracing import merge_views
from course.tracing.trace import make_trace

row = make_trace(n=8, d=4, tile=2, row=1)
merged = merge_views.merged(row, splits=2)
nb.picture(
    lambda look: merge_views.picture(merged, row.truth(), look),
    "Two parts of four keys. Left, the scores under each part's own max. Middle, the weights: "
    "those of the part with the smaller max shrink by its w, the others stay. Right, the outputs: "
    "what is merged lies on the truth, each part alone and the unweighted sum lie beside it.",
)

# %% [markdown]
# ## Both stages, side by side
#
# The walk over the tiles is stage 6's, except that a tile may lie in pages. What is new comes
# first: where a part starts and ends, and the merge.

# %%
kernel = nb.code(8, "split_kernel").lines
first = next(i for i, line in enumerate(kernel) if "tiles = tl.cdiv(last, BLOCK_N)" in line)
print("\n".join(kernel[first : first + 3]))
print("...")
merge_lines = nb.code(8, "merge_kernel").lines
first = next(i for i, line in enumerate(merge_lines) if "m_new =" in line)
print("\n".join(merge_lines[first : first + 6]))
nb.side_by_side(nb.code(6, "visit_tiles"), nb.code(8, "visit_tiles"), context=1)

# %% [markdown]
# ## Measure
#
# First: is it right? A few query rows, grouped heads, a causal mask:

# %%
sizes = nb.here(cpu="256,600", gpu="8192,131072")
nb.measure(stages="3,6,8", n=sizes, nq=4, d=64, h=4, hk=2, causal=True)

# %% [markdown]
# A cache of pages next: two texts share 6 pages of 16 tokens, one of them grows. Everything outside
# the texts is NaN, and must not be read:

# %%
if nb.runs(8):
    device = nb.here(cpu="cpu", gpu="cuda")
    cache = stage_8.PagedCache(6, 16, Hk=2, d=16, dtype=torch.float32, device=device)
    cache.k.fill_(float("nan")), cache.v.fill_(float("nan"))
    k, v = torch.randn(2, 2, 40, 16, device=device)  # K and V of 40 tokens, two heads
    cache.append("other", k[:, :20], v[:, :20])
    cache.append("mine", k[:, :30], v[:, :30])
    cache.free("other")
    cache.append("mine", k[:, 30:], v[:, 30:])
    q = torch.randn(1, 4, 1, 16, device=device)  # four heads, one row
    paged = stage_8.attend_paged(q, cache, ["mine"])
    alone = stage_8.attend(q, k[None], v[None])
    print(f"pages of 'mine': {cache.pages['mine']}, free: {cache.free_pages}")
    print(f"largest difference from the same keys in one piece: {(paged - alone).abs().max():.1e}")
    assert torch.allclose(paged, alone)

# %% [markdown]
# ## On a GPU
#
# All contestants in turns (bfloat16, one query row or eight). Did your prediction for stage 6 hold?

# %%
body = []
for nq in (1, 8):
    for shape, ours in times(8, nq).items():
        peers = [times(peer, nq).get(shape) for peer in (100, 101, 102, 103, 106)]
        best = min(filter(None, peers), key=lambda cell: cell["time_ms"])
        pages = times(8, nq, 64).get(shape)
        figures = [
            f"{bandwidth(cell):.2f}" if cell else "-" for cell in (times(6, nq)[shape], ours)
        ]
        figures += [f"{bandwidth(best):.2f}", f"{bandwidth(ours) / read_tb:.0%}"]
        kept = f"{ours['time_ms'] / pages['time_ms']:.2f}x" if pages else "-"
        body.append((", ".join(map(str, shape)), nq, *figures, kept))
header = ("B, H, Hk, N, d", "Nq", "6", "8", "best peer", "8, of reading", "in pages of 64")
nb.rows(header, body, "TB/s: the bytes of q, k, v and o over the time", bench.said)

# %% [markdown]
# The best peer is not the same in each row: [results](../docs/results.md#decoding-stage-8) names
# it.
#
# ## What was bought, what still hurts
#
# - Bought: one query row reads the cache nearly as fast as the memory can be read, where there is
#   enough to read; a short cache is read in a few tens of microseconds, of which starting two
#   kernels is a large part.
# - Bought: texts of different length share one memory, page by page.
# - Still hurts: loads and math take turns.
#
# ## Exercises
#
# **1.** Why does `choose_splits` never look at `seqlens_k`, though short texts would need fewer
# parts?
#
# <details><summary>Answer</summary>
#
# Its values lie on the GPU. To read them, Python would have to wait until all earlier work on the
# GPU is done, at each token and layer. So each batch entry divides its own length on the GPU, into
# the same number of parts; some may be empty.
#
# </details>
#
# **2.** One text, one key head, $N = 131072$: 1024 tiles of 128 keys. With `cost`, how many parts
# are the cheapest? What would a cap of 8 parts cost, here and with 8 key heads?
#
# <details><summary>Answer</summary>
#
# `min(range(1, 529), key=lambda splits: cost(splits, 1, 1024))`: a little more than half as many
# as there are multiprocessors; from there on the memory is what limits. Divide `cost(8, 1, 1024)`
# by the cost of those: a cap that costs a tenth with 8 key heads leaves most of the GPU idle with
# one.
#
# </details>
#
# **3.** Write the merge yourself: `ladder lab start 8`. What is the output where a part has no key,
# if its maximum is taken to be 0?
#
# <details><summary>Answer</summary>
#
# Where all scores of the row are far below 0, $m = 0$ is the largest, and all weights become
# $2^{-large}$, in the end 0: the output is $0 / 0$. An empty part must have the lowest maximum.
#
# </details>
