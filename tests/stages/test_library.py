"""Stages in Triton as operators of torch: one node of torch.compile's graph, forwards and back."""

import shutil

import pytest
import torch
from stage_checks import FAKES, device_of, for_each, normal, stage_id

import stages

IN_TRITON = [stage for stage in FAKES if "triton" in stage.STAGE.needs]
TRAINING = [stage for stage in IN_TRITON if stage.STAGE.gradients]
MASKED = [stage for stage in IN_TRITON if "causal" in stage.STAGE.options]
SHAPE = (2, 4, 9, 12, 8)


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()


@pytest.fixture
def counter():
    from torch._dynamo.testing import CompileCounter  # two seconds, which collection would take

    return CompileCounter()


def tensors(stage, heads=4, grad=False):
    """q, k, v ~ N(0, 1), k and v with `heads` heads; and lengths of the keys."""
    q, k, v, _ = normal(SHAPE, 0, device=device_of(stage))
    lengths = torch.tensor([12, 5], dtype=torch.int32, device=q.device)
    return *(x.requires_grad_(grad) for x in (q, k[:, :heads], v[:, :heads])), lengths


def compiled(function, backend="aot_eager", **options):
    """`function` as one graph: a break in it is an error."""
    return torch.compile(function, backend=backend, fullgraph=True, **options)


@for_each(IN_TRITON)
def test_a_model_around_a_stage_is_one_graph(stage, counter):
    q, k, v, _ = tensors(stage)

    def model(q, k, v):
        return torch.relu(stage.attend(q + 1, k, v.contiguous())).sum(-1)

    want = model(q, k, v)
    assert torch.equal(compiled(model, counter)(q, k, v), want)
    assert counter.frame_count == 1
    assert torch.equal(compiled(model)(q, k, v), want)


@pytest.mark.slow
@for_each(MASKED)
def test_masks_and_grouped_heads_go_with_it(stage):
    q, k, v, lengths = tensors(stage, heads=2)
    for causal in (False, True):
        for seqlens_k in (None, lengths):
            options = {"causal": causal, "seqlens_k": seqlens_k}
            got = compiled(lambda q, options=options: stage.attend(q, k, v, **options))(q)
            assert torch.equal(got, stage.attend(q, k, v, **options))


@pytest.mark.slow
@for_each(TRAINING)
@pytest.mark.parametrize("wanted", ["qkv", "q", "kv"])
def test_gradients_come_through_the_graph(stage, wanted):
    def gradients(function):
        q, k, v, lengths = tensors(stage, heads=2)
        leaves = {"q": q.detach(), "k": k.detach(), "v": v.detach()}
        for name in wanted:
            leaves[name].requires_grad_()
        function(*leaves.values(), lengths).square().sum().backward()
        return [x.grad for x in leaves.values()]

    def model(q, k, v, lengths):
        return 2 * stage.attend(q, 3 * k, v, causal=True, seqlens_k=lengths)

    for got, want in zip(gradients(compiled(model)), gradients(model), strict=True):
        assert (got is None) == (want is None)
        assert got is None or torch.equal(got, want)


@for_each(TRAINING)
def test_autocast_chooses_the_dtype_inside_the_graph_too(stage):
    q, k, v, _ = tensors(stage)

    def model(q):
        with torch.autocast(q.device.type, torch.float16):
            return stage.attend(q, k, v)

    got = compiled(model)(q)
    assert got.dtype == torch.float16
    assert torch.equal(got, model(q))


@pytest.mark.slow
@for_each(IN_TRITON)
def test_other_sizes_are_the_same_graph(stage, counter):
    def attend(n):
        q, k, v, _ = normal((2, 4, n, n + 3, 8), n, device=device_of(stage))
        return q, k, v

    function = compiled(stage.attend, counter, dynamic=True)
    for n in (9, 11, 13):
        assert torch.equal(function(*attend(n)), stage.attend(*attend(n)))
    assert counter.frame_count == 1


@pytest.mark.slow
@for_each(IN_TRITON)
def test_torch_finds_no_fault_with_the_operators(stage):
    """Schema, fake outputs, gradients through AOT: torch's own examination of an operator."""
    q, k, v, lengths = tensors(stage, grad=stage.STAGE.gradients)
    ladder, name = torch.ops.ladder, stage_id(stage)
    masks = (True, lengths) if stage in MASKED else (False, None)
    torch.library.opcheck(getattr(ladder, name).default, [x.detach() for x in (q, k, v)] + [*masks])
    if not stage.STAGE.gradients:
        return
    torch.library.opcheck(getattr(ladder, f"{name}_forward").default, (q, k, v, *masks))
    q, k, v = (x.detach() for x in (q, k, v))
    o, lse = getattr(ladder, f"{name}_forward")(q, k, v, *masks)
    for wanted in ([True, True, True], [False, True, False]):
        torch.library.opcheck(
            getattr(ladder, f"{name}_backward").default,
            (torch.ones_like(o), q, k, v, *masks, o, lse, wanted),
        )


@pytest.mark.slow
@for_each(IN_TRITON)
def test_bad_input_is_refused_in_a_graph_as_outside(stage):
    q, k, v, _ = tensors(stage, grad=stage.STAGE.gradients)
    function = torch.compile(stage.attend, backend="aot_eager")
    for bad in ((q[0], k, v), (q, k.double(), v), (q, k, v[:, :, :5]), (q, None, v)):
        with pytest.raises(ValueError, match=r"^[qkv]: got .*, expected"):
            function(*bad)
    if stage in MASKED:
        with pytest.raises(ValueError, match=r"^causal: got 1, expected True or False"):
            function(q, k, v, causal=1)


@for_each(
    [stage for stage in IN_TRITON if not stage.STAGE.gradients and "paged" in stage.STAGE.options]
)
def test_a_gradient_that_is_not_there_is_refused_in_a_graph_too(stage):
    q, k, v, _ = tensors(stage, grad=True)
    with pytest.raises(ValueError, match=r"^q: got requires_grad=True"):
        torch.compile(stage.attend, backend="aot_eager")(q, k, v)


@pytest.mark.parametrize("name", ["mine (1)", "mine-5", "O'Neil", "müller", "5"])
def test_a_file_of_any_name_is_loaded(name, tmp_path):
    """Its name goes into those of torch's operators."""
    path = tmp_path / f"{name}.py"
    shutil.copy(stages.HERE / "s05_triton_online.py", path)
    stage = stages.load(path)
    assert stage.STAGE.number == 5
    q = torch.randn(1, 1, 3, 4)
    assert torch.equal(stage.attend(q, q, q), stages.by_number(5).attend(q, q, q))
