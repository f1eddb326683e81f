"""A stage with gradients of its own is a node of torch's graph like any other."""

import pytest
import torch
from stage_checks import (
    FAKES,
    assert_close,
    device_of,
    for_each,
    gradient_rounding,
    in_nan,
    in_torch,
    normal,
    true_gradients,
)
from torch.autograd import forward_ad

every_node = for_each([stage for stage in FAKES if stage.STAGE.gradients and not in_torch(stage)])


def leaves(stage, shape=(1, 2, 5, 9, 8)):
    """q, k, v that require grad, and a dO; in a dtype that the stage's own kernels take."""
    dtype = torch.float32 if "float32" in stage.STAGE.dtypes else torch.float16
    *qkv, dO = normal(shape, 0, dtype, device_of(stage))
    return *(x.requires_grad_() for x in qkv), dO


def assert_honest(got, q, k, v, dO):
    """Raise unless `got` are dq, dk and dv, but for rounding."""
    want, bounds = true_gradients(q, k, v, dO)[1:], gradient_rounding(q, k, v, dO)
    for x, y, bound in zip(got, want, bounds, strict=True):
        assert_close(x, y, bound)


@every_node
def test_any_strides_of_the_gradient(stage):
    q, k, v, dO = leaves(stage)
    _, H, Nq, d = dO.shape
    for x in (
        in_nan(dO, (2, 0, 3, 1), (1, 2, 1, 2)),
        dO.mT.contiguous().mT,
        dO[:, :1, :1].expand(1, H, Nq, d),
        torch.ones((), dtype=q.dtype, device=q.device).expand(dO.shape),  # what sum() sends
    ):
        assert not x.is_contiguous()
        got = torch.autograd.grad(stage.attend(q, k, v), (q, k, v), x)
        assert_honest(got, q, k, v, x)


@every_node
@pytest.mark.parametrize("needs", ["q", "k", "v", "qk", "qv", "kv", ""])
def test_some_of_them_require_grad(stage, needs):
    q, k, v, dO = leaves(stage)
    want = torch.autograd.grad(stage.attend(q, k, v), (q, k, v), dO)
    some = [x.detach().requires_grad_(name in needs) for name, x in zip("qkv", (q, k, v))]
    o = stage.attend(*some)
    assert o.requires_grad == bool(needs)
    if needs:
        o.backward(dO)
    for name, x, grad in zip("qkv", some, want, strict=True):
        assert torch.equal(x.grad, grad) if name in needs else x.grad is None


@every_node
@pytest.mark.parametrize("how", [torch.no_grad, torch.inference_mode])
def test_without_gradients(stage, how):
    q, k, v, _ = leaves(stage)
    want = stage.attend(q, k, v)
    with how():
        o = stage.attend(q, k, v)
    assert not o.requires_grad and o.grad_fn is None
    assert torch.equal(o, want)


@every_node
def test_one_tensor_as_q_k_and_v(stage):
    x, _, _, dO = leaves(stage, (1, 2, 5, 5, 4))
    [got] = torch.autograd.grad(stage.attend(x, x, x), x, dO)
    want = sum(true_gradients(x, x, x, dO)[1:])
    assert_close(got, want, sum(gradient_rounding(x, x, x, dO)))


@every_node
def test_used_twice_in_one_graph(stage):
    q, k, v, dO = leaves(stage, (1, 2, 5, 5, 4))
    once = torch.autograd.grad(stage.attend(q, k, v), (q, k, v), dO)
    both = stage.attend(q, k, v) + stage.attend(q, k, v)
    twice = torch.autograd.grad(both, (q, k, v), dO)
    assert all(torch.equal(x, 2 * y) for x, y in zip(twice, once, strict=True))
    # the output of one is the input of the next: as the two steps one by one
    o = stage.attend(q, k, v)
    middle = o.detach().requires_grad_()
    dm, dk2, dv2 = torch.autograd.grad(stage.attend(middle, k, v), (middle, k, v), dO)
    dq, dk1, dv1 = torch.autograd.grad(o, (q, k, v), dm)
    deep = torch.autograd.grad(stage.attend(stage.attend(q, k, v), k, v), (q, k, v), dO)
    assert all(map(torch.equal, deep, (dq, dk1 + dk2, dv1 + dv2)))


@every_node
def test_passes_through_one_graph_are_the_same_and_add_up(stage):
    q, k, v, dO = leaves(stage)
    o = stage.attend(q, k, v)
    first = torch.autograd.grad(o, (q, k, v), dO, retain_graph=True)
    torch.autograd.grad(o, (q, k, v), 4 * dO, retain_graph=True)
    o.backward(dO, retain_graph=True)
    o.backward(dO)
    assert all(torch.equal(x.grad, 2 * y) for x, y in zip((q, k, v), first, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        o.backward(dO)


@every_node
@pytest.mark.parametrize("constant", [False, True])
def test_a_gradient_of_a_gradient_is_refused(stage, constant):
    """Whether dO is a constant, or part of the graph too."""
    q, k, v, dO = leaves(stage)
    plain = torch.autograd.grad(stage.attend(q, k, v), (q, k, v), dO)
    dO.requires_grad_(not constant)
    graphed = torch.autograd.grad(stage.attend(q, k, v), (q, k, v), dO, create_graph=True)
    assert all(map(torch.equal, plain, graphed))  # a graph that nobody goes back through is fine
    assert all(x.requires_grad for x in graphed)
    says = rf"stage {stage.STAGE.number} .*differentiated twice.*use stage 3"
    for wrt in (q, k, v) if constant else (q, k, v, dO):
        with pytest.raises(RuntimeError, match=says):
            torch.autograd.grad(sum(x.square().sum() for x in graphed), wrt, retain_graph=True)


@every_node
def test_gradients_that_come_all_at_once_are_refused(stage):
    q, k, v, dO = leaves(stage)
    says = rf"^stage {stage.STAGE.number} .*several gradients .*at once.*stage 3"
    with pytest.raises(RuntimeError, match=says):
        torch.autograd.grad(stage.attend(q, k, v), q, torch.stack([dO, dO]), is_grads_batched=True)


class Hides(torch.autograd.Function):
    """Calls a function where forward mode is off, as it is in a node's own forward pass."""

    @staticmethod
    def forward(ctx, call, x):
        with torch.enable_grad():
            call(x)
        return x.clone()

    @staticmethod
    def jvp(ctx, _, tangent):
        return tangent


@every_node
def test_a_tangent_that_was_hidden_from_the_forward_pass_is_not_lost(stage):
    q, k, v, dO = leaves(stage)
    kept = []
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(k.detach(), torch.ones_like(k))
        Hides.apply(lambda k: kept.append(stage.attend(q, k, v)), dual)
        with pytest.raises(NotImplementedError, match="forward mode AD"):
            torch.autograd.grad(kept[0], q, dO)


@every_node
def test_saved_tensors_may_come_back_as_negatives(stage):
    """As a hook of saved tensors may give them: raw memory holds their negatives."""
    q, k, v, dO = leaves(stage)
    want = torch.autograd.grad(stage.attend(q, k, v), (q, k, v), dO)
    with torch.autograd.graph.saved_tensors_hooks(torch.neg, torch._neg_view):
        got = torch.autograd.grad(stage.attend(q, k, v), (q, k, v), dO)
    assert all(map(torch.equal, got, want))


@every_node
def test_what_changes_in_place_before_the_backward_pass_is_refused(stage):
    """Or it doesn't matter, as the output's later life doesn't where nobody keeps it."""
    q, k, v, dO = leaves(stage)
    q, k, v = (x * 1 for x in (q, k, v))  # no leaves: those refuse by themselves
    given = {"q": q, "k": k, "v": v}
    if "seqlens_k" in stage.STAGE.options:
        given["seqlens_k"] = torch.tensor([4], dtype=torch.int32, device=q.device)
    for name in ("o", *given):
        o, same = stage.attend(**given), stage.attend(**given)
        want = torch.autograd.grad(same, (q, k, v), dO)
        with torch.no_grad():
            (given | {"o": o})[name].mul_(2)
        try:
            got = torch.autograd.grad(o, (q, k, v), dO)
        except RuntimeError as refusal:
            assert "modified by an inplace operation" in str(refusal)
        else:
            assert name == "o" and all(map(torch.equal, got, want))
