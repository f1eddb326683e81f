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
# # From stage 6 to stage 7: it trains
#
# To train, a model needs gradients: from $dO$, how the loss changes with the output, to $dQ$, $dK$
# and $dV$. Stage 3 keeps $P$ from the forward pass for that. $P$ is $N \times N$, and a model has
# many layers and heads. Stage 7 keeps one number per row instead, and makes $P$ again, tile by
# tile.

# %%
# Not found? Type `%pip install -e "..[notebooks]"` in a cell, restart the kernel, and come back.
import course.notebook as nb

# %% [markdown]
# ## What hurts in stage 6
#
# Ask for forward and backward, `mode="train"`. The gradients are judged like outputs.

# %%
nb.measure(stages="3,6,7", n="64,100", d=16, mode="train")

# %% [markdown]
# Stage 6 carries no gradients. Stage 3 does, at a price:
#
# ## Count
#
# The last prediction of [stage 7's page](../docs/walkthrough/7-training.md#predict): what is kept
# between forward and backward.

# %%
from harness.problems import cost

problem = nb.problem(8192, 64, "float16", b=2, h=4, direction="train")
p_bytes = cost.score_bytes(problem)
o_bytes = cost.query_bytes(problem)
lse_bytes = 4 * problem.b * problem.h * problem.nq
body = [
    ("3: P", f"{p_bytes / 2**20:,.1f} MB"),
    ("7: O and the log-sum-exp", f"{(o_bytes + lse_bytes) / 2**20:,.1f} MB"),
    ("quotient", f"{p_bytes / (o_bytes + lse_bytes):,.0f}"),
]
nb.rows(("what is kept", "bytes"), body)

# %% [markdown]
# What was measured on a GPU, the peak above the inputs of each pass:

# %%
bench = nb.recorded("h200/bench-001-train.jsonl", "bench")
NAMES = {3: "torch, three GEMMs", 7: "Triton training", 100: "SDPA, flash"}
body = []
for n in (2048, 8192):
    for stage, name in NAMES.items():
        of = bench.only(stage=stage, nk=n, causal=False)
        peaks = (of.one(direction=x)["peak_bytes"] / 2**20 for x in ("fwd", "bwd", "train"))
        body.append((n, f"{stage} {name}", *(f"{peak:,.0f} MB" for peak in peaks)))
shape = "b = 2, h = 4, d = 64, float16: peak above the inputs"
nb.rows(("N", "contestant", "forward", "backward", "both"), body, shape, bench.said, left=2)

# %% [markdown]
# ## How can it do without P?
#
# With the [log-sum-exp](../docs/glossary.md#lse) of each row, and the equations of [stage 7's
# page](../docs/walkthrough/7-training.md#explain). Here they are, in float64, against torch's own
# gradients:

# %%
import torch

q, k, v, do = torch.randn(4, 50, 8, dtype=torch.float64).unbind()
scale = 8**-0.5
leaves = [x.clone().requires_grad_() for x in (q, k, v)]
(torch.softmax(leaves[0] @ leaves[1].T * scale, -1) @ leaves[2]).backward(do)

s = q @ k.T * scale
lse = torch.logsumexp(s, -1, keepdim=True)  # all that is kept of s
p = torch.exp(s - lse)
o = p @ v
delta = (o * do).sum(-1, keepdim=True)
ds = p * (do @ v.T - delta)
for name, mine, leaf in zip(
    ("dQ", "dK", "dV"), (scale * ds @ k, scale * ds.T @ q, p.T @ do), leaves
):
    print(f"{name}: off by {(mine - leaf.grad).abs().max():.0e}")
    assert torch.allclose(mine, leaf.grad)

# %% [markdown]
# ## Both stages, side by side
#
# The loop of stage 6, and the one of stage 7 that makes $dQ$: the same walk over the same tiles.
# `p` comes out finished, so `m_i`, `l_i` and `alpha` are gone; `dp` and `ds` have come.

# %%
nb.side_by_side(nb.code(6, "visit_tiles"), nb.code(7, "walk_kv_tiles"), context=None)

# %% [markdown]
# $dK$ and $dV$ are sums over *queries*. A program that holds rows of $Q$ would have to add to them
# from many places at once. So there is a second kernel, which holds a tile of keys and walks over
# the queries:

# %%
print("\n".join(nb.code(7, "walk_q_tiles").lines))

# %% [markdown]
# The page has the reason for two kernels, and their price.
#
# ## Measure
#
# Look at how the two stages' peaks grow when $N$ doubles.

# %%
sizes, d = nb.here(cpu=("128,256,512", 16), gpu=("1024,2048,4096,8192", 64))
run = nb.measure(stages="3,7", n=sizes, d=d, mode="bwd", **nb.full_load())
run

# %%
nb.plot(run, "memory") or nb.plot(run, "error")

# %% [markdown]
# ## On a GPU
#
# Recomputing costs arithmetic: 7 matrix products in the backward pass, where 4 would be enough if
# $P$ had been kept. $S$ is one more, and each of the two kernels makes both $S$ and $dP$. Does it
# cost time?

# %%
body = []
for causal in (False, True):
    for stage, name in NAMES.items():
        of = bench.only(stage=stage, nk=8192, causal=causal)
        times = [of.one(direction=x)["time_ms"] for x in ("fwd", "bwd", "train")]
        mask = "causal" if causal else "full"
        body.append((mask, f"{stage} {name}", *(f"{time:.3g}" for time in times)))
shape = "N = 8192, b = 2, h = 4, d = 64, float16: time in ms"
nb.rows(("mask", "contestant", "forward", "backward", "both"), body, shape, bench.said, left=2)

# %% [markdown]
# It does not. Moving $N \times N$ matrices to memory and back takes longer than computing them
# again.
# That is the lesson of the whole ladder once more: arithmetic is cheap, memory traffic is
# expensive.
#
# ## What was bought, what still hurts
#
# - Bought: training in $O(N)$ memory, masks and all.
# - Still hurts: each tile's scores are computed twice in the backward pass. And with few query
#   rows, or one head, most of the GPU is idle. [Stage 8](06_to_08.ipynb) splits the keys, too.
#
# ## Exercises
#
# **1.** Why is $\delta_i = \sum_c O_{ic}\, dO_{ic}$ the same as $\sum_j P_{ij}\, dP_{ij}$, which
# the derivative of the softmax asks for?
#
# <details><summary>Answer</summary>
#
# $\sum_j P_{ij} dP_{ij} = \sum_j P_{ij} \sum_c dO_{ic} V_{jc} = \sum_c dO_{ic} \sum_j P_{ij}
# V_{jc} = \sum_c dO_{ic} O_{ic}$. The left sum runs over $N$ numbers of a row of $P$; the right
# one over $d$ numbers of a row of the output, which is there already.
#
# </details>
#
# **2.** Count the matrix products of the backward pass: how many if $P$ was kept, how many in one
# kernel that makes it again, how many in stage 7's two kernels?
#
# <details><summary>Answer</summary>
#
# 4, 5, 7. With $P$: $P^T dO$, $dO V^T$, $dS K$, $dS^T Q$. Without: $Q K^T$ once more. Two kernels:
# both make $Q K^T$ and $dO V^T$, so $3 + 4$. (One kernel could do with 5, if several programs
# might add to $dQ$ at the same time: atomics, whose order is never the same twice.)
#
# </details>
#
# **3.** Train something: `ladder train --help` says how. What do the losses of stage 7 and of
# torch's own attention look like from the same seed?
#
# <details><summary>Answer</summary>
#
# The curves lie on one another; see [training](../docs/training.md).
#
# </details>
