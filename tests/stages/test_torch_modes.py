"""Stages in torch's own modes: right there, or a clear refusal, and never silently wrong."""

import sys
import threading

import pytest
import torch
from stage_checks import (
    FAKES,
    TWINS,
    assert_close,
    attend,
    device_of,
    every_stage,
    everything,
    for_each,
    in_torch,
    normal,
    rounding,
)
from torch.fx.experimental.proxy_tensor import make_fx

from stages.contract import StageUnavailable

SHAPE = (1, 2, 3, 5, 4)
IN_TRITON = [stage for stage in FAKES if "triton" in stage.STAGE.needs]
NOT_TORCH = [stage for stage in FAKES if not in_torch(stage)]


def tensors(stage):
    """q, k, v ~ N(0, 1)."""
    return normal(SHAPE, 0, device=device_of(stage))[:3]


# ---- torch's transformations


@for_each(NOT_TORCH)
@pytest.mark.parametrize("way", ["grad", "vmap", "jvp", "dual"])
def test_a_transformation_is_refused(stage, way):
    q, k, v = tensors(stage)

    def dual(q):
        with torch.autograd.forward_ad.dual_level():
            return stage.attend(torch.autograd.forward_ad.make_dual(q, q), k, v)

    ways = {
        "grad": torch.func.grad(lambda q: stage.attend(q, k, v).sum()),
        "vmap": lambda q: torch.func.vmap(lambda q: stage.attend(q, k, v))(q[None]),
        "jvp": lambda q: torch.func.jvp(lambda q: stage.attend(q, k, v), (q,), (q,)),
        "dual": dual,
    }
    with pytest.raises((ValueError, RuntimeError, NotImplementedError)) as refusal:
        ways[way](q)
    says = "inside torch.func" if not stage.STAGE.gradients else "autograd.Function"
    assert says in str(refusal.value)


@every_stage
def test_torch_compile_changes_nothing(stage):
    q, k, v = tensors(stage)
    want = 2 * stage.attend(q, k, v)
    got = torch.compile(lambda q: 2 * stage.attend(q, k, v), backend="eager")(q)
    assert torch.equal(got, want)


@every_stage
def test_another_default_device_changes_nothing(stage):
    q, k, v = (x.requires_grad_(stage.STAGE.gradients) for x in tensors(stage))
    want, answers = stage.attend(q, k, v), []
    torch.set_default_device("meta")
    try:
        answers.append(stage.attend(q, k, v))
        if stage.STAGE.gradients:
            answers[0].backward(q)
    finally:
        torch.set_default_device(None)
    assert torch.equal(answers[0], want)
    if stage.STAGE.gradients:
        got, q.grad = q.grad, None
        want.backward(q)
        assert torch.equal(got, q.grad)


@every_stage
def test_inference_and_deterministic_mode_change_nothing(stage):
    q, k, v = tensors(stage)
    want = attend(stage, q, k, v)
    with torch.inference_mode():
        assert torch.equal(attend(stage, q, k, v), want)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(attend(stage, q, k, v), want)
    finally:
        torch.use_deterministic_algorithms(False)


@every_stage
def test_autocast_changes_what_the_contract_says(stage):
    """The dtype of stages that train, torch's own operations, and nothing else."""
    q, k, v = tensors(stage)
    want = attend(stage, q, k, v)
    with torch.autocast(q.device.type, torch.float16):
        got = attend(stage, q, k, v)
    if stage.STAGE.number in (7, 9, 10):
        assert got.dtype == torch.float16
    elif not in_torch(stage) and stage not in TWINS:
        assert torch.equal(got, want)
    assert_close(got, want, rounding(*(x.half() for x in (q, k, v))))


# ---- what records calls of torch

RECORDERS = {
    "make_fx": lambda f, args: make_fx(f)(*args),
    "make_fx, fake": lambda f, args: make_fx(f, tracing_mode="fake")(*args),
    "make_fx, before dispatch": lambda f, args: make_fx(f, pre_dispatch=True)(*args),
    "torch.jit.trace": lambda f, args: torch.jit.trace(f, args, check_trace=False),
}


@every_stage
@pytest.mark.parametrize("recorder", RECORDERS)
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of sizes that it keeps
def test_a_recorded_call_is_computed_anew_or_refused(stage, recorder):
    """Never a constant: the answer to what it was recorded with."""
    q, k, v = tensors(stage)
    if "triton" not in stage.STAGE.needs and not in_torch(stage) and stage not in TWINS:
        with pytest.raises(ValueError, match="would keep its answer as a constant"):
            RECORDERS[recorder](lambda q, k, v: stage.attend(q, k, v), (q, k, v))
        return
    if "triton" in stage.STAGE.needs and recorder == "make_fx, before dispatch":
        pytest.skip("torch refuses to record an operator of Triton's interpreter like this")
    recorded = RECORDERS[recorder](lambda q, k, v: stage.attend(q, k, v), (q, k, v))
    assert torch.equal(recorded(2 * q, k, v), stage.attend(2 * q, k, v))


# ---- threads


@for_each([stage for stage in FAKES if stage in IN_TRITON or stage.STAGE.gradients])
def test_threads_do_not_disturb_each_other(stage):
    sizes = [(1, 1, 9, 16 * (i + 1), 8) for i in range(4)]
    problems = [normal(size, 0, device=device_of(stage)) for size in sizes]
    want = [everything(stage, *each) for each in problems]
    wrong, interval = [], sys.getswitchinterval()

    def work(i):
        for _ in range(3):
            try:
                if not all(map(torch.equal, everything(stage, *problems[i]), want[i])):
                    wrong.append(i)
            except Exception as error:
                wrong.append(error)

    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


@for_each(IN_TRITON)
def test_a_call_that_fails_lets_the_next_one_in(stage, monkeypatch):
    q, k, v = tensors(stage)
    name = "split_kernel" if hasattr(stage, "split_kernel") else "attention_kernel"
    kernels = stage if hasattr(stage, name) else sys.modules["stages.s06_triton_flash2"]

    class Fails:
        __name__ = name

        def __getitem__(self, grid):
            raise StageUnavailable("no launch")

    with monkeypatch.context() as patched:
        patched.setattr(kernels, name, Fails())
        with pytest.raises(StageUnavailable):
            stage.attend(q, k, v)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(stage.attend(q, k, v)), daemon=True)
    thread.start()
    thread.join(60)
    assert len(answers) == 1
