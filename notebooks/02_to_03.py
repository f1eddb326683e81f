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
# # From stage 2 to stage 3: one operation per matrix
#
# Stage 2 makes a node for each multiplication. Stage 3 is what you would write in PyTorch:
#
# $$S = (Q \cdot \mathrm{scale}) K^T, \qquad P = \mathrm{softmax}(S), \qquad O = P V$$
#
# Three operations, each on whole matrices, each in code that others have tuned for decades. It is
# the yardstick of this project; in float64 it is the oracle that all stages are compared with.

# %%
# Not found? Type `%pip install -e "..[notebooks]"` in a cell, restart the kernel, and come back.
import course.notebook as nb

# %% [markdown]
# ## What hurts in stage 2
#
# It writes 48 bytes for each multiplication, with one thread.

# %%
nb.measure(stages="2", n="128,256", d=16)

# %% [markdown]
# ## Count
#
# The last prediction of [stage 3's page](../docs/walkthrough/3-torch-three-gemm.md#predict), and
# what each kernel of the method moves. $S$ and $P$ are the largest things that stage 3 ever makes.

# %%
from harness.problems import cost
from stages import s02_cpp_value_graph as stage_2

N, d = 256, 16
graph = stage_2.node_count(1, 1, N, N, d) * 48
problem = nb.problem(N, d, "float32")
matrices = cost.three_kernel_bytes(problem)
nb.rows(
    ("what", "bytes"),
    [("stage 2, its graph", f"{graph:,}"), ("S, and P", f"{cost.score_bytes(problem):,} each")]
    + [(f"stage 3, {kernel}: read and written", f"{size:,}") for kernel, size in matrices.items()]
    + [("graph over all that stage 3 moves", f"{graph / sum(matrices.values()):.0f} x")],
)

# %% [markdown]
# ## Both stages, side by side
#
# Every loop is gone. So is the graph: torch keeps one node for each *matrix* operation.

# %%
cpp = nb.code("csrc/attention.cpp", "Attention::attend_head")
nb.side_by_side(cpp, nb.code(3, "attend"), context=None)

# %% [markdown]
# Let torch itself tell what it recorded: its graph, from the output back. Under twenty
# nodes, where stage 2 has millions.

# %%
import torch

from stages import s03_torch_three_gemm as stage_3

q, k, v = (torch.randn(1, 1, N, d, requires_grad=True) for _ in range(3))
nodes = [stage_3.attend(q, k, v).grad_fn]
for node in nodes:
    nodes += [parent for parent, _ in node.next_functions if parent and parent not in nodes]
print(len(nodes), "nodes:", ", ".join(node.name() for node in nodes))

# %% [markdown]
# ## Measure

# %%
run = nb.measure(stages="2,3", n="64,128,256", d=16, paired=True)
run

# %%
nb.plot(run, "time")

# %%
print(nb.ratio(run, 2, 3, nk=N))
found = run.one(stage=3, nk=N, paired=True)
if found["time_ms"]:
    print(f"stage 3: {found['flops'] / found['time_ms'] / 1e6:.1f} GFLOP/s, one thread")

# %% [markdown]
# Both train. dq, dk and dv are checked too:

# %%
nb.measure(stages="2,3", n="64", d=16, mode="train")

# %% [markdown]
# ## On a GPU
#
# The same file runs on a GPU, unchanged: only the tensors lie elsewhere. From the project's records
# (stage 2 works on that machine's CPU, stage 3 on its GPU):

# %%
nb.recorded("h200/table-4.1.jsonl").only(stage=(2, 3), nq=64, nk=64)

# %% [markdown]
# ## What was bought, what still hurts
#
# - Bought: the interpreter's share is gone: it starts the same few operations whatever $N$ is.
#   Multiplications run several at a time, from caches, on matrix units where there are some.
# - Still hurts: $S$ and $P$ are $N \times N$. Each is written to memory and read back. At $N = 256$
#   nobody notices.
#
# [Stage 4](03_to_04.ipynb) does not write them.

# %%
for N in (1024, 4096, 8192, 16384, 32768):
    print(f"N = {N:6}: S is {cost.score_bytes(nb.problem(N)) / 2**20:7.0f} MB a head in float16")
nb.stages(2, 3)

# %% [markdown]
# ## Exercises
#
# **1.** Stage 3 scales `q`, not `S`. Why?
#
# <details><summary>Answer</summary>
#
# $(Q \cdot c) K^T = c \cdot (Q K^T)$, but $Q$ has $N d$ elements and $S$ has $N^2$. Scaling $S$
# would be one more pass over the largest matrix there is.
#
# </details>
#
# **2.** $N = 8$ instead of $256$: `nb.measure(stages="2,3", n="8", d=16, paired=True)`. Who wins,
# and why?
#
# <details><summary>Answer</summary>
#
# The gap shrinks. At $N = 8$ there is hardly any arithmetic, and what is left is the price of
# starting: a few calls from Python into a library, some microseconds each. Big matrices pay that
# once.
#
# </details>
#
# **3.** torch keeps $P$ for the backward pass. How many bytes is that for a model of 12 layers with
# 12 heads at $N = 4096$ in float16?
#
# <details><summary>Answer</summary>
#
# `12 * 12 * cost.score_bytes(nb.problem(4096))`: 144 times 32 MB is 4.5 GB, for one sequence.
# [Stage 7](06_to_07.ipynb) does not keep it.
#
# </details>
