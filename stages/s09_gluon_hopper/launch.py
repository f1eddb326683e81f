"""The host side of stage 9: what its kernels are launched with, in both passes.

What depends only on the kind of problem, not on its numbers, is computed once and kept: the
launches (stages/common/launch.py), the copy engine's descriptors. Of the backward pass all that is
launched is kept, by the tensors' addresses. From torch's graph it goes through stage 7:

    Attention.backward -> backward -> launch_for -> launch_backward -> launch_again, or
                                                                       launch_and_keep
"""

import functools
import itertools
import math
import operator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stages import s07_triton_training as s07
from stages import s08_triton_split_kv as s08
from stages.common.fit import padded_dim
from stages.common.gluon import TensorDescriptor, driver, gl
from stages.common.kernels import LOG2_E
from stages.common.launch import MOST_KEPT, Launch, Step, launch_again, launch_and_keep
from stages.common.machine import launching
from stages.s06_triton_flash2 import forward as flash2_forward

from .backward import backward_kernel, postprocess_kernel, preprocess_kernel
from .backward_two_pass import two_pass_kernel
from .forward import attention_kernel

# under a causal mask, by trial, where the L2 cache has 50 MB and more
L2_BYTES = 32 << 20  # the most that inputs of the heads computed at the same time may take
FEWEST_HEADS = 8  # that are computed at the same time all the same


@functools.lru_cache(maxsize=MOST_KEPT)
def descriptor(
    pointer: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    rows: int,
    BLOCK_D: int,
) -> Any:
    """Return the copy engine's descriptor of a tensor (B, H, N, d), 16 bits each, or None.

    It reads blocks of (1, 1, rows, BLOCK_D), with zeros past the ends, of tensors whose last
    dimension is contiguous and whose other steps are multiples of 16 bytes, none of them 0. Kept,
    since making one takes as long as a launch. It holds an address and no GPU: addresses differ
    among all GPUs of a process.
    """
    pitch = -(-shape[3] // 8) * 8  # stands for strides of axes of size 1, which may be anything
    steps = [s if n > 1 else pitch for n, s in zip(shape[:3], strides[:3], strict=True)]
    contiguous = shape[3] == 1 or strides[3] == 1
    if pointer % 16 or not contiguous or not all(0 < s < 1 << 39 and s % 8 == 0 for s in steps):
        return None
    layout = gl.NVMMASharedLayout(128, 16, rank=4)
    block = [1, 1, rows, BLOCK_D]
    # stands in for the tensor: what is kept here keeps no memory alive
    address = SimpleNamespace(data_ptr=lambda: pointer, dtype=dtype)
    made = TensorDescriptor(address, list(shape), [*steps, 1], block, layout)
    return described_as(made, dtype)


def described_as(descriptor: Any, dtype: torch.dtype) -> Any:
    """Return `descriptor` with a `kind`: all that a kernel is compiled for (common/launch.py)."""
    descriptor.kind = repr((dtype, descriptor.block_shape, descriptor.layout))
    return descriptor


def described(x: Tensor, rows: int, BLOCK_D: int) -> tuple[Tensor, Any]:
    """Return `x` and its descriptor; a copy where the copy engine can't read `x` itself."""
    found = descriptor(x.data_ptr(), x.dtype, x.shape, x.stride(), rows, BLOCK_D)
    if found is None or x.is_neg():
        return described(padded(x).copy_(x), rows, BLOCK_D)
    return x, found


def padded(like: Tensor) -> Tensor:
    """Return an uninitialised tensor like (B, H, N, d), its rows a multiple of 16 bytes apart."""
    *outer, d = like.shape
    if d % 8 == 0:
        return torch.empty_like(like, memory_format=torch.contiguous_format)
    return torch.empty(*outer, -(-d // 8) * 8, dtype=like.dtype, device=like.device)[..., :d]


counters: dict[tuple[int, int], Tensor] = {}


def counter_of(device: torch.device, captured: bool) -> Tensor:
    """The tile counter (1,) int32, 0 between launches.

    One tensor for each stream, since their launches overlap; torch has a few dozen. A CUDA graph
    gets one of its own for each launch in it, zeroed in the graph, where that is `captured`.
    """
    if captured:
        return torch.zeros(1, dtype=torch.int32, device=device)
    # as Triton asks for it; torch.cuda.current_stream would make an object of it first
    key = (device.index, driver.active.get_current_stream(device.index))
    if key not in counters:
        counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return counters[key]


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class Config(NamedTuple):
    """How the forward pass's roles share a multiprocessor: 64K registers, 227 KB of shared memory.

    All but the last two are constants of the kernel.
    """

    D: int = 64  # d and its padding
    BLOCK_D: int = 64  # of a part of that
    CONSUMERS: int = 2
    BLOCK_N: int = 128
    OVERLAP: bool = True
    K_SLOTS: int = 2
    V_SLOTS: int = 3
    CONSUMER_REGS: int = 240
    PRODUCER_REGS: int = 24
    ctas: int = 1
    maxnreg: int | None = None


TWO_CONSUMERS = Config(D=128, BLOCK_D=128)
THREE_CONSUMERS = Config(CONSUMERS=3, CONSUMER_REGS=160, PRODUCER_REGS=32)
# three CTAs to a multiprocessor: one begins or ends a work tile while the others are amid theirs.
# maxnreg: 80 x 8 warps, as the producer's one has the registers of four; the consumer gets what it
# leaves, (8 * 80 - 4 * 24) / 4 = 136
THREE_CTAS = Config(CONSUMERS=1, BLOCK_N=64, CONSUMER_REGS=136, ctas=3, maxnreg=80)
# d in parts; 11 named barriers are left for the slots of K and V and the consumers' queries. The
# accumulators, S and P at once would be 40 + 64 + 32 registers of 160 at d = 80, where some would
# spill, and 128 + 64 + 32 of 240 at d = 256
D_80 = THREE_CONSUMERS._replace(D=80, OVERLAP=False, K_SLOTS=3, V_SLOTS=2)
D_96 = D_80._replace(D=96)
D_192 = Config(D=192, K_SLOTS=5, V_SLOTS=4)
D_256 = Config(D=256, BLOCK_D=128, OVERLAP=False)
REGISTERS = {"CONSUMER_REGS": 240, "PRODUCER_REGS": 24}  # of a thread, in the backward pass
# of the backward pass, by BLOCK_D: BLOCK_M queries and BLOCK_N keys to a tile
BACKWARD: dict[int, dict[str, int]] = {
    BLOCK_D: {"BLOCK_M": BLOCK_M, "SLOTS": 2} for BLOCK_D, BLOCK_M in ((64, 128), (128, 64))
}
BACKWARD_BLOCK_N = 128
# for d above 128, by d and its padding, which go in PARTS parts: dv, then dk and dq. A slot has a
# part of a tile of BLOCK_M queries; TOGETHER slots are released at once
TWO_PASS: dict[int, dict[str, dict[str, int]]] = {
    192: {
        "VALUES": {"BLOCK_M": 128, "PARTS": 3, "TOGETHER": 3, "Q_SLOTS": 6, "DO_SLOTS": 3},
        "KEYS": {"BLOCK_M": 64, "PARTS": 3, "TOGETHER": 3, "Q_SLOTS": 6, "DO_SLOTS": 3},
    },
    256: {
        "VALUES": {"BLOCK_M": 64, "PARTS": 2, "TOGETHER": 1, "Q_SLOTS": 4, "DO_SLOTS": 4},
        "KEYS": {"BLOCK_M": 64, "PARTS": 2, "TOGETHER": 1, "Q_SLOTS": 3, "DO_SLOTS": 2},
    },
}


def plan(d: int, causal: bool, Nk: int) -> Config:
    """Choose a configuration of the forward pass: the best found on an H200.

    Three consumers' accumulators fit the registers up to d = 96. Where a causal mask leaves few
    keys, more of the time goes to the beginning and the end of a work tile; between 1,024 and 4,096
    none were measured.
    """
    if d > 64:
        return next(x for x in (D_80, D_96, TWO_CONSUMERS, D_192, D_256) if d <= x.D)
    return THREE_CTAS if causal and Nk <= 1024 else THREE_CONSUMERS


def heads_at_once(group: int, size: int) -> int:
    """Return how many key heads are computed at the same time under a causal mask.

    group  query heads to a key head
    size   bytes of what all work tiles of a key head read or add to
    """
    return max(FEWEST_HEADS // group, L2_BYTES // size)


def section_of(heads: int, most: int) -> int:
    """Return how many of `heads` a section has, at most `most`, but one at least.

    All sections have the same number where one above half of `most` divides `heads`: the last tiles
    of a section are short, and a last section of fewer heads would begin with long ones again, on
    few multiprocessors. Else there are as few sections as can be, with about as many heads each.
    """
    most = max(1, min(heads, most))
    alike = (size for size in range(most, most // 2, -1) if heads % size == 0)
    return next(alike, -(-heads // -(-heads // most)))


@functools.lru_cache(maxsize=MOST_KEPT)
def forward_launch(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device,
    causal: bool, has_seqlens: bool, has_lse: bool, config: Config,
) -> tuple[Launch, tuple[Any, ...]] | None:  # fmt: skip
    """Return the launch of a kind of problem and its numbers; None for what it can't do."""
    B, H, Nq, d = q_shape
    Hk, Nk = k_shape[1:3]
    BLOCK_M, BLOCK_N = 64 * config.CONSUMERS, config.BLOCK_N
    blocks = -(-Nq // BLOCK_M)
    tiles = B * H * blocks
    # tiles and keys are counted in int32
    if dtype == torch.float32 or max(tiles * config.CONSUMERS, Nq, Nk) >= 1 << 30:
        return None
    # the blocks of a head are neighbours, and read the same K and V; under a causal mask the same
    # block of the heads whose K and V fit the L2, so that the longest blocks come first
    group = H // Hk
    section = group * (section_of(B * Hk, heads_at_once(group, 4 * Nk * d)) if causal else 1)
    masked_tiles = int(causal or has_seqlens or Nk % BLOCK_N != 0)
    if causal and (Nk - Nq) % 64:  # the diagonal of 64 rows may cross the border of two KV tiles
        masked_tiles = 2
    sizes = (H, group, Nq, Nk, blocks, B * H, section, tiles, d**-0.5 * LOG2_E)
    grid = min(config.ctas * multiprocessors(device), tiles)
    constants = config._asdict()
    constants.pop("ctas")
    launch = Launch(
        attention_kernel, (grid,), CAUSAL=causal, HAS_SEQLENS=has_seqlens, LSE=has_lse,
        MASKED_TILES=masked_tiles, num_warps=4, **constants,
    )  # fmt: skip
    return launch, sizes


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    seqlens_k: Tensor | None,
    lse: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """Compute the output for checked arguments; `lse` is filled if given.

    lse (B, H, Nq) float32 is in base 2, as stage 6's. float32 goes to stage 6's kernel, or to stage
    8's where that splits the keys.
    """
    has_seqlens, has_lse = seqlens_k is not None, lse is not None
    config = config or plan(q.shape[3], causal, k.shape[2])
    found = forward_launch(
        q.shape, k.shape, q.dtype, q.device, causal, has_seqlens, has_lse, config
    )
    if found is None:
        if q.dtype == torch.float32:
            splits, tiles = s08.plan(q, *k.shape[1:3])
            if splits > 1:
                return s08.forward(q, k, v, causal, seqlens_k, lse, splits=splits, config=tiles)
        return flash2_forward(q, k, v, causal, seqlens_k, lse=lse)
    launch, sizes = found
    q, q_desc = described(q, 64, config.BLOCK_D)
    k, k_desc = described(k, config.BLOCK_N, config.BLOCK_D)
    v, v_desc = described(v, config.BLOCK_N, config.BLOCK_D)
    o, o_desc = described(padded(q), 64, config.BLOCK_D)
    if seqlens_k is not None:
        seqlens_k = seqlens_k.contiguous()  # the kernel takes no stride for it
    with launching(q):
        counter = counter_of(q.device, torch.cuda.is_current_stream_capturing())
        launch((q_desc, k_desc, v_desc, o_desc, lse, seqlens_k, counter), sizes)
    return o.contiguous()


def contiguous_strides(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


@functools.lru_cache(maxsize=MOST_KEPT)
def float32_descriptor(pointer: int, shape: tuple[int, ...], block: tuple[int, ...]) -> Any:
    """Return the copy engine's descriptor of a contiguous float32 tensor, in blocks of `block`."""
    steps = contiguous_strides(shape)
    layout = gl.NVMMASharedLayout(0, 32, rank=len(shape))
    address = SimpleNamespace(data_ptr=lambda: pointer, dtype=torch.float32)
    made = TensorDescriptor(address, list(shape), steps, list(block), layout)
    return described_as(made, torch.float32)


@dataclass(frozen=True, eq=False)  # each is equal to itself only, and so a short part of a key
class BackwardLaunches:
    """The launches of a kind of problem, and the numbers in them."""

    rows: tuple[int, ...]  # the shape of lse and -delta, float32
    parts: tuple[int, int]  # how many float32 these are, and dQ's sums: without DQ a tile
    preprocess: Launch
    of_rows: tuple[Any, ...]
    main: tuple[Launch, ...]  # one; for d above 128 what computes dv, then what computes dk and dq
    sizes: tuple[Any, ...]
    postprocess: Launch
    of_dq: tuple[Any, ...]


def backward_tile(d: int) -> tuple[int, int, int]:
    """Return how many rows the two small kernels take at a time, BLOCK_D, and D: d and its padding.

    Up to d = 128 the main kernel takes as many. Above, TWO_PASS has its BLOCK_M; the sums of dQ lie
    in tiles of these 64 rows.
    """
    D = next(D for D in (64, 80, 96, 128, *TWO_PASS) if d <= D)
    if d > 128:
        return 64, D // TWO_PASS[D]["KEYS"]["PARTS"], D
    BLOCK_D = 64 if d <= 64 else 128
    return BACKWARD[BLOCK_D]["BLOCK_M"], BLOCK_D, D


def rows_of_sums(D: int) -> int:
    """Return how many rows of 256 sums the narrower consumer's share of a tile of dQ has.

    64 x 64 are 16 rows; at D = 80 and 96 one consumer has 64 x (D - 64).
    """
    return 16 if D in (64, 128) else (D - 64) // 4


@functools.lru_cache(maxsize=MOST_KEPT)
def backward_launches(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], device: torch.device, causal: bool,
    has_seqlens: bool, DQ: bool, *strides: tuple[int, ...],
) -> BackwardLaunches:  # fmt: skip
    """Return a kind of problem's launches; `strides` are those of o, do and lse."""
    B, H, Nq, d = q_shape
    _, Hk, Nk, _ = k_shape
    BLOCK_M, BLOCK_D, D = backward_tile(d)
    scale = d**-0.5
    blocks = -(-Nq // BLOCK_M)
    padded_rows = blocks * BLOCK_M
    # of the two small kernels
    tile = {"BLOCK_M": BLOCK_M, "D": D, "num_warps": 4 if d <= 128 else 8}
    of_rows = (*itertools.chain(*strides), Nq, padded_rows, d)
    # Under a causal mask key heads whose queries, dO and sums of dQ fit the L2 cache together, so
    # that the longest work tiles come first. Else most are alike, and sums that are added to by all
    # CTAs soon after each other stay in the cache. Measured: one head at a time is slower than two.
    group = H // Hk
    section = section_of(B * Hk, heads_at_once(group, 8 * group * Nq * d) if causal else 2)
    tiles = B * Hk * -(-Nk // BACKWARD_BLOCK_N)
    grid = (min(multiprocessors(device), tiles),)
    constants: dict[str, Any] = {
        "CAUSAL": causal, "HAS_SEQLENS": has_seqlens,
        "EDGE": has_seqlens or Nk % BACKWARD_BLOCK_N != 0, "num_warps": 4,
    }  # fmt: skip
    main: tuple[Launch, ...]
    if d <= 128:
        config = {key: x for key, x in BACKWARD[BLOCK_D].items() if key != "BLOCK_M"}
        main = (Launch(backward_kernel, grid, DQ=DQ, D=D, **constants, **config, **REGISTERS),)
    else:
        main = tuple(
            Launch(
                two_pass_kernel, grid, VALUES=name == "VALUES", DQ=DQ, **constants,
                **{key: x for key, x in config.items() if key != "BLOCK_M"}, **REGISTERS,
            )
            for name, config in TWO_PASS[D].items()
        )  # fmt: skip
    sizes = (H, Hk, Nq, Nk, d, B * Hk, section, tiles, scale * LOG2_E, scale)
    rows = B, H, 2, padded_rows
    return BackwardLaunches(
        rows=rows,
        parts=(math.prod(rows), B * H * padded_rows * D if DQ else 64 * 64),
        preprocess=Launch(
            # above d = 128 the pass for dv writes the zeros
            preprocess_kernel, (blocks, H, B), ZERO=DQ and d <= 128, BLOCK_D=padded_dim(D), **tile
        ),
        of_rows=of_rows,
        main=main, sizes=sizes,
        postprocess=Launch(postprocess_kernel, (blocks, H, B), **tile),
        of_dq=(*contiguous_strides(q_shape), Nq, padded_rows, d, scale),
    )  # fmt: skip


def launch_backward(
    tensors: tuple[Tensor, ...], causal: bool, seqlens_k: Tensor | None, DQ: bool,
    wide: bool = False,
) -> tuple[Tensor | None, Tensor, Tensor]:  # fmt: skip
    """Launch the kernels on q, k, v, o, lse, do: dq (None without DQ), dk, dv, contiguous.

    In float32 if `wide`, else in q's dtype.
    """
    q, k, v, o, lse, do = tensors
    device = q.device
    kind = q.shape, k.shape, device, causal, seqlens_k is not None, DQ
    launches = backward_launches(*kind, o.stride(), do.stride(), lse.stride())
    both = torch.empty(sum(launches.parts), dtype=torch.float32, device=device)
    options: dict[str, Any] = {"memory_format": torch.contiguous_format}
    if wide:  # to name a dtype costs a microsecond each time
        options["dtype"] = torch.float32
    dk, dv = torch.empty_like(k, **options), torch.empty_like(v, **options)
    dq = torch.empty_like(q, **options) if DQ else None
    captured = torch.cuda.is_current_stream_capturing()
    counter = counter_of(device, captured)
    # `launches` tells the other strides apart, the counter's address tells streams apart
    looks = *[x.dtype for x in tensors], q.stride(), k.stride(), v.stride()
    passed = [x for x in (*tensors, both, dk, dv, dq, seqlens_k, counter) if x is not None]
    key = launches, wide, looks, *map(Tensor.data_ptr, passed)
    # a tensor's negative has its address, and is copied below
    if not captured and not any(map(Tensor.is_neg, tensors)) and launch_again(key):
        return dq, dk, dv
    BLOCK_M, BLOCK_D, D = backward_tile(q.shape[3])
    rows, sums = both.split(launches.parts)
    o, lse = o.resolve_neg(), lse.resolve_neg()
    # copies where need be; the names keep them until all is launched, as descriptors don't
    k, k_desc = described(k, BACKWARD_BLOCK_N, BLOCK_D)
    v, v_desc = described(v, BACKWARD_BLOCK_N, BLOCK_D)
    inputs = []  # of each main launch; the second finds copies that were made for the first
    for n in [BLOCK_M] if D <= 128 else [x["BLOCK_M"] for x in TWO_PASS[D].values()]:
        q, q_desc = described(q, n, BLOCK_D)
        do, do_desc = described(do, n, BLOCK_D)
        # at d = 192 a tile of 128 may go past the padded rows: there the copy engine fills in 0
        # for Q, lse and dO, so p = 2^0, and p times dO = 0 adds nothing where keys are finite
        rows_desc = float32_descriptor(rows.data_ptr(), launches.rows, (1, 1, 2, n))
        inputs.append((q_desc, k_desc, v_desc, do_desc, rows_desc))
    copied = any(map(operator.is_not, (q, k, v, o, lse, do), tensors))
    if copied:  # with other strides
        launches = backward_launches(*kind, o.stride(), do.stride(), lse.stride())
    block = rows_of_sums(D) if D <= 128 else 16, 256
    sums_desc = float32_descriptor(sums.data_ptr(), (sums.numel() // 256, 256), block)
    # for d above 128 threads add to them, too
    sums_in = (sums_desc,) if D <= 128 else (sums, sums_desc)
    steps: list[Step] = [(launches.preprocess, (o, do, lse, rows, sums), launches.of_rows)]
    gradients = [(dk, dv)] if D <= 128 else [(dv,), (dk,)]
    for launch, described_by, of_keys in zip(launches.main, inputs, gradients, strict=True):
        tensors_in = *described_by, *sums_in, *of_keys, seqlens_k, counter
        steps.append((launch, tensors_in, launches.sizes))
    if DQ:
        steps.append((launches.postprocess, (sums, rows, dq), launches.of_dq))
    launch_and_keep(None if copied or captured else key, steps)
    return dq, dk, dv


def launch_for(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool,
    seqlens_k: Tensor | None, wanted: tuple[bool, bool, bool], wide: bool = False,
) -> s07.Gradients:  # fmt: skip
    """Launch this stage's kernels, or stage 7's: dq, dk, dv; None where not `wanted`.

    wide  whether they are left in float32, not in the inputs' dtype

    float32 goes to stage 7's kernels, and so does all where only dq is wanted. CTAs add to dq in no
    fixed order: its last bits may differ from run to run, those of dk and dv don't.
    Under torch.use_deterministic_algorithms(True) dq is stage 7's, too, and has the same bits at
    every run.
    """
    tensors = q, k, v, o, lse, do
    # keys are counted in int32
    if q.dtype == torch.float32 or k.shape[2] >= 1 << 30 or not any(wanted[1:]):
        return s07.launch(*tensors, causal, seqlens_k, wanted, wide)
    again = wanted[0] and torch.are_deterministic_algorithms_enabled()
    dq, dk, dv = launch_backward(tensors, causal, seqlens_k, wanted[0] and not again, wide)
    if again:
        dq = s07.launch(*tensors, causal, seqlens_k, (True, False, False), wide)[0]
    return dq, dk if wanted[1] else None, dv if wanted[2] else None


backward = functools.partial(s07.backward, launch=launch_for)
