"""The facade for other projects: which stage is chosen, and a call by it."""

import os
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

import attention_ladder
import stages
from attention_ladder import choosing
from attention_ladder.choosing import Call
from harness.records.code import built_in_files
from stages import s08_triton_split_kv as split_kv
from stages.common.fit import H200

HALF = Call("cuda", "float16")
MASKED = HALF._replace(options=("causal", "seqlens_k", "gqa"))
WIDE = HALF._replace(many=True)


def card(major):
    """Stands in for why_not on a machine with a GPU of a compute capability; None: no Triton."""

    def why_not(declared, device):
        if major is None:
            return "no triton" if "triton" in declared.needs else None
        return None if declared.only_major in (None, major) else "another generation"

    return why_not


@pytest.mark.parametrize(
    ("major", "call", "number"),
    [
        (9, HALF, 9),
        (9, MASKED, 9),
        (9, HALF._replace(gradients=True), 9),
        (9, HALF._replace(few=True), 8),
        (9, HALF._replace(few=True, gradients=True), 9),
        (9, HALF._replace(dtype="float64"), 3),
        (9, HALF._replace(dtype="float32"), 6),
        (9, HALF._replace(dtype="float32", idle=True), 8),
        (8, HALF._replace(dtype="float32", idle=True), 8),
        (9, HALF._replace(dtype="float32", idle=True, gradients=True), 7),
        (10, HALF, 6),
        (8, HALF, 6),
        (8, MASKED, 6),
        (8, HALF._replace(dtype="bfloat16", few=True, options=("causal",)), 8),
        (8, HALF._replace(gradients=True), 7),
        (8, WIDE, 3),
        (8, HALF._replace(transformed=True), 3),
        (8, Call("cpu", "float32"), 3),
        (8, Call("mps", "float32", few=True), 3),
        (None, HALF, 3),
    ],
)
def test_the_rule(major, call, number, monkeypatch):
    monkeypatch.setattr(choosing, "why_not", card(major))
    assert choosing.number_for(*call) == number


def test_each_stage_is_in_the_rule_or_said_to_be_out_of_it():
    numbers = [stages.load(path).STAGE.number for path in built_in_files()]
    assert sorted([*choosing.ORDER, *choosing.NEVER]) == numbers
    for number in choosing.ORDER:  # what is chosen is exact, and takes every mask
        declared = stages.by_number(number).STAGE
        assert declared.exact_up_to is None
        assert {"causal", "seqlens_k", "gqa"} <= {*declared.options}


def tensors(heads=4, keys=9, **how):
    torch.manual_seed(0)
    shapes = (2, 4, 7, 8), (2, heads, keys, 8), (2, heads, keys, 8)
    return [torch.randn(shape, **how) for shape in shapes]


def test_what_the_rule_looks_at(monkeypatch):
    monkeypatch.setattr(choosing, "FEW", 7)

    def seen(tensors, causal=False, seqlens_k=None):
        return choosing.call_of(*tensors, causal, seqlens_k)

    plain = Call("cpu", "float32")
    assert seen(tensors()) == plain._replace(few=True)
    assert seen(tensors(keys=7)) == plain
    lengths = torch.tensor([7, 5], dtype=torch.int32)
    assert seen(tensors(2, 7), True, lengths).options == ("causal", "seqlens_k", "gqa")
    wanted = tensors(keys=7, requires_grad=True, dtype=torch.float64)
    assert seen(wanted) == Call("cpu", "float64", gradients=True)
    with torch.no_grad():
        assert not seen(wanted).gradients
    assert seen([x.expand(choosing.MAX_GRID + 1, -1, -1, -1) for x in (wanted[0][:1],) * 3]).many
    said = []
    torch.vmap(lambda *x: said.append(seen(x)) or x[0])(*(x[None] for x in tensors()))
    assert said[0].transformed


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 8),
    st.integers(1, 9000),
    st.integers(1, 9000),
    st.sampled_from([16, 64, 128, 256]),
    st.sampled_from([16, 132]),
)
@example(1, 1, 1, 4096, 4096, 64, 132)
@example(1, 44, 1, 192, 192, 64, 132)
def test_stage_8_is_chosen_for_float32_only_where_it_splits_the_keys(b, hk, group, nq, nk, d, sms):
    """And for one head, at any N from 256 on whose blocks leave multiprocessors idle."""
    card = H200._replace(multiprocessors=sms)
    q = SimpleNamespace(
        shape=(b, hk * group, nq, d), dtype=torch.float32, device=torch.device("cuda", 0)
    )
    k = SimpleNamespace(shape=(b, hk, nk, d))
    with (
        patch.object(split_kv, "input_precision", lambda q: "bf16x6"),
        patch.object(split_kv, "card_of", lambda device: card),
        patch.object(choosing, "multiprocessors", lambda index: sms),
    ):
        splits = split_kv.plan(q, hk, nk)[0]
        chosen = choosing.leaves_idle(q, k)
    assert splits > 1 or not chosen
    if b == hk == group == 1 and min(nq, nk) >= 256 and d <= 128:
        assert chosen == (nq <= 64 * sms)


def test_the_gpu_that_is_asked_is_the_one_that_has_the_tensors(monkeypatch):
    """One host may have an A100 and an H100."""

    def why_not(declared, device):
        return card({"cuda:0": 8, "cuda:1": 9}[str(device)])(declared, device)

    monkeypatch.setattr(choosing, "why_not", why_not)
    for index, number in enumerate((6, 9)):
        with FakeTensorMode():
            q = torch.empty(1, 1, 8, 64, dtype=torch.float16, device=f"cuda:{index}")
        call = choosing.call_of(q, q, q, False, None)
        assert choosing.number_for(*call) == number


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"seqlens_k": (9, 5)}])
def test_it_gives_the_stage_s_own_answer_and_gradients(options):
    if "seqlens_k" in options:
        options = {"seqlens_k": torch.tensor(options["seqlens_k"], dtype=torch.int32)}
    q, k, v = tensors(heads=2, requires_grad=True)
    chosen = attention_ladder.choose(q, k, v, **options)
    stage = attention_ladder.stage(chosen.number)
    got, want = attention_ladder.attend(q, k, v, **options), stage.attend(q, k, v, **options)
    assert torch.equal(got, want)
    for x, y in zip(*(torch.autograd.grad(o.sum(), (q, k, v)) for o in (got, want)), strict=True):
        assert torch.equal(x, y)


def test_a_choice_says_which_and_why_no_other(monkeypatch):
    q, k, v = tensors(requires_grad=True)
    assert attention_ladder.choose(q, k, v).number == 3
    monkeypatch.setattr(choosing, "why_not", card(8))
    monkeypatch.setattr(choosing, "call_of", lambda *_: HALF._replace(gradients=True))
    said = attention_ladder.choose(q, k, v)
    assert (said.number, said.name) == (7, "triton_training")
    assert {said.number, *said.passed_over} == {*choosing.ORDER, *choosing.NEVER}
    assert "another generation" in said.passed_over[9] and str(said).startswith("stage 7 (")
    assert "gradients" in said.passed_over[6] and "stage 7 comes first" in said.passed_over[3]


def test_wrong_arguments_raise_the_stage_s_own_error():
    q, k, v = tensors()
    wrong = [
        ({"q": q[0]}, "q: got 3 dimensions"), ({"v": [1.0]}, "v: got list"),
        ({"k": k.half()}, "k: got dtype float16"), ({"causal": 1}, "causal: got 1"),
        ({"seqlens_k": torch.ones(2)}, "seqlens_k: got float32"),
    ]  # fmt: skip
    for changed, said in wrong:
        for function in (attention_ladder.attend, attention_ladder.choose):
            with pytest.raises(ValueError, match=said):
                function(**{"q": q, "k": k, "v": v, **changed})
    with pytest.raises(ValueError, match="stage: got 77, expected one of 0, 1, "):
        attention_ladder.stage(77)


@pytest.mark.slow
@pytest.mark.parametrize("number", [3, 7])
def test_torch_compile_has_it_in_one_graph(number, monkeypatch):
    """As on a GPU, where stage 7 is chosen; here it is interpreted."""
    torch._dynamo.reset()
    if number == 7 and stages.by_number(7).STAGE.mode("cpu") != "interpreted":
        pytest.skip("compiled here: tests/stages/test_library.py")

    def why_passed_over(n, _):
        os.getpid()  # which breaks a graph, as does what asks for the GPU
        return None if n == number else "another"

    monkeypatch.setattr(choosing, "why_passed_over", why_passed_over)
    monkeypatch.setitem(choosing.MODULES, number, stages.by_number(number))

    def model(q, k, v):
        return 2 * attention_ladder.attend(q, 3 * k, v, causal=True)

    q, k, v = tensors(requires_grad=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for x, y in zip(
        *(torch.autograd.grad(f(q, k, v).sum(), (q, k, v)) for f in (compiled, model)), strict=True
    ):
        assert torch.allclose(x, y)


@pytest.mark.slow
def test_torch_compile_has_it_in_one_graph_for_any_length():
    """A cache of keys grows: from the second length on, torch compiles with symbols for sizes."""
    torch._dynamo.reset()
    compiled = torch.compile(attention_ladder.attend, backend="eager", fullgraph=True)
    for nq, nk in ((32, 32), (48, 48), (5, 40), (5, 41), (1, 42), (1, 43)):
        q, k, v = (torch.randn(1, 2, n, 16) for n in (nq, nk, nk))
        want = attention_ladder.attend(q, k, v, causal=True)
        assert torch.allclose(compiled(q, k, v, causal=True), want)


@pytest.mark.parametrize("gradients", [False, True])
def test_under_autocast_it_is_as_torch_s_own_attention(gradients):
    """With a gradient wanted or not."""
    q, k, v = tensors(requires_grad=gradients)
    with torch.autocast("cpu", torch.bfloat16):
        o = attention_ladder.attend(q, k, v)
        torchs = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert o.dtype == torchs.dtype == torch.bfloat16
    assert torch.equal(o, choosing.s03.attend(q.bfloat16(), k.bfloat16(), v.bfloat16()))


def test_what_no_stage_takes_is_said_by_stage_3():
    q = torch.randn(2, 8, 16)
    for layout in (torch.strided, torch.jagged):
        x = torch.nested.nested_tensor([q, q], layout=layout)
        with pytest.raises(ValueError, match=r"^q: got a [nN]ested ?[tT]ensor"):
            attention_ladder.attend(x, x, x)


@pytest.mark.parametrize("number", ["x", 5.0, True, [1], None, -1])
def test_a_number_that_no_stage_has_is_refused(number):
    with pytest.raises(ValueError, match=r"^stage: got .*expected one of 0, 1, 2"):
        attention_ladder.stage(number)
