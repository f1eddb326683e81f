"""What stage 9 keeps between calls: the copy engine's descriptors, tile counters."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from stages.common.machine import has_module
from stages.s09_gluon_hopper import launch as hopper_launch
from stages.s09_gluon_hopper.launch import described

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
    device = torch.device("cpu")
    first = hopper_launch.counter_of(device, capturing)
    again = hopper_launch.counter_of(device, capturing)
    stream = 1
    other = hopper_launch.counter_of(device, capturing)
    assert (again is first) is not capturing
    assert first.data_ptr() != other.data_ptr()
    assert first.tolist() == other.tolist() == [0]


def other_step(x):
    return x.as_strided(x.shape, (x.stride(0) - 8, *x.stride()[1:]))


PLACES = [torch.zeros(1 << 19, dtype=torch.uint8) for _ in range(2)]


def launched_again(monkeypatch, tensors, options, moved=None):
    """The key that gradients are asked for by; of all that is allocated, one is elsewhere."""
    place = itertools.count()

    def empty(*shape, dtype, device):
        size = torch.Size(shape).numel() * dtype.itemsize
        return PLACES[next(place) == moved][:size].view(dtype).view(shape)

    keys = []
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        patch.setattr(
            torch,
            "empty_like",
            lambda x, dtype=None, **_: empty(*x.shape, dtype=dtype or x.dtype, device=None),
        )
        patch.setattr(
            hopper_launch, "counter_of", lambda *_: empty(1, dtype=torch.int32, device=None)
        )
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(hopper_launch, "multiprocessors", lambda device: 3)
        patch.setattr(hopper_launch, "launch_again", lambda key: keys.append(key) or True)
        hopper_launch.launch_backward(tuple(tensors), **options)
    return keys[0]


@gluon
def test_what_is_launched_again_is_told_apart_by_all_that_it_depends_on(monkeypatch):
    q, k, v, o, do = (torch.zeros(2, 4, 96, 64).half() for _ in range(5))
    usual = q, k, v, o, torch.zeros(2, 4, 96), do
    plain = {"causal": False, "seqlens_k": None, "DQ": True, "wide": False}
    lengths = [torch.zeros(2, dtype=torch.int32) for _ in range(2)]
    options = [
        ("causal", True),
        ("DQ", False),
        ("wide", True),
        *(("seqlens_k", x) for x in lengths),
    ]
    changes = [{1: k[:, :2], 2: v[:, :2]}, {1: k[:, :, :80], 2: v[:, :, :80]}]
    for change in (torch.clone, other_step, lambda x: x.view(torch.bfloat16)):
        changes += [{at: change(x)} for at, x in enumerate(usual)]
    calls = [
        (usual, plain),
        *((usual, plain | dict([option])) for option in options),
        *(([change.get(at, x) for at, x in enumerate(usual)], plain) for change in changes),
        *((usual, plain, moved) for moved in range(5)),  # of dq, dk, dv, and what lies between
    ]
    keys, again = ([launched_again(monkeypatch, *call) for call in calls] for _ in range(2))
    assert keys == again
    assert len(set(keys)) == len(calls) == 1 + 5 + 2 + 3 * 6 + 5
