"""What a problem costs, counted, not measured: FLOPs, bytes through memory, and their ratio.

Attention is S = scale Q K^T, P = softmax(S), O = P V; backward dV = P^T dO, dP = dO V^T, dS = P (dP
- delta) with delta = rowsum(P dP), dQ = scale dS K, dK = scale dS^T Q. Every stage does the same
FLOPs (`flops`); what the ladder changes is how many bytes cross the bus between the chip and its
memory (HBM). With N = Nq = Nk, one head and elements of e bytes:

                    forward                                 backward
    stage 3         e (4 N^2 + 4 N d)                       e (7 N^2 + 8 N d)
    half fused      e (2 N^2 + 4 N d)
    Flash           e (2 N d + 2 N d ceil(N/Bm))            with q blocks of Bm rows
    the least       e 4 N d                                 e 7 N d

docs/memory.md tells what follows from that. Training moves what both passes do. Which count a stage
is held to, it declares itself: STAGE.traffic in stages/contract.py. Stages 0 to 2, which keep S and
P in objects or not at all, are held to the least.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from harness.problems.problem import ITEMSIZE, Problem

SOURCE_ITEMSIZE = 4  # bytes: the sources count float32


def visible_pairs(problem: Problem) -> int:
    """(query, key) pairs that the masks leave, over one head of each batch entry.

    With `causal`, query i sees keys up to i + nk - nq; with `seqlens_k` the first seqlens_k[b].
    """
    nq, nk = problem.nq, problem.nk

    def pairs(valid: int) -> int:
        if not problem.causal:
            return nq * valid
        # from the last row up they see nk, nk - 1, ... keys, but none more than valid: first the
        # rows that see them all, then a triangle, whose tip is cut off where nq < nk
        tip = min(valid, max(0, nk - nq))
        return min(nq, nk - valid) * valid + (valid * (valid + 1) - tip * (tip + 1)) // 2

    return sum(count * pairs(valid) for valid, count in key_lengths(problem).items())


def key_lengths(problem: Problem) -> dict[int, int]:
    """Each distinct number of valid keys -> how many batch entries have it."""
    return Counter(problem.seqlens_k) if problem.seqlens_k else {problem.nk: problem.b}


def flops(problem: Problem) -> int:
    """FLOPs of the two matrix products, 4 d a visible pair and head; the masked part not counted.

    A multiply and an add are two. The softmax (5 a pair at most) is not counted. The backward pass
    has five products to the forward's two: x2.5, and x3.5 for both.
    """
    forward = 4 * problem.h * problem.d * visible_pairs(problem)
    return forward * {"fwd": 2, "bwd": 5, "train": 7}[problem.direction] // 2


def score_bytes(problem: Problem) -> int:
    """The size of S, and of P: b h nq nk elements of the problem's dtype."""
    return problem.b * problem.h * problem.nq * problem.nk * ITEMSIZE[problem.dtype]


def query_bytes(problem: Problem) -> int:
    """The size of q, and of o: b h nq d elements."""
    return problem.b * problem.h * problem.nq * problem.d * ITEMSIZE[problem.dtype]


def key_bytes(problem: Problem) -> int:
    """The size of k, and of v: b hk nk d elements."""
    return problem.b * problem.hk * problem.nk * problem.d * ITEMSIZE[problem.dtype]


# kernel -> the matrices that it reads and writes, nothing kept in L2. S, P, dP and dS are whole,
# whatever the masks leave. Scaling q, repeating grouped heads and filling masks in are further
# kernels of stage 3 as it is written, not of the method, and aren't counted.
THREE_KERNELS = {"Q K^T": "q k S", "softmax": "S P", "P V": "P v o"}  # source 002's naive version
HALF_FUSED = {"softmax(Q K^T)": "q k P", "P V": "P v o"}  # a row of S must fit on the chip
# P was kept from the forward pass, so that S need not be computed again: four products to the five
# that `flops` counts
THREE_KERNELS_BACKWARD = {
    "P^T dO": "P dO dv", "dO V^T": "dO v dP", "softmax'": "P dP dS", "dS K": "dS k dq",
    "dS^T Q": "dS q dk",
}  # fmt: skip


def kernel_bytes(problem: Problem, kernels: Mapping[str, str]) -> dict[str, int]:
    """kernel -> the bytes of all the matrices that it reads and writes."""
    q, k, s = query_bytes(problem), key_bytes(problem), score_bytes(problem)
    sizes = dict.fromkeys(("q", "o", "dO", "dq"), q) | dict.fromkeys(("k", "v", "dk", "dv"), k)
    return {
        name: sum(sizes.get(matrix, s) for matrix in matrices.split())
        for name, matrices in kernels.items()
    }


def three_kernel_bytes(problem: Problem) -> dict[str, int]:
    """kernel -> bytes of GEMM, softmax, GEMM: 4 b h nq nk + 2 b h nq d + 2 b hk nk d elements."""
    return kernel_bytes(problem, THREE_KERNELS)


def half_fused_bytes(problem: Problem) -> dict[str, int]:
    """kernel -> bytes where Q K^T and softmax are one: half of the square part is gone."""
    return kernel_bytes(problem, HALF_FUSED)


def fused_bytes(problem: Problem) -> int:
    """The fewest bytes that attention can move: q, k, v read once and o written once.

    Queries that see no key, and keys that no query sees, need not be read; o is written whole.
    """
    rows, keys = looked_at(problem)
    return rows + 2 * keys + query_bytes(problem)


def fused_backward_bytes(problem: Problem) -> int:
    """The fewest bytes that a backward pass can move: q, k, v, dO read once, dq, dk, dv written.

    Whoever has whole rows of S on the chip again has their softmax, and delta = rowsum(P dP). A
    flash kernel holds no whole row, and reads o (for delta = rowsum(dO o)) and the LSE as well.
    """
    rows, keys = looked_at(problem)
    return 2 * rows + 2 * keys + query_bytes(problem) + 2 * key_bytes(problem)


def looked_at(problem: Problem) -> tuple[int, int]:
    """Bytes of the rows of q that see a key, and of those of k that a query sees."""
    rows = keys = 0
    for valid, count in key_lengths(problem).items():
        keys += count * valid
        if valid:
            rows += count * (min(problem.nq, problem.nk) if problem.causal else problem.nq)
    size = problem.d * ITEMSIZE[problem.dtype]
    return problem.h * rows * size, problem.hk * keys * size


def flash_bytes(problem: Problem, block_m: int) -> int:
    """Bytes of one fused kernel whose q blocks of `block_m` rows each read K and V, none from L2.

    What an L2 keeps for the neighbours comes off it: the truth lies between `fused_bytes` and this.
    It is the Theta(N^2 d^2 / M) of FlashAttention (Dao et al. 2022, theorem 2) for a chip that
    holds M elements, block_m being about M / (2 d); docs/memory.md works it out.
    """
    if block_m < 1:
        raise ValueError(f"block_m: got {block_m}, expected at least 1")
    keys = sum(keys_of_blocks(problem, block_m))
    read = 2 * problem.h * keys * problem.d
    return 2 * query_bytes(problem) + read * ITEMSIZE[problem.dtype]


def keys_of_blocks(problem: Problem, block_m: int) -> Iterator[int]:
    """How many keys each q block of each batch entry sees, its last row the most."""
    for valid in problem.seqlens_k or (problem.nk,) * problem.b:
        for start in range(0, problem.nq, block_m):
            last = min(start + block_m, problem.nq) - 1
            seen = max(0, last + problem.nk - problem.nq + 1) if problem.causal else problem.nk
            yield min(valid, seen)


def held_bytes(problem: Problem) -> int:
    """Bytes of the machine's own memory that checking an answer takes at the least.

    On a GPU q, k and v as they are drawn, in float32, by the stage's process and by the judge's. On
    a CPU the inputs twice, the stage's own and those that show whether it wrote into them; and the
    judge's inputs and outputs in float64 and in the problem's dtype.
    """
    q = problem.b * problem.h * problem.nq * problem.d  # elements, and as many of dO, o, dq
    k = problem.b * problem.hk * problem.nk * problem.d  # and of v, dk, dv
    if problem.device == "cuda":
        return 2 * 4 * (q + 2 * k)
    size = ITEMSIZE[problem.dtype]
    gradients = q + 2 * k
    given = gradients + (0 if problem.direction == "fwd" else q)
    answers = {"fwd": q, "bwd": gradients, "train": q + gradients}[problem.direction]
    return 2 * size * given + (size + 8) * (given + answers)


# a stage's STAGE.traffic -> pass -> the bytes that it moves at the least
TRAFFIC: dict[str, dict[str, Callable[[Problem], int]]] = {
    "fused": {"fwd": fused_bytes, "bwd": fused_backward_bytes},
    "three-kernel": {
        "fwd": lambda problem: sum(kernel_bytes(problem, THREE_KERNELS).values()),
        "bwd": lambda problem: sum(kernel_bytes(problem, THREE_KERNELS_BACKWARD).values()),
    },
}
PASSES = {"fwd": ("fwd",), "bwd": ("bwd",), "train": ("fwd", "bwd")}  # of each direction


def hbm_bytes(problem: Problem, traffic: str = "fused") -> int:
    """The fewest bytes that a stage with that STAGE.traffic moves in the problem's direction."""
    return sum(TRAFFIC[traffic][each](problem) for each in PASSES[problem.direction])


def intensity(operations: int, moved: int) -> float:
    """Arithmetic intensity, FLOPs a byte: over a machine's FLOP/s / bandwidth it's compute-bound.

    (The roofline of Williams, Waterman and Patterson 2009.)
    """
    return operations / moved


def source_intensity(n: int, d: int, softmax: bool = True) -> dict[str, float]:
    """FLOPs a byte by source 000's own count (its table 4.4), 'standard' and 'flash'.

    One head in float32: 4 N^2 d FLOPs, and 5 N^2 for the `softmax` (scale, max, exp, sum, divide),
    over 4 (4 N^2 + 4 N d) bytes and 4 (4 N d). Without the softmax it is our count.
    """
    operations = 4 * n * n * d + (5 * n * n if softmax else 0)
    return {
        "standard": intensity(operations, SOURCE_ITEMSIZE * (4 * n * n + 4 * n * d)),
        "flash": intensity(operations, SOURCE_ITEMSIZE * 4 * n * d),
    }
