"""Stage 8, Triton split-KV: the keys are split over programs too, and the parts merged.

    one program: a block of packed rows of one key head, and one part of the keys
        packed row r = i * group + g is query i of head h_k * group + g: the `group` heads that
        share a key head share its tiles, so that one query row makes a block of `group` rows
    |<---- part 0 ---->|<---- part 1 ---->| ...    whole tiles of BLOCK_N keys, shared out evenly
    each part walks its tiles as in stage 6 and leaves m, l and acc, float32, acc not divided by l
        p = 2^((s - m_i) * qk_scale)     m_i isn't scaled: one product more per score, for which
                                         there is time while K and V are read
    a second kernel, one program per row, merges the parts in index order, as stage 5 merges tiles:
        m = max m_s                      -inf, and l_s = 0, where the row sees nothing
        w_s = 2^((m_s - m) * qk_scale)
        o = sum w_s acc_s / sum w_s l_s  0 where no part saw anything

`choose_splits` chooses the number of parts from the shape and the number of multiprocessors alone.
With one part, o is written at once and nothing is merged. The same kernel reads a paged cache of
keys and values (paged_cache.py), where a table says in which page each PAGE_SIZE keys lie.

Cost: stage 6's FLOPs; q, k, v and o cross the bus once, and d + 2 floats per row and part twice.
Extra memory: those parts, of so many rows as a few programs per multiprocessor have: up to some
35 MB on an H200.
What it bought: one query row reads the cache as fast as the memory can be read, whatever the
number of heads, and one head's rows fill the GPU, however few they are (split-KV: FlashDecoding,
Dao et al. 2023; pages: PagedAttention, Kwon et al. 2023).
Still hurts: loads and math take turns. Stage 9 goes on.
"""

import functools
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from stages.common import operators
from stages.common.contract import wrong
from stages.common.fit import FORWARD, H200, Card, card_of, fit, kind_of, of_size, padded_dim
from stages.common.kernels import LARGEST_TILE, LOG2_E, loadable
from stages.common.launch import fast_launch
from stages.common.machine import launching
from stages.contract import Stage, check_inputs, input_precision

from .kernel import merge_kernel, split_kernel
from .paged_cache import PagedCache

STAGE = Stage(
    number=8,
    name="triton_split_kv",
    title="Triton split-KV",
    idea="split the keys too, merge the parts: one head, or decoding from a paged cache",
    still_hurts="loads and math take turns",
    needs=("triton",),
    dtypes=("float16", "bfloat16", "float32"),
    options=("causal", "seqlens_k", "gqa", "paged"),
    splits_keys=True,
    worth_up_to={"cpu": 1024},
    files=("kernel.py", "paged_cache.py"),
)


# BLOCK_M -> (BLOCK_N, num_warps, num_stages), for a BLOCK_D of up to 64, of 128, of 256: where a
# multiprocessor has one program, which has to keep many bytes in flight by itself. The best of a
# search on one H200.
Tiles = dict[int, tuple[int, int, int]]
TILES: dict[str, tuple[Tiles, ...]] = {
    "half": (
        {16: (128, 4, 4), 32: (128, 4, 3), 64: (128, 4, 3), 128: (64, 8, 3)},
        {16: (128, 4, 3), 32: (128, 4, 3), 64: (64, 4, 4), 128: (64, 8, 4)},
        {16: (64, 4, 2), 32: (64, 4, 2)},
    ),
    "tf32": ({16: (64, 4, 2), 32: (64, 4, 2)}, {16: (64, 8, 2)}, {16: (32, 4, 2)}),
    "bf16x6": (
        {16: (64, 4, 1), 64: (64, 4, 1)},
        {16: (64, 8, 1), 64: (64, 4, 1)},
        {16: (32, 8, 1)},
    ),
    "ieee": ({16: (64, 4, 2)}, {16: (64, 8, 2)}, {16: (32, 8, 2)}),
}
# where it has several
OF_SEVERAL: dict[str, tuple[Tiles, ...]] = TILES | {
    "half": (
        {16: (128, 4, 3), 32: (128, 4, 3), 64: (128, 4, 3), 128: (64, 8, 3)},
        {16: (128, 4, 2), 32: (64, 4, 3), 64: (64, 4, 3), 128: (64, 8, 3)},
        {16: (64, 4, 2), 32: (64, 4, 2)},
    ),
}
MOST_ROWS = 64  # of a block, where there are more than 128 in all


@functools.cache
def launch_config(
    d: int,
    dtype: torch.dtype,
    precision: str,
    rows: int = 1,
    several: bool = False,
    card: Card = H200,
) -> dict[str, int]:
    """BLOCK_M, BLOCK_N, BLOCK_D, num_warps and num_stages for `rows` packed rows of a key head.

    Smaller ones where `card` has no room for them (stages/common/fit.py).

    several  whether a multiprocessor has more than one program
    """
    kind = kind_of(dtype, precision, card)
    tiles = of_size(OF_SEVERAL if several else TILES, d, kind)
    BLOCK_M = min((m for m in tiles if m >= rows), default=min(MOST_ROWS, max(tiles)))
    return dict(fit((BLOCK_M, *tiles[BLOCK_M]), d, FORWARD, kind, card))


# The cost model's constants. The unit is the time in which a multiprocessor gets a tile while all
# of them read. Fitted on one H200; there its choices for 16 shapes are at most 2.1% slower than the
# best number of parts (results/h200/splits.jsonl).
ALONE = 0.55  # a tile's time where the memory is idle otherwise
WAVE = 8.0  # a wave of programs: to start, to fill the pipeline, to end
MERGE = 1.5  # the second kernel
PART = 0.02  # a part, to be merged
# Where a key head has more rows than a tile, its tiles come from the cache, and the time is that of
# the products: the unit is a tile's. A multiprocessor has two programs: neither slows the other.
COMPUTED = {"alone": 1.0, "wave": 2.0}


@functools.lru_cache(maxsize=4096)
def choose_splits(
    programs: int, tiles: int, places: int, alone: float = ALONE, wave: float = WAVE
) -> int:
    """Return the number of parts that the cost model finds the cheapest, at most one per tile.

    programs  how many there are without a split: the blocks of rows of all key heads
    tiles     of keys, the most that a row sees
    places    how many programs run at once: one for each multiprocessor, or two

    cost = tiles per part x (waves, or what is read at once) + waves x WAVE, and the merge's. A
    wave is one program for each place. The choice uses no timing and no value of a tensor: the same
    shape gives the same bits on the same GPU.
    """

    def cost(splits: int) -> float:
        waves = -(-programs * splits // places)
        each = -(-tiles // splits) * max(programs * splits / places, alone * waves)
        return each + wave * waves + (MERGE + PART * splits if splits > 1 else 0.0)

    # beyond four programs per place, more only cost time
    return min(range(1, min(tiles, -(-4 * places // programs)) + 1), key=cost)


def plan(
    q: Tensor,
    Hk: int,
    Nk: int,
    splits: int | None = None,
    config: dict[str, int] | None = None,
    paged: bool = False,
) -> tuple[int, dict[str, int]]:
    """Choose the parts' number and the launch configuration for q (B, H, Nq, d), Hk heads, Nk keys.

    `splits` and `config` are kept if given.
    """
    B, H, Nq, d = q.shape
    precision, rows = input_precision(q), Nq * H // Hk
    card = card_of(q.device)
    sms = card.multiprocessors
    first = config or launch_config(d, q.dtype, precision, rows, card=card)
    programs = B * Hk * -(-rows // first["BLOCK_M"])
    if splits is None:
        tiles = max(1, -(-Nk // first["BLOCK_N"]))
        computed = rows > LARGEST_TILE
        # finding the page of a short row takes as long as reading it: two programs hide it
        places = 2 * sms if computed or (paged and d <= 64) else sms
        splits = choose_splits(programs, tiles, places, **(COMPUTED if computed else {}))
    several = programs * splits > sms
    return splits, config or launch_config(d, q.dtype, precision, rows, several, card)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    seqlens_k: Tensor | None,
    lse: Tensor | None = None,
    *,
    table: Tensor | None = None,
    rows: Tensor | None = None,
    longest: int | None = None,
    splits: int | None = None,
    config: dict[str, int] | None = None,
) -> Tensor:
    """Compute the output for checked arguments; `lse` is filled if given.

    lse      (B, H, Nq) float32, in base 2: log2 of each row's sum of exp(s)
    table    (sequences, pages) int32, where k and v are a cache's (pages, Hk, PAGE_SIZE, d);
             seqlens_k are then its sequences' lengths, and longest is the most of them
    rows     (B,) int32, the row of the table for each batch entry
    splits   how many parts, in place of the cost model's choice
    config   the launch configuration, in place of `launch_config`'s
    """
    B, H, Nq, d = q.shape
    _, Hk, Nk, _ = k.shape
    page_size = 0
    if table is not None:
        page_size, Nk = Nk, table.shape[1] * Nk
    q, k, v = loadable(q), loadable(k), loadable(v)
    if seqlens_k is not None:
        seqlens_k = seqlens_k.contiguous()  # the kernel takes no stride for it
    keys = Nk if longest is None else longest
    splits, config = plan(q, Hk, keys, splits, config, paged=table is not None)
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    parts = stats = None
    if splits > 1:  # a buffer for each call: one for all would be written by two streams at once
        parts = torch.empty(B, H, Nq, splits, d, dtype=torch.float32, device=q.device)
        stats = torch.empty(B, H, Nq, splits, 2, dtype=torch.float32, device=q.device)
    qk_scale = d**-0.5 * LOG2_E

    def launch(config: dict[str, int], precision: str, splits: int, redo: bool) -> None:
        blocks = -(-Nq * (H // Hk) // config["BLOCK_M"])
        fast_launch(
            split_kernel, (blocks * splits, Hk, B),
            (q, k, v, o, lse, parts, stats, seqlens_k, table, rows),
            (
                *q.stride(), *k.stride(), *v.stride(), *o.stride(),
                0 if table is None else table.stride(0), H // Hk, Nq, Nk, d, qk_scale, splits,
            ),
            CAUSAL=causal and Nq > 1, HAS_SEQLENS=seqlens_k is not None, LSE=lse is not None,
            SPLIT=splits > 1, PAGE_SIZE=page_size, EVEN_D=d == config["BLOCK_D"],
            PRECISION=precision, REDO=redo, **config,
        )  # fmt: skip

    with launching(q):
        precision = input_precision(q)
        launch(config, precision, splits, redo=False)
        if splits > 1:
            # from Hopper on, a kernel may be launched while the one before it ends (1 us saved)
            early = q.is_cuda and card_of(q.device).capability >= (9, 0)
            fast_launch(
                merge_kernel, (Nq, H, B), (parts, stats, o, lse),
                (*o.stride(), d, qk_scale, splits),
                LSE=lse is not None, PDL=early, **merge_config(splits, d),
                **({"launch_pdl": True} if early else {}),
            )  # fmt: skip
        if precision == "bf16x6":
            card = card_of(q.device)
            whole = launch_config(d, q.dtype, "ieee", Nq * H // Hk, several=True, card=card)
            launch(whole, "ieee", splits=1, redo=True)
    return o


@functools.cache
def merge_config(splits: int, d: int) -> dict[str, int]:
    """The launch configuration of the merge: up to 16 parts at a time."""
    BLOCK_S = min(16, 1 << (splits - 1).bit_length())
    return {"BLOCK_S": BLOCK_S, "BLOCK_D": padded_dim(d), "num_warps": 1}


def launch_configs(
    d: int, dtype: torch.dtype, precision: str, card: Card = H200
) -> dict[str, dict[str, int]]:
    """kernel -> the configuration for one row and many parts."""
    return {
        "split_kernel": launch_config(d, dtype, precision, card=card),
        "merge_kernel": merge_config(16, d) | {"num_stages": 1},
    }


@operators.register()
def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, seqlens_k: Tensor | None = None
) -> Tensor:
    """Exact attention, its keys split over programs. Forward only.

    q (B, H, Nq, d), k and v (B, Hk, Nk, d) with Hk dividing H, float16, bfloat16 or float32;
    `seqlens_k` (B,) int32 -> (B, H, Nq, d) in q's dtype. A row that sees no key is 0. Raises
    ValueError on input that breaks the contract (stages/contract.py) or asks for a gradient,
    StageUnavailable where there is no Triton.
    """
    check_inputs(STAGE, q, k, v, causal=causal, seqlens_k=seqlens_k)
    for name, x in (("q", q), ("k", k), ("v", v)) if operators.wanted_of(q, k, v) else ():
        if x.requires_grad:  # the merge has no backward pass
            way = "call it under torch.no_grad(), or train with stage 7"
            only = f"none: stage {STAGE.number} is forward only; {way}"
            raise wrong(name, "requires_grad=True", only)
    return forward(q, k, v, causal, seqlens_k)


@operators.untraced
def attend_paged(
    q: Tensor, cache: PagedCache, sequences: Sequence[Hashable], *, causal: bool = True
) -> Tensor:
    """Attention of q's batch entries to `sequences` of a cache, one each.

    q (len(sequences), H, Nq, d) of the cache's dtype, on its device, H a multiple of its heads ->
    the same shape. A sequence's last Nq tokens are those of q: with `causal`, row i sees tokens up
    to i + length - Nq. A row that sees none is 0. Raises ValueError where an argument is wrong or
    a sequence unknown.

    It reads table and lengths as they are on the GPU when it runs: a CUDA graph of it sees what was
    appended since, if it was called once before with these sequences.
    """
    if not isinstance(cache, PagedCache):
        raise wrong("cache", type(cache).__name__, "a PagedCache")
    rows, longest = cache.rows(sequences)
    cache.check_queries(STAGE, q, len(sequences), causal)
    return forward(
        q, cache.k, cache.v, causal, cache.lengths, table=cache.table, rows=rows, longest=longest
    )
