"""What the tests of all stages share: the stages, sizes that each can bear, tensors and bounds."""

import gc
import math
import os
import subprocess
import sys
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

import stages
from harness.problems.problem import YARDSTICK
from harness.records.code import built_in_files, twin_files
from harness.records.environment import ROOT
from stages.common.contract import why_not
from stages.common.machine import has_module

FAKES = [stages.load(path) for path in [*built_in_files(), *twin_files()]]
TWINS = [stage for stage in FAKES if stage.__name__.startswith("stages.cpu.")]
MARGIN = 1 << 17  # elements around a tensor: further than a wrong stride or mask reaches here
UNTOUCHED = 1.625  # a number of every dtype that no kernel writes


def stage_id(stage):
    return stage.__name__.rpartition(".")[2]


def for_each(infos):
    """Parametrise a test by `stage`; a stage that is in `stages/` tomorrow is among them."""
    assert infos, "no stage is left to test"
    return pytest.mark.parametrize("stage", infos, ids=stage_id)


every_stage = for_each(FAKES)


def device_of(info):
    """Where `stage` runs here: the CPU if it can.

    Skips only what no machine of this kind can run. A stage that should run here and can't fails.
    """
    stage = info.STAGE
    reasons = {device: why_not(stage, device) for device in ("cpu", "cuda")}
    for device, reason in reasons.items():
        if reason is None:
            return device
    if not torch.cuda.is_available() and ("cuda" in stage.needs or stage.devices == ("cuda",)):
        pytest.skip(reasons["cuda"])
    if sys.platform != "linux" and "triton" in stage.needs and not has_module("triton"):
        pytest.skip(reasons["cpu"])
    return pytest.fail(f"stage {stage.number} runs nowhere here: {reasons}")


def budget(stage, device):
    """How large a b * h * nq * nk * d `stage` can bear: a twentieth of a second or so.

    Half of the tour's largest cell of d = 16, for a stage that is worth running up to small N only.
    """
    return min(16 * 192**2, 8 * (stage.STAGE.worth_up_to.get(device) or 384) ** 2)


def most_keys(stage, wanted):
    """`wanted` keys, or as many as `stage` is exact up to."""
    return min(wanted, stage.STAGE.exact_up_to or wanted)


def bearable(stage, device, shape):
    """Whether `stage` can bear a (b, h, nq, nk, d); an interpreted tile costs the same at any d."""
    b, h, nq, nk, _ = shape
    tiles = b * h * math.ceil(nq / 32) * math.ceil(nk / 64)
    few = tiles <= 10 or stage.STAGE.mode(device) != "interpreted"
    return few and math.prod(shape) <= budget(stage, device)


def normal(shape, seed, dtype=torch.float32, device="cpu"):
    """q, k, v and a dO ~ N(0, 1) for a shape (b, h, nq, nk, d)."""
    b, h, nq, nk, d = shape
    g = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(b, h, n, d, generator=g, dtype=torch.float64).to(device, dtype)
        for n in (nq, nk, nk, nq)
    )


def in_nan(x, order=(0, 1, 2, 3), steps=(1, 1, 1, 1)):
    """`x`'s values in a storage of NaN, whose axes go in `order` and have NaN between elements.

    Axis a takes every steps[a]-th place. Whoever reads what isn't x's gets a NaN for it.
    """
    sizes = [x.shape[a] * steps[a] for a in order]
    size = math.prod(sizes)
    storage = torch.full((size + 2 * MARGIN,), math.nan, dtype=x.dtype, device=x.device)
    y = storage[MARGIN : MARGIN + size].view(sizes)
    y = y.permute([order.index(a) for a in range(4)])
    y = y[tuple(slice(None, None, step) for step in steps)]
    return y.copy_(x)


@contextmanager
def guarded_outputs(whole=False):
    """An empty tensor is of NaN, with a margin around it; what is written into the margin shows.

    And what is not written, if all of it has to be (`whole`). Gives the list of the shapes that
    were asked for, of torch.empty or empty_like. An output made by other means is not looked after.
    Where such a tensor is split, each part has a margin.
    """
    margins, made, asked = [], [], []
    split_as_usual = torch.Tensor.split

    def empty(*size, dtype=None, device=None):
        shape = torch.Size(*size) if isinstance(size[0], (tuple, list)) else torch.Size(size)
        dtype = dtype or torch.get_default_dtype()
        size = shape.numel()
        asked.append(tuple(shape))
        # not NaN around, too: that is what a kernel that reads where it shouldn't writes
        around, inside = (UNTOUCHED, math.nan) if dtype.is_floating_point else (-77, -1)
        storage = torch.full((size + 2 * MARGIN,), around, dtype=dtype, device=device)
        margins.extend((x, around) for x in (storage[:MARGIN], storage[MARGIN + size :]))
        made.append(storage[MARGIN : MARGIN + size].fill_(inside).view(shape))
        return made[-1]

    def empty_like(x, dtype=None, memory_format=None):
        return empty(x.shape, dtype=dtype or x.dtype, device=x.device)

    def split(x, sizes, dim=0):
        if not any(x is one for one in made):
            return split_as_usual(x, sizes, dim)
        made[:] = [one for one in made if one is not x]
        asked.remove(tuple(x.shape))
        return [empty(size, dtype=x.dtype, device=x.device) for size in sizes]

    with (
        patch.object(torch, "empty", empty),
        patch.object(torch, "empty_like", empty_like),
        patch.object(torch.Tensor, "split", split),
    ):
        yield asked
    for margin, around in margins:
        assert (margin == around).all(), "the stage wrote outside its output"
    assert not whole or not any(x.isnan().any() for x in made), "an output was not written whole"


@contextmanager
def without_collector():
    """Without the garbage collector, which takes ten times stage 0's own time for nothing."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def printed(code):
    """The words that `code` prints in a process of its own: a crash there fails a test here."""
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def attend(stage, q, k, v, **options):
    """`stage`'s attend, its output looked after."""
    with without_collector(), guarded_outputs():
        return stage.attend(q, k, v, **options)


def probabilities(q, k, hidden=None):
    """P of q and k (both with as many heads) in float64; `hidden` as in truth(). Differentiable."""
    s = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1])
    if hidden is None:
        hidden = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=q.device)
    m = s.detach().masked_fill(hidden, -math.inf).amax(-1, keepdim=True)
    # hidden before exp, not after: the gradient of an exp that overflows is NaN, even times 0
    e = (s - m.clamp_min(-1e300)).masked_fill(hidden, -math.inf).exp()
    total = e.sum(-1, keepdim=True)
    return e / total.masked_fill(total == 0, 1.0)


def truth(q, k, v, hidden=None):
    """Attention in float64, plainly; `hidden` (B or 1, 1, Nq, Nk) is True where a key isn't seen.

    Written apart from stage 3, which is itself held to it. Differentiable.
    """
    groups = q.shape[1] // k.shape[1]
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    return torch.einsum("bhij,bhjd->bhid", probabilities(q, k, hidden), v)


def true_lse(q, k, hidden):
    """The log of each row's sum of exp(scaled scores) in float64, (B, H, Nq); -inf for no key."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    s = torch.einsum("bhid,bhjd->bhij", q.double(), k) / math.sqrt(q.shape[-1])
    return torch.logsumexp(s.masked_fill(hidden, -math.inf), -1)


def options_of(problem):
    """The keyword arguments that `problem` asks of an attend."""
    options = {"causal": True} if problem.causal else {}
    if problem.seqlens_k is not None:
        lengths = torch.tensor(problem.seqlens_k, dtype=torch.int32, device=problem.device)
        options["seqlens_k"] = lengths
    return options


def hidden_keys(problem):
    """The mask of `problem`, (b, 1, nq, nk), True where a key is not seen; straight from words."""
    late = problem.nk - problem.nq if problem.causal else problem.nk
    lengths = problem.seqlens_k or (problem.nk,) * problem.b
    i, j = torch.arange(problem.nq)[:, None], torch.arange(problem.nk)
    hidden = torch.stack([(j > i + late) | (j >= n) for n in lengths])[:, None]
    return hidden.to(problem.device)


def relative_rounding(q, k):
    """How far off, of itself, an honest probability may be in q's dtype, the largest of them.

    No number goes through more than n = d + Nk + Nq + 10 roundings in any sum that it is part of,
    the rescales of a running sum included. So scores are off by n u S, where S is the largest
    sum_c |q k| scale, and a probability by 2 n u (1 + S) of itself: once for p and once for the sum
    that it is divided by. eps is 2 u.

    In half precision all this is done in float32; then p is rounded to the dtype, of itself by u,
    or, where it is denormal, by half the smallest number: Nk of those in a sum. What is summed is
    rounded once more.
    """
    n = q.shape[3] + k.shape[2] + q.shape[2] + 10
    keys, half = k.shape[2], q.dtype in (torch.float16, torch.bfloat16)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    S = (q.double().abs() @ k.double().abs().transpose(-2, -1)).max() * q.shape[3] ** -0.5
    wide, own = torch.finfo(torch.promote_types(q.dtype, torch.float32)), torch.finfo(q.dtype)
    E = (n * wide.eps * (1 + S)).item()
    if half:
        E += own.eps + keys * own.smallest_normal * own.eps / 2
    assert E < 0.1, f"a bound of {E:.2g} would let anything pass: take smaller tensors"
    return E


def lse_rounding(q, k):
    """How far an honest float32 lse may be from the truth, absolutely.

    By what the scores are, and by what the sum of p is of itself: half of relative_rounding; the
    other half, more than 13 u (1 + S) + (Nk + 10) u, has room for the roundings of the max, the
    logarithm, their sum and its units, each at most u (S + log Nk).
    """
    return relative_rounding(q.float(), k.float())


def rounding(q, k, v):
    """How far an honest output in q's dtype may be from the truth: o is a sum weighted by p."""
    return relative_rounding(q, k) * v.abs().max().item()


def gradient_rounding(q, k, v, dO, hidden=None):
    """How far honest dq, dk, dv may be from the truth, element by element.

    dS = p (dP - D). No |dP| is larger than A = |dO| |v|^T, and no |D| than A's mean under p; like
    p, they are off by E of that at most, and so are the sums: dv by 2 E p^T |dO|, dS by less than
    3 E p (A + mean), dq and dk by 4 E of what that adds up to with |k| and |q|. In half precision,
    where o (in D), p, dS and the sums are rounded, E has room for that. What becomes denormal on
    the way, p or dS, is off by half the smallest number there is, or, in float32, gone.
    """
    E, scale = relative_rounding(q, k), q.shape[3] ** -0.5
    own, wide = (torch.finfo(x) for x in (q.dtype, torch.promote_types(q.dtype, torch.float32)))
    tiny = max(own.smallest_normal * own.eps / 2, wide.smallest_normal)
    groups = q.shape[1] // k.shape[1]
    q, k, v, dO = (x.double() for x in (q, k, v, dO))
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    p = probabilities(q, k, hidden)
    q, k, v, dO = (x.abs() for x in (q, k, v, dO))
    A = dO @ v.mT  # (B, H, Nq, Nk)
    lost = tiny * (p > 0)
    dS = (4 * E * p + lost) * (A + (p * A).sum(-1, keepdim=True)) + lost
    dq = scale * (dS @ k)
    dk, dv = scale * (dS.mT @ q), (2 * E * p + lost).mT @ dO
    dk, dv = (x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))
    return dq + tiny, dk + tiny, dv + tiny


def assert_close(got, want, bound, what="o"):
    """|got - want| <= bound everywhere, a number or a tensor like both, and no NaN."""
    error = (got.double() - want.double()).abs()
    bound = torch.as_tensor(bound, dtype=torch.float64, device=error.device)
    if (error <= bound).all():
        return
    over = torch.where(error <= bound, 0.0, error - bound).nan_to_num(nan=math.inf)
    at = tuple(int(i) for i in torch.unravel_index(over.argmax(), over.shape))
    honest = bound.expand(error.shape)[at].item()
    off = f"{what} is off by {error[at].item():.2e} at {at}"
    raise AssertionError(f"{off}, an honest one by {honest:.2e} at most")


def everything(stage, q, k, v, dO, **options):
    """o, and dq, dk, dv where the stage has them."""
    if not stage.STAGE.gradients:
        return (stage.attend(q, k, v, **options),)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = stage.attend(*leaves, **options)
    return (o.detach(), *torch.autograd.grad(o, leaves, dO))


def gradients(stage, q, k, v, dO, **options):
    """o, dq, dk, dv of `stage`, by backward()."""
    with without_collector(), guarded_outputs():
        return everything(stage, q, k, v, dO, **options)


def true_gradients(q, k, v, dO, hidden=None):
    """o, dq, dk, dv in float64, by torch's autograd of the plain formula."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    o = truth(q, k, v, hidden)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), dO.double())


def in_torch(stage):
    """Whether it computes in torch's own operations: stage 3 does, and so does a ring of one rank
    on a CPU, which is stage 3."""
    return is_yardstick(stage) or ("world" in stage.STAGE.options and device_of(stage) == "cpu")


def is_yardstick(stage):
    return stage.STAGE.number == YARDSTICK
