"""Stage 0; and what stages 0 and 2, the same graph in two languages, are both held to.

Tests that take `stage` run on both. What only the C++ graph has is in test_s02_cpp_value_graph.py.
"""

import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from stages import s00_scalar_autograd, s02_cpp_value_graph, s03_torch_three_gemm
from stages.s00_scalar_autograd import Value, backward, topological_order, total

ROOT = Path(__file__).parents[2]
EPS = torch.finfo(torch.float64).eps
SHAPES = [  # B, H, Nq, Nk, d
    (1, 1, 1, 1, 1),
    (1, 1, 1, 7, 3),
    (2, 1, 5, 1, 4),
    (1, 2, 4, 9, 1),
    (2, 3, 5, 7, 16),
]


@pytest.fixture(params=[s00_scalar_autograd, s02_cpp_value_graph], ids=["stage0", "stage2"])
def stage(request):
    return request.param


def inputs(B, H, Nq, Nk, d, dtype=torch.float64, spread=1.0):
    """q, k, v that require grad, and a dO."""
    g = torch.Generator().manual_seed(0)
    q, k, v, dO = (
        torch.randn(B, H, N, d, generator=g, dtype=torch.float64).to(dtype)
        for N in (Nq, Nk, Nk, Nq)
    )
    q = q * spread
    return *(x.requires_grad_() for x in (q, k, v)), dO


def answer(attend, q, k, v, dO):
    """o, dq, dk, dv."""
    o = attend(q, k, v)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), dO)


def rounding(q, k, v, dO):
    """How far two honest float64 computations of o, dq, dk, dv may be apart.

    No number goes through more than n = d + Nk + Nq + 10 roundings in any one of the sums that it
    is part of. So scores are off by up to n u S, where S is the largest sum_c |q k| scale, and a
    probability by 2 n u (1 + S) of itself: twice, once for p and once for l. Two computations, and
    eps = 2 u: E. Then o and dv are sums weighted by p; dS = p (dP - D), where |dP| and |D| are both
    up to G, is off by up to 4 E G p; and dq, dk are sums of dS times k or q.
    """
    Nq, d = q.shape[2:]
    n = d + k.shape[2] + Nq + 10
    scale = d**-0.5
    S = (q.abs() @ k.abs().transpose(-2, -1)).max() * scale
    E = 2 * n * EPS * (1 + S)
    q, k, v, dO = (x.abs().max() for x in (q, k, v, dO))
    G = d * dO * v
    return E * v, scale * k * 4 * E * G, scale * q * 4 * E * G * Nq, E * Nq * dO


def assert_same(got, want, bounds):
    for name, x, y, bound in zip(("o", "dq", "dk", "dv"), got, want, bounds, strict=True):
        error = (x - y).abs().max().item()
        assert error <= bound.item(), f"{name} is off by {error:.2e}, bound {bound.item():.2e}"


def live_values():
    return sum(type(x) is Value for x in gc.get_objects())


# ---- Value, against torch


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: x + y,
        lambda x, y: x + x,
        lambda x, y: x * y,
        lambda x, y: x * x,
        lambda x, y: x * 0.3,
        lambda x, y: x - 2.5,
        lambda x, y: x.exp(),
        lambda x, y: y.reciprocal(),
        lambda x, y: (x * y + x) * (x * y + y),  # a diamond: x y is used twice
        lambda x, y: (x - 2.0).exp() * ((x - 2.0).exp() + (y - 2.0).exp()).reciprocal(),
    ],
)
@pytest.mark.parametrize(("x", "y"), [(1.5, -0.7), (-3.0, 2.0)])
def test_operations_and_their_gradients(f, x, y):
    xt, yt = (torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in (x, y))
    (ft := f(xt, yt)).backward()
    xv, yv = Value(x), Value(y)
    backward([fv := f(xv, yv)], [1.0])
    assert fv.data == pytest.approx(ft.item(), rel=8 * EPS, abs=0)
    for value, tensor in ((xv, xt), (yv, yt)):
        want = 0.0 if tensor.grad is None else tensor.grad.item()
        assert value.grad == pytest.approx(want, rel=32 * EPS, abs=0)


def test_several_roots_and_one_of_them_twice():
    x, y = Value(2.0), Value(3.0)
    xy, xx = x * y, x * x
    backward([xy, xx, xy], [1.0, 10.0, 100.0])
    assert (x.grad, y.grad) == (101 * 3.0 + 10 * 4.0, 101 * 2.0)


def test_backward_starts_afresh():
    x = Value(3.0)
    y = x * x + x
    for _ in range(2):
        backward([y], [1.0])
        assert (x.grad, y.grad) == (7.0, 1.0)


def test_topological_order_has_each_node_once_after_its_parents():
    x = Value(0.5)
    y = total([x * x, x, (x * x).exp(), x])
    order = topological_order([y, x, y])
    at = {node: i for i, node in enumerate(order)}
    assert len(at) == len(order) == 7
    assert all(at[parent] < at[node] for node in order for parent in node.parents)


def test_a_sum_of_n_takes_n_minus_1_nodes():
    xs = [Value(float(i)) for i in range(5)]
    assert total(xs).data == 10.0
    assert len(topological_order([total(xs)])) == 5 + 4
    assert total(xs[:1]) is xs[0]


@pytest.mark.slow
def test_a_long_chain_goes_backward_and_dies():
    # in a process of its own, so that a crash fails this test instead of ending all of them
    code = (
        "import threading\n"
        "from stages.s00_scalar_autograd import Value, backward\n"
        "def work():\n"
        "    x = y = Value(1.0)\n"
        "    for _ in range(200_000): y = y + x\n"
        "    backward([y], [1.0])\n"
        "    print(x.grad)\n"
        "    del y\n"
        "    print('freed')\n"
        "threading.stack_size(1 << 20)\n"
        "thread = threading.Thread(target=work)\n"
        "thread.start()\n"
        "thread.join()\n"
    )
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["200001.0", "freed"]), done.stderr


def test_no_reference_cycles():
    q, k, v, dO = inputs(1, 2, 4, 5, 3)
    gc.collect()
    gc.disable()
    try:
        before = live_values()
        o = s00_scalar_autograd.attend(q, k, v)
        o.backward(dO)
        assert live_values() - before == s00_scalar_autograd.node_count(1, 2, 4, 5, 3)
        del o
        assert live_values() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("why", ["nothing requires grad", "no_grad"])
def test_the_graph_is_not_kept_where_no_gradient_is_wanted(why):
    q, k, v, _ = inputs(1, 1, 3, 4, 2)
    before = live_values()
    if why == "no_grad":
        with torch.no_grad():
            o = s00_scalar_autograd.attend(q, k, v)
    else:
        o = s00_scalar_autograd.attend(q.detach(), k.detach(), v.detach())
    assert not o.requires_grad
    assert live_values() == before


# ---- both stages


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spread", [1.0, 1000.0])  # 1000: exp overflows but for the max
def test_output_and_gradients_in_float64(stage, shape, spread):
    q, k, v, dO = inputs(*shape, spread=spread)
    want = answer(s03_torch_three_gemm.attend, q, k, v, dO)
    assert_same(answer(stage.attend, q, k, v, dO), want, rounding(q, k, v, dO))


def test_gradcheck(stage):
    q, k, v, _ = inputs(1, 2, 3, 4, 2)
    assert torch.autograd.gradcheck(stage.attend, (q, k, v))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_other_dtypes_are_float64_rounded_once(stage, dtype):
    q, k, v, dO = inputs(1, 2, 5, 7, 3, dtype=dtype)
    got = answer(stage.attend, q, k, v, dO)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want = answer(s03_torch_three_gemm.attend, *wide, dO.double())
    assert {x.dtype for x in got} == {dtype}
    half_ulp = torch.finfo(dtype).eps / 2
    bounds = rounding(*wide, dO.double())
    bounds = [b + half_ulp * y.abs().max() for b, y in zip(bounds, want, strict=True)]
    assert_same(got, want, bounds)


def test_any_strides_and_any_strides_of_the_gradient(stage):
    g = torch.Generator().manual_seed(1)
    base_q = torch.randn(2, 5, 3, 4, generator=g, dtype=torch.float64, requires_grad=True)
    base_k = torch.randn(2, 1, 7, 4, generator=g, dtype=torch.float64, requires_grad=True)
    base_v = torch.randn(2, 3, 14, 8, generator=g, dtype=torch.float64, requires_grad=True)
    bases = base_q, base_k, base_v
    q = base_q.transpose(1, 2)  # (2, 3, 5, 4)
    k = base_k.expand(2, 3, 7, 4)
    v = base_v[:, :, 1::2, ::2]  # (2, 3, 7, 4)
    row = torch.randn(4, generator=g, dtype=torch.float64)
    for dO in (
        torch.randn(4, 3, 5, 2, generator=g, dtype=torch.float64).transpose(0, 3),
        row.expand(2, 3, 5, 4),
        torch.ones((), dtype=torch.float64).expand(2, 3, 5, 4),  # what sum() sends
    ):
        got, want = (
            (o.detach(), *torch.autograd.grad(o, bases, dO))
            for o in (attend(q, k, v) for attend in (stage.attend, s03_torch_three_gemm.attend))
        )
        o, dq, dk, dv = rounding(q, k, v, dO)
        assert_same(got, want, (o, dq, 3 * dk, dv))  # base_k serves three heads


@pytest.mark.parametrize("needs", ["q", "k", "v", "qk", "qv", "kv"])
def test_some_of_them_require_grad(stage, needs):
    q, k, v, dO = inputs(1, 2, 3, 4, 5)
    _, *want = answer(stage.attend, q, k, v, dO)
    leaves = [
        x.detach().requires_grad_(name in needs) for name, x in zip("qkv", (q, k, v), strict=True)
    ]
    stage.attend(*leaves).backward(dO)
    for name, leaf, grad in zip("qkv", leaves, want, strict=True):
        if name in needs:
            assert torch.equal(leaf.grad, grad)
        else:
            assert leaf.grad is None


def test_one_tensor_as_q_k_and_v(stage):
    x, _, _, dO = inputs(1, 2, 4, 4, 3)
    got, want = (
        torch.autograd.grad(attend(x, x, x), x, dO)[0]
        for attend in (stage.attend, s03_torch_three_gemm.attend)
    )
    _, *bounds = rounding(x, x, x, dO)
    assert (got - want).abs().max() <= sum(bounds)


def test_used_twice_in_one_graph(stage):
    q, k, v, dO = inputs(1, 1, 4, 4, 3)
    _, *grads = answer(stage.attend, q, k, v, dO)
    first, second = stage.attend(q, k, v), stage.attend(q, k, v)
    twice = torch.autograd.grad(first + 2 * second, (q, k, v), dO)
    for got, grad in zip(twice, grads, strict=True):
        torch.testing.assert_close(got, 3 * grad, rtol=8 * EPS, atol=8 * EPS)

    def deep(attend):  # the output of one is the input of the next
        return torch.autograd.grad(attend(attend(q, k, v), k, v), (q, k, v), dO)

    o = stage.attend(q, k, v).detach()
    slack = 10 * sum(rounding(o, k, v, dO)) * (1 + dO.abs().max()) * q.numel()
    for got, want in zip(deep(stage.attend), deep(s03_torch_three_gemm.attend), strict=True):
        assert (got - want).abs().max() <= slack


def test_two_passes_through_one_graph_are_the_same(stage):
    q, k, v, dO = inputs(1, 2, 3, 4, 5)
    o = stage.attend(q, k, v)
    first = torch.autograd.grad(o, (q, k, v), dO, retain_graph=True)
    torch.autograd.grad(o, (q, k, v), 7 * dO, retain_graph=True)
    again = torch.autograd.grad(o, (q, k, v), dO, retain_graph=True)
    assert all(map(torch.equal, first, again))
    o.backward(dO, retain_graph=True)
    o.backward(dO)
    assert all(torch.equal(x.grad, 2 * grad) for x, grad in zip((q, k, v), first, strict=True))


def test_a_gradient_of_a_gradient_is_refused(stage):
    q, k, v, dO = inputs(1, 1, 2, 3, 2)
    (dq,) = torch.autograd.grad(stage.attend(q, k, v), q, dO.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        dq.sum().backward()


def test_what_happens_to_the_output_later_does_not_matter(stage):
    q, k, v, dO = inputs(1, 1, 3, 4, 2)
    _, *want = answer(stage.attend, q, k, v, dO)
    o = stage.attend(q, k, v)
    with torch.no_grad():
        o.zero_()
    got = torch.autograd.grad(o, (q, k, v), dO)
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("index", range(3))
def test_inputs_that_were_changed_since_are_refused_as_torch_refuses_them(stage, index):
    *given, dO = inputs(1, 1, 3, 4, 2)
    o = stage.attend(*given)
    with torch.no_grad():
        given[index].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(o, given, dO)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_nodes_made_are_the_formula(stage, shape, requires_grad):
    q, k, v, dO = (x.detach().requires_grad_(requires_grad) for x in inputs(*shape))
    stage.attend(q, k, v)
    assert stage.nodes_made() == stage.node_count(*shape)
    if requires_grad:
        stage.attend(q, k, v).backward(dO)
        assert stage.nodes_made() == stage.node_count(*shape)  # backward makes none


def test_node_count_of_one_number_by_hand():
    # leaves q k v; q k, times scale, minus max, exp, 1 / l, p v, times 1 / l
    assert s00_scalar_autograd.node_count(1, 1, 1, 1, 1) == 3 + 7
    assert s00_scalar_autograd.node_count(1, 1, 64, 64, 16) == 277_504


def test_both_count_alike():
    for shape in [*SHAPES, (3, 5, 64, 100, 256)]:
        assert s00_scalar_autograd.node_count(*shape) == s02_cpp_value_graph.node_count(*shape)


def test_two_threads_at_a_time(stage):
    problems = [inputs(1, 2, 9 + i, 11, 4) for i in range(2)]
    want = [answer(stage.attend, *problem) for problem in problems]
    together = threading.Barrier(2)

    def work(i):
        together.wait()
        return [answer(stage.attend, *problems[i]) for _ in range(20)]

    with ThreadPoolExecutor(2) as pool:
        for i, answers in enumerate(pool.map(work, range(2))):
            assert all(all(map(torch.equal, got, want[i])) for got in answers)


def test_two_threads_through_one_graph(stage):
    q, k, v, dO = inputs(1, 1, 12, 12, 4)
    o = stage.attend(q, k, v)
    want = torch.autograd.grad(o, (q, k, v), dO, retain_graph=True)
    together = threading.Barrier(2)

    def work(_):
        together.wait()
        return [torch.autograd.grad(o, (q, k, v), dO, retain_graph=True) for _ in range(20)]

    with ThreadPoolExecutor(2) as pool:
        for answers in pool.map(work, range(2)):
            assert all(all(map(torch.equal, got, want)) for got in answers)
