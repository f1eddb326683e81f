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
# # From stage 1 to stage 2: compile the graph
#
# Stage 1 is loops on plain floats, and Python reads every one of its operations anew. Stage 2
# writes the loops in C++, and takes stage 0's graph back: each operation makes a node again, 48
# bytes in an arena. So gradients are back, too.
#
# You will see: that compiled code which *records everything* beats interpreted code which records
# nothing.

# %%
# Not found? Type `%pip install -e "..[notebooks]"` in a cell, restart the kernel, and come back.
import course.notebook as nb

# %% [markdown]
# ## What hurts in stage 1
#
# One dot product of 16 numbers, in plain Python. What does the interpreter do for it?

# %%
import dis
import io


def dot(x, y):
    return sum(a * b for a, b in zip(x, y))


text = io.StringIO()
dis.dis(next(c for c in dot.__code__.co_consts if hasattr(c, "co_code")), file=text)
print("\n".join(line[16:] for line in text.getvalue().splitlines() if line.strip()))

# %% [markdown]
# That is the inside of the generator: those instructions are read and dispatched again for each of
# the 16 products, and each product is a new float object. Measured:

# %%
nb.measure(stages="1", n="64,128", d=16)

# %% [markdown]
# ## Count
#
# What you predicted on [stage 2's page](../docs/walkthrough/2-cpp-value-graph.md#predict), counted:

# %%
from stages import s02_cpp_value_graph as stage_2

N, d = 64, 16
nodes = stage_2.node_count(B=1, H=1, Nq=N, Nk=N, d=d)
print(f"{nodes:,} nodes, as in stage 0; at 48 bytes {nodes * 48 / 2**20:.1f} MB")

# %% [markdown]
# ## Both stages, side by side
#
# Python at the left, C++ at the right; the same loops, in the same order. `graph_.mul` makes a
# node.

# %%
cpp = nb.code("csrc/attention.cpp", "Attention::attend_head")
nb.side_by_side(nb.code(1, "attend_head"), cpp, context=None)

# %% [markdown]
# How a node is made: a pointer moves on by 48 bytes, and six fields are written. Then the backward
# pass ([why it needs no sort](../docs/walkthrough/2-cpp-value-graph.md#explain)):

# %%
for name in ("Value* make", "void backward"):
    print("\n".join(nb.code("csrc/value_graph.hpp", name).lines))

# %% [markdown]
# ## Measure

# %%
run = nb.measure(stages="1,2", n="32,64,128", d=16, paired=True)
run

# %%
nb.plot(run, "time")

# %% [markdown]
# Look at the peak of stage 2 at $N = 64$: it is the graph that you predicted. (The harness reads
# the process's resident memory: below 1 MB that tells nothing, and the table says so.)

# %%
print(nb.ratio(run, 1, 2, nk=N))
found = run.one(stage=2, nk=N, paired=False)
if found["peak_bytes"]:
    print(f"peak {found['peak_bytes'] / 2**20:.1f} MB, predicted {nodes * 48 / 2**20:.1f} MB")

# %% [markdown]
# The gradients are back. The harness checks dq, dk and dv against float64, as it does the output;
# stage 1 has none, and its row says so.

# %%
nb.measure(stages="0,1,2", n="32", d=16, mode="train")

# %% [markdown]
# ## What was bought, what still hurts
#
# - Bought: no interpreter, no box around a float. A recorded operation in C++ costs less than an
#   unrecorded one in Python.
# - Bought: the backward pass is one walk over memory in order.
# - Still hurts: one thread, and one node per operation. The result of a multiplication takes 8
#   bytes, but 48 bytes are written, and read again on the way back. The processor could do several
#   multiplications in one instruction; a graph of single numbers keeps it from that.
#
# [Stage 3](02_to_03.ipynb) makes a whole matrix product one operation.

# %%
nb.stages(1, 2)

# %% [markdown]
# ## Exercises
#
# **1.** A Python `Value` takes about 200 bytes, a C++ one 48. Where do the others go?
#
# <details><summary>Answer</summary>
#
# Each Python object has a header (a reference count, a pointer to its type) and is known to the
# garbage collector. Its fields are pointers to other objects: the float `data` is one, the tuple of
# parents another, the tuple of derivatives a third, with floats of its own. In C++ all six fields
# lie in the node itself.
#
# </details>
#
# **2.** How large is the graph at $N = 256$? What if you have 4 GB?
#
# <details><summary>Answer</summary>
#
# `stage_2.node_count(1, 1, 256, 256, 16) * 48` bytes: 16 times that of $N = 64$, about 200 MB. At
# $N = 1024$ it is 16 times that again, over 3 GB: there is no room for a second head.
#
# </details>
#
# **3.** Stage 0 sorts its graph topologically before it goes back; stage 2 doesn't. Why needn't it?
#
# <details><summary>Answer</summary>
#
# An arena keeps nodes in the order in which they are made, and every node is made after its
# parents. Stage 0's `Value`s lie anywhere in memory, so their order must be found again from the
# pointers.
#
# </details>
