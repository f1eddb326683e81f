"""Stage 0, scalar autograd: every `*` and `+` is a Value node, and gradients come for free.

    s[j] = sum_c q[c] * k[j][c] * scale
    p[j] = exp(s[j] - max s)                     each operation makes a node that knows its parents
    o[c] = sum_j p[j] * v[j][c] / sum p          and its derivative with respect to each of them

    forward     q, k, v ---> * ---> + ---> exp ---> ... ---> o
    backward    dq, dk, dv <--- the chain rule, node by node, from the last to the first <--- dO

Cost: 4 B H Nq Nk d FLOPs, and B H Nq Nk (4 d + 3) nodes of about 200 bytes, all kept until the
output dies. They are made with and without requires_grad: this stage always records. While the
garbage collector is on, it scans all of them again and again, which takes many times as long at
N = 64 (torch's Timer, and so the harness, turns it off).
What it bought: gradients of q, k and v, though no derivative of attention is written anywhere.
Still hurts: one object per operation. Stage 1 runs the same loops on plain floats.

The idea is Andrej Karpathy's micrograd (https://github.com/karpathy/micrograd).
"""

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from stages.common.operators import untraced
from stages.contract import FirstDerivative, Stage, check_inputs

STAGE = Stage(
    number=0,
    name="scalar_autograd",
    title="scalar autograd",
    idea="every * and + is a Value node; gradients for free",
    still_hurts="one object per operation",
    devices=("cpu",),
    gradients=True,
    worth_up_to={"cpu": 64, "cuda": 64},
)

_made = 0  # Values made by this process
_nodes_made = 0  # of them, by the last attend
_backward_lock = threading.Lock()


class Value:
    """A number, and how it was computed.

    data         the number
    grad         d(what backward() was called on) / d(this), after backward()
    parents      the Values that it was computed from; none for a leaf
    local_grads  d(this) / d(parent), one for each parent, known as soon as `data` is

    micrograd keeps a closure in each node; numbers do the same work, and leave no reference cycle:
    a graph is freed by its last reference, without waiting for the garbage collector. (However deep
    it is: CPython bounds the recursion of its own deallocation, "the trashcan".)
    """

    __slots__ = ("data", "grad", "local_grads", "parents")

    def __init__(
        self,
        data: float,
        parents: "tuple[Value, ...]" = (),
        local_grads: tuple[float, ...] = (),
    ) -> None:
        global _made
        _made += 1
        self.data = data
        self.grad = 0.0
        self.parents = parents
        self.local_grads = local_grads

    def __add__(self, other: "Value") -> "Value":
        return Value(self.data + other.data, (self, other), (1.0, 1.0))

    def __sub__(self, constant: float) -> "Value":
        return Value(self.data - constant, (self,), (1.0,))

    def __mul__(self, other: "Value | float") -> "Value":
        # exercise mul: self times a Value or a number -> the node of the product
        if isinstance(other, Value):
            # step value: the product's node, its two parents, its two local derivatives
            return Value(self.data * other.data, (self, other), (other.data, self.data))
        # step constant: a number is no node -> one parent, one local derivative
        return Value(self.data * other, (self,), (other,))
        # end of mul

    def exp(self) -> "Value":
        e = math.exp(self.data)
        return Value(e, (self,), (e,))

    def reciprocal(self) -> "Value":
        r = 1.0 / self.data
        return Value(r, (self,), (-r * r,))


Matrix = list[list[Value]]


def total(values: Iterable[Value]) -> Value:
    """Return their sum, in n - 1 additions: starting from 0 would make one more node."""
    first, *rest = values
    return sum(rest, start=first)


def topological_order(roots: Iterable[Value]) -> list[Value]:
    """Return every Value that `roots` depend on, roots included, each one after all its parents.

    Depth first with an explicit stack: recursion would fail on a graph 1000 nodes deep.
    """
    order: list[Value] = []
    seen: set[Value] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, parents_done = stack.pop()
        if parents_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend([(parent, False) for parent in node.parents])
    return order


def backward(roots: Sequence[Value], grads: Iterable[float]) -> None:
    """Set x.grad = sum_i grads[i] * d roots[i] / d x on every Value x that `roots` depend on.

    A second call starts afresh: nothing is left over from the first.
    """
    # exercise backward: roots (n Values), grads (n numbers) -> .grad of every node
    order = topological_order(roots)
    for node in order:
        node.grad = 0.0
    for root, grad in zip(roots, grads):
        # step seed: what a root's gradient begins with; a root may stand there twice
        root.grad += grad
    for node in reversed(order):
        for parent, local_grad in zip(node.parents, node.local_grads):
            # step chain: what a node passes on to one of its parents, the chain rule
            parent.grad += local_grad * node.grad
    # end of backward


def attend_head(q: Matrix, k: Matrix, v: Matrix, scale: float) -> Matrix:
    """One head: q (Nq, d), k and v (Nk, d) as nested lists of Values -> o (Nq, d)."""
    v_columns = list(zip(*v, strict=True))  # (d, Nk)
    o = []
    for q_row in q:
        s = [total(a * b for a, b in zip(q_row, k_row)) * scale for k_row in k]  # (Nk,)
        m_i = max(x.data for x in s)  # a constant: softmax is the same for any, so is its gradient
        p = [(x - m_i).exp() for x in s]  # (Nk,)
        l_inv = total(p).reciprocal()
        o.append(
            [total(a * b for a, b in zip(p, v_column)) * l_inv for v_column in v_columns]  # (d,)
        )
    return o


def each(f: Callable[[Any], Any], nested: Any) -> Any:
    """`f` of every element of nested lists, in nested lists of the same shape."""
    return [each(f, x) for x in nested] if isinstance(nested, list) else f(nested)


class ScalarAttention(torch.autograd.Function):
    """The interface to torch, whose graph sees one node, which holds the graph of Values."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scale = q.shape[-1] ** -0.5
        leaves = [each(Value, x.tolist()) for x in (q, k, v)]  # (B, H, Nq, d), (B, H, Nk, d) twice
        o = [
            [
                attend_head(q_head, k_head, v_head, scale)
                for q_head, k_head, v_head in zip(q_heads, k_heads, v_heads)
            ]
            for q_heads, k_heads, v_heads in zip(*leaves)
        ]  # (B, H, Nq, d)
        # where nothing requires grad, torch drops ctx when this returns, and the graph with it
        ctx.leaves, ctx.o = leaves, o
        ctx.save_for_backward(q, k, v)
        return torch.tensor(each(lambda x: x.data, o), dtype=torch.float64, device="cpu").to(q)

    @staticmethod
    def backward(ctx: Any, dO: torch.Tensor) -> Any:
        def passes(dO: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
            roots = [x for heads in ctx.o for head in heads for row in head for x in row]
            with _backward_lock:  # two passes at a time through one graph would add up
                backward(roots, dO.flatten().tolist())
                grads = [each(lambda x: x.grad, leaves) for leaves in ctx.leaves]
            wide = (torch.tensor(x, dtype=torch.float64, device="cpu") for x in grads)
            dq, dk, dv = (x.to(dO) for x in wide)
            return dq, dk, dv  # (B, H, Nq, d), (B, H, Nk, d), (B, H, Nk, d)

        return FirstDerivative.apply(STAGE, passes, dO, *ctx.saved_tensors)


@untraced
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Exact attention with gradients, in double precision whatever the dtype.

    q (B, H, Nq, d), k and v (B, H, Nk, d), any float dtype -> (B, H, Nq, d) in q's dtype. Its
    backward() fills q.grad, k.grad and v.grad from the graph of Values, which lives as long as the
    output. Raises ValueError on input that breaks the contract (stages/contract.py), RuntimeError
    when it is differentiated twice (a gradient of a gradient).
    """
    global _nodes_made
    check_inputs(STAGE, q, k, v)
    before = _made
    o = ScalarAttention.apply(q, k, v)
    _nodes_made = _made - before
    return o


def nodes_made() -> int:
    """Return how many nodes the last attend made, leaves included; counted, not computed.

    The count is the process's: attends that run at the same time count each other's nodes.
    """
    return _nodes_made


def node_count(B: int, H: int, Nq: int, Nk: int, d: int) -> int:
    """Return how many nodes attend makes for q (B, H, Nq, d), k and v (B, H, Nk, d).

    Each operation makes one.

    A query row takes
        s        Nk dot products, each of d products, d - 1 sums, 1 scaling    2 Nk d
        p        Nk subtractions of the maximum, Nk exponentials               2 Nk
        1 / l    Nk - 1 sums, 1 reciprocal                                     Nk
        o        d sums of Nk products: Nk products, Nk - 1 sums, 1 scaling    2 Nk d
    which is Nk (4 d + 3), and a head has Nq d + 2 Nk d leaves.
    """
    return B * H * (Nq * Nk * (4 * d + 3) + (Nq + 2 * Nk) * d)
