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
# # From stage 6 to stage 9: loads, products and softmax at the same time
#
# The arithmetic stays what it is: the same tiles, the same online softmax. What changes is *when*
# each part runs, and which warps run it. On a Hopper GPU a copy engine moves tiles and a matrix
# unit multiplies them while the warps that asked for it do something else.

# %%
# Not found? Type `%pip install -e "..[notebooks]"` in a cell, restart the kernel, and come back.
import course.notebook as nb

# %% [markdown]
# ## What hurts in stage 6
#
# The most that the GPU multiplies, and what of it stage 6 uses (float16, no mask):

# %%
bench = nb.recorded("h200/hopper-float16.jsonl")
ceilings = nb.recorded("h200/ceilings.jsonl", "ceiling")
most = {
    dtype: ceilings.one(what="matmul", dtype=dtype)["value"] for dtype in ("float16", "bfloat16")
}
body = []
for d in (64, 128):
    for n in (1024, 4096, 16384):
        cell = bench.one(stage=6, d=d, nk=n, causal=False)
        body.append((d, n, f"{nb.tflops(cell):.0f}", f"~{nb.tflops(cell) / most['float16']:.0%}"))
title = f"stage 6; a matrix product alone reaches {most['float16']:.0f} TFLOP/s"
nb.rows(("d", "N", "TFLOP/s", "of the product alone"), body, title, bench.said)

# %% [markdown]
# ## Count
#
# The matrix unit of an H100 does 989 TFLOP/s; the units for exponentials do 3.9 (Shah et al. 2024,
# [FlashAttention-3](https://arxiv.org/abs/2407.08608), section 3.1; an H200 has the same ones).
# Each score takes $4 d$ FLOPs, in two products, and one exponential. **Predict:** how long do the
# exponentials take, beside the products? And what share of the time does the matrix unit work, if
# products and softmax take turns?

# %%
body = []
for d in (64, 128):
    softmax = (1 / 3.9) / (4 * d / 989)
    body.append((d, 4 * d, f"{softmax:.2f}", f"{1 / (1 + softmax):.0%}"))
header = ("d", "FLOPs per score", "exponentials' time / products' time", "matrix unit, in turns")
nb.rows(header, body, "a tile of scores, by the units' rates alone")

# %% [markdown]
# A softmax is more than its exponentials (maxima, sums, a conversion), so in turns the share is
# smaller still. Stage 6 does better than that, because several programs share a multiprocessor, and
# one multiplies while another is in its softmax. That is left to chance.
#
# ## Two units, two plans
#
# Let there be two units, for products and for softmax, and groups of warps that need both: $S = Q
# K^T$, then $P$, the softmax, then $O \mathrel{+}= P V$. This schedules them, at $d = 64$: a
# product takes 1, a softmax 2. `ahead` begins $S$ of the next tile before $P V$ of this one.


# %%
def schedule(consumers, ahead, softmax=2.0, tiles=5):
    """When each step begins: (consumer, step, unit, begin, end)."""
    steps = [("S", 0), ("P", 0)]
    for j in range(1, tiles):
        steps += [("S", j), ("O", j - 1), ("P", j)] if ahead else [("O", j - 1), ("S", j), ("P", j)]
    steps.append(("O", tiles - 1))
    before = {"S": "P" if ahead else "O", "P": "S", "O": "P"}  # S: of the tile before
    free, done, plan = {"matrix": 0.0, "softmax": 0.0}, {}, []
    left = [list(steps) for _ in range(consumers)]
    while any(left):
        offers = []
        for c, queue in enumerate(left):
            if queue:
                kind, j = queue[0]
                unit = "softmax" if kind == "P" else "matrix"
                ready = done.get((c, before[kind], j - (kind == "S")), 0.0)
                offers.append((max(free[unit], ready), j, c, kind, unit))
        begin, j, c, kind, unit = min(offers)
        end = begin + (softmax if unit == "softmax" else 1.0)
        free[unit] = done[c, kind, j] = end
        plan.append((c, kind, unit, begin, end))
        left[c].pop(0)
    return plan


PLANS = {
    "one consumer, in turns": (1, False),
    "one consumer, ahead": (1, True),
    "two consumers, in turns": (2, False),
    "two consumers, ahead": (2, True),
}


def busy(plan):
    """The share of the time in which the matrix unit works."""
    return sum(end - begin for *_, unit, begin, end in plan if unit == "matrix") / max(
        end for *_, end in plan
    )


header = ("plan", "d = 64: matrix unit busy", "d = 128")
shares = [
    (name, *(f"{busy(schedule(*plan, softmax, tiles=200)):.0%}" for softmax in (2.0, 1.0)))
    for name, plan in PLANS.items()
]
print(nb.rows(header, shares, "the four plans, over 200 tiles"))


def draw(axis, look):
    colours = ("C0", "C1")
    for row, plan in enumerate(PLANS.values()):
        for c, kind, unit, begin, end in schedule(*plan):
            y = 2.6 * row + (unit == "softmax")
            axis.barh(y, end - begin, left=begin, height=0.85, color=colours[c], edgecolor="w")
            axis.text((begin + end) / 2, y, kind, ha="center", va="center", color="w", fontsize=8)
    ticks = [2.6 * row + unit for row in range(len(PLANS)) for unit in (0, 1)]
    names = [f"{name}: {unit}" for name in PLANS for unit in ("products", "softmax")]
    axis.set_yticks(ticks, names)
    axis.invert_yaxis()
    axis.set_xlabel("time; one product = 1")


nb.drawn(
    draw,
    "Four plans as bars over time, products above softmax. With one consumer in turns the bars of "
    "the two never overlap. Ahead, each O lies under the next P. With two consumers the products "
    "of one lie over the softmax of the other, and the row of products has hardly a gap.",
    8.6,
    5.0,
)

# %% [markdown]
# On paper two groups of warps suffice, even in turns. What the paper leaves out: the wait for
# loads, the steps at the beginning and the end of each query tile, and that nobody tells the two
# groups to be out of step. So stage 9 takes both, and at $d \le 64$ three groups.
#
# ## Both stages, side by side
#
# The loop over KV tiles. In stage 6 one program loads, multiplies and computes the softmax of a
# tile; in stage 9 a consumer waits for tiles and releases their slots, and `s` of tile `j`
# is begun before `p` of the tile before it is used:

# %%
nb.side_by_side(nb.code(6, "visit_tiles"), nb.code(9, "mainloop"), context=1)

# %% [markdown]
# The pipelines are filled by one warp, the producer. It does nothing but ask the copy engine:

# %%
print("\n".join(nb.code(9, "producer").lines))

# %% [markdown]
# ## Is it right?
#
# On a Hopper GPU this measures; elsewhere the table says why it can't:

# %%
nb.measure(stages="3,6,9", n=nb.here(cpu="64", gpu="1000,4096"), d=64, **nb.full_load())

# %% [markdown]
# ## The climb
#
# What did each idea buy? A variant of stage 9 that lacks one idea takes turns with it
# ([stage 9's log](../docs/log/hopper.md#each-idea-taken-away) has the command).
# **Predict** the order before you
# run the cell: which three cost the most at $N = 1024$, where a query tile is soon done?

# %%
from course.report.hopper import ideas
from stages import s09_gluon_hopper as stage_9

variants = nb.recorded("h200/hopper-variants.jsonl")
loops = nb.recorded("cpu/hopper-loops.jsonl", "loop")  # what the compiler made of them


def taken(name, d):
    """Registers and spills of a variant's loop over KV tiles, where nothing is masked."""
    [loop] = (loop for loop in loops.only(d=d) if loop["name"] == name)
    return f"{loop['registers']} of {loop['given']}", loop["spills"]


def climb(d, causal, n):
    """The table of one problem: what each variant reaches, in the order of the climb."""
    found = {cell["name"]: cell for cell in variants.only(d=d, causal=causal, nk=n)}
    if not found:
        return f"d = {d}, {'causal' if causal else 'no mask'}, N = {n}: not measured yet"
    ours = found["gluon_hopper"]
    body = []
    for name, (idea, expected) in [*ideas().items(), ("gluon_hopper", ("as shipped", ""))]:
        cell = found[name]
        share, loss = nb.tflops(cell) / most["bfloat16"], cell["time_ms"] / ours["time_ms"] - 1
        figures = f"{nb.tflops(cell):.0f}", f"~{share:.0%}", f"{round(100 * loss):+d}%"
        # the loops were read as they are compiled for these problems
        body.append((idea, expected, *figures, *(() if causal else taken(name, d))))
    header = ("without", "expected", "TFLOP/s", "of the product alone", "time")
    header += () if causal else ("registers", "spills")
    title = f"bfloat16, d = {d}, {'causal' if causal else 'no mask'}, N = {n}"
    said = variants.said if causal else f"{variants.said} {loops.said}"
    return nb.rows(header, body, title, said)


climb(64, False, 1024)

# %%
climb(64, False, 16384)

# %%
climb(64, True, 1024)

# %%
climb(128, False, 4096)

# %% [markdown]
# At short $N$ the beginning and the end of a query tile count; at long $N$ only what happens in the
# loop does. Some ideas bought nothing here and stay in the list of
# [what was tried](../docs/log/hopper.md#tried-without-gain): a surprise is worth as much as a gain.
#
# Registers decide how many consumers there can be: a multiprocessor has 65,536, and each thread of
# a consumer holds its part of $S$, $P$ and $O$.

# %%
body = []
for name in ("TWO_CONSUMERS", "THREE_CONSUMERS", "THREE_CTAS"):
    config = getattr(stage_9.launch, name)
    for d in (64, 128) if name == "TWO_CONSUMERS" else (64,):
        held = 64 * config.BLOCK_N // 128 * 3 // 2 + 64 * d // 128  # S in float32, P in 16 bits, O
        threads = 128 * config.CONSUMERS * config.ctas
        body.append((name, d, config.BLOCK_N, threads, held, config.CONSUMER_REGS))
header = ("configuration", "d", "keys per tile", "threads", "S, P and O", "registers per thread")
nb.rows(header, body, "consumers on one multiprocessor")

# %% [markdown]
# What is not for $S$, $P$ and $O$ is for the maxima, the sums, the next $P$ and the addresses. If
# it is not enough, the compiler spills to memory, and worse: it makes the products wait for each
# other. The tests read the machine code: no loop without a mask spills.
#
# ## On a GPU
#
# All in turns. Does your prediction for the share of the matrix unit hold?

# %%
body = []
for d in (64, 128):
    for causal in (False, True):
        for n in (1024, 4096, 16384):
            cells = {cell["stage"]: cell for cell in bench.only(d=d, causal=causal, nk=n)}
            six, nine, peer = (nb.tflops(cells[number]) for number in (6, 9, 101))
            rates = f"{six:.0f}", f"{nine:.0f}", f"~{nine / most['float16']:.0%}", f"{peer:.0f}"
            mask = "causal" if causal else "no mask"
            body.append((d, mask, n, *rates, f"{nine / peer:.2f}x"))
header = ("d", "mask", "N", "stage 6", "stage 9", "of the product alone", "cuDNN", "9 over cuDNN")
nb.rows(header, body, "TFLOP/s, float16, the masked part not counted", bench.said)

# %% [markdown]
# ## What was bought, what still hurts
#
# - Bought: the matrix unit works for most of the time, where $N$ is large.
# - Bought: the backward pass in one pass over the keys, with five products where stage 7 has seven.
# - The price: it runs on one kind of GPU, and a wrong barrier hangs or loses a tile in silence.
# - Still hurts: one GPU is all it uses.
#
# ## Exercises
#
# **1.** With `schedule`, from which `softmax` on does a third consumer help? (Products take 1.)
#
# <details><summary>Answer</summary>
#
# `busy(schedule(3, True, x, tiles=200))` against two consumers: as long as a softmax takes less
# than both products, two consumers keep the matrix unit busy. Beyond, the softmax unit itself is
# what limits, and no number of consumers helps. The real gain of a third at $d = 64$ comes from
# what the schedule leaves out: waits, and more rows per tile of K and V.
#
# </details>
#
# **2.** A pipeline has two slots. The producer has filled tiles 0 and 1. For which barrier
# does it wait
# before tile 2, and who arrives there, how many times?
#
# <details><summary>Answer</summary>
#
# For `empty` of slot 0, at which each consumer's 128 threads arrive once, when its product has read
# tile 0. With three consumers it opens at arrival 416: the producer's 32 threads arrive there, too,
# and wait ([pipeline.py](../stages/s09_gluon_hopper/pipeline.py)).
#
# </details>
#
# **3.** Why does `finish_scores` leave one newer product running, with `warpgroup_mma_wait(1)`?
#
# <details><summary>Answer</summary>
#
# Products end in the order in which they were begun. At most one may be left unfinished: so $S$,
# begun first, is done, and $P V$ may still run while the softmax of $S$ is computed. (`ptxas` moves
# the second wait up,
# [before the exponentials](../docs/log/hopper.md#what-the-compiler-makes-of-the-loop): what runs
# during them
# are the products of the other consumers.)
#
# </details>
