"""Stage 9's backward kernels, as far as they run without a GPU: before and after the Gluon one.

What the copy engine and the matrix unit do is tested on a Hopper GPU (tests/gpu), how the Gluon
kernel compiles in test_cubins.py.
"""

import math
import sys

import pytest
import torch
from stage_checks import normal

from stages import hopper_gradients
from stages import s07_triton_training as s07
from stages.machine import has_module

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" and not has_module("triton"), reason="no triton for this machine"
)

SIZES = [(128, 128, 64), (100, 128, 64), (64, 64, 128), (39, 64, 128)]  # d, BLOCK_D, BLOCK_M


def registers(tile):
    """A tile of dQ as its two consumers add it up: each its half, in the order of its registers.

    After wgmma's picture of an accumulator (PTX ISA, m64nNk16): warp w has rows 16 w to 16 w + 15;
    of 8 rows and 8 columns thread t has row t / 4 and columns 2 (t % 4) and the next.
    """
    halves = tile.split(64, dim=1 if tile.shape[1] == 128 else 0)
    return torch.stack(
        [
            half[16 * warp + 8 * below + thread // 4, 8 * group + 2 * (thread % 4) + column]
            for half in halves
            for warp in range(4)
            for group in range(8)
            for thread in range(32)
            for below in range(2)
            for column in range(2)
        ]
    )


@pytest.mark.parametrize(("d", "BLOCK_D", "BLOCK_M"), SIZES)
def test_rows_are_prepared_and_sums_start_at_zero(d, BLOCK_D, BLOCK_M):
    B, H, Nq = 2, 2, BLOCK_M + 22
    padded = 2 * BLOCK_M
    o, _, _, do = (x.transpose(1, 2) for x in normal((B, Nq, H, 1, d), 0, torch.float16))
    lse = normal((B, H, Nq, 1, 1), 1)[0][..., 0]
    lse[1] = float("-inf")  # rows that see no key
    rows = torch.full((B, H, 2, padded), float("nan"))
    sums = torch.full((B, H, padded, BLOCK_D), float("nan"))
    hopper_gradients.prepare_kernel[(2, H, B)](
        o, do, lse, rows, sums, *o.stride(), *do.stride(), *lse.stride(), Nq, padded, d,
        ZERO=True, BLOCK_M=BLOCK_M, BLOCK_D=BLOCK_D,
    )  # fmt: skip
    assert (sums == 0).all()
    assert torch.equal(rows[0, :, 0, :Nq], lse[0])
    assert (rows[1, :, 0] == float("inf")).all()  # 2^(s - inf) = 0
    assert (rows[:, :, 0, Nq:] == float("inf")).all()
    torch.testing.assert_close(rows[:, :, 1, :Nq], -(o.float() * do.float()).sum(-1))
    assert (rows[:, :, 1, Nq:] == 0).all()


@pytest.mark.parametrize(("d", "BLOCK_D", "BLOCK_M"), SIZES)
def test_sums_come_back_in_order(d, BLOCK_D, BLOCK_M):
    H, Nq = 2, BLOCK_M + 22
    padded = 2 * BLOCK_M
    want = normal((1, H, padded, 1, BLOCK_D), 0)[0]
    tiles = want.view(H, 2, BLOCK_M, BLOCK_D)
    sums = torch.stack([torch.stack([registers(tile) for tile in head]) for head in tiles])
    rows = torch.zeros((1, H, 2, padded))
    rows[0, 1, 0] = float("inf")  # a head whose rows see no key
    dq = torch.full((1, Nq, H, d), float("nan")).transpose(1, 2)
    hopper_gradients.finish_kernel[(2, H, 1)](
        sums, rows, dq, *dq.stride(), Nq, padded, d, 0.5, BLOCK_M=BLOCK_M,
        BLOCK_D=BLOCK_D,
    )  # fmt: skip
    assert torch.equal(dq[0, 0], 0.5 * want[0, 0, :Nq, :d])
    assert (dq[0, 1] == 0).all()


@pytest.mark.parametrize(("d", "dtype"), [(16, torch.float32), (136, torch.float16)])
def test_what_the_kernel_has_no_tiles_for_goes_to_stage_7(d, dtype):
    q, k, v, do = normal((1, 2, 5, 7, d), 0, dtype)
    o, lse = normal((1, 2, 5, 7, d), 1, dtype)[0], torch.zeros((1, 2, 5))
    got = hopper_gradients.backward(q, k, v, o, lse, do, True, None)
    for x, y in zip(got, s07.backward(q, k, v, o, lse, do, True, None), strict=True):
        assert torch.equal(x, y)


def test_rows_that_see_no_key_are_left_out(monkeypatch):
    """More queries than keys under a causal mask: the first rows see nothing, whatever do says."""
    q, k, v, do = normal((1, 2, 7, 5, 8), 0, torch.float16)
    o = normal((1, 2, 7, 5, 8), 1, torch.float16)[0]
    do[:, :, :2] = float("nan")
    lse = torch.zeros((1, 2, 7))

    def launches(q, k, v, o, lse, do, causal, seqlens_k, config):
        assert not do.isnan().any()
        assert [x.shape[2] for x in (q, o, do, lse)] == [5] * 4
        return [], (q, k, v)

    monkeypatch.setattr(hopper_gradients, "launches", launches)
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: torch.no_grad())
    dq, dk, dv = hopper_gradients.backward(q, k, v, o, lse, do, True, None, (True, False, True))
    assert (dq[:, :, :2] == 0).all()
    assert torch.equal(dq[:, :, 2:], q[:, :, 2:])
    assert dk is None
    assert torch.equal(dv, v)


@pytest.mark.parametrize(("d", "causal", "lengths"), [(128, False, None), (40, True, (3, 9))])
def test_what_is_launched_are_the_kernels_arguments(d, causal, lengths, monkeypatch):
    q, k, v, do = normal((2, 4, 300, 200, d), 0, torch.float16)
    k, v = k[:, :2], v[:, :2]
    lse = torch.zeros((2, 4, 300))
    seqlens_k = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    launched = {}

    class Kernel:
        def __init__(self, name):
            self.name, self.names = name, getattr(hopper_gradients, name).arg_names

        def __getitem__(self, grid):
            return lambda *args, **kwargs: launched.update(
                {self.name: {"grid": grid, **dict(zip(self.names, args, strict=False)), **kwargs}}
            )

    counter = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(hopper_gradients, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(hopper_gradients, "counter_of", lambda device: counter)
    for name in ("prepare_kernel", "backward_kernel", "finish_kernel"):
        kernel = Kernel(name)
        monkeypatch.setattr(hopper_gradients, name, kernel)
    steps, (dq, dk, dv) = hopper_gradients.launches(
        q, k, v, v, lse, do, causal, seqlens_k, hopper_gradients.CONFIGS[64 if d == 40 else 128]
    )
    for step in steps:
        step()
    for name, got in launched.items():
        asked = set(getattr(hopper_gradients, name).names)
        assert set(got) - {"grid", "num_warps"} == asked, name
    walk = launched["backward_kernel"]
    rows, columns = (128, 64) if d == 40 else (64, 128)
    assert walk["grid"] == (3,)
    sizes = {"H": 4, "Hk": 2, "Nq": 300, "Nk": 200, "d": d, "heads": 4, "units": 8}
    assert {name: walk[name] for name in sizes} == sizes
    assert walk["dk_ptr"] is dk
    assert walk["dv_ptr"] is dv
    assert launched["finish_kernel"]["dq_ptr"] is dq
    sums = launched["prepare_kernel"]["sums_ptr"]
    assert sums is launched["finish_kernel"]["sums_ptr"]
    assert walk["sums_desc"].base.data_ptr() == sums.data_ptr()
    assert walk["counter_ptr"] is counter
    assert (walk["seqlens_ptr"] is None) == (lengths is None) == (not walk["HAS_SEQLENS"])
    assert walk["CAUSAL"] is causal
    assert walk["EDGE"]
    assert walk["scale"] * math.log2(math.e) == pytest.approx(walk["qk_scale"])
    tensors = {"q": q, "k": k, "v": v, "do": do}
    for name, x in tensors.items():
        found = walk[f"{name}_desc"]
        assert found.shape == list(x.shape), name
        assert found.block_shape == [1, 1, rows if name in ("q", "do") else 128, columns], name


@pytest.mark.parametrize("wanted", [(True, True, True), (False, True, True)])
def test_dq_is_stage_7s_where_its_bits_must_not_differ(wanted, monkeypatch):
    q, k, v, do = normal((1, 2, 7, 9, 8), 0, torch.float16)
    lse = torch.zeros((1, 2, 7))
    asked = []

    def launches(*args):
        asked.append(args[-1]["DQ"])
        return [], (q, k, v)

    monkeypatch.setattr(hopper_gradients, "launches", launches)
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: torch.no_grad())
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    dq, dk, dv = hopper_gradients.backward(q, k, v, q, lse, do, False, None, wanted)
    assert asked == [False]  # not added up by whoever comes first
    assert dk is k
    assert dv is v
    want = s07.backward(q, k, v, q, lse, do, False, None, (wanted[0], False, False))[0]
    assert (dq is None and want is None) or torch.equal(dq, want)
