"""What a problem costs at the least, counted, not measured."""

from harness.problem import ITEMSIZE, Problem


def visible_pairs(problem: Problem) -> int:
    """(query, key) pairs that the masks leave, over one head of each batch entry.

    With `causal`, query i sees keys up to i + nk - nq; with `seqlens_k` the first seqlens_k[b].
    """
    nq, nk = problem.nq, problem.nk
    pairs = 0
    for valid in problem.seqlens_k or (nk,) * problem.b:
        if not problem.causal:
            pairs += nq * valid
            continue
        # row i sees min(valid, max(0, i + nk - nq + 1)) keys
        pairs += sum(min(valid, max(0, i + nk - nq + 1)) for i in range(nq))
    return pairs


def flops(problem: Problem) -> int:
    """FLOPs of the two matrix products, 4 d a visible pair and head; the masked part not counted.

    A multiply and an add are two. The softmax is not counted (it is 5 a pair at most). The backward
    pass has five products to the forward's two: x2.5, and x3.5 for both.
    """
    forward = 4 * problem.h * problem.d * visible_pairs(problem)
    return forward * {"fwd": 2, "bwd": 5, "train": 7}[problem.direction] // 2


def hbm_bytes(problem: Problem) -> int:
    """The fewest bytes that a forward pass moves: q, k, v read once and o written once."""
    q = problem.b * problem.h * problem.nq * problem.d
    kv = problem.b * problem.hk * problem.nk * problem.d
    return (2 * q + 2 * kv) * ITEMSIZE[problem.dtype]
