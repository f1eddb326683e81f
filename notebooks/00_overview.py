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
# # The attention ladder: an overview
#
# One algorithm, exact attention, written again and again. Each stage is a file, or from 7 on a
# folder, with one function to call, `attend(q, k, v)`, and teaches one idea. One harness measures
# them all on the same problem.
#
# $$O = \mathrm{softmax}\!\left(\frac{Q K^T}{\sqrt d}\right) V$$
#
# This notebook shows the whole ladder once. The others go from stage to stage:
# [0 to 1](00_to_01.ipynb), [1 to 2](01_to_02.ipynb), [2 to 3](02_to_03.ipynb),
# [3 to 4](03_to_04.ipynb), [4 to 5](04_to_05.ipynb), [5 to 6](05_to_06.ipynb),
# [6 to 7](06_to_07.ipynb), [6 to 8](06_to_08.ipynb), [6 to 9](06_to_09.ipynb),
# [9 to 10](09_to_10.ipynb).

# %%
# Not found? Type `%pip install -e "..[notebooks]"` in a cell, restart the kernel, and come back.
import course.notebook as nb

# %%
nb.stages()

# %% [markdown]
# ## Attention in ten lines
#
# The simplest stage. `q`, `k` and `v` are lists of rows.

# %%
print("\n".join(nb.code(1, "attend_head").lines))

# %% [markdown]
# ## Stages 0 to 3, measured here
#
# Have you written down your guesses of [the walkthrough](../docs/walkthrough/index.md)? On one
# thread of this machine:

# %%
run = nb.measure(stages="0,1,2,3", n="16,32,64", d=16, paired=True)
for stage in (1, 2, 3):
    print(nb.ratio(run, 0, stage, nk=64))

# %% [markdown]
# All of them compute the same numbers, with the same number of multiplications. Before a time is
# taken, the answer is checked against float64.

# %%
run

# %%
nb.plot(run, "time")

# %% [markdown]
# ## From stage 4 on: kernels
#
# Stages 4 to 8 are written in Triton, for a GPU. Without one they are *interpreted*: the answers
# are the real ones, the times mean nothing, so they are not shown. Right or wrong can be seen
# anywhere. Stage 9, in Gluon, needs a GPU of the Hopper generation: elsewhere it is skipped, with
# the reason below the table. (On a GPU the cell takes float16 and 32 heads, so that all of it has
# work.)

# %%
sizes, d = nb.here(cpu=("64,65,128", 16), gpu=("64,65,1024,4096", 64))
kernels = nb.measure(stages="3,4,5,6,7,8,9", n=sizes, d=d, **nb.full_load())
kernels

# %%
nb.plot(kernels, "error")

# %% [markdown]
# Stage 4 is wrong above 64 keys, on purpose: the nine lines that mend it are
# [the heart of the course](04_to_05.ipynb).
#
# ## FLOPs in the time of one byte
#
# On a GPU, measured with the largest matrix product and the largest copy:

# %%
ceilings = nb.recorded("h200/ceilings.jsonl", "ceiling")
copy = ceilings.one(what="copy")["value"]
body = [
    (f"{x['dtype']}, {x['precision']}", f"{x['value']:.0f} TFLOP/s", f"{x['value'] / copy:.0f}")
    for x in ceilings.only(what="matmul")
]
header = ("product of matrices", "rate", "FLOPs in the time of a byte")
nb.rows(header, body, f"copy: {copy:.2f} TB/s", ceilings.said)

# %% [markdown]
# Attention as three kernels does about $d / e$ FLOPs for each byte that it moves, with $e$ bytes
# per element ([derived here](../docs/source-tables.md#table-44-arithmetic-intensity)). Compare that
# with the last column: this is why stages 4 to 9 exist.
#
# ## The ladder on a GPU
#
# From the project's records. The time of a wrong stage is not drawn.

# %%
tour = nb.recorded("h200/tour.jsonl").only(d=64, inputs="normal", stage=(3, 4, 5, 102))
print(tour.said)
nb.plot(tour, "time")

# %% [markdown]
# One head leaves most of such a card idle: here the library is hard to beat. In float16 with many
# heads the fused kernels win; all contestants in turns:

# %%
bench = nb.recorded("h200/hopper-float16.jsonl")
body = []
for n in (1024, 4096, 16384):
    found = [bench.one(stage=stage, nk=n, d=64, causal=False) for stage in (3, 6, 9, 100)]
    body.append((n, *(f"{nb.tflops(x):.0f}" for x in found)))
header = ("N", "3 torch, three GEMMs", "6 Triton Flash 2", "9 Gluon on Hopper", "100 SDPA, flash")
shape = f"TFLOP/s, d = 64, float16, {found[0]['h']} heads, {found[0]['b'] * n:,} tokens in all"
nb.rows(header, body, shape, bench.said)

# %% [markdown]
# Stage 8 is for one query row, or a few, against many keys: a model that writes text. It splits the
# keys, so that the whole GPU has work:

# %%
decode = nb.recorded("h200/decode.jsonl")
one_row = decode.only(nq=1, b=1, hk=8, page_size=None)
body = [
    (f"{n:,}", *(f"{1000 * one_row.one(stage=x, nk=n)['time_ms']:.0f}" for x in (6, 8)))
    for n in (8192, 131072)
]
shape = "microseconds; one query row of one text, 32 heads, 8 of keys, d = 128, bfloat16"
nb.rows(("keys", "6 Triton Flash 2", "8 Triton split-KV"), body, shape, decode.said)

# %% [markdown]
# ## Exercises
#
# **1.** `nb.measure(stages="0,1,2,3", n="64", nq=1, d=16)` has one query row. What does that do to
# the times, and to the comparison of stage 0 with stage 3?
#
# <details><summary>Answer</summary>
#
# Stages 0 to 2 get about 64 times faster: they have 64 times less to do. Stage 3 hardly changes: at
# this size, most of its time is the cost of starting its operations. Whoever compares one row in
# Python with all rows on a GPU is off by a factor of $N$.
#
# </details>
#
# **2.** Which stages give gradients? Try `nb.measure(stages="0,1,2,3,4,5,6,7,8,9", n="32",
# d=16, mode="train")`.
#
# <details><summary>Answer</summary>
#
# 0, 2, 3, 7 and 9. The others are skipped, with the reason below their table; so is 9, for
# another reason, where there is no Hopper GPU.
#
# </details>
#
# **3.** In your own words: what does `wrong-by-design` mean, and why is such a stage never ranked?
#
# <details><summary>Answer</summary>
#
# The stage says itself up to which $N$ it is exact, and was asked for more. Its answer is wrong, so
# its speed is of no interest: a stage that returns zeros would be the fastest of all.
#
# </details>
