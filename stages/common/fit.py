"""Launch configurations that fit the card: the table's own where it can, else smaller ones.

Tiles were chosen on an H200, whose programs may have 232,448 bytes of shared memory. An A100's may
have 166,912, an RTX 40's 101,376 and a T4's 65,536. `fit` makes a configuration smaller until it
fits by `shared_needed`, an estimate that is never below what Triton takes
(tests/stages/test_cubins.py compiles for seven kinds of cards, and compares). Smaller is all they
are: on no other card was the fastest searched for.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from stages.common.inputs import dtype_name, input_precision
from stages.common.machine import has_module

Config = dict[str, int]  # BLOCK_M, BLOCK_N, BLOCK_D, num_warps, num_stages
Choice = TypeVar("Choice")


class Card(NamedTuple):
    """What the choice of a launch configuration asks of a GPU."""

    capability: tuple[int, int]
    shared: int  # bytes of shared memory that a program may have
    multiprocessors: int


H200 = Card((9, 0), 232_448, 132)


@functools.cache
def card_of(device: torch.device) -> Card:
    """The card that `device` is; on a CPU an H200, as whose kernels are interpreted."""
    if device.type != "cuda":
        return H200
    card = torch.cuda.get_device_properties(device)
    shared = getattr(card, "shared_memory_per_block_optin", None)
    if shared is None:  # torch 2.6 doesn't tell
        from triton.runtime import driver

        shared = driver.active.utils.get_device_properties(device.index)["max_shared_mem"]
    return Card((card.major, card.minor), shared, card.multi_processor_count)


class Walk(NamedTuple):
    """Which tiles a program keeps, and which two it walks; both are BLOCK_D wide."""

    keeps: str  # BLOCK_M or BLOCK_N: the rows of a tile that is kept
    kept: int  # how many tiles are kept
    walks: str  # the rows of a tile that is walked: the other of BLOCK_M and BLOCK_N
    twice: int  # how many of the two walked tiles are multiplied twice, once transposed


FORWARD = Walk("BLOCK_M", 1, "BLOCK_N", 0)  # q; k and v
DQ = Walk("BLOCK_M", 2, "BLOCK_N", 1)  # q and do; k, which is multiplied twice, and v
DK_DV = Walk("BLOCK_N", 2, "BLOCK_M", 2)  # k and v; q and do, both multiplied twice


def kind_of(dtype: torch.dtype, precision: str, card: Card) -> str:
    """The row of a table of tiles: 'half', 'tf32', 'bf16x6' or 'ieee'.

    Triton knows no matrix unit before sm_80: there 16 bits are multiplied as IEEE float32 is.
    """
    if dtype == torch.float32:
        return precision
    return "half" if card.capability >= (8, 0) else "ieee"


def padded_dim(d: int) -> int:
    """BLOCK_D: the power of two that holds d, 16 at least, since tl.dot refuses fewer."""
    return max(16, 1 << (d - 1).bit_length())


def of_size(tiles: Mapping[str, Sequence[Choice]], d: int, kind: str) -> Choice:
    """What a table of tiles has for a head dimension and one of the kinds of `kind_of`.

    It has one entry per kind for a BLOCK_D of up to 64, of 128 and of 256.
    """
    return tiles[kind][(padded_dim(d) > 64) + (padded_dim(d) > 128)]


def shared_needed(config: Config, walk: Walk, kind: str, card: Card) -> int:
    """Bytes of shared memory that a kernel takes at the most: its tiles, and what it exchanges."""
    kept, walked, stages = config[walk.keeps], config[walk.walks], config["num_stages"]
    # from Hopper on (but not on the RTX 50) large products read shared memory while the program
    # goes on: the tile that they read is one more
    runs_on = (9, 0) <= card.capability < (12, 0) and kept >= 64 and kind != "ieee"
    number = 2 if kind in ("half", "bf16x6") else 4
    if kind == "bf16x6":  # three pieces of all that is kept, and of what is walked one by one
        kept_bytes, walked_bytes = 3 * number, number + runs_on + 4 * (stages - 1)
    else:
        loaded = stages if runs_on else max(stages - 1, 1)  # tiles, one after another
        kept_bytes, walked_bytes = number, number * loaded
    tiles = config["BLOCK_D"] * (walk.kept * kept * kept_bytes + 2 * walked * walked_bytes)
    # p on its way from one product to the next, or what is stored in both orders
    both = walk.twice if runs_on else min(walk.twice, 1)
    transposed = both * walked * config["BLOCK_D"] if kind in ("half", "tf32") else 0
    return tiles + max(kept * walked, transposed) * number + 2048  # sums of rows, lse, delta


def without_spills(config: Config, walk: Walk, card: Card) -> Config:
    """A configuration in 16 bits that spills nothing, up to d = 128 and without masks.

    Those of the tables spill nothing on sm_90. On other cards 4 warps become 8 where each thread
    would hold 96 values of s, of the output and of a walked tile. In the forward pass a thread may
    have all 255 registers there: ptxas would take fewer, to have more programs at once.
    """
    if card.capability == (9, 0):
        return config
    kept, walked, BLOCK_D = config[walk.keeps], config[walk.walks], config["BLOCK_D"]
    held = kept * walked + kept * BLOCK_D + walked * BLOCK_D // 2  # two of 16 bits in a register
    warps = 8 if held >= 96 * 128 else config["num_warps"]
    return config | {"num_warps": warps} | ({"maxnreg": 255} if walk is FORWARD else {})


@functools.cache  # each call of a stage asks
def fit(tile: tuple[int, ...], d: int, walk: Walk, kind: str, card: Card) -> Config:
    """The launch configuration of BLOCK_M, BLOCK_N, num_warps and num_stages, made to fit `card`.

    As long as it takes too much, it has one stage less, if that saves anything; else the larger of
    BLOCK_M and BLOCK_N is halved. If they are equal, that is the kept tile's, since tl.dot sums
    over the walked one's rows and refuses fewer than 16.
    """
    names = "BLOCK_M", "BLOCK_N", "num_warps", "num_stages"
    config = dict(zip(names, tile, strict=True), BLOCK_D=padded_dim(d))
    if kind == "bf16x6" and (10, 0) <= card.capability < (12, 0):
        # products of 64 rows and more end in tensor memory, six of them in more than there is
        config[walk.keeps] = min(config[walk.keeps], 32)
    while (needed := shared_needed(config, walk, kind, card)) > card.shared:
        fewer = config | {"num_stages": config["num_stages"] - 1}
        if fewer["num_stages"] and shared_needed(fewer, walk, kind, card) < needed:
            config = fewer
            continue
        rows = walk.keeps if config[walk.keeps] >= config[walk.walks] else walk.walks
        config = config | {rows: config[rows] // 2}
    return without_spills(config, walk, card) if kind == "half" else config


def fit_each(
    tiles: Mapping[str, Sequence[Sequence[tuple[int, ...]]]],
    walk: Walk,
    d: int,
    dtype: torch.dtype,
    precision: str,
    card: Card,
) -> list[Config]:
    """The launch configurations that a table has for a head dimension and a dtype, each once."""
    kind = kind_of(dtype, precision, card)
    configs = [dict(fit(tile, d, walk, kind, card)) for tile in of_size(tiles, d, kind)]
    return [config for at, config in enumerate(configs) if config not in configs[:at]]


def told(stage: Any) -> dict[str, str]:
    """How the kernels of a stage's module run on the GPU that is here, for people.

    'card': what that is; 'float16' and 'float32': how they multiply it, and BLOCK_M x BLOCK_N at
    d = 64, 128 and 256. {} without a GPU or Triton, and for a stage without launch configurations.
    """
    configs = getattr(stage, "launch_configs", None)
    if configs is None and hasattr(stage, "launch_config"):
        configs = lambda *asked: {"": stage.launch_config(*asked)}  # noqa: E731
    if configs is None or not torch.cuda.is_available() or not has_module("triton"):
        return {}
    card = card_of(torch.device("cuda", torch.cuda.current_device()))
    capability = ".".join(map(str, card.capability))
    room = (
        f"{card.multiprocessors} multiprocessors, {card.shared:,} bytes of shared memory a program"
    )
    said = {"card": f"compute capability {capability}, {room}"}
    for dtype in (torch.float16, torch.float32):
        precision = input_precision(torch.empty(0, dtype=dtype, device="cuda"))
        tiles: dict[str, list[str]] = {}
        for d in (64, 128, 256):
            for kernel, config in configs(d, dtype, precision, card).items():
                if "BLOCK_M" in config:
                    size = f"{config['BLOCK_M']}x{config['BLOCK_N']}"
                    tiles.setdefault(kernel.removesuffix("_kernel"), []).append(size)
        sizes = "; ".join(f"{kernel} {' '.join(each)}".strip() for kernel, each in tiles.items())
        said[dtype_name(dtype)] = f"{kind_of(dtype, precision, card)}: {sizes}"
    return said
