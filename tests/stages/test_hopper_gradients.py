"""Stage 9's backward kernels, as far as they run without a GPU: before and after the Gluon one.

What the copy engine and the matrix unit do is tested on a Hopper GPU (tests/gpu), how the Gluon
kernel compiles in test_cubins.py.
"""

import sys
import weakref

import pytest
import torch
from stage_checks import normal

import stages
from stages import s07_triton_training as s07
from stages import s08_triton_split_kv as s08
from stages.common.machine import has_module
from stages.s06_triton_flash2 import forward as s06_forward
from stages.s09_gluon_hopper import launch as hopper_launch

STAGE = stages.by_number(9)

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" and not has_module("triton"), reason="no triton for this machine"
)

SIZES = [  # d, D, BLOCK_M
    (128, 128, 64), (100, 128, 64), (64, 64, 128), (39, 64, 128), (256, 256, 64), (200, 256, 64),
    (192, 192, 64), (96, 96, 64), (90, 96, 64), (80, 80, 64),
]  # fmt: skip


def registers(tile):
    """A tile of dQ as its two consumers add it up: each its half, in the order of its registers.

    64 x 64 at a time, or 64 x 32, 64 x 16; above d = 128 a consumer has one or two of them.

    After wgmma's picture of an accumulator (PTX ISA, m64nNk16): warp w has rows 16 w to 16 w + 15;
    of 8 rows and 8 columns thread t has row t / 4 and columns 2 (t % 4) and the next.
    """
    halves = tile.split(64, dim=1 if tile.shape[1] > 64 else 0)
    return torch.stack(
        [
            half[16 * warp + 8 * below + thread // 4, 8 * group + 2 * (thread % 4) + column]
            for half in halves
            for warp in range(4)
            for group in range(half.shape[1] // 8)
            for thread in range(32)
            for below in range(2)
            for column in range(2)
        ]
    )


@pytest.mark.parametrize(("d", "D", "BLOCK_M"), SIZES)
def test_sums_come_back_in_order(d, D, BLOCK_M):
    H, Nq = 2, BLOCK_M + 22
    padded = 2 * BLOCK_M
    want = normal((1, H, padded, 1, D), 0)[0]
    tiles = want.view(H, 2, BLOCK_M, D)
    sums = torch.stack([torch.stack([registers(tile) for tile in head]) for head in tiles])
    rows = torch.zeros((1, H, 2, padded))
    rows[0, 1, 0] = float("inf")  # a head whose rows see no key
    dq = torch.full((1, Nq, H, d), float("nan")).transpose(1, 2)
    hopper_launch.postprocess_kernel[(2, H, 1)](
        sums, rows, dq, *dq.stride(), Nq, padded, d, 0.5, BLOCK_M=BLOCK_M, D=D
    )
    assert torch.equal(dq[0, 0], 0.5 * want[0, 0, :Nq, :d])
    assert (dq[0, 1] == 0).all()


@pytest.mark.parametrize(
    ("d", "dtype", "wanted"),
    [(16, torch.float32, (True, True, True)), (136, torch.float32, (False, True, True)),
     (16, torch.float16, (True, False, False)), (136, torch.float16, (True, False, False))],
)  # fmt: skip
def test_what_this_kernel_is_not_for_goes_to_stage_7(d, dtype, wanted):
    q, k, v, do = normal((1, 2, 5, 7, d), 0, dtype)
    o, lse = normal((1, 2, 5, 7, d), 1, dtype)[0], normal((1, 2, 10, 7, 1), 2)[0][:, :, ::2, 0]
    got = hopper_launch.backward(q, k, v, o, lse, do, True, None, wanted)
    want = s07.backward(q, k, v, o, lse.contiguous(), do, True, None, wanted)
    for x, y in zip(got, want, strict=True):
        assert (x is None and y is None) or torch.equal(x, y)


@pytest.mark.parametrize(("n", "number"), [(200, 8), (64, 6)])
def test_float32_goes_to_stage_8_or_6(n, number):
    """To stage 8 where one head is split over its keys."""
    q, k, v, _ = normal((1, 1, n, n, 16), 0, torch.float32)
    got, want = torch.empty(2, 1, 1, n)
    o = hopper_launch.forward(q, k, v, True, None, lse=got)
    other = {6: s06_forward, 8: s08.forward}[number]
    assert torch.equal(o, other(q, k, v, True, None, lse=want)) and torch.equal(got, want)
    assert (s08.plan(q, 1, n)[0] > 1) == (number == 8)


class Launched:
    """Stands in for the three kernels: notes what each is launched with, by name."""

    def __init__(self, monkeypatch):
        counter, self.calls = torch.zeros(1, dtype=torch.int32), {}
        monkeypatch.setattr(hopper_launch, "multiprocessors", lambda device: 3)
        monkeypatch.setattr(hopper_launch, "counter_of", lambda *_: counter)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        uncached = hopper_launch.backward_launches.__wrapped__
        monkeypatch.setattr(hopper_launch, "backward_launches", uncached)
        for name in (
            "preprocess_kernel", "backward_kernel", "two_pass_kernel", "postprocess_kernel",
        ):  # fmt: skip
            monkeypatch.setattr(hopper_launch, name, self.kernel(name))

    def kernel(self, name):
        names = getattr(hopper_launch, name).arg_names

        class Kernel:
            def __getitem__(_, grid):
                return lambda *args, **options: self.note(
                    name, {"grid": grid, **dict(zip(names, args, strict=False)), **options}
                )

        return Kernel()

    def note(self, name, given):
        if name == "two_pass_kernel":
            name = "values" if given["VALUES"] else "keys"
        self.calls[name] = given

    def backward(self, tensors, causal=False, seqlens_k=None, DQ=True):
        """The gradients' tensors, of q, k, v and dO."""
        q, k, v, do = tensors
        passed = q, k, v, q, torch.zeros(q.shape[:3]), do
        return hopper_launch.launch_backward(passed, causal, seqlens_k, DQ)


@pytest.fixture
def launched(monkeypatch):
    return Launched(monkeypatch)


@pytest.mark.parametrize("d", [136, 192, 193, 256])
@pytest.mark.parametrize("DQ", [True, False])
def test_above_128_dv_is_computed_in_one_pass_and_dk_and_dq_in_another(d, DQ, launched):
    dq, dk, dv = launched.backward(normal((1, 2, 70, 130, d), 0, torch.float16), True, DQ=DQ)
    values, keys = launched.calls["values"], launched.calls["keys"]
    assert values["gradient_ptr"] is dv
    assert keys["gradient_ptr"] is dk
    # the first pass zeroes the sums of dq, the second adds to them
    assert (dq is not None, values["DQ"], keys["DQ"]) == (DQ, DQ, DQ)
    assert not launched.calls["preprocess_kernel"]["ZERO"]
    assert values["PARTS"] == keys["PARTS"] == (3 if d <= 192 else 2)
    assert ("postprocess_kernel" in launched.calls) == DQ


@pytest.mark.parametrize(
    ("nk", "lengths", "edge"), [(256, None, False), (255, None, True), (256, (3, 9), True)]
)
@pytest.mark.parametrize(("d", "kernels"), [(64, ["backward_kernel"]), (192, ["values", "keys"])])
def test_only_tiles_with_keys_that_do_not_count_are_edges(nk, lengths, edge, d, kernels, launched):
    seqlens_k = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    launched.backward(normal((2, 2, 64, nk, d), 0, torch.float16), seqlens_k=seqlens_k)
    assert all(launched.calls[kernel]["EDGE"] is edge for kernel in kernels)


@pytest.mark.parametrize(("causal", "heads", "section"), [
    (True, 1, 4), (True, 6, 4), (True, 100, 8), (False, 1, 2), (False, 100, 2)
])  # fmt: skip
def test_heads_computed_together_fit_the_cache(causal, heads, section, launched, monkeypatch):
    """In sections alike of all eight, of at least eight query heads; two, where tiles are alike."""
    q, k, v, do = normal((2, 8, 70, 130, 64), 0, torch.float16)
    size = 2 * 70 * 64 * (2 + 2 + 4)  # of a key head's queries, dO and sums of dQ
    monkeypatch.setattr(hopper_launch, "L2_BYTES", heads * size)
    launched.backward((q, k[:, :4], v[:, :4], do), causal)
    assert launched.calls["backward_kernel"]["section"] == section


@pytest.mark.parametrize("captured", [False, True])
def test_into_a_graph_of_the_user_s_each_kernel_is_launched_anew(captured, launched, monkeypatch):
    """No other graph can be launched into it, and its memory is its own: nothing is kept of it."""
    asked, kept, told = [], [], []
    counter_of = hopper_launch.counter_of
    monkeypatch.setattr(
        hopper_launch, "counter_of", lambda *args: told.append(args[1]) or counter_of(*args)
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    monkeypatch.setattr(hopper_launch, "launch_again", asked.append)
    launch_and_keep = hopper_launch.launch_and_keep
    monkeypatch.setattr(
        hopper_launch,
        "launch_and_keep",
        lambda *args: kept.append(args[0]) or launch_and_keep(*args),
    )
    launched.backward(normal((1, 2, 64, 64, 64), 0, torch.float16), False)
    assert len(launched.calls) == 3 and told == [captured]
    assert (asked, kept) == ([], [None]) if captured else asked == kept != [None]


@pytest.mark.parametrize(("d", "kernels"), [(64, 3), (192, 4)])
def test_copies_live_until_every_kernel_is_launched(d, kernels, launched, monkeypatch):
    """Descriptors keep no memory: a copy that nobody holds any more would be written over.

    At d = 192 two kernels read the same copies, in tiles of other sizes.
    """
    copies, alive = [], []
    padded = hopper_launch.padded

    def note(*args):
        made = padded(*args)
        copies.append(weakref.ref(made))
        return made

    monkeypatch.setattr(hopper_launch, "padded", note)
    launched.note = lambda name, given: alive.append([copy() for copy in copies])
    launched.backward(x[..., ::2] for x in normal((1, 2, 70, 130, 2 * d), 0, torch.float16))
    assert len(copies) == 4
    assert len(alive) == kernels
    assert not any(copy is None for kept in alive for copy in kept)


OTHER_STEPS, NEGATIVE = lambda x: x[..., ::2], torch._neg_view


@pytest.mark.parametrize(("look", "copied"), [
    (None, None), *((OTHER_STEPS, at) for at in (0, 1, 2, 5)),
    *((NEGATIVE, at) for at in range(6)),
])  # fmt: skip
def test_what_is_launched_with_a_copy_is_not_kept(look, copied, launched, monkeypatch):
    """The copy's address is not in the key; a negative's own is that of another tensor."""
    wide = normal((1, 2, 70, 130, 128), 0, torch.float16)
    q, k, v, do = (x[..., :64] for x in wide)
    tensors = [q, k, v, q, torch.zeros((1, 2, 70)), do]
    if look is OTHER_STEPS:
        tensors[copied] = look((*wide[:3], None, None, wide[3])[copied])
    elif look is NEGATIVE:
        tensors[copied] = look(tensors[copied])
    asked, keys, keep = [], [], hopper_launch.launch_and_keep
    monkeypatch.setattr(hopper_launch, "launch_again", asked.append)
    monkeypatch.setattr(
        hopper_launch, "launch_and_keep", lambda key, steps: keys.append(key) or keep(key, steps)
    )
    hopper_launch.launch_backward(tuple(tensors), False, None, True)
    assert [key is None for key in keys] == [copied is not None]
    assert (not asked) == (look is NEGATIVE)
    given = launched.calls["preprocess_kernel"]
    steps = [given[f"stride_do{axis}"] for axis in "bhmd"]
    assert torch.equal(given["do_ptr"], tensors[5])
    assert not any(x.is_neg() for x in given.values() if isinstance(x, torch.Tensor))
    assert list(given["do_ptr"].stride()) == steps


@pytest.mark.parametrize("wanted", [(True, True, True), (False, True, True)])
def test_dq_is_stage_7s_where_its_bits_must_not_differ(wanted, monkeypatch):
    q, k, v, do = normal((1, 2, 7, 9, 8), 0, torch.float16)
    lse = torch.zeros((1, 2, 7))
    asked = []

    def launch(*args):
        asked.append(args[-1])
        return None, k, v

    monkeypatch.setattr(hopper_launch, "launch_backward", launch)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    dq, dk, dv = hopper_launch.backward(q, k, v, q, lse, do, False, None, wanted)
    assert asked == [False]  # not added up by whoever comes first
    assert dk is k
    assert dv is v
    want = s07.backward(q, k, v, q, lse, do, False, None, (wanted[0], False, False))[0]
    assert (dq is None and want is None) or torch.equal(dq, want)


def test_a_second_derivative_is_refused_in_this_stage_s_name(monkeypatch):
    """With stage 7's kernels, which run here: what is refused is the same."""
    q, k, v, do = normal((1, 2, 5, 7, 8), 0)
    monkeypatch.setattr(STAGE.launch, "forward", s06_forward)
    o = STAGE.Attention.apply(STAGE.PASSES, q.requires_grad_(), k, v, False, None)
    [dq] = torch.autograd.grad(o, q, do, create_graph=True)
    want = s07.attend(q, k, v)
    assert torch.equal(dq, torch.autograd.grad(want, q, do)[0])
    with pytest.raises(RuntimeError, match=r"stage 9 .* can't be differentiated twice"):
        dq.sum().backward()
