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
# # From stage 3 to stage 4: S and P never leave the chip
#
# Stage 3 writes $S$ to memory, reads it, writes $P$, and reads that. Stage 4 ("Lite") is one Triton
# kernel: each program takes some rows of $Q$ and walks over the keys, 64 at a time. A tile of $S$
# lives in registers, and dies there.
#
# You will see: what a memory bus has to do with attention, and that the fused kernel is wrong. On
# purpose: [the next notebook](04_to_05.ipynb) mends it.

# %%
# Not found? Type `%pip install -e "..[notebooks]"` in a cell, restart the kernel, and come back.
import course.notebook as nb

# %% [markdown]
# ## What hurts in stage 3
#
# Its memory. "Peak" is what a call takes above its inputs. (`full_load` is nothing on a CPU; a GPU
# gets float16 and 32 heads, so that all of it has work.)

# %%
sizes = nb.here(cpu="512,1024", gpu="1024,2048,4096,8192")
run = nb.measure(stages="3", n=sizes, d=64, **nb.full_load())
run

# %% [markdown]
# Double $N$: four times the memory. Where does it come from? Count, do not measure:

# %%
from harness.problems import cost

for found in run:
    S = cost.score_bytes(nb.problem(found["nk"], 64, found["dtype"], h=found["h"]))
    peak = found["peak_bytes"]
    counted = f"S and P together {2 * S / 2**20:.1f} MB"
    print(f"N = {found['nk']}: {counted}" + (f", peak {peak / 2**20:.1f} MB" if peak else ""))

# %% [markdown]
# ## Count
#
# Take a GPU, $N = 4096$, 32 heads, $d = 64$, float16. How long does its memory (HBM) need for what
# [your predictions](../docs/walkthrough/4-triton-lite.md#predict) count, at the least? And how long
# do its matrix units need for the arithmetic? What the machine can do was measured with
# `ladder ceilings`: the fastest copy, the fastest product.

# %%
ceilings = nb.recorded("h200/ceilings.jsonl", "ceiling")
bandwidth = ceilings.one(what="copy")["value"] * 1e12  # bytes a second, read and written
matrix_rate = ceilings.one(what="matmul", dtype="float16")["value"] * 1e12  # FLOPs a second
problem = nb.problem(4096, 64, "float16", h=32)
three, fused = sum(cost.three_kernel_bytes(problem).values()), cost.fused_bytes(problem)


def at_least(moved):
    return f"{moved / 2**20:,.0f} MB", f"{moved / bandwidth * 1e3:.3f} ms"


operations = cost.flops(problem)
body = [
    ("S", f"{cost.score_bytes(problem) / 2**20:,.0f} MB", "-"),
    ("through HBM, three kernels", *at_least(three)),
    ("through HBM, one kernel", *at_least(fused)),
    ("arithmetic", f"{operations / 1e9:,.0f} GFLOP", f"{operations / matrix_rate * 1e3:.3f} ms"),
]
shape = "N = 4096, 32 heads, d = 64, float16"
nb.rows(("what", "counted", "takes at the least"), body, shape, ceilings.said)

# %% [markdown]
# The arithmetic would be done long before the bytes are through: stage 3 is memory-bound. A fused
# kernel moves so little that memory is not its limit. What was measured there:

# %%
nb.recorded("h200/table-4.2.jsonl").only(
    stage=(3, 5), nk=4096, h=32, dtype="float16", precision="float16"
)

# %% [markdown]
# (Stage 5 stands for the fused kernel in that record. Stage 4 is not in it, and you will see why.)
# The bytes can be counted by the GPU's own profiler, too, which knows nothing of our formulas:

# %%
io = nb.recorded("h200/io.jsonl", "io")
body = []
for stage, name in ((3, "torch, three GEMMs"), (4, "Triton Lite")):
    kernels = io.only(stage=stage, nk=4096).records
    moved = sum(x["dram_read_bytes"] + x["dram_write_bytes"] for x in kernels)
    counted = kernels[0]["predicted_bytes"]
    sizes = (f"{size / 2**30:.2f} GB" for size in (moved, counted))
    body.append((f"{stage} {name}", len(kernels), *sizes))
shape = "N = 4096, d = 64, 8 x 12 heads, float16"
nb.rows(("stage", "kernels", "moved, by the profiler", "counted"), body, shape, io.said)

# %% [markdown]
# The picture of it: bytes through memory against $N$, counted.

# %%
from harness.views.look import mark

sizes = [256, 512, 1024, 2048, 4096, 8192, 16384]


def draw(axis, look):
    half = {"color": look.orange, "linestyle": ":", "marker": "."}
    for count, label, style in (
        (lambda p: sum(cost.three_kernel_bytes(p).values()), "three kernels", mark(3).line),
        (lambda p: sum(cost.half_fused_bytes(p).values()), "half fused", half),
        (cost.fused_bytes, "one kernel, at the least", mark(4).line),
    ):
        found = [count(nb.problem(n)) / 2**20 for n in sizes]
        axis.plot(sizes, found, label=label, **style)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("N")
    axis.set_ylabel("MB through memory, one head, float16, d = 64")
    axis.grid(True)
    axis.legend()


nb.drawn(
    draw,
    "Megabytes against N, both axes logarithmic. What three kernels move rises with the square of "
    "N, half fused too, but lower; what one kernel moves rises in step with N, far below.",
)

# %% [markdown]
# ## Both stages, side by side
#
# At the right, one program's work. `q` is loaded once and stays. `s` and `p` are never stored: look
# for the only `tl.store`.

# %%
nb.side_by_side(nb.code(3, "attend"), nb.code(4, "attention_kernel"), context=None)

# %% [markdown]
# ## Measure
#
# Without a GPU a Triton kernel is *interpreted*: its answers are right or wrong as on a GPU, and no
# N x N is kept here either, but its time means nothing. So no time is shown.

# %%
sizes = nb.here(cpu="64,65,512", gpu="64,65,1024,4096,8192")
run = nb.measure(stages="3,4", n=sizes, d=64, **nb.full_load())
run

# %%
nb.plot(run, "memory")

# %% [markdown]
# The square is gone from the memory (on a CPU, less than 1 MB cannot be told from nothing).
#
# But look at the status. Up to 64 keys stage 4 is exact; at 65 it is far off. It declares that
# itself, `exact_up_to=64` in its file, so it is *wrong by design*, and never ranked: the speed of a
# wrong answer is of no interest.

# %%
nb.plot(run, "error")

# %% [markdown]
# ## What was bought, what still hurts
#
# - Bought: $O(N)$ memory instead of $O(N^2)$, and one launch instead of four ([three for the
#   method, one to scale q](../docs/walkthrough/3-torch-three-gemm.md#explain)).
# - Bought: memory is no longer the limit ([what is, hasn't been
#   measured](../docs/profiling.md#what-a-fused-kernel-waits-for)).
# - Still hurts: the softmax is taken inside each tile of 64 keys, so it is right only while one
#   tile holds all the keys. [The next notebook](04_to_05.ipynb) shows the nine lines that mend it.

# %%
nb.stages(3, 4)

# %% [markdown]
# ## Exercises
#
# **1.** FLOPs over bytes is the arithmetic intensity. Compute it for stage 3 and for a fused kernel
# at $N = 1024$ and $4096$: `cost.intensity(cost.flops(p), bytes)`. At which intensity does the
# machine above stop waiting for its memory?
#
# <details><summary>Answer</summary>
#
# At `matrix_rate / bandwidth` FLOPs per byte. Three kernels stay near $d / e$, with $e$ bytes per
# element (32 here), whatever $N$ is; a fused one has $N / e$, which grows. See [the
# roofline](../docs/figures/roofline.png).
#
# </details>
#
# **2.** A half-way step fuses $Q K^T$ with the softmax and still writes $P$. What does it save?
#
# <details><summary>Answer</summary>
#
# `cost.half_fused_bytes`: half of the square part, $S$'s write and read. The dotted line in the
# picture runs in parallel to the dashed one: a factor of two, and the same slope.
#
# </details>
#
# **3.** Why does each program hold many rows of $Q$, and not one?
#
# <details><summary>Answer</summary>
#
# Every program walks over all of $K$ and $V$. With one row each, $K$ and $V$ would be read $N$
# times; with 128 rows, $N / 128$ times. `cost.flash_bytes(problem, block_m)` counts it. And matrix
# units multiply matrices, not vectors.
#
# </details>
