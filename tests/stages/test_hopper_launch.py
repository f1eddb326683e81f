"""What stage 9 keeps between calls: compiled kernels, inputs that have passed, tile counters."""

from types import SimpleNamespace

import pytest
import torch

from stages.common import inputs
from stages.common.machine import has_module
from stages.contract import Stage, StageUnavailable
from stages.s09_gluon_hopper import launch as hopper_launch
from stages.s09_gluon_hopper.launch import MOST_KEPT, Launch, checks, described

STAGE = Stage(number=9, name="any", title="Any", idea="none", options=("causal", "seqlens_k"))


class Kernel:
    """Notes how it is called, itself and what it "compiles"."""

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        return lambda *args, **options: self.calls.append((grid, args, options)) or self.compiled

    @property
    def compiled(self):
        class Compiled:
            def __getitem__(_, grid):
                return lambda *args: self.calls.append((grid, args, "kept"))

        return Compiled()


def test_a_kernel_is_looked_for_at_the_first_call_only():
    kernel = Kernel()
    launch = Launch(kernel, 132, (1, 2, True), num_warps=4)
    for tensors in ("ab", "cd", "ef"):
        launch(*tensors)
    args = [(*tensors, 1, 2, True) for tensors in ("ab", "cd", "ef")]
    how = [{"num_warps": 4}, "kept", "kept"]
    grid = (132, 1, 1)
    assert kernel.calls == [(grid, each, way) for each, way in zip(args, how, strict=True)]


@pytest.fixture
def counted(monkeypatch):
    """A check, and the list of inputs that it looked at."""
    looked = []

    def check_inputs(*args, **options):
        looked.append(args)
        return inputs.check_inputs(*args, **options)

    monkeypatch.setattr("stages.s09_gluon_hopper.launch.check_inputs", check_inputs)
    return checks(STAGE), looked


def test_input_like_the_input_that_passed_is_not_checked_again(counted):
    check, looked = counted
    lengths = torch.tensor([3, 2], dtype=torch.int32)
    for _ in range(3):
        q, k = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4)
        check(q, k, k, True, None)
        check(q, k, k, False, lengths)
    assert len(looked) == 2


def test_input_unlike_the_input_that_passed_is_refused():
    q, k = torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 7, 4)
    lengths = torch.tensor([3, 2], dtype=torch.int32)
    good = {"q": q, "k": k, "v": k, "causal": False, "seqlens_k": lengths}
    check = checks(STAGE)
    for causal in (False, True):
        check(q, k, k, causal, None)
        check(q, k, k, causal, lengths)
    bad = [
        ("q", q[0]), ("q", q.half()), ("q", q[..., :2]), ("q", q.to("meta")), ("q", None),
        ("q", q.to_sparse()), ("q", torch.nested.nested_tensor(list(q))), ("k", k[:1]),
        ("k", k.double()), ("v", k[:, :, :6]), ("causal", 1), ("causal", None),
        ("seqlens_k", lengths[:1]), ("seqlens_k", lengths.long()), ("seqlens_k", [3, 2]),
    ]  # fmt: skip
    for name, value in bad:
        for _ in range(2):  # to be refused is not to pass
            with pytest.raises(ValueError, match=r"^(q|k|v|causal|seqlens_k): got"):
                check(*(good | {name: value}).values())


def test_a_machine_that_cannot_run_it_says_so_each_time(monkeypatch):
    monkeypatch.setattr(inputs, "why_not", lambda stage, device: "there is no such GPU")
    q, check = torch.zeros(1, 1, 1, 1), checks(STAGE)
    for _ in range(2):
        with pytest.raises(StageUnavailable, match="there is no such GPU"):
            check(q, q, q, False, None)


def test_only_so_many_kinds_are_kept(counted):
    check, looked = counted
    sizes = range(1, MOST_KEPT + 2)
    for n in sizes:
        q = torch.empty(1, 1, n, 1)
        check(q, q, q, False, None)
    assert len(looked) == len(sizes)
    check(q, q, q, False, None)  # the latest one is kept
    assert len(looked) == len(sizes)
    q = torch.empty(1, 1, 1, 1)
    check(q, q, q, False, None)  # the oldest one is not
    assert len(looked) == len(sizes) + 1


gluon = pytest.mark.skipif(not has_module("triton"), reason="no wheel of triton for this machine")


def read_by_the_copy_engine(x):
    """What `described` returns of x, and the tensor that its descriptor leads to."""
    named, descriptor = described(x, 64, 128)
    steps = descriptor.strides
    assert descriptor.base.data_ptr() == named.data_ptr()
    assert named.data_ptr() % 16 == 0 and steps[3] == 1
    assert all(step > 0 and step % 8 == 0 for step in steps[:3])
    return named, named.as_strided(descriptor.shape, steps)


@gluon
@pytest.mark.parametrize("make", [
    lambda x: x, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    lambda x: x[:, :, 3:], lambda x: x[:, 1:2, :1], lambda x: x[..., 8:12],
    # an axis of size 1 is never stepped along
    lambda x: x[:1, :1].as_strided((1, 1, 5, 64), (7, 0, 64, 1)),
    lambda x: x[..., :1].as_strided((2, 3, 5, 1), (960, 320, 64, 3)),
])  # fmt: skip
def test_what_the_copy_engine_can_read_is_not_copied(make):
    x = make(torch.randn(2, 3, 5, 64).half())
    named, read = read_by_the_copy_engine(x)
    assert named is x and torch.equal(read, x)


@gluon
@pytest.mark.parametrize("make", [
    lambda x: x[..., 1:], lambda x: x[..., ::2], lambda x: x.transpose(2, 3),
    lambda x: x[:, :1].expand(2, 3, 5, 64), lambda x: x[:, :, :1].expand(2, 3, 5, 64),
    lambda x: x[..., :12].contiguous(), lambda x: x[..., :7].contiguous(), torch._neg_view,
])  # fmt: skip
def test_what_it_cannot_read_is_copied(make):
    x = make(torch.randn(2, 3, 5, 64).half())
    named, read = read_by_the_copy_engine(x)
    assert named.data_ptr() != x.data_ptr() and not named.is_neg()
    assert torch.equal(read, x)


@pytest.mark.parametrize("capturing", [False, True], ids=["launched", "captured"])
def test_launches_that_may_overlap_have_tile_counters_of_their_own(capturing, monkeypatch):
    """Two streams' launches do; so do two in one CUDA graph, for all that is known of its parts."""
    stream = 0

    class Active:
        def get_current_stream(self, device):
            return stream

    monkeypatch.setattr(hopper_launch, "driver", SimpleNamespace(active=Active()))
    monkeypatch.setattr(hopper_launch, "counters", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    device = torch.device("cpu")
    first = hopper_launch.counter_of(device)
    again = hopper_launch.counter_of(device)
    stream = 1
    other = hopper_launch.counter_of(device)
    assert (again is first) is not capturing
    assert first.data_ptr() != other.data_ptr()
    assert first.tolist() == other.tolist() == [0]
