"""Stage 10, ring attention: keys and values travel round a ring of GPUs, queries stay.

    W ranks, one GPU each; rank r holds a part of the sequence: its q, k and v. At hop s

        K and V of rank r - s are here; computed with them: a block of attention, o_s and lse_s
        meanwhile they are sent on to rank r + 1, and those of the next hop come from rank r - 1
        (o, lse) and (o_s, lse_s) are merged, in float32

    time ->
    rank 0   compute K0 | merge | compute K2 | merge | compute K1 | merge, o
             K0 to 1, K2 from 2 | K2 to 1, K1 from 2 |                           W = 3

    backward: the same way round once more, with lse and o of all keys (local.py); dK and dV travel
    one hop behind the K and V they belong to, in float32, each rank adds its share, and a last hop
    brings them home

After W - 1 hops each rank has seen all keys, and has never held more than two parts of them. Under
a causal mask a rank that holds the first W-th of the sequence would be done after its own block and
wait for the rank that holds the last: with zigzag each holds an early and a late chunk, and all
have as much to do at each hop.

    schedule.py   who holds what, and which block of attention a hop is: read it first
    copies.py     how tensors get to the next rank: post, then wait
    merge.py      how two results over different keys become one
    local.py      attention on one rank: stages 9, 7 or 3, as functions of plain tensors
    agreement.py  what ranks tell each other before they send, so that none waits in vain
    this file     the loops of both passes

Cost, for each rank: 1 / W of the FLOPs; 2 B Hk Nk d (W - 1) / W elements sent in the forward pass;
in the backward pass as many, and twice as many bytes again per element of 16 bits for dK and dV in
float32, W hops of them. Memory above q, k, v and o: two parts of K and V, o in float32, one hop's
o; in the backward pass dq in float32, and two parts of dK and dV. None of it grows with W.
What it bought: a sequence that one GPU can't hold, in little more than 1 / W of the time (Ring
Attention with Blockwise Transformers, Liu et al. 2023, https://arxiv.org/abs/2310.01889).
"""

import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stages import s03_torch_three_gemm as s03
from stages.common import operators
from stages.common.contract import StageUnavailable, wrong
from stages.common.inputs import autocast, check_seqlens, dtype_name
from stages.contract import FirstDerivative, Stage, check_inputs

from . import copies as ways
from .agreement import agree
from .local import Local, best, wide
from .merge import merge
from .schedule import Hop, Span, hop, length, spans

STAGE = Stage(
    number=10,
    name="ring",
    title="ring attention",
    idea="keys and values travel round a ring of GPUs, and hide behind the products",
    options=("causal", "seqlens_k", "gqa", "world"),
    gradients=True,
    # alone it is another stage: no row of the tour; `ladder ring` measures it
    worth_up_to={"cpu": 0, "cuda": 0},
    files=("schedule.py", "copies.py", "merge.py", "local.py", "agreement.py"),
)

Parts = list[tuple[Span, ...]]  # by rank


class Plan(NamedTuple):
    """What all ranks have agreed on for one call."""

    group: dist.ProcessGroup
    rank: int
    q_spans: Parts
    k_spans: Parts
    causal: bool
    overlap: bool
    copies: str  # 'engine' or 'group'
    wanted: tuple[bool, bool, bool]  # of which of q, k and v there will be gradients
    local: Local

    @property
    def world(self) -> int:
        return len(self.k_spans)

    def hop(self, step: int) -> Hop:
        return hop(self.rank, step, self.q_spans, self.k_spans, self.causal)

    def exchange(self, k: Tensor) -> ways.Exchange:
        """A way for K and V and, where there are gradients, for dK and dV in float32."""
        longest = max(map(length, self.k_spans))
        widths = [k.element_size()] * 2
        if any(self.wanted):
            widths += [wide(k.dtype).itemsize] * 2
        most = k.numel() // k.shape[2] * longest
        return ways.make_exchange(self.copies, self.group, k.device, most, widths)

    def shape_of(self, step: int, k: Tensor) -> tuple[int, ...]:
        """The shape of the keys that this rank has at hop `step`."""
        return (*k.shape[:2], length(self.k_spans[(self.rank - step) % self.world]), k.shape[3])


def valid(seqlens_k: Tensor | None, held: tuple[Span, ...]) -> Tensor | None:
    """How many keys of some spans are valid, (B,): always the first ones, since spans ascend."""
    if seqlens_k is None:
        return None
    return torch.stack([(seqlens_k - start).clamp(0, end - start) for start, end in held]).sum(
        0, dtype=torch.int32
    )


def forward(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, seqlens_k: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return o (B, H, Nq, d) in q's dtype, and lse (B, H, Nq) in base 2, over all ranks' keys."""
    exchange = plan.exchange(k)
    k, v = k.contiguous(), v.contiguous()
    for step in range(plan.world):
        last = step == plan.world - 1
        if not last:
            exchange.post([k, v], [plan.shape_of(step + 1, k)] * 2)
            if not plan.overlap:
                arrived = exchange.wait()
        now = plan.hop(step)
        if not now.empty:
            rows, keys = now.rows, now.keys
            part, part_lse = plan.local.forward(
                q[:, :, rows], k[:, :, keys], v[:, :, keys], now.causal, valid(seqlens_k, now.spans)
            )
            if step == 0:  # all rows; float32 unless the next merge is the last
                o, lse = part if plan.world == 2 else part.to(wide(part.dtype)), part_lse
            else:
                merge(o[:, :, rows], lse[:, :, rows], part, part_lse)
        if not last:
            k, v = exchange.wait() if plan.overlap else arrived
    return o.to(q.dtype), lse


def backward(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor,
    seqlens_k: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return dq, dk, dv of this rank's part; None where not wanted. o and lse are of all keys."""
    exchange, keys_wanted = plan.exchange(k), any(plan.wanted[1:])
    wanted = plan.wanted[0], keys_wanted, keys_wanted
    dtypes = q.dtype, k.dtype, v.dtype
    k, v = k.contiguous(), v.contiguous()
    dq: Tensor | None = None
    sums: list[Tensor] = []  # dK and dV of the last hop's keys, by all ranks that had them so far
    for step in range(plan.world):
        last = step == plan.world - 1
        # K and V go on to the next hop, dK and dV to this one
        held = [] if last else [k, v]
        shapes = [plan.shape_of(step + 1, k)] * len(held) + [plan.shape_of(step, k)] * len(sums)
        arrived: list[Tensor] = []
        if shapes:
            exchange.post(held + sums, shapes)
            if not plan.overlap:
                arrived = exchange.wait()
        now, share = plan.hop(step), [None, None]
        if not now.empty:
            rows, keys = now.rows, now.keys
            dq_rows, *share = plan.local.backward(
                q[:, :, rows], k[:, :, keys], v[:, :, keys], o[:, :, rows], lse[:, :, rows],
                do[:, :, rows], now.causal, valid(seqlens_k, now.spans), wanted,
            )  # fmt: skip
            if step == 0:
                dq = dq_rows  # the first hop has all rows
            elif dq is not None:
                dq[:, :, rows] += dq_rows
        if shapes and plan.overlap:
            arrived = exchange.wait()
        if not last:
            k, v = arrived[:2]
        sums = arrived[len(held) :] if step else share if keys_wanted else []
        for total, x in zip(sums, share, strict=False):
            if step and x is not None:
                total[:, :, now.keys] += x
    if keys_wanted:  # home
        exchange.post(sums, [plan.shape_of(plan.world, k)] * 2)
        sums = exchange.wait()
    # copied, since these may lie where the next call receives
    found = (
        x.to(dtype, copy=True)
        for x, dtype in zip([dq, *sums], dtypes, strict=False)
        if x is not None
    )
    return tuple(x if want else None for x, want in zip(found, plan.wanted))


class Ring(torch.autograd.Function):
    """Ring attention as a node of torch's graph: it keeps this rank's q, k, v and o, and lse."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, *inputs: Any) -> Tensor:
        q, k, v, seqlens_k = inputs
        o, lse = forward(plan, q, k, v, seqlens_k)
        ctx.save_for_backward(q, k, v, o, lse, seqlens_k)
        ctx.plan = plan
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        *kept, seqlens_k = ctx.saved_tensors  # q, k, v, o, lse

        def run(do: Tensor, *kept: Tensor) -> Any:
            return backward(ctx.plan, *kept, do, seqlens_k)

        return None, *FirstDerivative.apply(STAGE, run, do, *kept), None


def world_of(group: dist.ProcessGroup | None) -> int:
    """How many ranks there are; 1 without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(group)
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > 1:  # each rank would see its own keys only, and nothing would say so
        raise RuntimeError(
            f"stage 10 (ring): {started} processes were started together (WORLD_SIZE), but there "
            "is no process group: call torch.distributed.init_process_group first"
        )
    return 1


def check(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, seqlens_k: Tensor | None, keys: int | None = None
) -> None:
    """Raise ValueError or StageUnavailable for what this rank can't compute, by itself."""
    check_inputs(STAGE, q, k, v, causal=causal)
    check_inputs(best(q).stage.STAGE, q, k, v, causal=causal)


def make_plan(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, seqlens_k: Tensor | None,
    group: dist.ProcessGroup | None, zigzag: bool, overlap: bool, copies: str | None,
) -> Plan:  # fmt: skip
    """Agree with the other ranks on this call. Raises the same ValueError on all of them."""
    group = group or dist.group.WORLD
    assert group is not None  # there is one, since there are several ranks
    error, shared, own = "", {}, {}
    try:
        check_inputs(STAGE, q, k, v, causal=causal)
        check_inputs(best(q).stage.STAGE, q, k, v, causal=causal)
        for name, x in (("zigzag", zigzag), ("overlap", overlap)):
            if not isinstance(x, bool):
                raise wrong(name, repr(x), "True or False")
        if copies not in (None, "engine", "group"):
            raise wrong("copies", repr(copies), "'engine', 'group' or None")
        if seqlens_k is not None:
            check_seqlens(seqlens_k, q.shape[0], 2**31 - 1, q.device)
        shared = {
            "q": f"(B, H, d) = {(*q.shape[:2], q.shape[3])} of {dtype_name(q.dtype)}",
            "k": f"{k.shape[1]} heads",
            "device": q.device.type,
            "causal": causal, "zigzag": zigzag, "overlap": overlap, "copies": copies,
            "seqlens_k": seqlens_k if seqlens_k is None or q.is_cuda else seqlens_k.tolist(),
            "requires_grad": [operators.wanted_of(x) for x in (q, k, v)],
        }  # fmt: skip
        own = {"Nq": q.shape[2], "Nk": k.shape[2]} | ways.reach(q.device)
    except (ValueError, StageUnavailable) as found:
        error = str(found)
    told = agree(group, shared, own, error)
    zigzag = zigzag and causal
    parts = []
    for name, what in (("q", "Nq"), ("k", "Nk")):
        got = [each[what] for each in told]
        held = spans(sum(got), len(told), zigzag)
        if got != [*map(length, held)]:
            wants = f"{[*map(length, held)]}, as shard cuts {sum(got)}"
            raise wrong(name, f"{got} rows on ranks 0 to {len(told) - 1}", wants)
        parts.append(held)
    if causal and parts[0] != parts[1]:
        rows = [sum(map(length, held)) for held in parts]
        raise wrong("causal", f"True for {rows[0]} queries and {rows[1]} keys", "as many of both")
    return Plan(
        group, dist.get_rank(group), *parts, causal, overlap, ways.choose(copies, told),
        tuple(shared["requires_grad"]), best(q),
    )  # fmt: skip


def alone(q: Tensor, k: Tensor, v: Tensor, causal: bool, seqlens_k: Tensor | None) -> Tensor:
    """Attention by the best stage for it; stage 3 computes half precision in float32."""
    stage = best(q).stage
    if stage is s03:
        q, k, v, dtype = (*(x.to(wide(x.dtype)) for x in (q, k, v)), q.dtype)
        return s03.attend(q, k, v, causal=causal, seqlens_k=seqlens_k).to(dtype)
    out: Tensor = stage.attend(q, k, v, causal=causal, seqlens_k=seqlens_k)
    return out


def ring(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, seqlens_k: Tensor | None = None,
    group: dist.ProcessGroup | None = None, zigzag: bool = True, overlap: bool = True,
    copies: str | None = None,
) -> Tensor:  # fmt: skip
    """Ring attention over `group` (None: all ranks), with the switches that measurements compare.

    zigzag   whether parts are zigzag under a causal mask; else, and without a mask, contiguous
    overlap  whether K and V travel while the rank computes
    copies   'engine' or 'group' (copies.py); None: by engine where that is possible

    Shapes and errors as `attend`.
    """
    q, k, v = autocast(q, k, v)
    if world_of(group) == 1:
        check_inputs(STAGE, q, k, v, causal=causal, seqlens_k=seqlens_k)
        return alone(q, k, v, causal, seqlens_k)
    plan = make_plan(q, k, v, causal, seqlens_k, group, zigzag, overlap, copies)
    return Ring.apply(plan, q, k, v, seqlens_k)


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, seqlens_k: Tensor | None = None
) -> Tensor:
    """Exact attention that trains, over all ranks of the process group.

    q (B, H, Nq, d), k and v (B, Hk, Nk, d) with Hk dividing H, any float dtype: this rank's parts,
    as `shard` cuts them; `seqlens_k` (B,) int32: valid keys of the whole sequence, the same on all
    ranks -> this rank's part of the output, (B, H, Nq, d) in q's dtype. With `causal` the whole
    sequence has as many queries as keys. Without a process group, or with one rank, the parts are
    the whole and the best stage of this machine computes it.

    Raises ValueError on input that breaks the contract (stages/contract.py) or doesn't fit that of
    other ranks, on all ranks in the same words; RuntimeError where a rank has ended or is silent
    for longer than the process group's timeout, and where it is differentiated twice.
    """
    return ring(q, k, v, causal=causal, seqlens_k=seqlens_k)


def shard(x: Tensor, *, causal: bool, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return this rank's part of `x` (..., N, d), the same whole on all ranks: zigzag if `causal`.

    Differentiable. Raises ValueError where there are fewer rows than ranks.
    """
    world = world_of(group)
    if x.shape[-2] < world:
        raise wrong("x", f"N = {x.shape[-2]} rows", f"at least {world}, one for each rank")
    if world == 1:
        return x
    held = spans(x.shape[-2], world, causal)[dist.get_rank(group)]
    return torch.cat([x[..., start:end, :] for start, end in held], dim=-2)


def unshard(x: Tensor, *, causal: bool, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the whole (..., N, d) on each rank, of all ranks' parts `x`, as `shard` cut them.

    No gradient passes through it.
    """
    world = world_of(group)
    if world == 1:
        return x
    group = group or dist.group.WORLD
    assert group is not None
    shape = [*x.shape[:-2], x.shape[-1]]
    told = agree(
        group, {"x": f"{shape} of {dtype_name(x.dtype)}", "causal": causal}, {"N": x.shape[-2]}
    )
    lengths = [each["N"] for each in told]
    held = spans(sum(lengths), world, causal)
    if lengths != [*map(length, held)]:
        raise wrong("x", f"{lengths} rows", f"{[*map(length, held)]}, as shard cuts {sum(lengths)}")
    padded = x.new_zeros((*x.shape[:-2], max(lengths), x.shape[-1]))
    padded[..., : x.shape[-2], :] = x.detach()
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded, group=group)
    whole = x.new_empty((*x.shape[:-2], sum(lengths), x.shape[-1]))
    for part, spans_of in zip(parts, held, strict=True):
        for start, end in spans_of:
            whole[..., start:end, :] = part[..., : end - start, :]
            part = part[..., end - start :, :]
    return whole
