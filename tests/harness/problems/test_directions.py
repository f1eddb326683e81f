"""What a call is in each direction, and what is said of an output that can't be differentiated."""

import weakref

import pytest
import torch
from made_up import problem

import stages
from harness.isolation import call
from harness.isolation.call import BadGradient, prepare
from harness.isolation.changes import AGAIN, ask_again
from harness.problems.directions import OUTPUTS, make_output_gradient
from harness.problems.inputs import make_inputs
from harness.problems.problem import DIRECTIONS

stage3 = stages.by_number(3).attend

SMALL = {"nq": 6, "nk": 5, "d": 4, "dtype": "float64", "h": 2, "hk": 2}
BOTH = ["bwd", "train"]


def given(**changes):
    """q, k, v and dO of a small problem in float64."""
    asked = problem(**{**SMALL, **changes})
    return (*make_inputs(asked), make_output_gradient(asked))


def copying(backward, forward=lambda ctx, x: x.clone()):
    """A function of autograd that copies its input, with a backward pass of its own."""
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Copying", (torch.autograd.Function,), methods).apply


def by_backward(q, k, v, dO):
    """o, dq, dk, dv as a user gets them: o.backward(dO), then .grad."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = stage3(*leaves)
    o.backward(dO)
    return o.detach(), *(x.grad for x in leaves)


def test_the_tables_know_every_direction_and_output():
    assert set(OUTPUTS) == set(AGAIN) == set(DIRECTIONS)
    for direction, rounds in AGAIN.items():
        assert rounds
        for _, factors in rounds:
            assert len(factors) == len(OUTPUTS[direction])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_call_returns_what_backward_leaves_behind(direction):
    q, k, v, dO = given()
    expected = dict(zip(("o", "dq", "dk", "dv"), by_backward(q, k, v, dO)))
    call = prepare(stage3, direction, q, k, v, dO)
    for _ in range(3):  # again and again the same
        found = call()
        assert len(found) == len(OUTPUTS[direction])
        for name, x in zip(OUTPUTS[direction], found):
            assert torch.equal(x, expected[name]), name
            assert not x.requires_grad
    # nothing is left behind in what was given
    assert all(x.grad is None and not x.requires_grad for x in (q, k, v, dO))


def test_a_backward_call_does_no_forward_pass():
    calls = []

    def counted(q, k, v):
        calls.append(1)
        return stage3(q, k, v)

    for direction, expected in (("fwd", 3), ("bwd", 1), ("train", 3)):
        calls.clear()
        call = prepare(counted, direction, *given())
        assert len(calls) == (direction == "bwd")
        for _ in range(3):
            call()
        assert len(calls) == expected


def test_dO_is_of_the_seed_the_dtype_and_no_copy_of_q():
    asked = problem(nq=40, nk=30, d=64)
    dO = make_output_gradient(asked)
    q = make_inputs(asked)[0]
    assert dO.shape == q.shape and dO.dtype == q.dtype
    assert torch.equal(dO, make_output_gradient(asked))
    assert not torch.equal(dO, make_output_gradient(problem(nq=40, nk=30, d=64, seed=8)))
    assert torch.corrcoef(torch.stack([q.flatten(), dO.flatten()]))[0, 1].abs() < 0.1
    assert abs(dO.mean()) < 0.1 and abs(dO.std() - 1) < 0.1
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        name = str(dtype).removeprefix("torch.")
        other = make_output_gradient(problem(nq=40, nk=30, d=64, dtype=name))
        assert torch.equal(other, dO.to(dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_asked_again_the_answers_are_the_old_ones_times_the_factors(direction, dtype):
    """Exactly: a change of sign or exponent rounds nothing. And the inputs are then as before."""
    inputs = given(dtype=dtype)
    before = [x.clone() for x in inputs]
    call = prepare(stage3, direction, *inputs)
    first = [x.clone() for x in call()]
    versions = [x._version for x in inputs]
    rounds = 0
    for changed, (words, factors) in zip(ask_again(call, direction, *inputs[2:]), AGAIN[direction]):
        rounds += 1
        assert torch.equal(inputs[2], -before[2] if "v" in words else before[2])
        assert torch.equal(inputs[3], 2 * before[3] if "dO" in words else before[3])
        assert [x._version for x in inputs] == versions, "a version counter tells"
        for x, old, factor in zip(changed(), first, factors):
            assert torch.equal(x, factor * old)
    assert rounds == len(AGAIN[direction])
    assert all(torch.equal(x, y) for x, y in zip(inputs, before))
    assert all(torch.equal(x, y) for x, y in zip(prepare(stage3, direction, *inputs)(), first))


def test_inputs_are_restored_when_the_second_call_fails():
    inputs = given()
    before = [x.clone() for x in inputs]
    for direction in DIRECTIONS:
        call = prepare(stage3, direction, *inputs)
        with pytest.raises(ZeroDivisionError):
            for _ in ask_again(call, direction, *inputs[2:]):
                raise ZeroDivisionError
        assert all(torch.equal(x, y) for x, y in zip(inputs, before))


@pytest.mark.parametrize("direction", BOTH)
@pytest.mark.parametrize(
    ("attend", "said"),
    [
        (lambda q, k, v: [stage3(q, k, v)], "o: returned list, expected a tensor"),
        (lambda q, k, v: None, "o: returned NoneType, expected a tensor"),
        (lambda q, k, v: stage3(q, k, v).detach(), "o: does not require grad"),
        (lambda q, k, v: stage3(q, k, v)[..., :3], r"o: returned shape \(1, 2, 6, 3\), expected"),
        (lambda q, k, v: stage3(q, k, v).float(), "o: returned dtype float32, expected float64"),
    ],
)
def test_an_output_that_breaks_the_contract_is_named(direction, attend, said):
    # a call whose output alone is amiss is left to the check of its outputs
    if direction == "train" and "dtype" in said:
        assert prepare(attend, direction, *given())()[0].dtype == torch.float32
        return
    with pytest.raises(BadGradient, match=said):
        prepare(attend, direction, *given())()


@pytest.mark.parametrize("direction", BOTH)
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_gradient_of_another_shape_is_named(direction, index):
    """By its own name, wherever in the stage's graph the function is that made it."""

    def attend(*inputs):
        # a view first: torch's own message then names an index of nobody's argument
        inputs = [x.view(x.shape) for x in inputs]
        inputs[index] = copying(lambda ctx, grad: grad[..., :-1])(inputs[index])
        return stage3(*inputs)

    name = ("dq", "dk", "dv")[index]
    with pytest.raises(BadGradient, match=rf"^{name}: got \[1, 2, ., 3\] but expected shape"):
        prepare(attend, direction, *given())()


@pytest.mark.parametrize("direction", BOTH)
def test_a_gradient_that_does_not_come_is_none(direction):
    dq, dk, dv = prepare(lambda q, k, v: stage3(q, k, v.detach()), direction, *given())()[-3:]
    assert dv is None and dq is not None and dk is not None


@pytest.mark.parametrize("direction", BOTH)
def test_what_a_backward_pass_raises_itself_is_passed_on(direction):
    def fails(ctx, grad):
        raise FileNotFoundError("no such kernel")

    with pytest.raises(FileNotFoundError, match="no such kernel"):
        prepare(lambda q, k, v: copying(fails)(stage3(q, k, v)), direction, *given())()


@pytest.mark.slow
def test_what_torch_compiled_for_training_can_go_through_its_graph_again():
    """Its backward pass may write into what was saved, unless it's told that it is needed again."""
    import torch._functorch.config

    # torch's own patch: pytest's deletes the setting afterwards, so that others don't find it
    with torch._functorch.config.patch(donated_buffer=True):
        # exp's result is saved, and is nobody's output
        attend = torch.compile(
            lambda q, k, v: torch.exp(torch.sin(q @ k.mT)) @ v, backend="aot_eager"
        )
        inputs = given()
        trained = prepare(attend, "train", *inputs)()[1:]
        call = prepare(attend, "bwd", *inputs)
        for _ in range(2):
            assert all(torch.equal(x, y) for x, y in zip(call(), trained))


def test_the_graph_of_the_last_forward_pass_goes_before_the_next_is_made():
    """Or two of them, N x N each in stage 3, would have to fit."""
    graphs, most = weakref.WeakSet(), []

    def forward(ctx, o):
        graphs.add(ctx)
        return o.clone()

    def attend(q, k, v):
        most.append(len(graphs))
        return copying(lambda ctx, grad: grad, forward)(stage3(q, k, v))

    inputs = given()
    call = prepare(attend, "bwd", *inputs)
    for again in ask_again(call, "bwd", *inputs[2:]):
        again()
    assert most == [0, 0]


def test_the_module_needs_no_torch():
    """The runner reads its tables."""
    assert "torch" not in vars(call)
