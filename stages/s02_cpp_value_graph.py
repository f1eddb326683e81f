"""Stage 2, the Value graph compiled: stage 0's nodes, in C++, in an arena.

    attend      q, k, v ---> [leaves | * + * + ... exp ... o]      nodes, in the order they are made
    backward    dq, dk, dv <---------------------------- dO        the same nodes, last to first

    csrc/value_graph.hpp   Value, the operations, the arena, backward: one walk, no sort
    csrc/attention.cpp     the loops of stages 0 and 1
    csrc/bindings.cpp      the way into Python

Cost: 4 B H Nq Nk d FLOPs, and B H Nq Nk (4 d + 3) nodes of 48 bytes, all kept until the output
dies. They are made with and without requires_grad, as in stage 0.
What it bought: no interpreter, no box around a float. It is faster than stage 1, which records
nothing, and its memory is handed from one call to the next.
Still hurts: one thread, and one node per operation: 48 bytes written for each multiplication.
Stage 3 makes a whole matrix product one operation.
"""

from typing import Any

import torch

from stages.common.operators import untraced
from stages.contract import FirstDerivative, Stage, check_inputs

try:
    import ladder_value_graph
except ImportError:  # not built here, or for another Python: check_inputs tells which
    ladder_value_graph = None

STAGE = Stage(
    number=2,
    name="cpp_value_graph",
    title="C++ Value graph",
    idea="the Value graph compiled, its nodes in an arena",
    still_hurts="one thread, one node per operation",
    needs=("extension",),
    devices=("cpu",),
    gradients=True,
    worth_up_to={"cpu": 64, "cuda": 64},
    files=("../csrc/value_graph.hpp", "../csrc/attention.cpp", "../csrc/bindings.cpp"),
)

_nodes_made = 0  # by the last attend


class GraphAttention(torch.autograd.Function):
    """The interface to torch, whose graph sees one node, which holds the graph of Values."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        global _nodes_made
        scale = q.shape[-1] ** -0.5
        # where nothing requires grad, torch drops ctx when this returns, and the graph with it
        o, ctx.graph = ladder_value_graph.attend(
            *(x.to(torch.float64).numpy(force=True) for x in (q, k, v)), scale
        )
        _nodes_made = ctx.graph.nodes
        ctx.save_for_backward(q, k, v)
        return torch.from_numpy(o).to(q)  # (B, H, Nq, d)

    @staticmethod
    def backward(ctx: Any, dO: torch.Tensor) -> Any:
        def passes(dO: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
            grads = ctx.graph.backward(dO.to(torch.float64).numpy(force=True))
            return tuple(torch.from_numpy(x).to(dO) for x in grads)  # dq (B, H, Nq, d), dk, dv

        return FirstDerivative.apply(STAGE, passes, dO, *ctx.saved_tensors)


@untraced
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Exact attention with gradients, in double precision whatever the dtype, without the GIL.

    q (B, H, Nq, d), k and v (B, H, Nk, d), any float dtype -> (B, H, Nq, d) in q's dtype. Its
    backward() fills q.grad, k.grad and v.grad from the graph of Values, which lives as long as the
    output. Raises ValueError on input that breaks the contract (stages/contract.py),
    StageUnavailable where the extension is not built, MemoryError where the graph does not fit, and
    RuntimeError when it is differentiated twice (a gradient of a gradient).
    """
    check_inputs(STAGE, q, k, v)
    return GraphAttention.apply(q, k, v)


def nodes_made() -> int:
    """Return how many nodes the last attend made, leaves included; counted, not computed."""
    return _nodes_made


def node_count(B: int, H: int, Nq: int, Nk: int, d: int) -> int:
    """Return how many nodes attend makes for q (B, H, Nq, d), k and v (B, H, Nk, d).

    Each operation makes one. The operations are stage 0's, and so is the count. A query row takes
        s        Nk dot products, each of d products, d - 1 sums, 1 scaling    2 Nk d
        p        Nk subtractions of the maximum, Nk exponentials               2 Nk
        1 / l    Nk - 1 sums, 1 reciprocal                                     Nk
        o        d sums of Nk products: Nk products, Nk - 1 sums, 1 scaling    2 Nk d
    which is Nk (4 d + 3), and a head has Nq d + 2 Nk d leaves.
    """
    return B * H * (Nq * Nk * (4 * d + 3) + (Nq + 2 * Nk) * d)
