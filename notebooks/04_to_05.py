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
# # From stage 4 to stage 5: nine lines that make it right
#
# Stage 4 ("Lite") is fast, and wrong above 64 keys. Stage 5 ("Online") is right. Between them lie
# nine lines: the *online softmax*. They are the heart of FlashAttention.
#
# At the end of this notebook you write them yourself, and the harness judges your kernel beside the
# real ones.

# %%
# Not found? Type `%pip install -e "..[notebooks]"` in a cell, restart the kernel, and come back.
import course.notebook as nb

# %% [markdown]
# ## What hurts in stage 4
#
# The harness compares every stage with float64. Watch the error at 64 keys, at 65, and at 128:

# %%
nb.measure(stages="3,4", n="64,65,128", d=16)

# %% [markdown]
# Right at 64, far off at 65. One more key, and the error is several times as large as the outputs.
# And at 128 it is *smaller* than at 65. What is so special about the 65th key?
#
# ## Look at the weights
#
# Stage 4 walks over the keys in tiles of 64. In each tile it takes a softmax of that tile's scores
# alone, multiplies it by the tile's $V$, and adds that to the output. With $N = 65$ there are two
# tiles: 64 keys in the first, one key in the second. [Stage 4's
# page](../docs/walkthrough/4-triton-lite.md#predict) asked for their weights:

# %%
from course.tracing import trace
from course.tracing.trace import make_trace

one_row = make_trace(n=65, d=16, tile=64, row=0)  # query row 0 of 65, the harness's own inputs
first, last = one_row.steps()

lite, right = last.lite_p[-1], last.p[-1] / last.l_i
nb.rows(
    ("N = 65, tiles of 64, one query row", "stage 4", "right"),
    [
        ("weight of the 65th key", f"{lite:.4f}", f"{right:.4f}"),
        ("average weight of a key", f"{last.lite_weight / 65:.4f}", f"{1 / 65:.4f}"),
        ("sum of all weights", f"{last.lite_weight:.4f}", f"{1:.4f}"),
    ],
)

# %% [markdown]
# **That is the whole mistake**: the 65th key's $v$ is added to the output in full. At 128 keys the
# second tile's weight is spread over 64 keys, whose values average out to something small. For
# every $N$ up to 256:

# %%
import numpy as np

random = np.random.RandomState(0)
q, k, v = (random.standard_normal((rows, 64)).astype(np.float32) for rows in (32, 256, 256))


def errors(n):
    """Lite's and Online's largest error with the first n keys, in tiles of 64."""
    last, truth = trace.walk(q, k[:n], v[:n], 64)[-1], trace.attention(q, k[:n], v[:n])
    return trace.max_error(last.lite, truth), trace.max_error(last.o, truth)


sizes = range(1, 257)
lite_errors, online_errors = zip(*map(errors, sizes))


def draw(axis, look):
    axis.plot(sizes, lite_errors, color=look.red, label="stage 4, Lite")
    axis.plot(sizes, online_errors, color=look.blue, linestyle="--", label="stage 5, Online")
    axis.set_xticks([1, 64, 128, 192, 256])
    axis.set_xlabel("N (keys)")
    axis.set_ylabel("max error against float64")
    axis.grid(True)
    axis.legend()


nb.drawn(
    draw,
    "Largest error against N. Lite's is nothing up to 64 keys, then leaps just after each multiple "
    "of 64 and falls until the next: a sawtooth that grows. Online's stays at nothing throughout.",
)

# %% [markdown]
# (Worked out in NumPy, by the same arithmetic as the kernels': 32 rows, $d = 64$. On [the
# page](../docs/report.html#lite) you can drag N.)
#
# ## See it happen
#
# A small case to look at: 9 keys in tiles of 4. Key 8 is the lone one. The top row has the scores.
# The bottom row has the output so far: a dash is the truth over all the keys, a triangle Online, a
# square Lite.

# %%
from course.tracing import trace_plots

small = make_trace(n=9, d=4, tile=4, row=3)
steps, truth = small.steps(), small.truth()
nb.picture(
    lambda look: trace_plots.still(steps, truth, look),
    "Three columns, a tile each: the scores so far with their running max; the weights, older ones "
    "shrunk where the max rose; the output so far. Online ends on the truth, Lite far from it.",
)

# %% [markdown]
# In the third column the lone key comes. Its score is nothing special, and its true weight is
# small. Lite's squares leap by the whole of its $v$.
#
# ## The way out
#
# [Stage 5's page](../docs/walkthrough/5-triton-online.md#the-recurrences) has the recurrences and
# the proof. In the kernel the max so far $m$ is `m_i`, the sum so far $\ell$ is `l_i`, the weighted
# sum of rows of V is `acc`, and the correction is `alpha`. Tile by tile (`ladder trace --n 9 --tile
# 4 --row 3 --d 4` prints it in full; an example to play with is on [the
# page](../docs/report.html#player)):

# %%
from IPython.display import display

body = []
for step in steps:
    so_far = trace.attention(small.q, small.k[: step.stop], small.v[: step.stop])
    numbers = (step.s.max(), step.m_i, step.alpha, step.l_i)
    errors = (trace.max_error(o, so_far) for o in (step.o, step.lite))
    texts = [*(f"{x:.3f}" for x in numbers), *(f"{x:.1e}" for x in errors)]
    body.append((trace.title(step), *texts, f"{step.lite_weight:.0f}"))
    assert np.allclose(step.o, so_far, rtol=1e-5, atol=1e-6)
header = ("tile", "max s", "m_i", "alpha", "l_i", "Online: error", "Lite: error", "Lite's weights")
note = "Errors are against exact attention over the keys so far, in float64."
display(nb.rows(header, body, note=note))

# %% [markdown]
# ## Both stages, side by side
#
# The kernels, and what differs between them:

# %%
exercise = nb.Exercise(4, 5, "attention_kernel")
print(f"the lines: {len(exercise.answer)} come, {exercise.gone} go")
nb.side_by_side(nb.code(4, "attention_kernel"), nb.code(5, "attention_kernel"))

# %% [markdown]
# Read them once more with the mistake in mind. `p` is no longer divided by its tile's sum: it is
# measured against `m_new`, which all tiles share in the end. `l_i` grows by what the tile really
# weighs, and one division at the end makes the weights sum to 1.
#
# ## Measure
#
# The last prediction of [stage 5's page](../docs/walkthrough/5-triton-online.md#predict). (All
# errors are against float64.)

# %%
sizes = nb.here(cpu="64,65,256", gpu="64,65,128,256,1024,4096")
run = nb.measure(stages="3,4,5", n=sizes, d=64)
display(run)
nb.plot(run, "error")

# %% [markdown]
# The same on a GPU, from the project's records, up to 1024 keys. In TF32, which keeps 11 of the 24
# bits of each factor, both stages lose some digits at 64 already; the *mistake* is another matter.

# %%
table_4_3 = nb.recorded("h200/table-4.3.jsonl")
body = [
    (n, precision, *(f"{table_4_3.one(stage=stage, nk=n, precision=precision)['err_f64_max']:.1e}"
                     for stage in (3, 4, 5)))
    for precision in ("ieee", "tf32") for n in (64, 128, 256, 512, 1024)
]  # fmt: skip
nb.rows(("N", "float32 as", "#3: max error", "#4 Lite", "#5 Online"), body, note=table_4_3.said)

# %% [markdown]
# ## Float32 on the matrix unit
#
# A GPU's matrix unit takes no float32 with all its bits. It takes bfloat16, which has 8 of the 24
# bits and the same exponent. So three bfloat16 hold one float32: high, middle and low, each the
# part that those before it left over. A product of two float32 has nine parts then. From compute
# capability 8.0 on, stages 4 to 9 compute six of them ([how](../stages/common/products.py)). Torch
# can show on a CPU what error that leaves.
#
# **Predict:** how large are the nine, compared with the product of both numbers? What error is left
# with the largest one alone, with the three largest, with six? And what is float32's own error?

# %%
import torch


def split(x):
    """Three bfloat16, whose sum is float32 `x`."""
    high = x.bfloat16()
    middle = (x - high).bfloat16()
    return high, middle, (x - high - middle).bfloat16()


a, b = torch.randn((2, 128, 128), generator=torch.Generator().manual_seed(0))
truth = a.double() @ b.double()
pairs = [(i + j, x, y) for i, x in enumerate(split(a)) for j, y in enumerate(split(b))]
pairs.sort(key=lambda pair: pair[0])  # the largest first: of size 2^0, 2^-8, 2^-8, 2^-16, ...


def error(count, dtype):
    """The largest error with so many of the nine, multiplied and added up in `dtype`."""
    ab = sum(x.to(dtype) @ y.to(dtype) for _, x, y in reversed(pairs[:count]))
    return f"{(ab - truth).abs().max().item():.1e}"


body = [(n, error(n, torch.float64), error(n, torch.float32)) for n in (1, 3, 6, 9)]
body.append(("plain float32", "-", f"{(a @ b - truth).abs().max().item():.1e}"))
nb.rows(("products", "error, computed in float64", "in float32"), body)

# %% [markdown]
# The first column has what is left out, and nothing else: nine are all there is. The second one has
# the rounding of sums in float32, too, which hides what is left out from six on: three more would
# be work for nothing. (A product of two bfloat16 has 16 bits. A float32 has 8 more, and so the sum
# rounds less than that of plain float32.) [Stage 5's
# page](../docs/walkthrough/5-triton-online.md#float32-on-the-matrix-unit) has what a kernel needs
# besides.
#
# ## Now you
#
# The next cell prints stage 5's kernel with those lines blanked. In the cell after it, replace each
# `____`. Keep the lines in their order, one for each blank. It writes `mine.py`: the whole stage
# with your lines in it.
#
# The third cell lets the harness judge your file beside the real stages, and beside two others: the
# answer, made from stage 5's own lines, and a kernel by somebody who forgot the correction, so that
# the past is never shrunk.

# %%
print(exercise)

# %%
from pathlib import Path

my_lines = """
m_i = ____
l_i = ____
m_new = ____
alpha = ____
p = ____
l_i = ____
acc = ____
m_i = ____
acc = ____
"""
Path("mine.py").write_text(exercise.filled(my_lines, title="mine"))
print(f"mine.py: {my_lines.count('____')} blanks left")

# %%
Path("answer.py").write_text(exercise.filled(exercise.answer, 91, "answer", "the answer"))
# alpha = 1, whatever the maxima are
forgot = ["alpha = tl.exp(m_new - m_new)" if x.startswith("alpha") else x for x in exercise.answer]
Path("forgot.py").write_text(exercise.filled(forgot, 92, "forgot", "forgot alpha"))
run = nb.measure(
    stages="3,4,5", stage=["mine.py", "answer.py", "forgot.py"], n="64,65,128", d=16, inputs="peaky"
)
run

# %% [markdown]
# As long as there are blanks, your row says `crashed`, and what was wrong. Without `alpha` the
# kernel is right at 64 keys, where there is one tile and no past, and `wrong` from 65 on. The real
# lines are `ok` everywhere. (The *peaky* input has large scores, far apart, so that a forgotten
# maximum or correction shows.)
#
# From a terminal, with `mine.py` where you are:
# `ladder run --stages 3,4,5 --stage mine.py --n 64,65,128 --d 16 --inputs peaky`.
#
# <details><summary>The lines</summary>
#
# ```python
# m_i = tl.full((BLOCK_M,), -3.4028234663852886e38, dtype=tl.float32)
# l_i = tl.zeros((BLOCK_M,), dtype=tl.float32)
# m_new = tl.maximum(m_i, tl.max(s, 1))
# alpha = tl.exp(m_i - m_new)
# p = tl.exp(s - m_new[:, None])
# l_i = l_i * alpha + tl.sum(p, 1)
# acc = acc * alpha[:, None]
# m_i = m_new
# acc = acc / l_i[:, None]
# ```
#
# </details>
#
# ## What was bought, what still hurts
#
# - Bought: exact for any $N$, in one kernel, with no $N \times N$ anywhere. Two more numbers per
#   row, which never leave the chip.
# - Still hurts: every tile is visited, with the mask of the last one on; a causal mask is not
#   supported at all, though it would save half of the work.
#
# [Stage 6](05_to_06.ipynb) goes on.
#
# ## More exercises
#
# **1.** Put the line `m_i = m_new` before `alpha = ...` in `my_lines`. Which status do you get, at
# which $N$, and why?
#
# <details><summary>Answer</summary>
#
# `alpha` is then $e^0 = 1$ at every tile, as in the kernel without the correction. At 64 keys it is
# right: there is nothing to correct. From 65 keys on it is wrong as soon as a later tile has a
# larger maximum. (At the first tile `alpha` would have been $e^{-\infty} = 0$; it multiplies zeros
# there.)
#
# </details>
#
# **2.** Leave the maximum out altogether: `m_new = m_i * 0.0`, and start `m_i` at zero. In exact
# arithmetic the result is the same. Which status does the harness give for `inputs="peaky"`, and
# for `inputs="normal"`?
#
# <details><summary>Answer</summary>
#
# On normal input it may be `ok`: scores are small, and $e^s$ is no large number. The peaky input
# has scores past 100, and $e^{100}$ is more than float32 can hold: infinity over infinity is not a
# number, and NaN is always `wrong`. The maximum is there so that no exponent is ever above 0.
#
# </details>
#
# **3.** How many bytes of `k` and `v` does a program load? How many more than stage 4's?
#
# <details><summary>Answer</summary>
#
# `sum(step.bytes_loaded for step in steps)`, all of $K$ and $V$ once, in both stages. The
# correction costs arithmetic, on numbers that are in registers already, and not one byte.
#
# </details>
#
# **4.** Which of the nine products may go? Try it: `del pairs[4]` below `pairs.sort` leaves out one
# of the six. And why not three float16, which have 11 bits each? Put `.half()` in place of
# `.bfloat16()`; then multiply `a` by 1e6 before `truth` is computed.
#
# <details><summary>Answer</summary>
#
# Count high as 0, middle as 1, low as 2: those may go whose pieces add up to 3 or more. They are
# $2^{-24}$ of the whole or less, below the last bit of a float32. Without any other one the error
# is hundreds of times as large, or more; with three it is some $2^{-16}$. Float16 has more bits,
# but a shorter exponent: low pieces lose bits below its smallest number, so that even nine products
# are not exact, and numbers beyond 65504 are infinite. Bfloat16 has float32's exponent.
#
# </details>
