"""Stage 10, ring attention: queries stay, keys and values travel round a ring of GPUs.

W ranks, a GPU each. Rank r holds its part of the sequence: rows of q, k and v. Its queries have to
meet all keys, so at hop s = 0, 1, ..., W - 1 it

    has K and V of rank r - s, sends them on to rank r + 1, and meanwhile
    computes its queries' attention to them: o_s, lse_s           a rectangle or a triangle
    merges that into what it has: (o, lse)                        in float32

    W = 3, time ->
    rank 0   compute K0 |merge| compute K2 |merge| compute K1 |merge| o
    rank 1   compute K1 |merge| compute K0 |merge| compute K2 |merge| o
    rank 2   compute K2 |merge| compute K1 |merge| compute K0 |merge| o
    links    all K, V one on        all K, V one on

The backward pass goes round once more, with the o and lse of all keys (local.py). dK and dV travel,
too, one hop behind the K and V they belong to: each rank adds its share. The keys of its own that a
rank sees are done in pieces: a quarter while the first K and V come, a quarter beside the last
tiles of the first hop, half while all sums come home. Read the rest of the stage in this order:

    schedule.py      who holds what, and which block of attention each hop is; why zigzag
    merge.py         how results over different keys become one; merge_kernel.py is its kernel
    this file        the loops: `forward` first; then `backward`
    lanes.py         two streams, so that a hop begins while the last tiles of another are computed
    local.py         attention on one rank: stage 9, 7 or 3, as functions of plain tensors
    copies.py        how tensors get to the next rank: post, compute, wait
    agreement.py     what ranks tell each other before they send, so that none waits in vain
    calls.py         one call at a time, and none after one that failed midway

The first three are the idea, the others what it takes to be fast, and never to hang or be wrong.

Cost, per rank: 1 / W of the FLOPs. Sent: 2 B Hk Nk d (W - 1) / W elements in each pass, and in the
backward pass as many of float32. Memory above q, k, v and o, for parts of S = B Hk Nk d / W and
R = B H Nq d / W elements of e bytes: o between hops 4 R, one hop's R e; in the backward pass dq
4 R, dK and dV that go round 8 S, half of those of the own keys 2 R + 4 S, what a hop's kernels make
8 (R + S). Received meanwhile: 4 S e at the most, backward 4 S (e + 2). With W = 2 less: o as the
kernel gives it, and keys never come together with sums. Copy engines receive in slots that are kept
between calls, 6 S e or 6 S (e + 4). Nothing grows with W, while S and R shrink.
What it bought: a sequence that one GPU can't hold, or 1 / W of the time (Ring Attention with
Blockwise Transformers, Liu et al. 2023, https://arxiv.org/abs/2310.01889).
"""

import itertools
import os
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from stages import s03_torch_three_gemm as s03
from stages.common import operators
from stages.common.contract import wrong
from stages.common.inputs import autocast, dtype_name
from stages.contract import FirstDerivative, Stage, check_inputs

from .agreement import Parts, Plan, agree, cut_as_told, make_plan
from .calls import call_on
from .local import best, wide
from .merge import merge
from .schedule import Hop, Span, length, spans

STAGE = Stage(
    number=10,
    name="ring",
    title="ring attention",
    idea="keys and values travel round a ring of GPUs, and hide behind the products",
    options=("causal", "seqlens_k", "gqa", "world"),
    gradients=True,
    # alone it is another stage: no row of the tour; `ladder ring` measures it
    worth_up_to={"cpu": 0, "cuda": 0},
    files=(
        "schedule.py", "merge.py", "merge_kernel.py", "lanes.py", "local.py", "copies.py",
        "agreement.py", "calls.py",
    ),
)  # fmt: skip


def valid(seqlens_k: Tensor | None, held: tuple[Span, ...]) -> Tensor | None:
    """How many keys of some spans are valid, (B,): always the first ones, since spans ascend."""
    if seqlens_k is None:
        return None
    each = [(seqlens_k - start).clamp(0, end - start) for start, end in held]
    return torch.stack(each).sum(0, dtype=torch.int32)


def forward(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, seqlens_k: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return o (B, H, Nq, d) in q's dtype, and lse (B, H, Nq) in base 2, over all ranks' keys."""
    exchange = plan.exchange(k)
    k, v = k.contiguous(), v.contiguous()

    def attention(now: Hop) -> tuple[Tensor, Tensor]:
        """o and lse of the hop's rows, over its keys."""
        k_seen, v_seen, lengths = k[:, :, now.keys], v[:, :, now.keys], valid(seqlens_k, now.spans)
        return plan.local.forward(q[:, :, now.rows], k_seen, v_seen, now.causal, lengths)

    lanes = plan.lanes(k.device)
    for step in range(plan.world):
        now, more = plan.hop(step), step + 1 < plan.world
        with lanes.of(step):
            if step:
                k, v = exchange.wait()
            if more:
                exchange.post([k, v], [plan.shape(step + 1, k)] * 2)
            if step == 0:  # its own keys, which all rows see
                o, lse = attention(now)
                if plan.world > 2:  # merged once, o is rounded once; more often, it is float32
                    o = o.to(wide(o.dtype))
            elif not now.empty:
                part = attention(now)
                lanes.meet()  # o is that of all hops before
                merge(o[:, :, now.rows], lse[:, :, now.rows], *part)
                del part
    lanes.meet()
    return o.to(q.dtype), lse


Piece = tuple[slice, slice, slice]  # some batch entries, heads of q, heads of k
ALL = slice(None)


def backward(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor,
    seqlens_k: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return dq, dk, dv of this rank's part; None where not wanted. o and lse are of all keys."""
    exchange, world = plan.exchange(k), plan.world
    # a copy stays until the end: the caller's lane may write over what is freed while it is sent
    own = [k.contiguous(), v.contiguous()]
    wants_q, wants_kv = plan.wanted[0], any(plan.wanted[1:])

    def share(now: Hop, kv: list[Tensor], piece: Piece = (ALL, ALL, ALL)) -> tuple[Sums, Sums]:
        """What a hop adds: [dq] of its rows, [dk, dv] of its keys; [] of what isn't wanted."""
        (b, h, h_k), (k, v) = piece, kv
        given = (
            q[b, h, now.rows], k[b, h_k, now.keys], v[b, h_k, now.keys], o[b, h, now.rows],
            lse[b, h, now.rows], do[b, h, now.rows],
        )  # fmt: skip
        if now.empty:
            zeros = given[0], k[b, h_k], v[b, h_k]
            dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in zeros)
        else:
            lengths = None if seqlens_k is None else valid(seqlens_k[b], now.spans)
            wanted = wants_q, wants_kv, wants_kv
            dq, dk, dv = plan.local.backward(*given, now.causal, lengths, wanted)
        dkv = [dk, dv] if wants_kv else []
        return Sums(now.rows.start, [dq] if wants_q else []), Sums(0, dkv)

    def of_own(some: list[Piece]) -> list[tuple[Piece, Sums, Sums]]:
        """What its own keys add, in some pieces."""
        return [(piece, *share(plan.hop(0), own, piece)) for piece in some]

    first, *rest = pieces(q, k)
    lanes = plan.lanes(k.device)
    exchange.post(own, [plan.shape(1, k)] * 2)
    kept = of_own([first])
    with lanes.of(1):
        kv = exchange.wait()
        dq = sums = NONE  # of the hops so far; of this hop's keys, by the ranks that have had them
        for step in range(1, world):
            now, more = plan.hop(step), step + 1 < world
            going = (kv if more else []) + sums.tensors  # sums of the last hop's keys
            coming = [plan.shape(step + 1, k)] * 2 * more
            coming += [plan.sums_shape(step, k)] * len(sums.tensors)
            if going:
                exchange.post(going, coming)
            shares = share(now, kv) if step == 1 or not now.empty else (NONE, NONE)
            if step == 1:  # takes what the hop's last tiles leave
                with lanes.of(0):
                    kept += of_own(rest[:-1])
            arrived = exchange.wait() if going else []
            kv, sums = arrived[: 2 * more], Sums(0, arrived[2 * more :])
            dq, sums = add(dq, shares[0]), add(sums, shares[1])
            del shares, going, arrived  # before the next hop's are made
        if sums.tensors:
            exchange.post(sums.tensors, [plan.sums_shape(world, k)] * 2)  # home
        kept += of_own(rest[-1:])
    if sums.tensors:  # the first half needs what came home, and not the second
        sums = Sums(0, exchange.wait())
    else:
        lanes.meet()
    totals = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    for (b, h, h_k), dq_share, dkv_share in kept:
        round_sums(totals[:1], (b, h), dq, dq_share)
        round_sums(totals[1:], (b, h_k), sums, dkv_share)
        lanes.meet()
    lanes.end()  # dq and the second half's shares are freed to the other lane now
    return tuple(x if want else None for x, want in zip(totals, plan.wanted, strict=True))


def pieces(q: Tensor, k: Tensor) -> list[Piece]:
    """Two quarters and a half of the batch, or of a single entry's heads; fewer of less than 4."""
    (B, H), Hk = q.shape[:2], k.shape[1]
    group, count = H // Hk, B if B > 1 else Hk
    cuts = itertools.pairwise(sorted({0, count // 4, count // 2, count}))
    if B > 1:
        return [(slice(a, b), ALL, ALL) for a, b in cuts]
    return [(ALL, slice(a * group, b * group), slice(a, b)) for a, b in cuts]


class Sums(NamedTuple):
    """Sums in float32, (B, H, N, d) each: of some of a part's rows, from its row `first` on."""

    first: int
    tensors: list[Tensor]


NONE = Sums(0, [])


def add(sums: Sums, share: Sums) -> Sums:
    """Return the sum of both, in the memory of one: all rows of one are among the other's."""
    if not (sums.tensors and share.tensors):
        return sums if sums.tensors else share
    if sums.tensors[0].shape[2] < share.tensors[0].shape[2]:
        sums, share = share, sums
    for x, y in zip(sums.tensors, share.tensors, strict=True):
        x.narrow(2, share.first - sums.first, y.shape[2]).add_(y)
    return sums


def round_sums(totals: list[Tensor], piece: tuple[slice, slice], sums: Sums, share: Sums) -> None:
    """Write a piece of `sums`, and all rows' share of it, to totals in the inputs' dtype."""
    for total, x, y in zip(totals, sums.tensors, share.tensors, strict=False):  # none if unwanted
        end = sums.first + x.shape[2]
        total, both = total[piece], slice(sums.first, end)
        torch.add(x[piece], y[:, :, both], out=total[:, :, both])
        for rest in (slice(0, sums.first), slice(end, None)):
            total[:, :, rest] = y[:, :, rest]


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
            plan, (q, k, v, o, lse) = ctx.plan, kept
            with call_on(plan.group, partial(plan.agree_again, q.device)):
                return backward(plan, q, k, v, o, lse, do, seqlens_k)

        return None, *FirstDerivative.apply(STAGE, run, do, *kept), None


def world_of(group: dist.ProcessGroup | None) -> int:
    """How many ranks there are; 1 without a process group."""
    if dist.is_available() and (dist.is_initialized() or group is not None):
        known: tuple[Any, ...] = (None, dist.GroupMember.NON_GROUP_MEMBER)
        if not (isinstance(group, dist.ProcessGroup) or group in known):
            raise wrong("group", type(group).__name__, "a torch.distributed.ProcessGroup, or None")
        try:
            if isinstance(group, dist.ProcessGroup):
                dist.get_process_group_ranks(group)  # raises where it is destroyed
            world = dist.get_world_size(group)
        except (KeyError, ValueError):
            raise wrong("group", "one that was destroyed", "one that is there, or None") from None
        if world < 1:
            raise wrong("group", "one that this process is not in", "one of its own, or None")
        return world
    started = int(os.environ.get("WORLD_SIZE") or "1")
    if started > 1:  # each rank would see its own keys only, and nothing would say so
        raise RuntimeError(
            f"stage 10 (ring): {started} processes were started together (WORLD_SIZE), but there "
            "is no process group: call torch.distributed.init_process_group first"
        )
    return 1


def alone(q: Tensor, k: Tensor, v: Tensor, causal: bool, seqlens_k: Tensor | None) -> Tensor:
    """Attention by the best stage for it; stage 3 computes half precision in float32."""
    stage = best(q).stage
    if stage is s03:
        q, k, v, dtype = (*(x.to(wide(x.dtype)) for x in (q, k, v)), q.dtype)
        return s03.attend(q, k, v, causal=causal, seqlens_k=seqlens_k).to(dtype)
    out: Tensor = stage.attend(q, k, v, causal=causal, seqlens_k=seqlens_k)
    return out


@operators.untraced
def over_ranks(q: Tensor, k: Tensor, v: Tensor, seqlens_k: Tensor | None, **asked: Any) -> Tensor:
    """Ring attention over the ranks of a group; arguments as `make_plan`'s."""
    agreement = partial(make_plan, STAGE, q, k, v, seqlens_k=seqlens_k, **asked)
    with call_on(asked["group"], agreement) as plan:
        out: Tensor = Ring.apply(plan, q, k, v, seqlens_k)
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
    return over_ranks(
        q, k, v, seqlens_k, causal=causal, group=group or dist.group.WORLD, zigzag=zigzag,
        overlap=overlap, copies=copies,
    )  # fmt: skip


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
    other ranks, on all ranks in the same words; RuntimeError where a rank has failed, has ended or
    is silent for longer than the process group's timeout, from then on at every call; in threads
    that call at once; and where it is differentiated twice.
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
    members: Any = group or dist.group.WORLD

    def cut() -> Parts:
        kind = f"{(*x.shape[:-2], x.shape[-1])} of {dtype_name(x.dtype)}"
        shared = {"call": "unshard", "x": kind, "causal": causal}
        return cut_as_told("x", agree(members, shared, {"x": x.shape[-2]}), causal)

    with call_on(members, cut) as parts:
        whole = x.new_empty((*x.shape[:-2], sum(map(length, parts)), x.shape[-1]))
        for rank, held in enumerate(parts):
            part = x.detach().contiguous()
            if rank != dist.get_rank(members):
                part = x.new_empty((*x.shape[:-2], length(held), x.shape[-1]))
            dist.broadcast(part, group_src=rank, group=members)
            for start, end in held:
                whole[..., start:end, :] = part[..., : end - start, :]
                part = part[..., end - start :, :]
    return whole
