"""The cost of a problem, counted and not measured: FLOPs, bytes moved, and their ratio.

Attention is S = scale Q K^T, P = softmax(S), O = P V; backward dV = P^T dO, dP = dO V^T, dS = P (dP
- delta) with delta = rowsum(P dP), dQ = scale dS K, dK = scale dS^T Q. Every stage does the same
FLOPs (`flops`); the stages differ in how many bytes they move between the chip and its memory
(HBM). With N = Nq = Nk, one head and elements of e bytes:

                    forward                                 backward
    stage 3         e (4 N^2 + 4 N d)                       e (7 N^2 + 8 N d)
    half fused      e (2 N^2 + 4 N d)
    Flash           e (2 N d + 2 N d ceil(N/Bm))            with q blocks of Bm rows
    lower bound     e 4 N d                                 e 7 N d

docs/memory.md says what follows from that. Training moves the bytes of both passes. Each stage
declares which count applies to it: STAGE.traffic in stages/contract.py. For stages 0 to 2, which
keep S and P as Python or C++ objects or not at all, it is the lower bound.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from harness.problems.problem import ITEMSIZE, Problem


def visible_pairs(problem: Problem) -> int:
    """Count the (query, key) pairs that are not masked, for one head of each batch entry.

    With `causal`, query i sees keys up to i + nk - nq; with `seqlens_k` the first seqlens_k[b].
    """
    nq, nk = problem.nq, problem.nk

    def pairs(valid: int) -> int:
        if not problem.causal:
            return nq * valid
        # from the last row up, rows see nk, nk - 1, ... keys, but at most `valid`: first the rows
        # that see all valid keys, then a triangle, whose tip is cut off where nq < nk
        tip = min(valid, max(0, nk - nq))
        return min(nq, nk - valid) * valid + (valid * (valid + 1) - tip * (tip + 1)) // 2

    return sum(count * pairs(valid) for valid, count in key_lengths(problem).items())


def key_lengths(problem: Problem) -> dict[int, int]:
    """Map each distinct number of valid keys to the number of batch entries that have it."""
    return Counter(problem.seqlens_k) if problem.seqlens_k else {problem.nk: problem.b}


def flops(problem: Problem) -> int:
    """Count the FLOPs of the matrix products: forward, 4 d per visible pair and head.

    A multiply and an add count as two. Masked pairs and the softmax (at most 5 FLOPs per pair) are
    not counted. The backward pass has five products, the forward pass two: 2.5 times as many FLOPs,
    and 3.5 times for both passes.
    """
    forward = 4 * problem.h * problem.d * visible_pairs(problem)
    return forward * {"fwd": 2, "bwd": 5, "train": 7}[problem.direction] // 2


def score_bytes(problem: Problem) -> int:
    """Bytes of S, and of P: b h nq nk elements of the problem's dtype."""
    return problem.b * problem.h * problem.nq * problem.nk * ITEMSIZE[problem.dtype]


def query_bytes(problem: Problem) -> int:
    """Bytes of q, and of o: b h nq d elements."""
    return problem.b * problem.h * problem.nq * problem.d * ITEMSIZE[problem.dtype]


def key_bytes(problem: Problem) -> int:
    """Bytes of k, and of v: b hk nk d elements."""
    return problem.b * problem.hk * problem.nk * problem.d * ITEMSIZE[problem.dtype]


# kernel -> the matrices that it reads and writes, with nothing kept in L2. S, P, dP and dS count as
# whole matrices, also where there is a mask. Stage 3 as written has further kernels (it scales q,
# repeats grouped heads and fills in masks); they are not part of the method and aren't counted.
THREE_KERNELS: Final = {"Q K^T": "q k S", "softmax": "S P", "P V": "P v o"}
HALF_FUSED: Final = {"softmax(Q K^T)": "q k P", "P V": "P v o"}  # a row of S must fit on the chip
# P was kept from the forward pass, so that S need not be computed again: four products, where
# `flops` counts five
THREE_KERNELS_BACKWARD: Final = {
    "P^T dO": "P dO dv", "dO V^T": "dO v dP", "softmax'": "P dP dS", "dS K": "dS k dq",
    "dS^T Q": "dS q dk",
}  # fmt: skip


def kernel_bytes(problem: Problem, kernels: Mapping[str, str]) -> dict[str, int]:
    """Map each kernel to the bytes of all the matrices that it reads and writes."""
    q, k, s = query_bytes(problem), key_bytes(problem), score_bytes(problem)
    sizes = dict.fromkeys(("q", "o", "dO", "dq"), q) | dict.fromkeys(("k", "v", "dk", "dv"), k)
    return {
        name: sum(sizes.get(matrix, s) for matrix in matrices.split())
        for name, matrices in kernels.items()
    }


def three_kernel_bytes(problem: Problem) -> dict[str, int]:
    """Bytes of GEMM, softmax, GEMM by kernel: 4 b h nq nk + 2 b h nq d + 2 b hk nk d elements."""
    return kernel_bytes(problem, THREE_KERNELS)


def half_fused_bytes(problem: Problem) -> dict[str, int]:
    """Bytes by kernel where one kernel does Q K^T and softmax: S is never written or read."""
    return kernel_bytes(problem, HALF_FUSED)


def fused_bytes(problem: Problem) -> int:
    """The fewest bytes that a forward pass can move: q, k, v read once and o written once.

    Queries that see no key, and keys that no query sees, need not be read; o is written whole.
    """
    rows, keys = visible_bytes(problem)
    return rows + 2 * keys + query_bytes(problem)


def fused_backward_bytes(problem: Problem) -> int:
    """The fewest bytes that a backward pass can move: q, k, v, dO read once, dq, dk, dv written.

    A kernel that has whole rows of S on the chip can compute their softmax and delta = rowsum(P dP)
    again. A flash kernel has no whole row: it also reads the LSE and o (for delta = rowsum(dO o)).
    """
    rows, keys = visible_bytes(problem)
    return 2 * rows + 2 * keys + query_bytes(problem) + 2 * key_bytes(problem)


def visible_bytes(problem: Problem) -> tuple[int, int]:
    """Bytes of the rows of q that see a key, and of the rows of k that a query sees."""
    rows = keys = 0
    for valid, count in key_lengths(problem).items():
        keys += count * valid
        if valid:
            rows += count * (min(problem.nq, problem.nk) if problem.causal else problem.nq)
    size = problem.d * ITEMSIZE[problem.dtype]
    return problem.h * rows * size, problem.hk * keys * size


def flash_bytes(problem: Problem, block_m: int) -> int:
    """Bytes of one fused kernel where each q block of `block_m` rows reads K and V from HBM.

    A kernel moves fewer bytes where the L2 cache still has what another block has read: the true
    number lies between `fused_bytes` and this. It is the Theta(N^2 d^2 / M) of FlashAttention (Dao
    et al. 2022, theorem 2) for on-chip memory of M elements, with block_m about M / (2 d);
    docs/memory.md derives it.
    """
    if block_m < 1:
        raise ValueError(f"block_m: got {block_m}, expected at least 1")
    keys = sum(keys_of_blocks(problem, block_m))
    read = 2 * problem.h * keys * problem.d
    return 2 * query_bytes(problem) + read * ITEMSIZE[problem.dtype]


def keys_of_blocks(problem: Problem, block_m: int) -> Iterator[int]:
    """Yield how many keys each q block of each batch entry sees, that is, its last row."""
    for valid in problem.seqlens_k or (problem.nk,) * problem.b:
        for start in range(0, problem.nq, block_m):
            last = min(start + block_m, problem.nq) - 1
            seen = max(0, last + problem.nk - problem.nq + 1) if problem.causal else problem.nk
            yield min(valid, seen)


def checking_bytes(problem: Problem) -> int:
    """The least main memory, in bytes, that checking an output takes.

    On a GPU: q, k and v as they are drawn, in float32, by the stage's process and by the judge's.
    On a CPU: the inputs twice (the stage's own, and copies that show whether it wrote into them),
    and the judge's inputs and outputs in float64 and in the problem's dtype.
    """
    q = problem.b * problem.h * problem.nq * problem.d  # elements, and as many of dO, o, dq
    k = problem.b * problem.hk * problem.nk * problem.d  # and of v, dk, dv
    if problem.device == "cuda":
        return 2 * 4 * (q + 2 * k)
    size = ITEMSIZE[problem.dtype]
    gradients = q + 2 * k
    inputs = gradients + (0 if problem.direction == "fwd" else q)
    outputs = {"fwd": q, "bwd": gradients, "train": q + gradients}[problem.direction]
    return 2 * size * inputs + (size + 8) * (inputs + outputs)


# a stage's STAGE.traffic -> pass -> the fewest bytes that it moves
TRAFFIC: dict[str, dict[str, Callable[[Problem], int]]] = {
    "fused": {"fwd": fused_bytes, "bwd": fused_backward_bytes},
    "three-kernel": {
        "fwd": lambda problem: sum(three_kernel_bytes(problem).values()),
        "bwd": lambda problem: sum(kernel_bytes(problem, THREE_KERNELS_BACKWARD).values()),
    },
}
PASSES: Final = {"fwd": ("fwd",), "bwd": ("bwd",), "train": ("fwd", "bwd")}  # of each direction


def hbm_bytes(problem: Problem, traffic: str = "fused") -> int:
    """The fewest bytes that a stage with that STAGE.traffic moves in the problem's direction."""
    return sum(TRAFFIC[traffic][each](problem) for each in PASSES[problem.direction])


# a GPU's name, as its driver has it -> TFLOP/s of its matrix units, dense, by NVIDIA's data sheets:
# in 16 bits; of float32 as TF32, of which no other way to multiply it is faster; in float64
PEAK_TFLOPS: Final = {
    "NVIDIA H100 80GB HBM3": (989.4, 494.7, 66.9), "NVIDIA H200": (989.4, 494.7, 66.9),
    "NVIDIA H100 PCIe": (756.0, 378.0, 51.0), "NVIDIA A100": (312.0, 156.0, 19.5),
}  # fmt: skip


def peak_tflops(card: str, problem: Problem) -> float | None:
    """The most TFLOP/s of all GPUs of a problem together; None where `card` isn't a known one."""
    found = next((peaks for name, peaks in PEAK_TFLOPS.items() if card.startswith(name)), None)
    index = {2: 0, 4: 1, 8: 2}[ITEMSIZE[problem.dtype]]
    return found and problem.world * found[index]


def intensity(operations: int, moved: int) -> float:
    """Arithmetic intensity in FLOPs per byte.

    Above a machine's FLOP/s / bandwidth, a kernel is compute-bound (the roofline model, Williams,
    Waterman and Patterson 2009).
    """
    return operations / moved
