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
# # From stage 0 to stage 1: throw the graph away
#
# Stage 0 computes attention with one Python object for each multiplication and addition. The
# objects remember how they came about, so gradients come for free. Stage 1 runs the same loops on
# plain floats.
#
# You will see: what one object per operation costs, in time and in memory, and what is lost without
# it.

# %%
# Not found? Type `%pip install -e "..[notebooks]"` in a cell, restart the kernel, and come back.
import course.notebook as nb

# %% [markdown]
# ## What hurts in stage 0
#
# For one head, scores are dot products of length $d$, one for each of the $N^2$ pairs of a query
# and a key. We let the harness judge stage 0 alone. Each row is a process of its own. The answer is
# checked first, against float64; only then is it timed.

# %%
nb.measure(stages="0", n="32,64", d=16)

# %% [markdown]
# Double $N$, and the time grows fourfold, or a little more: there are four times as many pairs.
#
# ## Count
#
# What you predicted on [stage 0's page](../docs/walkthrough/0-scalar-autograd.md#predict), counted.
# (A score takes $d$ products, $d - 1$ sums and one scaling. The softmax takes about three
# operations per pair. The output takes about $2d$ more per pair.)

# %%
from stages import s00_scalar_autograd as stage_0

N, d = 64, 16
nodes = stage_0.node_count(B=1, H=1, Nq=N, Nk=N, d=d)
print(f"{nodes:,} Values: N * N * (4 d + 3) operations, and the leaves q, k, v")
print(f"at 200 bytes each: {nodes * 200 / 2**20:.0f} MB")
print(f"q, k, v and o as plain float32: {4 * 4 * N * d / 2**10:.0f} KB")

# %% [markdown]
# Is that formula true? Count them: stage 0 keeps a tally.

# %%
import torch

q, k, v = torch.randn(3, 1, 1, N, d).unbind()
stage_0.attend(q, k, v)
print(f"made: {stage_0.nodes_made():,}, predicted: {nodes:,}")
assert stage_0.nodes_made() == nodes

# %% [markdown]
# ## Both stages, side by side
#
# The loops are the same. `total(...)`, which chains `Value`s, becomes Python's `sum`; `.exp()`
# becomes `math.exp`; the reciprocal node becomes a division.

# %%
nb.side_by_side(nb.code(0, "attend_head"), nb.code(1, "attend_head"), context=None)

# %% [markdown]
# What stage 1 no longer has: the class in which every operation makes a new object.

# %%
print("\n".join(nb.code(0, "Value").lines))

# %% [markdown]
# ## Measure
#
# What did you say on [stage 1's page](../docs/walkthrough/1-raw-python.md#predict)?
# `paired` means that both also take turns in one process, so that the ratio ("vs before") is fair.

# %%
run = nb.measure(stages="0,1", n="16,32,64", d=16, paired=True)
run

# %%
nb.plot(run, "time")

# %% [markdown]
# Both lines climb by the same slope: the same $N^2 d$ work. The gap between them is the price of
# one object per operation. The harness times with Python's garbage collector off, as torch's timer
# does; with it on, stage 0 would be slower still, since the collector looks through all those
# objects again and again.
#
# ## What was bought, what still hurts

# %%
operations = 4 * N * N * d
stage_1 = run.one(stage=1, nk=N, paired=True)["time_ms"]
print(nb.ratio(run, 0, 1, nk=N))
print(f"stage 1 takes {stage_1 * 1e6 / operations:.0f} ns for each multiplication or addition")

# %% [markdown]
# - Bought: no object and no edge per operation, so far less time; only a row of scores is kept.
# - Lost: the gradients. Stage 1 is forward only.
# - Still hurts: the interpreter. Tens of nanoseconds for one multiplication are a hundred or more
#   cycles of the processor, which could do several multiplications in one. Every float is an
#   object still, though a short-lived one, and every `*` looks up what `*` means.
#
# [Stage 2](01_to_02.ipynb) compiles the loops, and takes the graph back.

# %%
nb.stages(0, 1)

# %% [markdown]
# ## Exercises
#
# **1.** One query row against $N$ keys: how does the time grow with $N$ now? Measure it:
# `nb.measure(stages="0,1", n="16,32,64", nq=1, d=16)`.
#
# <details><summary>Answer</summary>
#
# It grows with $N$, not $N^2$: one row has $N$ pairs. Compare it with the tables above before you
# compare anybody's "attention in Python" with a GPU's: one row or all rows is a factor of $N$.
#
# </details>
#
# **2.** Stage 0's `attend_head` subtracts the maximum as a plain number (`x.data`), not as a
# `Value`. Why are the gradients right all the same?
#
# <details><summary>Answer</summary>
#
# Softmax is the same whatever constant is subtracted from all the scores, so its derivative with
# respect to that constant is 0. A node for the maximum would carry a gradient that cancels out.
#
# </details>
#
# **3.** How long would stage 0 take for one head at $N = 4096$, $d = 64$? And how much memory would
# its graph need?
#
# <details><summary>Answer</summary>
#
# The number of nodes grows like $N^2 (4d + 3)$. Against $N = 64$, $d = 16$ that is $64^2 = 4096$
# times as many pairs with about 3.9 times as many operations each: about 16,000 times. Multiply
# your time and the memory above: tens of minutes, and most of a terabyte. No such machine stands
# on a desk; the graph, not the arithmetic, is what does not fit.
#
# </details>
