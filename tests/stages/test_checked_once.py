"""Input like one that has passed is not looked at again; any other is."""

import pytest
import torch

from stages.common import inputs
from stages.common.inputs import MOST_KEPT, check_inputs
from stages.contract import Stage, StageUnavailable


def make_stage(**fields):
    options = ("causal", "seqlens_k")
    return Stage(number=9, name="any", title="Any", idea="none", options=options, **fields)


@pytest.fixture
def looked(monkeypatch):
    """The list of inputs that are looked at."""
    looked, check_each = [], inputs.check_each

    def noted(*args):
        looked.append(args)
        return check_each(*args)

    monkeypatch.setattr(inputs, "check_each", noted)
    monkeypatch.setattr(inputs, "passed", {})
    return looked


def test_input_like_the_input_that_passed_is_not_looked_at_again(looked):
    stage = make_stage()
    for _ in range(3):
        q, k = torch.randn(2, 3, 5, 4), torch.nn.Parameter(torch.randn(2, 3, 7, 4))
        check_inputs(stage, q, k, k, causal=True)
        check_inputs(stage, q, k, k)
    assert len(looked) == 2
    check_inputs(make_stage(), q, k, k)  # another stage may refuse it
    assert len(looked) == 3


def test_input_unlike_the_input_that_passed_is_refused():
    q, k = torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 7, 4)
    lengths = torch.tensor([3, 2], dtype=torch.int32)
    good = {"q": q, "k": k, "v": k, "causal": False, "seqlens_k": lengths}
    stage = make_stage()
    for causal in (False, True):
        check_inputs(stage, q, k, k, causal=causal)
        check_inputs(stage, q, k, k, causal=causal, seqlens_k=lengths)
    bad = [
        ("q", q[0]), ("q", q.half()), ("q", q[..., :2]), ("q", q.to("meta")), ("q", None),
        ("q", q.to_sparse()), ("q", torch.nested.nested_tensor(list(q))), ("k", k[:1]),
        ("k", k.double()), ("v", k[:, :, :6]), ("causal", 1), ("causal", None),
        ("seqlens_k", lengths[:1]), ("seqlens_k", lengths.long()), ("seqlens_k", [3, 2]),
        ("seqlens_k", torch.tensor([3, 8], dtype=torch.int32)),
    ]  # fmt: skip
    for name, value in bad:
        for _ in range(2):  # to be refused is not to pass
            with pytest.raises(ValueError, match=r"^(q|k|v|causal|seqlens_k): got"):
                check_inputs(stage, **(good | {name: value}))


@pytest.mark.slow
def test_a_transformed_tensor_is_refused_after_a_plain_one_has_passed():
    """torch.func wraps a tensor of the same type, shape and dtype."""
    q, k = torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 7, 4)
    stage = make_stage()
    check_inputs(stage, q, k, k)
    with pytest.raises(ValueError, match=r"^q: got a tensor inside torch.func"):
        torch.func.grad(lambda q: check_inputs(stage, q, k, k) or q.sum())(q)
    ad = torch.autograd.forward_ad
    with ad.dual_level(), pytest.raises(ValueError, match=r"^q: got a tensor inside torch.func"):
        check_inputs(stage, ad.make_dual(q, q), k, k)
    trains = make_stage(gradients=True)
    torch.func.grad(lambda q: check_inputs(trains, q, k, k) or q.sum())(q)


def test_a_machine_that_cannot_run_it_says_so_each_time(monkeypatch):
    monkeypatch.setattr(inputs, "why_not", lambda stage, device: "there is no such GPU")
    q, stage = torch.zeros(1, 1, 1, 1), make_stage()
    for _ in range(2):
        with pytest.raises(StageUnavailable, match="there is no such GPU"):
            check_inputs(stage, q, q, q)


def test_only_so_many_kinds_are_kept(looked):
    stage = make_stage()
    sizes = range(1, MOST_KEPT + 2)
    for n in sizes:
        q = torch.empty(1, 1, n, 1)
        check_inputs(stage, q, q, q)
    assert len(looked) == len(sizes)
    check_inputs(stage, q, q, q)  # the latest one is kept
    assert len(looked) == len(sizes)
    q = torch.empty(1, 1, 1, 1)
    check_inputs(stage, q, q, q)  # the oldest one is not
    assert len(looked) == len(sizes) + 1
