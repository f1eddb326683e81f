"""Compute the oracles: the references that the outputs of a problem are compared with.

The rule is that of harness/measures/accuracy.py. Everything is computed in blocks of query rows, so
that no N x N matrix in float64 is ever in memory; where a world has several GPUs, on all of them.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy
import torch

import stages
from harness.measures.accuracy import Error, Oracle, set_precision
from harness.problems.directions import OUTPUTS, make_output_gradient
from harness.problems.inputs import make_inputs
from harness.problems.judged import judged_heads, judged_problem
from harness.problems.problem import YARDSTICK, Problem

BLOCK_BYTES: Final = 1 << 26  # of a block of float64 scores
GPU_BLOCK: Final = 4  # times as large on a GPU, which would wait for Python between small blocks
GPU_SHARE: Final = 64  # of a GPU's memory, the most for a block
JUDGES_SHARE: Final = 0.5  # of the memory of each of several GPUs, the most for oracles
HALF: Final = ("float16", "bfloat16")
FORGIVEN: Final = 0.25  # of a change's effect on an output: rounding may differ by so much

Attend = Callable[..., torch.Tensor]
Rounding = Callable[[torch.Tensor], torch.Tensor]
Tensors = tuple[torch.Tensor, ...]


def row_blocks(problem: Problem) -> Iterator[tuple[int, int]]:
    """Yield [start, end) of blocks of query rows whose float64 scores take 64 MB, on a GPU more.

    There each has d rows at least, if memory allows: with fewer, keys and values, which each block
    reads, would be larger than the scores.
    """
    row, size = 8 * problem.b * problem.h * problem.nk, BLOCK_BYTES
    if problem.device == "cuda":
        memory = torch.cuda.get_device_properties().total_memory
        size = max(GPU_BLOCK * size, min(problem.d * row, memory // GPU_SHARE))
    step = max(1, size // row)
    for start in range(0, problem.nq, step):
        yield start, min(start + step, problem.nq)


def seen_blocks(
    problem: Problem, device: torch.device
) -> Iterator[tuple[slice, int, dict[str, object]]]:
    """Yield the blocks of query rows that see a key: rows, number of keys seen, and options.

    A causal block sees the keys up to the last one of its last row. With the keys cut off there,
    a causal call on the block has the same mask as the whole problem.
    """
    seqlens_k = None
    if problem.seqlens_k is not None:
        seqlens_k = torch.tensor(problem.seqlens_k, dtype=torch.int32, device=device)
    for start, end in row_blocks(problem):
        seen = min(problem.nk, end + problem.nk - problem.nq) if problem.causal else problem.nk
        if seen < 1:
            continue
        options: dict[str, object] = {"causal": True} if problem.causal else {}
        if seqlens_k is not None:
            options["seqlens_k"] = seqlens_k.clamp(max=seen)
        yield slice(start, end), seen, options


def in_blocks(
    attend: Attend, problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """attend(q, k, v) with the problem's masks, one block of query rows at a time."""
    o = torch.zeros_like(q)  # it stays 0 where a block sees no key
    for rows, seen, options in seen_blocks(problem, q.device):
        o[:, :, rows] = attend(q[:, :, rows], k[:, :, :seen], v[:, :, :seen], **options)
    return o


def gradients_in_blocks(
    attend: Attend, problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    dO: torch.Tensor,
) -> Tensors:  # fmt: skip
    """dq, dk, dv of attend(q, k, v) by torch's autograd, one block of query rows at a time.

    dk and dv are summed over the blocks in float32, or in float64 for float64 inputs.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    dq = torch.zeros_like(q)
    dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for rows, seen, options in seen_blocks(problem, q.device):
        block = (q[:, :, rows], k[:, :, :seen], v[:, :, :seen])
        leaves = [x.detach().requires_grad_() for x in block]
        o = attend(*leaves, **options)
        dq_rows, dk_seen, dv_seen = torch.autograd.grad(o, leaves, dO[:, :, rows])
        dq[:, :, rows] = dq_rows
        dk[:, :, :seen] += dk_seen
        dv[:, :, :seen] += dv_seen
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def largest_score(problem: Problem, q: torch.Tensor, k: torch.Tensor) -> float:
    """max |q . k| * scale over all pairs, in float64."""
    k = k.double().repeat_interleave(problem.h // problem.hk, dim=1)
    largest = 0.0
    for start, end in row_blocks(problem):
        s = q[:, :, start:end].double() @ k.transpose(-2, -1)
        largest = max(largest, s.abs().max().item())
    return largest * problem.d**-0.5


def with_rounded_p(round_p: Callable[[torch.Tensor], torch.Tensor]) -> Attend:
    """Make an `attend` with the steps of stage 3 that applies `round_p` to P before P V."""

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


@dataclass(frozen=True)
class Recomputed:
    """What a backward pass recomputes for a block of query rows.

    p and dp (b, h, rows, seen), delta (b, h, rows, 1), in float32 or float64. dS = p (dp - delta).
    """

    rows: slice
    seen: int
    p: torch.Tensor
    dp: torch.Tensor
    delta: torch.Tensor


def recompute(
    problem: Problem, inputs: Tensors, operand: Rounding, dtype: torch.dtype
) -> Iterator[Recomputed]:
    """Recompute P, dP and delta, one block of query rows at a time (Dao 2023, algorithm 2).

    `inputs`: q, k, v, dO in float32 or float64, k and v with as many heads as q. `operand` rounds
    each operand of a matrix product; `dtype` is that of the o from which delta is computed.
    """
    q, k, v, dO = inputs
    hidden_keys = stages.by_number(YARDSTICK).hidden_keys
    for rows, seen, options in seen_blocks(problem, q.device):
        q_rows, dO_rows = q[:, :, rows], dO[:, :, rows]  # (b, h, rows, d)
        k_seen, v_seen = k[:, :, :seen], v[:, :, :seen]  # (b, h, seen, d)
        s = operand(q_rows) @ operand(k_seen).mT * problem.d**-0.5
        hidden = hidden_keys(
            q_rows, k_seen, bool(options.get("causal", False)), options.get("seqlens_k")
        )
        p = torch.softmax(s.masked_fill(hidden, torch.finfo(s.dtype).min), dim=-1)
        p = p.masked_fill(hidden, 0.0)
        o = (operand(p) @ operand(v_seen)).to(dtype).to(p.dtype)
        delta = (o * dO_rows).sum(-1, keepdim=True)
        yield Recomputed(rows, seen, p, operand(dO_rows) @ operand(v_seen).mT, delta)


def spread_heads(problem: Problem, x: torch.Tensor) -> torch.Tensor:
    """Repeat each head of k or v (b, hk, nk, d) for each query head that uses it: (b, h, nk, d)."""
    return x.repeat_interleave(problem.h // problem.hk, dim=1)


def gather_heads(problem: Problem, x: torch.Tensor) -> torch.Tensor:
    """Sum (b, h, nk, d) over the query heads that share a key head: (b, hk, nk, d)."""
    return x.unflatten(1, (problem.hk, -1)).sum(2)


def rounded_gradients(
    problem: Problem, inputs: Tensors, operand: Rounding, dtype: torch.dtype
) -> Tensors:
    """dq, dk, dv in `dtype` from q, k, v, dO in float32, by a backward pass in float32.

    `operand` rounds each operand of a matrix product, P and dS too.
    """
    q, k, v, dO = inputs
    k, v = spread_heads(problem, k), spread_heads(problem, v)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    scale = problem.d**-0.5
    for block in recompute(problem, (q, k, v, dO), operand, dtype):
        rows, seen = block.rows, block.seen
        ds = operand(block.p * (block.dp - block.delta))
        dv[:, :, :seen] += operand(block.p).mT @ operand(dO[:, :, rows])
        dq[:, :, rows] = scale * (ds @ operand(k[:, :, :seen]))
        dk[:, :, :seen] += scale * (ds.mT @ operand(q[:, :, rows]))
    dk, dv = gather_heads(problem, dk), gather_heads(problem, dv)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def magnitudes(problem: Problem, inputs: Tensors) -> Tensors:
    """How large dq, dk, dv would be, element by element, if nothing cancelled.

    `inputs`: q, k, v, dO. The root of the sum of the squared terms: P_ij dO_i for dv_j, scale P_ij
    (|dP_ij| + |delta_i|) times k_j for dq_i and times q_i for dk_j. That is the size of a sum of n
    terms of random signs; the sum of their absolute values is sqrt(n) times as large, too loose a
    bound to find mistakes.
    """
    q, k, v, dO = inputs
    k, v = spread_heads(problem, k), spread_heads(problem, v)
    dq2, dk2, dv2 = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for block in recompute(problem, (q, k, v, dO), lambda x: x, q.dtype):
        rows, seen = block.rows, block.seen
        ds2 = (block.p * (block.dp.abs() + block.delta.abs())).square() / problem.d
        dv2[:, :, :seen] += block.p.square().mT @ dO[:, :, rows].square()
        dq2[:, :, rows] = ds2 @ k[:, :, :seen].square()
        dk2[:, :, :seen] += ds2.mT @ q[:, :, rows].square()
    return dq2.sqrt(), gather_heads(problem, dk2).sqrt(), gather_heads(problem, dv2).sqrt()


def devices_of(problem: Problem) -> list[torch.device]:
    """The devices that compute the oracles: a GPU for each rank, where each has whole key heads."""
    world = problem.world if problem.device == "cuda" else 1
    if world == 1 or problem.hk % world or torch.cuda.device_count() < world:
        return [torch.device(problem.device)]
    return [torch.device(problem.device, rank) for rank in range(world)]


def by_heads(
    compute: Callable[..., Tensors], problem: Problem, tensors: Tensors, dtype: torch.dtype
) -> Tensors:
    """compute(problem, *tensors), the tensors in `dtype`; where there are several devices, each
    computes a share of the heads, all at the same time.

    The heads are the second dimension of all tensors. One GPU takes minutes where N is 500,000.
    """
    devices = devices_of(problem)
    count = len(devices)
    if count == 1:
        return compute(problem, *(x.to(dtype) for x in tensors))
    each = replace(problem, h=problem.h // count, hk=problem.hk // count)

    def share(device: torch.device, *given: torch.Tensor) -> Tensors:
        if device.type == "cuda":  # ranks load meanwhile; blocks of other sizes stay cached
            torch.cuda.set_per_process_memory_fraction(JUDGES_SHARE, device)
        return compute(each, *(x.to(device).to(dtype) for x in given))

    with ThreadPoolExecutor(count) as pool:
        found = [*pool.map(share, devices, *(x.chunk(count, dim=1) for x in tensors))]
    return tuple(
        torch.cat([x.to(tensors[0].device) for x in parts], dim=1)
        for parts in zip(*found, strict=True)
    )


def make_oracles(problem: Problem) -> dict[str, Oracle]:
    """Make the oracle of each output of `problem`'s direction, by name, in OUTPUTS' order.

    They are of the heads that are judged (harness/problems/judged.py), on the problem's device.
    """
    wanted = OUTPUTS[problem.direction]
    dO = [make_output_gradient(problem)] if "dq" in wanted else []
    inputs = tuple(judged_heads(problem, x) for x in (*make_inputs(problem), *dO))
    problem = judged_problem(problem)
    oracles = {"o": make_oracle(problem, *inputs[:3])} if "o" in wanted else {}
    if "dq" in wanted:
        oracles |= zip(("dq", "dk", "dv"), make_gradient_oracles(problem, inputs), strict=True)
    return oracles


def make_oracle(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Oracle:
    """Make the oracle of o = attend(q, k, v)."""
    stage3: Attend = stages.by_number(YARDSTICK).attend
    dtype = getattr(torch, problem.dtype)

    def attended(attend: Attend, kind: torch.dtype) -> torch.Tensor:
        def compute(part: Problem, *given: torch.Tensor) -> Tensors:
            return (in_blocks(attend, part, *given),)

        return by_heads(compute, problem, (q, k, v), kind)[0]

    out64, out3 = attended(stage3, torch.float64), attended(stage3, dtype)
    yardstick = Error.between(out3, out64)
    u = torch.finfo(dtype).eps
    largest_v = v.abs().max().item()
    if problem.dtype in HALF:
        floor = u
        mixed = with_rounded_p(lambda p: p.to(dtype).float())
        yardstick = Error.between(attended(mixed, torch.float32).to(dtype), out64)
    else:
        floor = 4 * u * (1 + largest_score(problem, q, k))
    if problem.precision == "tf32":
        set_precision("ieee")
        truncated = (truncate_to_tf32(x) for x in (q, k, v))
        out_tf32 = in_blocks(with_rounded_p(truncate_to_tf32), problem, *truncated)
        set_precision("tf32")
        yardstick = yardstick.larger(Error.between(out_tf32, out64))
    bound = Error(2 * yardstick.max + floor * largest_v, 2 * yardstick.rel + floor)
    return Oracle(out64, out3, bound)


def make_gradient_oracles(problem: Problem, inputs: Tensors) -> list[Oracle]:
    """Make the oracles of dq, dk and dv of `inputs`: q, k, v, dO."""
    stage3: Attend = stages.by_number(YARDSTICK).attend
    dtype = getattr(torch, problem.dtype)
    wide = torch.promote_types(dtype, torch.float32)

    def by_autograd(part: Problem, *given: torch.Tensor) -> Tensors:
        q, k, v, dO = given
        return gradients_in_blocks(stage3, part, q, k, v, dO)

    def rounded(operand: Rounding) -> Callable[..., Tensors]:
        return lambda part, *given: rounded_gradients(part, given, operand, dtype)

    truths = by_heads(by_autograd, problem, inputs, torch.float64)
    by_stage3 = by_heads(by_autograd, problem, inputs, dtype)
    u = torch.finfo(dtype).eps
    if problem.dtype in HALF:
        floor = 2 * u
        in_half = rounded(lambda x: x.to(dtype).float())
        yardsticks = [by_heads(in_half, problem, inputs, wide)]
    else:
        floor = 4 * u * (1 + largest_score(problem, *inputs[:2]))
        yardsticks = [by_stage3]
    if problem.precision == "tf32":
        set_precision("ieee")
        yardsticks.append(by_heads(rounded(truncate_to_tf32), problem, inputs, dtype))
    sizes = by_heads(lambda part, *given: magnitudes(part, given), problem, inputs, wide)
    if problem.precision == "tf32":
        set_precision("tf32")
    return [
        gradient_oracle(truth, out3, found, size.double(), floor, u)
        for truth, out3, size, *found in zip(truths, by_stage3, sizes, *yardsticks, strict=True)
    ]


def gradient_oracle(
    truth: torch.Tensor, out3: torch.Tensor, yardsticks: list[torch.Tensor], size: torch.Tensor,
    floor: float, u: float,
) -> Oracle:  # fmt: skip
    """Make the oracle of one gradient from its truth, stage 3's and the yardsticks' gradients.

    `size`: its magnitudes.
    """
    size = torch.maximum(size, truth.abs())  # terms of one sign add up to more than that root
    norm = None
    divisor = truth.norm().item()
    if divisor <= u * size.norm().item():  # smaller than the rounding error of its terms
        norm = divisor = size.norm().item()
    yardstick = Error(0.0, 0.0)
    for found in yardsticks:
        yardstick = yardstick.larger(Error.between(found, truth, norm))
    rel = floor * (size.norm().item() / divisor if divisor else 1.0)
    bound = Error(3 * yardstick.max + floor * size.max().item(), 3 * yardstick.rel + rel)
    return Oracle(truth, out3, bound, norm)


def undo(
    outputs: Sequence[torch.Tensor], truths: Sequence[torch.Tensor], problem: Problem,
    given: Sequence[torch.Tensor], change: tuple[int, int],
) -> list[torch.Tensor]:  # fmt: skip
    """Remove the effect of the `change` of one element from `outputs`; all in float64.

    Raises ValueError where there is no such element or value. `truths`: the exact outputs without
    the change; `given`: q, k, v, dO without the change.
    """
    at, value = change
    x = given[3 if problem.direction == "bwd" else 0]
    if not 0 <= at < x.numel():
        raise ValueError(f"element {at} of {x.numel()}")
    b, h, i, _ = (int(n) for n in numpy.unravel_index(at, x.shape))  # torch's imports sympy: 0.5 s
    hk = h * problem.hk // problem.h
    seen = problem.nk if problem.seqlens_k is None else problem.seqlens_k[b]
    if problem.causal:
        seen = max(0, min(seen, i + 1 + problem.nk - problem.nq))
    k, v = (y[b, hk, :seen].double() for y in given[1:3])  # (seen, d)
    row = [given[0][b, h, i], given[3][b, h, i]]  # q and dO, (d)
    before = row_terms(row[0], k, v, row[1])
    cells = x.view(getattr(torch, f"int{8 * x.element_size()}")).view(-1)
    was = cells[at].clone()
    cells[at] = value
    after = row_terms(row[0], k, v, row[1])
    cells[at] = was
    where: dict[str, Any] = {"o": (b, h, i), "dq": (b, h, i)}
    undone = []
    for name, output, truth in zip(OUTPUTS[problem.direction], outputs, truths, strict=True):
        here = where.get(name, (b, hk, slice(seen)))
        effect = torch.zeros_like(output)
        effect[here] = after[name] - before[name]
        error = output - effect - truth
        error = error.sign() * (error.abs() - FORGIVEN * effect.abs()).clamp_min(0)
        undone.append(truth + error / 2)  # halved: the bounds are those of the unchanged problem
    return undone


def row_terms(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dO: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Compute one query row's o and dq (d), and its terms of dk and dv (seen, d)."""
    q, dO, scale = q.double(), dO.double(), q.shape[-1] ** -0.5
    p = torch.softmax(k @ q * scale, dim=0)  # (seen)
    o = p @ v
    ds = p * (v @ dO - o @ dO) * scale
    return {"o": o, "dq": ds @ k, "dk": torch.outer(ds, q), "dv": torch.outer(p, dO)}
