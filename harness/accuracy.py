"""When an output is exact: the errors of an output, and the bounds that they are held to.

The truth is stage 3 in float64. How far an honest rung may be from it is measured on a yardstick,
on the same inputs: stage 3 itself in float32; in half precision the *mixed* yardstick (float32
scores and softmax, P rounded to the dtype, float32 P V, the output rounded). With u the dtype's
eps and s_max the largest |scaled score|, an output is exact when both its maximum and its relative
error are within twice the yardstick's plus a floor:

    float32, float64   4 u (1 + s_max), times max|v| for the maximum
    float16, bfloat16  u, times max|v| for the maximum

Everything is computed in blocks of query rows: no N x N matrix in float64 is ever held.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

import stages
from harness.inputs import make_inputs
from harness.problem import Problem

YARDSTICK = 3  # the rung that every other is compared with
BLOCK_BYTES = 1 << 26  # of a block of float64 scores

Attend = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Error:
    """max|a - b| and ||a - b|| / ||b||."""

    max: float
    rel: float

    @staticmethod
    def between(a: torch.Tensor, b: torch.Tensor) -> "Error":
        """The error of `a` against `b`, both taken to float64; NaN where `a` has one."""
        a, b = a.double(), b.double()
        difference, norm = (a - b), b.norm().item()
        distance = difference.norm().item()
        rel = distance / norm if norm else (0.0 if distance == 0 else math.inf)
        return Error(difference.abs().max().item(), rel)

    def larger(self, other: "Error") -> "Error":
        """The larger of both, each figure by itself."""
        return Error(max(self.max, other.max), max(self.rel, other.rel))

    def within(self, bound: "Error") -> bool:
        """Whether both figures are in their bounds; NaN never is."""
        return self.max <= bound.max and self.rel <= bound.rel


@dataclass(frozen=True)
class Oracle:
    """What outputs of one problem are held against.

    out64 and out3 (b, h, nq, d): stage 3 in float64, and in the problem's own dtype and precision.
    bound: the largest errors against out64 that an exact rung may have.
    """

    out64: torch.Tensor
    out3: torch.Tensor
    bound: Error


def row_blocks(problem: Problem) -> Iterator[tuple[int, int]]:
    """[start, end) of blocks of query rows whose float64 scores take about 64 MB."""
    row = 8 * problem.b * problem.h * problem.nk
    step = max(1, BLOCK_BYTES // row)
    for start in range(0, problem.nq, step):
        yield start, min(start + step, problem.nq)


def in_blocks(
    attend: Attend, problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """attend(q, k, v) with the problem's masks, a block of query rows at a time.

    A causal block sees the keys up to its last row's: cut there, its own mask is the problem's.
    """
    seqlens_k = None
    if problem.seqlens_k is not None:
        seqlens_k = torch.tensor(problem.seqlens_k, dtype=torch.int32, device=q.device)
    blocks = []
    for start, end in row_blocks(problem):
        rows = q[:, :, start:end]
        seen = min(problem.nk, end + problem.nk - problem.nq) if problem.causal else problem.nk
        if seen < 1:  # these rows see no key
            blocks.append(torch.zeros_like(rows))
            continue
        options: dict[str, object] = {"causal": True} if problem.causal else {}
        if seqlens_k is not None:
            options["seqlens_k"] = seqlens_k.clamp(max=seen)
        blocks.append(attend(rows, k[:, :, :seen], v[:, :, :seen], **options))
    return torch.cat(blocks, dim=2)


def largest_score(problem: Problem, q: torch.Tensor, k: torch.Tensor) -> float:
    """max |q . k| * scale over all pairs, in float64."""
    k = k.double().repeat_interleave(problem.h // problem.hk, dim=1)
    largest = 0.0
    for start, end in row_blocks(problem):
        s = q[:, :, start:end].double() @ k.transpose(-2, -1)
        largest = max(largest, s.abs().max().item())
    return largest * problem.d**-0.5


def with_rounded_p(round_p: Callable[[torch.Tensor], torch.Tensor]) -> Attend:
    """The steps of stage 3, its P put through `round_p` before P V."""

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object
    ) -> torch.Tensor:
        groups = q.shape[1] // k.shape[1]
        scale = q.shape[-1] ** -0.5
        k = k.repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
        s = (q * scale) @ k.transpose(-2, -1)
        hidden = stages.by_number(YARDSTICK).hidden_keys(
            q, k, bool(options.get("causal", False)), options.get("seqlens_k")
        )
        p = torch.softmax(s.masked_fill(hidden, torch.finfo(s.dtype).min), dim=-1)
        return round_p(p.masked_fill(hidden, 0.0)) @ v

    return attend


def truncate_to_tf32(x: torch.Tensor) -> torch.Tensor:
    """Float32 `x` with the 13 low bits of its mantissa cleared, as Triton's TF32 operands are."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def make_oracle(problem: Problem) -> Oracle:
    """Compute what outputs of `problem` are held against, on the problem's device."""
    stage3: Attend = stages.by_number(YARDSTICK).attend
    dtype = getattr(torch, problem.dtype)
    q, k, v = make_inputs(problem)
    out64 = in_blocks(stage3, problem, q.double(), k.double(), v.double())
    out3 = in_blocks(stage3, problem, q, k, v)
    yardstick = Error.between(out3, out64)
    u = torch.finfo(dtype).eps
    largest_v = v.abs().max().item()
    if problem.dtype in ("float16", "bfloat16"):
        floor = u
        mixed = with_rounded_p(lambda p: p.to(dtype).float())
        out_mixed = in_blocks(mixed, problem, q.float(), k.float(), v.float()).to(dtype)
        yardstick = Error.between(out_mixed, out64)
    else:
        floor = 4 * u * (1 + largest_score(problem, q, k))
    if problem.precision == "tf32":
        set_precision("ieee")
        truncated = (truncate_to_tf32(x) for x in (q, k, v))
        out_tf32 = in_blocks(with_rounded_p(truncate_to_tf32), problem, *truncated)
        set_precision("tf32")
        yardstick = yardstick.larger(Error.between(out_tf32, out64))
    bound = Error(2 * yardstick.max + floor * largest_v, 2 * yardstick.rel + floor)
    return Oracle(out64.cpu(), out3.cpu(), bound)


def set_precision(precision: str) -> None:
    """Set torch's switch for float32 matrix products on a GPU to 'ieee' or 'tf32'."""
    switch = torch.backends.cuda.matmul
    if hasattr(switch, "fp32_precision"):
        switch.fp32_precision = precision
    else:
        switch.allow_tf32 = precision == "tf32"


def explain(error: Error, bound: Error) -> str:
    """Which bound `error` misses, and by how much."""
    if not error.max <= bound.max:
        return f"max error {error.max:.2g}, exact is {bound.max:.2g} at most"
    return f"relative error {error.rel:.2g}, exact is {bound.rel:.2g} at most"
