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
# # The primer, run
#
# [The page](../docs/primer.md) explains and asks for predictions; this notebook runs. Read a
# section there, write your predictions down, then run the cells of the same heading here.

# %%
# Not found? Type `%pip install -e "..[notebooks]"` in a cell, restart the kernel, and come back.
import course.notebook as nb

# %% [markdown]
# ## Queries, keys and values
#
# [The page's six words](../docs/primer.md#queries-keys-and-values), all rows at once. `scores` is
# $S$, `weights` is $P$, each (6 queries, 6 keys); the output is (6, 2).

# %%
import torch

words = ["the", "cat", "sat", "because", "it", "slept"]
q = torch.tensor([[0.0, 0], [1, 0], [2, 0], [0, 2], [2, 0], [2, 0]])  # what each word looks for
k = torch.tensor([[0.0, 0], [2, 0], [0, 2], [0, 0], [1, 0], [0, 2]])  # what each word offers
v = torch.tensor([[0.0, 0], [1, 0], [0, 1], [0, 0], [0, 0], [0, 1]])  # what each word passes on


def attention(q, k, v):
    scores = q @ k.T * q.shape[-1] ** -0.5  # (Nq, Nk)
    weights = scores.exp() / scores.exp().sum(-1, keepdim=True)  # (Nq, Nk), each row sums to 1
    return weights, weights @ v  # (Nq, d)


weights, output = attention(q, k, v)
body = [
    (word, *(f"{p:.3f}" for p in row), "  ".join(f"{x:.3f}" for x in o))
    for word, row, o in zip(words, weights, output)
]
nb.rows(("looks at", *words, "output"), body, "The weights: a row for each query")

# %% [markdown]
# The third prediction: all queries doubled. And the stages do just this: stage 1, plain Python,
# gives the same output. It wants the shape (B, H, N, d), batch and heads first.

# %%
from stages import s01_raw_python as stage_1

doubled, _ = attention(2 * q, k, v)
print(f"'it' on 'cat': {weights[4, 1]:.3f}, with queries twice as long {doubled[4, 1]:.3f}")
q4, k4, v4 = (x[None, None] for x in (q, k, v))  # (1, 1, 6, 2)
difference = (stage_1.attend(q4, k4, v4)[0, 0] - output).abs().max()
print(f"largest difference from stage 1: {difference:.1e}")

# %% [markdown]
# ## Heads
#
# Six words of width 8, cut into two heads of width 4. Each head is an attention of its own.

# %%
x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))  # (N, H d)
heads = x.view(6, 2, 4).transpose(0, 1)  # (H, N, d) = (2, 6, 4)
outputs = [attention(head, head, head)[1] for head in heads]  # each (6, 4)
together = torch.cat(outputs, dim=-1)  # (6, 8): side by side again
print(tuple(x.shape), "->", tuple(heads.shape), "->", tuple(together.shape))

changed = heads.clone()
changed[1] *= 3  # only the second head
again = [attention(head, head, head)[1] for head in changed]
for number in (0, 1):
    print(f"head {number} changed: {not torch.equal(outputs[number], again[number])}")

# %% [markdown]
# ## The chain rule on one graph
#
# The page's graph at $x = 3$, $y = 1$, built of stage 0's `Value`s. First in a right order, as
# stage 0's `backward` goes; then in an order in which `a` passes its gradient on too early.

# %%
from stages.s00_scalar_autograd import Value, backward


def graph():
    x, y = Value(3.0), Value(1.0)
    a = x * y
    b = a + x
    return {"x": x, "y": y, "a": a, "b": b, "L": a * b}


right = graph()
backward([right["L"]], [1.0])

hasty = graph()
hasty["L"].grad = 1.0
for name in ("L", "a", "b"):  # a before b, though b still has something to send to a
    for parent, local_grad in zip(hasty[name].parents, hasty[name].local_grads):
        parent.grad += local_grad * hasty[name].grad

body = [(name, right[name].data, right[name].grad, hasty[name].grad) for name in right]
nb.rows(("", "value", "dL/d(it), right", "a before b"), body)

# %% [markdown]
# ## Memory-bound: measured here
#
# A sum of two long vectors, and a product of two matrices. (The sum reads two vectors and writes
# one. On a CPU one thread works.)

# %%
from harness.measures.timing import time_call

device = nb.here(cpu="cpu", gpu="cuda")
length, side = nb.here(cpu=(1 << 23, 768), gpu=(1 << 28, 8192))
torch.set_num_threads(1)
long = torch.randn(2, length, device=device)
square = torch.randn(2, side, side, device=device)
sum_of, product_of = torch.empty_like(long[0]), torch.empty_like(square[0])

body = []
for name, call, operations, moved in (
    ("sum of two vectors", lambda: torch.add(*long, out=sum_of), length, 3 * 4 * length),
    ("product of two matrices", lambda: torch.matmul(*square, out=product_of),
     2 * side**3, 3 * 4 * side**2),
):  # fmt: skip
    call()
    seconds = time_call(call, device, seconds=0.5).median_ms / 1e3
    rates = f"{operations / seconds / 1e9:.3g}", f"{moved / seconds / 1e9:.3g}"
    body.append((name, f"{operations / moved:.3g}", *rates))
header = ("float32", "FLOPs per byte", "GFLOP per second", "GB per second")
nb.rows(header, body, f"vectors of {length:,} elements, matrices of {side} x {side}")

# %% [markdown]
# The sum moves more bytes per second, the product does many more operations. The sum is
# *memory-bound*: a faster adder would not help it.
#
# ## First kernels
#
# Three kernels with gaps, `____`. Fill a cell's gaps, run it, then run the check below it. The
# check launches your kernel on small tensors that lie in storage full of NaN, and says what is
# wrong. Without a GPU the kernels are interpreted.

# %%
import stages  # decides whether kernels are interpreted, before triton is imported

assert stages
try:
    import triton
    import triton.language as tl
except ImportError:
    print("There is no Triton here. A twin in NumPy runs the same kernels.")
    from course.primer import tl, triton

from course.primer import check

____ = "a gap"
eps = torch.finfo(torch.float32).eps
draw = torch.Generator().manual_seed(1)


def normal(*shape):
    """Random numbers, float32, where the kernels run."""
    return torch.randn(*shape, generator=draw).to(device)


# %% [markdown]
# ### 1. Vector add
#
# **Goal:** `out = x + y`. **Shapes:** `x`, `y` and `out` have `n` elements each; a program adds
# `BLOCK` of them. `n` is no multiple of `BLOCK`, so the last program has a *ragged tail*.
#
# **Gaps:** which elements are this program's own? Which of those exist?


# %%
@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    offs = ____  # (BLOCK,), whole numbers: the elements of this program
    mask = ____  # (BLOCK,), True or False: does the element exist?
    x = tl.load(x_ptr + offs, mask=mask)  # (BLOCK,)
    y = tl.load(y_ptr + offs, mask=mask)  # (BLOCK,)
    tl.store(out_ptr + offs, x + y, mask=mask)


# %%
x, y = normal(100), normal(100)
check(
    add_kernel,
    lambda kernel, x, y, out: kernel[(triton.cdiv(100, 32),)](x, y, out, 100, BLOCK=32),
    inputs=(x, y),
    expected=x + y,
    bound=0.0,  # one addition, rounded once: the same everywhere
    hints=[
        ("every program did the same block. Use its number, `program`.",
         lambda out: bool((out[:32] == (x + y)[:32].cpu()).all() and (out[32:] == out[99]).all())),
        ("the last elements are missing. n is 100, no multiple of BLOCK.",
         lambda out: bool((out[:96] == (x + y)[:96].cpu()).all() and (out[96:] == out[99]).all())),
    ],
)  # fmt: skip

# %% [markdown]
# <details><summary>The lines</summary>
#
# ```python
# offs = program * BLOCK + tl.arange(0, BLOCK)
# mask = offs < n
# ```
#
# </details>
#
# ### 2. Row softmax with a ragged tail
#
# **Goal:** the softmax of each row of `x`. **Shapes:** `x` and `out` are (rows, N), one row after
# the other in memory; a program has one row. `BLOCK` is a power of two and larger than N: the
# elements from N on do not exist, and must not count.
#
# **Gaps:** which number must a load give for an element that doesn't exist, so that its weight
# becomes 0? Then the exponentials, none of which may overflow, then the division.


# %%
@triton.jit
def softmax_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)  # (BLOCK,)
    mask = offs < N
    s = tl.load(x_ptr + row * N + offs, mask=mask, other=____)  # (BLOCK,)
    e = ____  # (BLOCK,): e to the power of s minus the largest s of the row
    p = ____  # (BLOCK,): the weights; they sum to 1
    tl.store(out_ptr + row * N + offs, p, mask=mask)


# %%
s = normal(5, 20)
s[1] -= 8  # a row whose true scores are far below 0
s[3] += 200  # a row whose exponentials overflow, unless its max is subtracted
exact = torch.softmax(s.double(), -1)
spread = s.amax(-1, keepdim=True) - s  # an exponent's rounding grows with it
check(
    softmax_kernel,
    lambda kernel, x, out: kernel[(5,)](x, out, 20, BLOCK=32),
    inputs=(s,),
    expected=exact.float(),
    bound=(eps * (20 + 4 + spread) * exact).float(),
    hints=[
        ("the row of large scores overflows. Subtract the row's max before the exponential.",
         lambda out: bool(out[3].isnan().all()) and not bool(out[0].isnan().any())),
        ("a row's weights sum to less than 1: do elements that don't exist have a weight?",
         lambda out: bool((out[1].sum() < 0.99) and (out.sum(-1) < 1.01).all())),
        ("a row's weights sum to more than 1. Divide by their sum.",
         lambda out: bool((out.sum(-1) > 1.01).any())),
    ],
)  # fmt: skip

# %% [markdown]
# <details><summary>The lines</summary>
#
# ```python
# s = tl.load(x_ptr + row * N + offs, mask=mask, other=float("-inf"))
# e = tl.exp(s - tl.max(s, 0))
# p = e / tl.sum(e, 0)
# ```
#
# </details>
#
# ### 3. A tiled matrix product
#
# **Goal:** `C = A B`. **Shapes:** A is (M, K), B is (K, N), C is (M, N), rows one after the other
# in memory: element (i, j) of B is `b_ptr + i * N + j`. A program makes one tile of C, (BLOCK,
# BLOCK). It walks along K, a tile of A and a tile of B at a time, and adds their product to `acc`.
#
# **Gaps:** this program's columns; which elements of B's tile exist; where they lie; the sum.


# %%
@triton.jit
def matmul_kernel(a_ptr, b_ptr, c_ptr, M, N, K, BLOCK: tl.constexpr):
    offs_m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,): rows of A and of C
    offs_n = ____  # (BLOCK,): columns of B and of C, by the program's second number
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, K, BLOCK):
        offs_k = start + tl.arange(0, BLOCK)  # (BLOCK,): columns of A, rows of B
        a_mask = (offs_m[:, None] < M) & (offs_k[None, :] < K)  # (BLOCK, BLOCK)
        b_mask = ____  # (BLOCK, BLOCK)
        a = tl.load(a_ptr + offs_m[:, None] * K + offs_k[None, :], mask=a_mask, other=0.0)
        b = tl.load(b_ptr + ____, mask=b_mask, other=0.0)  # (BLOCK, BLOCK)
        acc = ____  # with tl.dot(a, b, input_precision="ieee"): (BLOCK, BLOCK)
    c_mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], acc, mask=c_mask)


# %%
M, N, K = 40, 35, 50
a, b = normal(M, K), normal(K, N)
exact = a.double() @ b.double()
last = (a[:, 48:].double() @ b[48:].double()).cpu()
check(
    matmul_kernel,
    lambda kernel, a, b, c: kernel[(triton.cdiv(M, 16), triton.cdiv(N, 16))](
        a, b, c, M, N, K, BLOCK=16
    ),
    inputs=(a, b),
    expected=exact.float(),
    bound=(eps * K * (a.abs().double() @ b.abs().double())).float(),
    hints=[
        ("only the last step along K is in the sum. Add to acc what it holds already.",
         lambda out: bool(((out - last).abs() < eps * K * 100).all())),
        ("the tiles on the diagonal alone were made. The columns go by tl.program_id(1).",
         lambda out: bool((out[:16, 16:] < -700).all())),
    ],
)  # fmt: skip

# %% [markdown]
# <details><summary>The lines</summary>
#
# ```python
# offs_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
# b_mask = (offs_k[:, None] < K) & (offs_n[None, :] < N)
# b = tl.load(b_ptr + offs_k[:, None] * N + offs_n[None, :], mask=b_mask, other=0.0)
# acc = acc + tl.dot(a, b, input_precision="ieee")
# ```
#
# </details>
#
# These three are all that [stage 4's kernel](../stages/s04_triton_lite.py) is made of: a matrix
# product, a row softmax, a matrix product, on tiles.
# [The page](../docs/primer.md#now-read-stage-4) goes through it line by line.
