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
# # From stage 9 to stage 10: a ring of GPUs
#
# The arithmetic of one GPU stays what it is. The sequence is cut into parts, one for each of $W$
# GPUs, the *ranks*. Each keeps its queries, and keys and values travel from rank to rank. Nothing
# here needs a GPU: a rank is a process, or only a turn of a loop.

# %%
# Not found? Type `%pip install -e "..[notebooks]"` in a cell, restart the kernel, and come back.
import course.notebook as nb

# %% [markdown]
# ## What hurts in stage 9
#
# One GPU is all it uses. At the rate that was measured at $N = 16384$, one layer of 16 heads takes:

# %%
from harness.records.units import show_bytes, show_time

bench = nb.recorded("h200/hopper.jsonl")
cell = bench.one(stage=9, d=128, nk=16384, causal=True, direction="fwd")
rate = 1e12 * nb.tflops(cell)  # FLOP/s
H, d, size = 16, 128, 2  # bfloat16
body = []
for N in (1 << 16, 1 << 20, 1 << 23):
    seconds = 4 * H * d * N * N / 2 / rate
    body.append((N, show_bytes(4 * H * N * d * size), show_time(1e3 * seconds)))
header = ("N", "q, k, v and o", "forward, causal")
nb.rows(header, body, f"stage 9 at {rate / 1e12:.0f} TFLOP/s", bench.said)

# %% [markdown]
# The last of them doesn't fit into the memory of any one GPU with the rest of a model, and nobody
# waits that long for a layer.
#
# ## Count: bytes per hop
#
# Rank $r$ has $n = N / W$ rows of q, k and v. At hop 0 its queries meet its own keys. Meanwhile it
# sends its K and V to rank $r + 1$ and receives those of rank $r - 1$, which are for hop 1; and so
# on, until all queries have met all keys after $W$ hops.
#
# **Predict**, for $N = 65536$, 16 heads, $d = 128$, bfloat16: how many bytes does a rank send per
# hop with two ranks, and with eight? Which of the two is hidden better behind what is computed
# meanwhile?

# %%
from harness.views.rings import LINKS

link, _ = LINKS["NVLink"]  # bytes/s one way, of the data sheet
body = []
for N in (8192, 65536):
    for W in (2, 8):
        n = N // W
        sent = 2 * H * n * d * size  # K and V
        hop = 4 * H * d * n * n / 2 / rate  # half of the pairs, as we shall see
        send = sent / link
        times = (show_time(1e3 * send), show_time(1e3 * hop))
        body.append((N, W, n, show_bytes(sent), *times, f"{send / hop:.0%}"))
header = ("N", "W", "rows per rank", "sent per hop", "to send", "to compute", "send / compute")
nb.rows(header, body, f"causal; a link of {link / 1e9:.0f} GB/s one way, on paper")

# %% [markdown]
# What is sent grows with $n$, what is computed with $n^2$. So from some $n$ on a hop hides what is
# sent, and that $n$ doesn't depend on $W$.
#
# ## Who waits?
#
# Under a causal mask let each rank have a *contiguous* part: rank 0 the first rows, and so on.
# **Predict**, for $W = 4$: at which hops does rank 0 have something to compute? And rank 3? Since
# all take part in each exchange, a hop takes as long as the busiest rank.
#
# The stage's own schedule says which rows meet which keys at each hop. Counted in pairs of a query
# and a key:

# %%
from stages.s10_ring.schedule import hop, spans


def pairs(W, zigzag, N=1024):
    """By rank, how many pairs it computes at each hop, in squares of its part."""
    parts, found = spans(N, W, zigzag), []
    for rank in range(W):
        hops = (hop(rank, step, parts, parts, causal=True) for step in range(W))
        seen = [((x.rows.stop - x.rows.start) * x.keys.stop, x.causal) for x in hops]
        found.append([many / (N // W) ** 2 / (2 if triangle else 1) for many, triangle in seen])
    return found


body = []
for zigzag in (False, True):
    work = pairs(4, zigzag)
    for rank, hops in enumerate(work):
        name = "zigzag" if zigzag else "contiguous"
        held = ", ".join(f"{start}-{end - 1}" for start, end in spans(1024, 4, zigzag)[rank])
        body.append((f"{name}, rank {rank}", held, *(f"{x:.1f}" for x in hops), sum(hops)))
    body.append(("the busiest", "", *(f"{max(x):.1f}" for x in zip(*work)), sum(map(max, *work))))
nb.rows(("", "rows of 1024", *(f"hop {x}" for x in range(4)), "sum"), body, "W = 4")

# %% [markdown]
# With contiguous parts rank 0 is done after its own triangle, and waits at all other hops; rank 3
# has a whole square at each. In *zigzag* a rank holds an early and a late chunk: chunks $r$ and $2W
# - 1 - r$ of $2W$. Each has half a square at each hop: all of its rows and the early chunk's keys,
# or its late rows and all keys. Nobody waits, and the ring takes about half the time.


# %%
def draw(axis, look):
    for side, zigzag in enumerate((False, True)):
        work, begun = pairs(4, zigzag), 0.0
        for step, hops in enumerate(zip(*work)):
            for rank, took in enumerate(hops):
                y = 5 * side + rank
                axis.barh(y, took, left=begun, height=0.8, color=f"C{step}", edgecolor="w")
            begun += max(hops)
    ticks = [5 * side + rank for side in (0, 1) for rank in range(4)]
    names = [f"{name}, rank {rank}" for name in ("contiguous", "zigzag") for rank in range(4)]
    axis.set_yticks(ticks, names)
    axis.invert_yaxis()
    axis.set_xlabel("time; one square of a part's rows and keys = 1")


nb.drawn(
    draw,
    "Bars over time, one row per rank, one colour per hop. Contiguous: rank 0 has one short bar "
    "and nothing after it, rank 3 is busy all the time, three and a half units. Zigzag: the bars "
    "of all four ranks are equally long, without a gap, and end after two units.",
    7.6,
    3.6,
)

# %% [markdown]
# ## The merge on paper
#
# Each hop gives $o$, the output over its keys, and $lse$, the logarithm (here in base 2) of the
# row's sum of exponentials. **Do it on paper first:** a row has seen two parts. What is its $o$?
#
# | part | $lse$ | $o$ |
# |---|---:|---:|
# | so far | 3 | (4, 0) |
# | this hop | 1 | (0, 5) |
#
# <details><summary>On paper</summary>
#
# The larger is 3: weights $2^{3-3} = 1$ and $2^{1-3} = 1/4$, together $5/4$. $o = (4, 0) \cdot 4/5
# + (0, 5) \cdot 1/5 = (3.2, 1)$, and $lse = 3 + \log_2 5/4 \approx 3.32$.
#
# </details>

# %%
import torch

from stages.s10_ring.merge import merge

o, lse = torch.tensor([[[[4.0, 0.0]]]]), torch.tensor([[[3.0]]])
merge(o, lse, torch.tensor([[[[0.0, 5.0]]]]), torch.tensor([[[1.0]]]))
print("o =", [round(x, 2) for x in o.flatten().tolist()], " lse =", round(lse.item(), 2))

# %% [markdown]
# Nothing else is needed: no scores, no maxima of the other part. It is stage 8's merge of parts of
# the keys, where each part was divided by its sum before.
#
# ## A ring in twenty lines
#
# One process plays all ranks: their turns are two loops, and "to receive" is to look into another
# rank's part. The rest is the stage's own code. `between` is the dtype that a rank keeps its output
# in between two hops. **Predict:** with bfloat16, what does the error do as $W$ grows?

# %%
import stages
from stages.s10_ring.local import torch_forward


def cut(x, held):
    """The rows of some spans, (B, H, n, d)."""
    return torch.cat([x[:, :, start:end] for start, end in held], dim=2)


def ring(q, k, v, W, between):
    parts, whole = spans(q.shape[2], W, zigzag=True), torch.empty_like(q)
    for rank in range(W):
        mine = cut(q, parts[rank])
        for step in range(W):
            now = hop(rank, step, parts, parts, causal=True)
            theirs = (cut(x, parts[now.owner])[:, :, now.keys] for x in (k, v))
            found = torch_forward(mine[:, :, now.rows], *theirs, now.causal, None)
            if step == 0:
                o, lse = found
            else:
                merge(o[:, :, now.rows], lse[:, :, now.rows], *found)
            o = o.to(between).float()
        at = 0
        for start, end in parts[rank]:  # back to where these rows were
            whole[:, :, start:end] = o[:, :, at : at + end - start]
            at += end - start
    return whole


generator = torch.Generator().manual_seed(0)
q, k, v = torch.randn(3, 1, 4, 512, 32, generator=generator)
truth = stages.by_number(3).attend(*(x.double() for x in (q, k, v)), causal=True)
body = []
for W in (1, 2, 4, 8, 16):
    errors = (
        (ring(q, k, v, W, between) - truth).norm() / truth.norm()
        for between in (torch.float32, torch.bfloat16)
    )
    body.append((W, *(f"{error:.1e}" for error in errors)))
nb.rows(("W", "float32 between hops", "bfloat16"), body, "relative error of the output, float32")

# %% [markdown]
# In bfloat16 it is rounded at each hop: the error grows with $W$. Stage 10 keeps it in float32 and
# rounds once.
#
# ## Both stages, side by side
#
# The same loop, one level up. Stage 9 walks over tiles of keys, which the producer loads while it
# computes, and corrects $acc$ by the running maximum. Stage 10 walks over the parts of all ranks,
# which the exchange brings while it computes, and corrects $o$ by the merge:

# %%
nb.side_by_side(nb.code(9, "mainloop"), nb.code(10, "forward"), context=1)

# %% [markdown]
# Ranks pair what they send by order alone. What they must agree on first, so that none waits for
# ever or gets a wrong number, is in [agreement.py](../stages/s10_ring/agreement.py).
#
# ## Is it right?
#
# Three processes, which exchange tensors by gloo. Their outputs and gradients are put together and
# held to stage 3 in float64. Beside the ring: without zigzag, without overlap, all keys gathered
# first, and Ulysses, which exchanges heads for rows:

# %%
run = nb.measure(
    command="ring", world=3, n=96, causal="on", mode="train", device="cpu",
    stages="10,110,111,114,115",
)  # fmt: skip
run

# %% [markdown]
# They share the cores of one CPU, so no time is shown. On a machine with two GPUs `ladder ring`
# measures all of them in turns: [several GPUs, measured](../docs/ring.md).
#
# ## To the scale of a cluster
#
# From how many rows of each GPU on is all that travels hidden? The same sum as above, with the time
# of a message, by the project's cost model:

# %%
from dataclasses import replace

from harness.views import rings

table = rings.cluster_table(replace(nb.problem(65536, d=d, dtype="bfloat16", h=H), world=2))
nb.rows([x.header for x in table.columns], table.rows, table.title, " ".join(table.notes))

# %% [markdown]
# ## What was bought, what still hurts
#
# - Bought: a sequence that one GPU can't hold, or a $W$-th of the time where a part is long enough.
# - Bought: what a rank holds of others' keys doesn't grow with $W$.
# - The price: all ranks must do the same, in the same order, and one that fails ends the call for
#   all.
# - Still hurts: over a slow network a part must be long, or have fewer key heads.
#
# ## Exercises
#
# **1.** With 2 key heads in place of 16, what changes in the table of bytes per hop?
#
# <details><summary>Answer</summary>
#
# K and V are an eighth, and so is the time to send them; what is computed stays, since all query
# heads are there. The $n$ from which on a hop hides what is sent is an eighth, too, but for the
# time of a message.
#
# </details>
#
# **2.** Why does rank $r$ compute its own keys first, and not last?
#
# <details><summary>Answer</summary>
#
# They are the only ones that it has before anything was sent, so the first exchange is hidden. And
# under a causal mask each row sees at least one of them: from the first hop on every row has a
# finite $lse$.
#
# </details>
#
# **3.** In the backward pass dK and dV travel with the K and V that they belong to, one hop behind.
# How many bytes is that per hop, in float32, and why not in bfloat16?
#
# <details><summary>Answer</summary>
#
# Twice as many as K and V in bfloat16. Each rank adds its share to the sums that it receives: in
# bfloat16 they would be rounded $W$ times, as the output was in the ring above.
#
# </details>
