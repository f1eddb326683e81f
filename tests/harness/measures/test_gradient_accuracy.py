"""The judge of gradients: the truth is float64's, honest stages are exact, mistakes are not.

`flash` is an honest stage of another make than the judge: FlashAttention-2's two passes over tiles,
an online softmax, P again from the LSE in float32, dS and P rounded to the dtype, delta from the
rounded o. Its mutants make the mistakes that such kernels have.
"""

import math
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from made_up import problem, scores

import stages
from harness.isolation.call import bind, prepare
from harness.measures import oracle as oracle_module
from harness.measures.accuracy import Error, Oracle, judge_outputs
from harness.measures.oracle import (
    gradients_in_blocks,
    make_oracles,
    rounded_gradients,
    row_blocks,
    truncate_to_tf32,
)
from harness.problems.directions import OUTPUTS, make_output_gradient
from harness.problems.inputs import make_inputs

stage3 = stages.by_number(3).attend
pytestmark = pytest.mark.usefixtures("one_thread")


def hidden(asked):
    """(b, 1, nq, nk), True where a query may not see a key, pair by pair as the contract has it."""
    lengths = asked.seqlens_k or (asked.nk,) * asked.b
    rows = [
        [
            [j >= valid or (asked.causal and j > i + asked.nk - asked.nq) for j in range(asked.nk)]
            for i in range(asked.nq)
        ]
        for valid in lengths
    ]
    return torch.tensor(rows)[:, None]


def dense(asked, q, k, v):
    """Attention in the inputs' own dtype, by other means than stage 3's: groups, -inf, exp."""
    q = q.unflatten(1, (asked.hk, -1))  # (b, hk, groups, nq, d)
    s = torch.einsum("bhgid,bhjd->bhgij", q, k) * asked.d**-0.5
    s = s.masked_fill(hidden(asked)[:, :, None], -math.inf)
    top = s.amax(-1, keepdim=True).clamp_min(-1e300)
    p = (s - top).exp()
    p = p / p.sum(-1, keepdim=True).clamp_min(1e-300)
    return torch.einsum("bhgij,bhjd->bhgid", p, v).flatten(1, 2)


def dense_answers(asked):
    """o of `dense` in float64, and dq, dk, dv by autograd, the whole matrix at once."""
    leaves = [x.double().requires_grad_() for x in make_inputs(asked)]
    o = dense(asked, *leaves)
    return o.detach(), *torch.autograd.grad(o, leaves, make_output_gradient(asked).double())


@st.composite
def problems(draw, dtypes=("float64", "float32", "float16", "bfloat16")):
    """Small problems with every mask, group and ragged size."""
    b, hk, groups = (draw(st.integers(1, 2)) for _ in range(3))
    nq, nk = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    lengths = st.none() | st.tuples(*[st.integers(0, nk)] * b)
    dtype = draw(st.sampled_from(dtypes))
    return problem(
        inputs=draw(st.sampled_from(["normal", "peaky"])), seed=draw(st.integers(0, 99)),
        b=b, h=hk * groups, hk=hk, nq=nq, nk=nk, d=draw(st.integers(1, 9)), dtype=dtype,
        precision="ieee" if dtype == "float32" else dtype, causal=draw(st.booleans()),
        seqlens_k=draw(lengths), direction="bwd",
    )  # fmt: skip


def sizes_of(asked):
    """The magnitudes of dq, dk, dv, from dense matrices in float64: what nothing cancels in."""
    q, k, v = (x.double() for x in make_inputs(asked))
    dO = make_output_gradient(asked).double()
    k, v = (x.repeat_interleave(asked.h // asked.hk, dim=1) for x in (k, v))
    s = (q @ k.mT * asked.d**-0.5).masked_fill(hidden(asked), -math.inf)
    p = torch.softmax(s, -1).nan_to_num(0.0)
    dp = dO @ v.mT
    delta = (p * dp).sum(-1, keepdim=True)
    ds2 = (p * (dp.abs() + delta.abs())).square() / asked.d
    found = (ds2 @ k.square(), ds2.mT @ q.square(), p.square().mT @ dO.square())
    dk2, dv2 = (x.unflatten(1, (asked.hk, -1)).sum(2) for x in found[1:])
    return found[0].sqrt(), dk2.sqrt(), dv2.sqrt()


def gradient_oracles(asked):
    """The oracles of dq, dk, dv."""
    return [*make_oracles(replace(asked, direction="bwd")).values()]


def float64_rounding(asked):
    """How far apart two float64 gradients may be, each of dq, dk, dv: twice the rule's floor."""
    s_max = scores(*make_inputs(asked)[:2]).abs().max().item()
    u = torch.finfo(torch.float64).eps
    return [8 * u * (1 + s_max) * size.max().item() for size in sizes_of(asked)]


@settings(max_examples=120, deadline=None)
@given(problems())
def test_the_truth_is_float64s_own_gradient(asked):
    """Dense autograd's, up to rounding; 0 where a row sees no key, or a key is seen by none."""
    oracles = gradient_oracles(asked)
    for oracle, expected, bound in zip(oracles, dense_answers(asked)[1:], float64_rounding(asked)):
        assert oracle.out64.dtype == torch.float64 and oracle.out64.shape == expected.shape
        assert oracle.out3.dtype == getattr(torch, asked.dtype)
        assert (oracle.out64 - expected).abs().max() <= bound
    blind = hidden(asked).all(-1)[..., None].expand(-1, asked.h, -1, asked.d)
    assert (oracles[0].out64[blind] == 0).all()
    unseen = hidden(asked).all(2)[..., None].expand(-1, asked.hk, -1, asked.d)
    for oracle in oracles[1:]:
        assert (oracle.out64[unseen] == 0).all()


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(1, 5))
def test_blocks_are_the_whole(asked, rows):
    """The oracles in blocks of a few query rows are those of all rows at once."""
    whole = gradient_oracles(asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle_module, "BLOCK_BYTES", rows * 8 * asked.b * asked.h * asked.nk)
        assert len(list(row_blocks(asked))) == math.ceil(asked.nq / rows)
        parts = gradient_oracles(asked)
    for one, other, rounding in zip(whole, parts, float64_rounding(asked)):
        assert (one.out64 - other.out64).abs().max() <= rounding
        if asked.dtype in ("float32", "float64"):  # in half precision stage 3 need not be exact
            assert one.error(other.out3).within(one.bound)
            assert other.error(one.out3).within(other.bound)
        # yardsticks that sum in another order err otherwise, but no bound is another's double
        assert 0.5 * one.bound.max <= other.bound.max <= 2 * one.bound.max
        assert 0.5 * one.bound.rel <= other.bound.rel <= 2 * one.bound.rel


def test_no_n_by_n_is_held(monkeypatch):
    """Whatever the problem's size, no tensor is larger than a block, or an input in float64."""
    asked = problem(nq=700, nk=600, d=4, direction="train", causal=True)
    monkeypatch.setattr(oracle_module, "BLOCK_BYTES", 8 * 600 * 10)

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            result = function(*arguments, **(options or {}))
            if isinstance(result, torch.Tensor):
                self.elements = max(self.elements, result.numel())
            return result

    with Largest() as largest:
        make_oracles(asked)
    assert 600 * 10 <= largest.elements <= 2 * 600 * 10 < 700 * 600 / 10


def flash(asked, mistake=None, tile=64):
    """o, dq, dk, dv by tiles, as FlashAttention-2 has them; `mistake` says what it gets wrong."""
    q, k, v = make_inputs(asked)
    dtype, scale = q.dtype, asked.d**-0.5
    up = torch.promote_types(dtype, torch.float32)
    dO = make_output_gradient(asked).to(up)
    if mistake == "dO ignored":
        dO = torch.ones_like(dO)
    q, k, v = (x.to(up) for x in (q, k, v))
    k, v = (x.repeat_interleave(asked.h // asked.hk, dim=1) for x in (k, v))
    away = hidden(replace(asked, nk=asked.nk))
    if mistake == "mask off by one":
        i, j = torch.arange(asked.nq)[:, None], torch.arange(asked.nk)[None]
        away = away | (j == i + asked.nk - asked.nq)
    log2e = math.log2(math.e)
    m_i = torch.full((*q.shape[:3], 1), -math.inf, dtype=up)
    l_i, acc = torch.zeros_like(m_i), torch.zeros_like(q)
    tiles = [slice(start, start + tile) for start in range(0, asked.nk, tile)]
    for cols in tiles:
        s = (q @ k[:, :, cols].mT * (scale * log2e)).masked_fill(away[..., cols], -math.inf)
        m_new = torch.maximum(m_i, s.amax(-1, keepdim=True))
        finite = m_new.clamp_min(torch.finfo(up).min)
        p, alpha = torch.exp2(s - finite), torch.exp2(m_i - finite)
        l_i = l_i * alpha + p.sum(-1, keepdim=True)
        past = acc if mistake == "no rescale" else acc * alpha
        acc = past + p.to(dtype).to(up) @ v[:, :, cols]
        m_i = m_new
    o = torch.where(l_i > 0, acc / l_i, 0.0).to(dtype).to(up)
    lse = torch.where(l_i > 0, m_i + torch.log2(l_i), math.inf)
    delta = (o * dO).sum(-1, keepdim=True)
    if mistake == "no delta":
        delta = torch.zeros_like(delta)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for cols in tiles:
        for start in range(0, asked.nq, tile):
            rows = slice(start, start + tile)
            s = q[:, :, rows] @ k[:, :, cols].mT * (scale * log2e)
            p = torch.exp2(s - lse[:, :, rows]).masked_fill(away[..., rows, cols], 0.0)
            dp = dO[:, :, rows] @ v[:, :, cols].mT
            ds = (p * (dp - delta[:, :, rows])).to(dtype).to(up)
            dv[:, :, cols] += p.to(dtype).to(up).mT @ dO[:, :, rows]
            dq[:, :, rows] += ds @ k[:, :, cols]
            dk[:, :, cols] += ds.mT @ q[:, :, rows]
    dk = dk if mistake == "dK without scale" else scale * dk
    dk, dv = (x.unflatten(1, (asked.hk, -1)).sum(2) for x in (dk, dv))
    if mistake == "dK and dV swapped":
        dk, dv = dv, dk
    return [x.to(dtype) for x in (o, scale * dq, dk, dv)]


GRID = [
    {"nq": 1, "nk": 1, "d": 1}, {"nq": 5, "nk": 1, "d": 16}, {"nq": 1, "nk": 2, "d": 1},
    {"nq": 1, "nk": 70}, {"nq": 17, "nk": 33, "d": 5}, {"nq": 64, "nk": 64},
    {"nq": 100, "nk": 65, "d": 32, "causal": True},
    {"nq": 65, "nk": 130, "d": 24, "b": 2, "seqlens_k": (130, 41)},
    {"nq": 90, "nk": 70, "d": 16, "b": 2, "h": 4, "hk": 2, "causal": True, "seqlens_k": (70, 0)},
    {"nq": 300, "nk": 300, "d": 128, "causal": True},
]  # fmt: skip


def case(shape, dtype, inputs, seed=7):
    precision = "ieee" if dtype == "float32" else dtype
    asked = {"dtype": dtype, "precision": precision, "inputs": inputs, "seed": seed}
    return problem(**asked, direction="bwd", **shape)


def verdict(asked, answers):
    """What the judge says of o, dq, dk, dv: of those that the problem's direction has."""
    oracles = make_oracles(asked)
    return judge_outputs([x.double() for x in answers[-len(oracles) :]], oracles)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("inputs", ["normal", "peaky"])
@pytest.mark.parametrize("shape", GRID, ids=str)
def test_honest_tiles_are_exact(shape, inputs, dtype):
    """For every seed, and with tiles of another size: 320 runs."""
    for seed in (1, 2):
        asked = case(shape, dtype, inputs, seed)
        for tile in (16, 64):
            found = verdict(asked, flash(asked, tile=tile))
            assert found["exact"], f"seed {seed}, tile {tile}: {found['why']}"


MISTAKES = ["no delta", "dK without scale", "dO ignored", "dK and dV swapped", "mask off by one"]
TELLING = [  # one key: dq and dk are 0, scaled or not
    (shape, mistake)
    for shape in GRID
    for mistake in MISTAKES
    if shape["nk"] > 2 and (mistake != "mask off by one" or shape.get("causal"))
]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(("shape", "mistake"), TELLING, ids=str)
def test_mistakes_are_never_exact(shape, mistake, dtype):
    asked = case(shape, dtype, "normal")
    assert not verdict(asked, flash(asked, mistake))["exact"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("inputs", ["normal", "peaky", "real"])
def test_forgotten_delta_or_rescale_is_no_rounding_on_sharp_or_real_scores(inputs, dtype):
    """Where one key has all the weight dq and dk cancel to nothing, and the floor is the terms'."""
    asked = replace(case({"nq": 200, "nk": 200, "d": 32}, dtype, inputs), direction="train")
    assert verdict(asked, flash(asked))["exact"]
    for mistake, wrong in (("no delta", "dq"), ("dO ignored", "dq"), ("no rescale", "o")):
        found = verdict(asked, flash(asked, mistake))
        assert not found["exact"] and found["why"].startswith(f"{wrong}: "), mistake
    # not by a hair: the bound leaves room for honest rounding, and this is no rounding
    oracle = make_oracles(asked)["o"]
    apart = Error.between(flash(asked, "no rescale")[0], oracle.out64).max
    assert dtype != "float32" or apart > 100 * oracle.bound.max


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_one_key_leaves_room_for_rounding_and_for_nothing_else(dtype):
    """dq and dk are 0: the bound is finite, above 0, and of the terms' rounding."""
    asked = case({"nq": 30, "nk": 1, "d": 16}, dtype, "normal")
    q, k, v = (x.double() for x in make_inputs(asked))
    dO = make_output_gradient(asked).double()
    u = torch.finfo(getattr(torch, dtype)).eps
    dp = (dO @ v.mT).abs()  # (1, 1, 30, 1), and delta is as large
    largest = (2 * dp * k.abs()).max().item() * 16**-0.5
    dq, dk, dv = gradient_oracles(asked)
    assert (dq.out64 == 0).all() and (dk.out64 == 0).all() and dv.out64.norm() > 0
    assert u * largest < dq.bound.max < 20 * u * (1 + scores(q, k).abs().max()) * largest
    assert 0 < dq.bound.rel < 1 and 0 < dk.bound.rel < 1
    for oracle in (dq, dk):
        rounding = torch.full_like(oracle.out64, 0.1 * u * largest)
        assert oracle.error(rounding).within(oracle.bound)
        assert math.isfinite(oracle.error3(rounding).rel)
        assert not oracle.error(rounding + 30 * oracle.bound.max).within(oracle.bound)
    assert not oracle.error(torch.full_like(oracle.out64, math.nan)).within(oracle.bound)


def test_where_nothing_flows_only_zero_is_exact():
    """No row sees a key: there is nothing to round."""
    asked = problem(nq=4, nk=3, d=2, seqlens_k=(0,), direction="train")
    oracles = make_oracles(asked)
    zeros = [torch.zeros_like(oracle.out64) for oracle in oracles.values()]
    assert judge_outputs(zeros, oracles)["exact"]
    for index, name in enumerate(oracles):
        some = [x.clone() for x in zeros]
        some[index][..., 0] = 1e-30
        found = judge_outputs(some, oracles)
        assert not found["exact"] and found["why"].startswith(f"{name}: ")
        # an error against nothing has no size: no number is made of it
        assert found["err_f64_rel"] is None and found["err_f64_max"] == 1e-30


def figures(x, truth):
    """(max, relative) error, from the definitions."""
    difference = (x.double() - truth).abs()
    return difference.max().item(), (difference.square().sum() / truth.square().sum()).sqrt().item()


def mixed_answers(asked):
    """o, dq, dk, dv of design's mixed yardstick, the whole matrix at once; no groups, no masks."""
    q, k, v = make_inputs(asked)
    dtype, scale, dO = q.dtype, asked.d**-0.5, make_output_gradient(asked).float()
    q, k, v = q.float(), k.float(), v.float()
    p = torch.softmax(q @ k.mT * scale, -1)
    o = (p.to(dtype).float() @ v).to(dtype).float()
    ds = (p * (dO @ v.mT - (o * dO).sum(-1, keepdim=True))).to(dtype).float()
    found = o, scale * (ds @ k), scale * (ds.mT @ q), p.to(dtype).float().mT @ dO
    return [x.to(dtype) for x in found]


@pytest.mark.parametrize("inputs", ["normal", "peaky"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_mixed_yardstick_rounds_where_a_kernel_does(dtype, inputs):
    """P, dS, the o of delta, and the gradients: each has its share in the yardstick's error."""
    asked = case({"nq": 130, "nk": 130, "d": 64}, dtype, inputs)
    kind = getattr(torch, dtype)
    wide = tuple(x.float() for x in (*make_inputs(asked), make_output_gradient(asked)))
    found = rounded_gradients(asked, wide, lambda x: x.to(kind).float(), kind)
    for x, expected, truth in zip(found, mixed_answers(asked)[1:], dense_answers(asked)[1:]):
        assert x.dtype == kind
        apart = (x.double() - expected.double()).norm()
        assert apart < 0.1 * (expected.double() - truth).norm()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_judged_by_the_mixed_yardstick_not_by_stage_3(dtype):
    """On near-ties stage 3 in half precision is far worse than a good kernel."""
    asked = problem(inputs="peaky", dtype=dtype, nq=512, nk=512)
    [oracle] = make_oracles(asked).values()
    assert Error.between(mixed_answers(asked)[0], oracle.out64).within(oracle.bound)
    assert not Error.between(oracle.out3, oracle.out64).within(oracle.bound)


def assert_bounds(asked, yardsticks, floor_o, floor, slack):
    """The oracles, each with a bound of its yardstick's errors, o's twice, and of the floor.

    That is the floor of the largest v for o, of the terms that cancel for a gradient. `slack` is
    what two honest orders of summation differ by.
    """
    oracles, v = make_oracles(asked), make_inputs(asked)[2]
    sizes = v.double().abs().max(), *sizes_of(asked)
    rows = zip(oracles.items(), yardsticks, dense_answers(asked), sizes, strict=True)
    for (name, oracle), yardstick, truth, size in rows:
        times, floor_max, floor_rel = 2, floor_o * size.max().item(), floor_o
        if name != "o":
            size = torch.maximum(size, truth.abs())
            floor_rel = floor * (size.norm() / truth.norm()).item()
            times, floor_max = 3, floor * size.max().item()
        most, rel = figures(yardstick, truth)
        assert oracle.bound.max == pytest.approx(times * most + floor_max, rel=slack), name
        assert oracle.bound.rel == pytest.approx(times * rel + floor_rel, rel=slack), name
        assert oracle.out64.dtype == torch.float64 and oracle.out3.dtype == v.dtype
        torch.testing.assert_close(oracle.out64, truth, rtol=1e-10, atol=1e-11)
        assert oracle.norm is None
    return oracles


@pytest.mark.parametrize("inputs", ["normal", "peaky"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_the_bound_is_a_few_yardsticks_and_the_floor(dtype, inputs):
    asked = replace(case({"nq": 130, "nk": 130, "d": 64}, dtype, inputs), direction="train")
    q, k, v = make_inputs(asked)
    u = torch.finfo(q.dtype).eps
    of_three = prepare(stage3, "train", q, k, v, make_output_gradient(asked))()
    if dtype in ("float16", "bfloat16"):
        yardsticks, floors, slack = mixed_answers(asked), (u, 2 * u), 0.05
    else:
        floor = 4 * u * (1 + scores(q, k).abs().max().item())
        yardsticks, floors, slack = of_three, (floor, floor), 0.1
    oracles = assert_bounds(asked, yardsticks, *floors, slack)
    torch.testing.assert_close(oracles["o"].out3, of_three[0])


def test_tf32_is_judged_by_truncated_operands(monkeypatch):
    """On a CPU the switch does nothing, so that the truncated yardstick alone makes the bound."""
    switched = []
    monkeypatch.setattr(oracle_module, "set_precision", switched.append)
    asked = problem(precision="tf32", nq=256, nk=256, direction="train")
    q, k, v = make_inputs(asked)
    dO, scale, cut = make_output_gradient(asked), 64**-0.5, truncate_to_tf32
    p = torch.softmax(cut(q) @ cut(k).mT * scale, -1)
    o = cut(p) @ cut(v)
    ds = cut(p * (cut(dO) @ cut(v).mT - (o * dO).sum(-1, keepdim=True)))
    found = o, scale * (ds @ cut(k)), scale * (ds.mT @ cut(q)), cut(p).mT @ cut(dO)
    floor = 4 * torch.finfo(torch.float32).eps * (1 + scores(q, k).abs().max().item())
    oracles = assert_bounds(asked, found, floor, floor, 0.05)
    assert switched == 2 * ["ieee", "tf32"]  # the yardsticks themselves were computed in IEEE
    for name, narrow in make_oracles(replace(asked, precision="ieee")).items():
        assert oracles[name].bound.max > 20 * narrow.bound.max


def test_the_largest_errors_are_told_and_the_first_output_that_misses():
    oracles = {
        name: Oracle(torch.full((4,), 2.0).double(), torch.full((4,), 2.5), Error(0.25, 0.5))
        for name in ("o", "dq", "dk")
    }
    fine = [torch.full((4,), x).double() for x in (2.0, 2.125, 1.75)]
    found = judge_outputs(fine, oracles)
    assert found == {
        "finite": True, "exact": True, "why": "", "err_f64_max": 0.25, "err_f64_rel": 0.125,
        "err_stage3_max": 0.75, "err_stage3_rel": 0.3,
    }  # fmt: skip
    bad = [fine[0], fine[1] + 0.25, fine[2] + 8]
    found = judge_outputs(bad, oracles)
    assert not found["exact"] and found["finite"]
    assert found["why"] == "dq: max error 0.38, exact is 0.25 at most"
    assert found["err_f64_max"] == 7.75  # dk's, though dq is named
    bad[2][1] = math.inf
    found = judge_outputs(bad, oracles)
    assert found == {
        "finite": False, "exact": False, "why": "dk: 1 of 4 outputs are NaN or infinite"
    }  # fmt: skip
    # a forward pass has one output, and nobody asks which
    alone = {"o": oracles["o"]}
    assert judge_outputs([fine[0] + 1], alone)["why"] == "max error 1, exact is 0.25 at most"


def test_an_error_beyond_float64_is_no_number_and_no_end():
    oracles = make_oracles(problem(nq=4, nk=4, d=2, dtype="float64", precision="float64"))
    found = judge_outputs([torch.full((1, 1, 4, 2), 1e300, dtype=torch.float64)], oracles)
    assert not found["exact"] and found["finite"]
    assert found["err_f64_rel"] is None and found["err_f64_max"] == 1e300


@pytest.mark.parametrize("direction", ["fwd", "bwd", "train"])
def test_every_output_of_a_direction_has_its_oracle(direction, monkeypatch):
    asked = problem(nq=9, nk=7, d=4, causal=True, direction=direction)
    drawn = []
    monkeypatch.setattr(oracle_module, "make_inputs", lambda x: drawn.append(x) or make_inputs(x))
    oracles = make_oracles(asked)
    assert drawn == [asked]  # once: for 262144 tokens that takes seconds
    assert tuple(oracles) == OUTPUTS[direction]
    q, k, v = make_inputs(asked)
    call = prepare(bind(stage3, asked), direction, q, k, v, make_output_gradient(asked))
    for oracle, x in zip(oracles.values(), call(), strict=True):
        assert torch.equal(oracle.out3, x)
        assert oracle.error(x).within(oracle.bound)
    if direction == "train":
        [alone] = make_oracles(replace(asked, direction="fwd")).values()
        assert torch.equal(alone.out64, oracles["o"].out64) and alone.bound == oracles["o"].bound


def test_dk_and_dv_are_summed_in_float32_at_least(monkeypatch):
    """Or a thousand blocks' worth of half precision sums would be stage 3's error."""
    asked = case({"nq": 512, "nk": 8, "d": 8}, "bfloat16", "normal")
    inputs = (*make_inputs(asked), make_output_gradient(asked))
    truth = dense_answers(asked)[1:]
    monkeypatch.setattr(oracle_module, "BLOCK_BYTES", 8 * 8)
    assert len(list(row_blocks(asked))) == 512
    parts = gradients_in_blocks(stage3, asked, *inputs)
    u = torch.finfo(torch.bfloat16).eps
    for x, true in zip(parts[1:], truth[1:]):
        assert x.dtype == torch.bfloat16
        assert figures(x, true)[1] < 2 * u
