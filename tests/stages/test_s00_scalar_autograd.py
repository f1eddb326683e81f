"""Stage 0; and what stages 0 and 2, the same graph in two languages, are both held to.

Tests that take `stage` run on both. What only the C++ graph has is in test_s02_cpp_value_graph.py;
outputs and gradients are asked in test_problems.py and test_graph_nodes.py, of every stage.
"""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from ladder_value_graph import arena_stats
from stage_checks import everything, normal, printed

from stages import s00_scalar_autograd, s02_cpp_value_graph
from stages.s00_scalar_autograd import Value, backward, topological_order, total

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


def inputs(*shape):
    """q, k, v that require grad, and a dO."""
    *qkv, dO = normal(shape, 0, torch.float64)
    return *(x.requires_grad_() for x in qkv), dO


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
    said = printed(
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
    assert said == ["200001.0", "freed"]


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


# ---- both stages


@pytest.mark.parametrize("why", ["nothing requires grad", "no_grad"])
def test_the_graph_is_not_kept_where_no_gradient_is_wanted(stage, why):
    q, k, v = (x.detach().requires_grad_(why == "no_grad") for x in inputs(1, 1, 3, 4, 2)[:3])
    before = live_values(), arena_stats()["chunks_live"]
    with torch.set_grad_enabled(why != "no_grad"):
        o = stage.attend(q, k, v)
    assert not o.requires_grad
    assert (live_values(), arena_stats()["chunks_live"]) == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_other_dtypes_are_float64_rounded_once(stage, dtype):
    given = [x.to(dtype) for x in inputs(1, 2, 5, 7, 3)]
    wide = everything(stage, *(x.double() for x in given))
    assert all(map(torch.equal, everything(stage, *given), (x.to(dtype) for x in wide)))


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
