"""Peer: FlashInfer, where it is installed (flashinfer-python): few queries, from pages.

It builds its kernels at the first call for each dtype and head dimension, by nvcc: a minute or two,
once for a machine. What it plans on the host for a batch, it plans once for as long as the pages
stay as they are, as a model does once for all of its layers; a later call is the kernel alone.
"""

import functools
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from stages.contract import Stage, StageUnavailable, check_inputs
from stages.s08_triton_split_kv.paged_cache import PagedCache as Pages

STAGE = Stage(
    number=108,
    name="flashinfer",
    title="FlashInfer",
    idea="kernels for serving, from a paged cache, built for each kind of problem",
    needs=("triton", "cuda", "flashinfer-python"),
    capability=(8, 0),
    devices=("cuda",),
    dtypes=("float16", "bfloat16"),
    options=("causal", "gqa", "paged"),
    few_queries=True,
)

WORKSPACE = 128 << 20  # bytes, as FlashInfer recommends
GROUP = 4  # query heads to a key head from which on its decoding is fastest by matrix products


class PagedCache(Pages):
    """Stage 8's cache, whose pages (Hk, page_size, d) FlashInfer reads as they are ('HND')."""

    planned: tuple[Any, ...] = ()  # the pages' lists, what else was planned for, and the plan


@functools.cache
def workspace(device: torch.device) -> torch.Tensor:
    """The memory in which FlashInfer's kernels merge parts; one call after another uses it."""
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device)


class Plan:
    """A plan of FlashInfer's for one batch.

    `pages`: the pages of each sequence, `lengths`: its tokens. Raises StageUnavailable where
    FlashInfer can't be loaded, or can't build a kernel.
    """

    def __init__(
        self, q: torch.Tensor, Hk: int, page_size: int, pages: Sequence[Sequence[int]],
        lengths: Sequence[int], causal: bool,
    ) -> None:  # fmt: skip
        try:
            import flashinfer
        except (ImportError, OSError, RuntimeError) as error:
            raise StageUnavailable(f"FlashInfer can't be loaded here: {error}") from error
        _, H, Nq, d = q.shape
        self.one_row = Nq == 1
        numbers = functools.partial(torch.tensor, dtype=torch.int32, device="cpu")
        ends, rows = [0], [0]
        for own in pages:
            ends.append(ends[-1] + len(own))
            rows.append(rows[-1] + Nq)
        table = (
            numbers(ends),
            numbers([page for own in pages for page in own]).to(q.device),
            numbers([(length - 1) % page_size + 1 for length in lengths]),
        )
        shape = H, Hk, d, page_size
        kind = {"q_data_type": q.dtype, "kv_data_type": q.dtype}
        try:
            if self.one_row:
                self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                    workspace(q.device), "HND", use_tensor_cores=GROUP * Hk <= H
                )
                self.wrapper.plan(*table, *shape, **kind)
            else:
                self.wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                    workspace(q.device), "HND"
                )
                self.wrapper.plan(numbers(rows), *table, *shape, causal=causal, **kind)
        except (RuntimeError, ValueError, OSError) as error:
            why = str(error).strip().splitlines()[:1]
            raise StageUnavailable(f"FlashInfer does not take this problem: {why}") from error

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The attention of q (B, H, Nq, d) to pages k and v (pages, Hk, page_size, d)."""
        B, H, Nq, d = q.shape
        rows = q[:, :, 0] if self.one_row else q.transpose(1, 2).reshape(B * Nq, H, d)
        o = self.wrapper.run(rows.contiguous(), (k, v))
        return o.view(B, Nq, H, d).transpose(1, 2)


@functools.lru_cache(4)
def plan_of_one_piece(
    shape: tuple[int, ...], Hk: int, Nk: int, dtype: torch.dtype, device: torch.device, causal: bool
) -> Plan:
    """The plan where each sequence is one page of Nk tokens; `shape` is that of q."""
    q = torch.empty(shape, dtype=dtype, device=device)
    return Plan(q, Hk, Nk, [[b] for b in range(shape[0])], [Nk] * shape[0], causal)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False
) -> torch.Tensor:
    """FlashInfer's paged kernels, with each batch entry's keys as one page.

    FlashInfer splits keys between pages, so here it doesn't split them, and is slow where there are
    few heads: compare it by `attend_paged`.

    q (B, H, Nq, d), k and v (B, Hk, Nk, d) -> (B, H, Nq, d). Raises StageUnavailable where it can't
    be loaded or has no kernel, and ValueError for a causal mask that hides all keys from a row.
    """
    check_inputs(STAGE, q, k, v, causal=causal)
    check_rows(q, k.shape[2], causal)
    run = plan_of_one_piece((*q.shape,), k.shape[1], k.shape[2], q.dtype, q.device, causal)
    return run(q, k.contiguous(), v.contiguous())


def attend_paged(
    q: torch.Tensor, cache: PagedCache, sequences: Sequence[Hashable], *, causal: bool = True
) -> torch.Tensor:
    """FlashInfer's attention of q's batch entries to `sequences` of a cache, one each.

    q (len(sequences), H, Nq, d) -> the same shape. Raises as `attend` does, and ValueError where a
    sequence is unknown.
    """
    cache.check_known(sequences)
    cache.check_queries(STAGE, q, len(sequences), causal)
    lengths = [cache.length[sequence] for sequence in sequences]
    check_rows(q, min(lengths), causal)
    pages = [cache.pages[sequence] for sequence in sequences]
    asked = (*sequences, *lengths, *q.shape, causal)
    known = cache.planned and cache.planned[1] == asked and len(cache.planned[0]) == len(pages)
    # a sequence keeps its pages while its list is the same one, and as long
    if not known or any(a is not b for a, b in zip(cache.planned[0], pages, strict=True)):
        plan = Plan(q, cache.k.shape[1], cache.page_size, pages, lengths, causal)
        cache.planned = pages, asked, plan
    return cache.planned[2](q, cache.k, cache.v)


def check_rows(q: torch.Tensor, keys: int, causal: bool) -> None:
    """Raise ValueError where a row sees no key: FlashInfer's output for it is not defined."""
    if not keys or (causal and q.shape[2] > keys):
        raise ValueError(f"q: got {q.shape[2]} rows for {keys} keys, expected a key for each row")
