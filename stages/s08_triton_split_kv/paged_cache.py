"""A paged cache of keys and values: sequences grow, and share one pool of pages.

    k, v     (pages, Hk, page_size, d), apart; what lies beyond a sequence's length is never read
    table    (sequences, pages) int32: in its row, the pages of a sequence, in order
    lengths  (sequences,) int32

All four lie on the device and stay where they are, so that a captured CUDA graph reads what was
appended since. The host keeps its own lists: which pages are free, and how long each sequence is.
It decides by them and never waits for the device. One stream owns a cache.
"""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from stages.common.contract import (
    MAX_GRID,
    MAX_HEAD_DIM,
    Stage,
    StageUnavailable,
    why_not,
    why_not_dtype,
    wrong,
)
from stages.common.fit import padded_dim
from stages.common.inputs import check_inputs, check_plain, dtype_name, transformed
from stages.common.launch import fast_launch
from stages.common.machine import capturing, launching
from stages.common.no_triton import tl, triton

PAGE_SIZES = (16, 32, 64, 128, 256)
DTYPES = ("float16", "bfloat16", "float32")
SPARE = 16  # columns of the table past its last page: a kernel looks one tile of keys ahead
MOST_BATCHES = 256  # whose rows, and kinds of queries whose checks, are kept

# what the cache itself needs of a machine
NEEDS = Stage(number=8, name="paged_cache", title="Paged cache", idea="pages", needs=("triton",))


@triton.jit(do_not_specialize=["row", "length", "n"])
def append_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, table_ptr, lengths_ptr, pages_ptr,
    stride_kh, stride_kn, stride_kd, stride_vh, stride_vn, stride_vd,
    stride_page, stride_head, stride_table, row, length, n, d,
    PAGE_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program per page written and head: its tokens, and with the first head its number."""
    j, h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    nth = length // PAGE_SIZE + j  # of the sequence's pages
    offs_d = tl.arange(0, BLOCK_D).to(tl.int64)  # (BLOCK_D,)
    slots = tl.arange(0, PAGE_SIZE)  # (PAGE_SIZE,)
    token = (nth * PAGE_SIZE + slots - length).to(tl.int64)  # (PAGE_SIZE,), of k and v
    mask = ((token >= 0) & (token < n))[:, None] & (offs_d[None, :] < d)
    page = tl.load(pages_ptr + j)
    out = page.to(tl.int64) * stride_page + h * stride_head
    out_offs = out + slots[:, None] * d + offs_d[None, :]
    k_ptrs = k_ptr + h * stride_kh + token[:, None] * stride_kn + offs_d[None, :] * stride_kd
    v_ptrs = v_ptr + h * stride_vh + token[:, None] * stride_vn + offs_d[None, :] * stride_vd
    tl.store(k_cache_ptr + out_offs, tl.load(k_ptrs, mask=mask), mask=mask)
    tl.store(v_cache_ptr + out_offs, tl.load(v_ptrs, mask=mask), mask=mask)
    if h == 0:
        used = nth * PAGE_SIZE < length + n
        tl.store(table_ptr + row.to(tl.int64) * stride_table + nth, page, mask=used)
        if j == 0:
            tl.store(lengths_ptr + row, length + n)


@triton.jit
def append_many_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, table_ptr, lengths_ptr, rows_ptr, pages_ptr,
    stride_kb, stride_kh, stride_kd, stride_vb, stride_vh, stride_vd,
    stride_page, stride_head, stride_table, Hk, d,
    PAGE_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program per sequence: a token of all heads, and the sequence's new length.

    It has a single warp, of which no thread can store the length before another has loaded it.
    pages_ptr has a new page for each sequence, or -1 where the token fits into its last one; it is
    None where all do.
    """
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + b).to(tl.int64)
    length = tl.load(lengths_ptr + row)
    place = table_ptr + row * stride_table + length // PAGE_SIZE
    if pages_ptr is None:
        page = tl.load(place)
    else:
        page = tl.load(pages_ptr + b)
        if page < 0:
            page = tl.load(place)
        else:
            tl.store(place, page)
    offs_d = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]  # (1, BLOCK_D)
    out = page.to(tl.int64) * stride_page + (length % PAGE_SIZE) * d
    for start in range(0, Hk, BLOCK_H):
        heads = (start + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]  # (BLOCK_H, 1)
        mask = (heads < Hk) & (offs_d < d)
        k = tl.load(k_ptr + b * stride_kb + heads * stride_kh + offs_d * stride_kd, mask=mask)
        v = tl.load(v_ptr + b * stride_vb + heads * stride_vh + offs_d * stride_vd, mask=mask)
        tl.store(k_cache_ptr + out + heads * stride_head + offs_d, k, mask=mask)
        tl.store(v_cache_ptr + out + heads * stride_head + offs_d, v, mask=mask)
    tl.store(lengths_ptr + row, length + 1)


class PagedCache:
    """Keys and values of several sequences, in pages of one pool.

    pages      how many pages there are
    page_size  tokens per page: 16, 32, 64, 128 or 256
    Hk, d      key heads, and numbers per head
    dtype      torch.float16, torch.bfloat16 or torch.float32
    device     where it lies: 'cuda', 'cpu' (interpreted), ...
    sequences  how many it holds at a time, at most; the page table has a row for each

    Raises ValueError on arguments that are none of these, StageUnavailable where Triton can't run.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        Hk: int,
        d: int,
        dtype: torch.dtype,
        device: str | torch.device,
        *,
        sequences: int = 256,
    ) -> None:
        for name, value, most in (
            ("pages", pages, (1 << 31) - 1),
            ("Hk", Hk, MAX_GRID),
            ("d", d, MAX_HEAD_DIM),
            ("sequences", sequences, (1 << 31) - 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise wrong(name, repr(value), f"an int from 1 to {most}")
        if not isinstance(page_size, int) or page_size not in PAGE_SIZES:
            raise wrong("page_size", repr(page_size), f"one of {', '.join(map(str, PAGE_SIZES))}")
        if not isinstance(dtype, torch.dtype) or dtype_name(dtype) not in DTYPES:
            raise wrong("dtype", repr(dtype), f"one of {', '.join(DTYPES)}")
        try:
            device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise wrong("device", repr(device), "'cuda' or 'cpu'") from error
        if device.type not in NEEDS.devices:
            raise wrong("device", f"'{device}'", "'cuda' or 'cpu'")
        if reason := why_not(NEEDS, device):
            raise StageUnavailable(f"a paged cache can't be kept here: {reason}")
        if reason := why_not_dtype(NEEDS, dtype_name(dtype), device):
            raise ValueError(f"dtype: got {dtype_name(dtype)}: {reason}")
        self.page_size = page_size
        self.k = torch.empty((pages, Hk, page_size, d), dtype=dtype, device=device)
        self.v = torch.empty((pages, Hk, page_size, d), dtype=dtype, device=device)
        # zeros: what a kernel looks up ahead, and does not use, is a page all the same
        size = (sequences, pages + SPARE)
        self.table = torch.zeros(size, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(sequences, dtype=torch.int32, device=device)
        self.free_pages = list(range(pages - 1, -1, -1))  # taken from the end
        self.free_rows = list(range(sequences - 1, -1, -1))
        self.row: dict[Hashable, int] = {}  # of each sequence
        self.pages: dict[Hashable, list[int]] = {}
        self.length: dict[Hashable, int] = {}
        self.batches: dict[tuple[int, ...], Tensor] = {}  # rows, on the device
        # the same by sequence, until one is freed: no more of them than of batches
        self.asked: dict[tuple[Hashable, ...], Tensor] = {}
        self.passed: set[tuple[int, torch.Size, bool]] = set()  # see `check_queries`
        self.captured: list[Tensor] = []  # what a CUDA graph reads is kept

    def append(self, sequence: Hashable, k: Tensor, v: Tensor) -> None:
        """Append the tokens of k and v, each (Hk, n, d), to a sequence; a new one is begun.

        n may be 0. Raises ValueError where an argument is wrong and RuntimeError where pages or
        rows run out, or while a CUDA graph is captured; the cache is then as it was.
        """
        try:
            hash(sequence)
        except TypeError:
            got = f"a {type(sequence).__name__}"
            raise wrong("sequence", got, "a number, a text, ...") from None
        self.check_tokens(k, v)
        self.check_capture("append")
        length, n = self.length.get(sequence, 0), k.shape[1]
        pages = self.pages.get(sequence, [])
        end = -(-(length + n) // self.page_size)
        missing = max(0, end - len(pages))
        if missing > len(self.free_pages):
            raise RuntimeError(
                f"append: {n} tokens more for sequence {sequence!r} take {missing} pages more, but "
                f"{len(self.free_pages)} of {self.k.shape[0]} are free; free a sequence"
            )
        if sequence not in self.row and not self.free_rows:
            raise RuntimeError(
                f"append: the cache holds {len(self.row)} sequences, the most that it was made "
                "for; free one, or make it with a larger sequences="
            )
        if n == 1 and not missing:  # nothing for the host to decide
            rows, _ = self.rows([sequence])
            self.write_each(k[None], v[None], rows, None)
            self.length[sequence] = length + 1
            return
        new = self.free_pages[len(self.free_pages) - missing :][::-1]
        row = self.row[sequence] if sequence in self.row else self.free_rows[-1]
        written = (pages + new)[length // self.page_size : end]
        self.write(k, v, row, length, written)
        # the host's lists last: whatever was raised before, they are as they were
        if sequence not in self.row:
            self.row[sequence] = self.free_rows.pop()
        del self.free_pages[len(self.free_pages) - missing :]
        self.pages[sequence], self.length[sequence] = pages + new, length + n

    def append_many(self, sequences: Sequence[Hashable], k: Tensor, v: Tensor) -> None:
        """Append one token to each of `sequences`, by one kernel: a step of decoding.

        k and v (len(sequences), Hk, 1, d), each sequence once, all of them begun by `append`.
        Raises ValueError where an argument is wrong and RuntimeError where pages run out; the cache
        is then as it was.

        Where each sequence has a page for its token (`reserve`), and the call was made once before
        with these sequences, a CUDA graph may capture it: each replay appends, at the lengths on
        the device. Before it, call `advance`.
        """
        captured = capturing(self.k)
        rows, _ = self.rows(sequences)
        self.check_once(sequences)
        self.check_tokens(k, v, batch=len(sequences))
        full = self.without_room(sequences)
        if full and captured:
            raise RuntimeError(
                "append_many: a CUDA graph is being captured, and a token begins a page; reserve "
                "pages before the capture"
            )
        if len(full) > len(self.free_pages):
            raise RuntimeError(
                f"append_many: {len(full)} of the sequences begin a page, but "
                f"{len(self.free_pages)} of {self.k.shape[0]} are free; free a sequence"
            )
        new = dict(zip(full, reversed(self.free_pages), strict=False))
        pages = self.upload([new.get(i, -1) for i in range(len(sequences))]) if new else None
        self.write_each(k, v, rows, pages)
        if captured:  # nothing has been appended yet
            return
        del self.free_pages[len(self.free_pages) - len(new) :]
        for name in sequences:
            self.length[name] += 1
        for i, page in new.items():
            self.pages[sequences[i]].append(page)

    def reserve(self, sequence: Hashable, n: int) -> None:
        """Take the pages for `n` tokens more of a sequence now, and enter them in the table.

        Raises ValueError where an argument is wrong and RuntimeError where pages run out, or while
        a CUDA graph is captured; the cache is then as it was.
        """
        self.check_known([sequence])
        self.check_capture("reserve")
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise wrong("n", repr(n), "an int of at least 0")
        pages = self.pages[sequence]
        missing = max(0, -(-(self.length[sequence] + n) // self.page_size) - len(pages))
        if missing > len(self.free_pages):
            raise RuntimeError(
                f"reserve: {n} tokens more for sequence {sequence!r} take {missing} pages more, "
                f"but {len(self.free_pages)} of {self.k.shape[0]} are free; free a sequence"
            )
        if missing:
            new = self.free_pages[-missing:][::-1]
            first = len(pages)
            self.table[self.row[sequence], first : first + missing] = self.upload(new)
            del self.free_pages[-missing:]
            pages += new

    def advance(self, sequences: Sequence[Hashable]) -> None:
        """Count a token more of each of `sequences`: a CUDA graph with `append_many` is replayed.

        Call it before the replay. Raises RuntimeError where one has no page for its token, which
        would be written to another's page; ValueError where an argument is wrong.
        """
        self.check_list(sequences)
        self.check_known(sequences)
        self.check_once(sequences)
        if full := self.without_room(sequences):
            raise RuntimeError(
                f"advance: sequence {sequences[full[0]]!r} has no page for another token; reserve "
                "more before the replay"
            )
        for name in sequences:
            self.length[name] += 1

    def without_room(self, sequences: Sequence[Hashable]) -> list[int]:
        """Which of `sequences`, by index, have no place for a token in their pages."""
        lengths = map(self.length.__getitem__, sequences)
        ends = [i for i, n in enumerate(lengths) if n % self.page_size == 0]  # of pages
        room = {i: len(self.pages[sequences[i]]) * self.page_size for i in ends}
        return [i for i in ends if room[i] == self.length[sequences[i]]]

    def write_each(self, k: Tensor, v: Tensor, rows: Tensor, pages: Tensor | None) -> None:
        """Write one token of each sequence, k and v (B, Hk, 1, d), and its length, by one kernel.

        rows and pages (B,): of the table, and the new pages, or -1; None where there is none.
        """
        k, v = k.resolve_neg(), v.resolve_neg()
        B, Hk, _, d = k.shape
        (k_b, k_h, _, k_d), (v_b, v_h, _, v_d) = k.stride(), v.stride()
        page, head, _, _ = self.k.stride()
        BLOCK_D = padded_dim(d)
        with launching(self.k):
            fast_launch(
                append_many_kernel, (B,),
                (k, v, self.k, self.v, self.table, self.lengths, rows, pages),
                (k_b, k_h, k_d, v_b, v_h, v_d, page, head, self.table.stride(0), Hk, d),
                PAGE_SIZE=self.page_size, BLOCK_H=max(1, 1024 // BLOCK_D), BLOCK_D=BLOCK_D,
                num_warps=1,
            )  # fmt: skip

    def write(self, k: Tensor, v: Tensor, row: int, length: int, pages: list[int]) -> None:
        """Write tokens, table and length on the device, by one kernel, without waiting for it."""
        k, v = k.resolve_neg(), v.resolve_neg()
        Hk, n, d = k.shape
        numbers = self.upload(pages or [0])
        with launching(self.k):
            fast_launch(
                append_kernel, (len(numbers), Hk),
                (k, v, self.k, self.v, self.table, self.lengths, numbers),
                (
                    *k.stride(), *v.stride(), self.k.stride(0), self.k.stride(1),
                    self.table.stride(0), row, length, n, d,
                ),
                PAGE_SIZE=self.page_size, BLOCK_D=padded_dim(d),
            )  # fmt: skip

    def upload(self, numbers: Sequence[int]) -> Tensor:
        """Copy int32 `numbers` to the device; from pinned memory, since a plain copy waits."""
        host = torch.tensor(numbers, dtype=torch.int32, device="cpu", pin_memory=self.k.is_cuda)
        return host.to(self.k.device, non_blocking=True)

    def free(self, sequence: Hashable) -> None:
        """Forget a sequence: its pages are free again. Raises ValueError where it is unknown."""
        self.check_known([sequence])
        self.free_pages += reversed(self.pages.pop(sequence))
        self.free_rows.append(self.row.pop(sequence))
        del self.length[sequence]
        self.asked.clear()

    def rows(self, sequences: Sequence[Hashable]) -> tuple[Tensor, int]:
        """The table's rows of `sequences`, (B,) int32 on the device, and the longest's length.

        Raises ValueError where there is none or one is unknown, RuntimeError where a CUDA graph
        captures a batch that was never asked for before it.
        """
        self.check_list(sequences)
        captured = capturing(self.k)
        names = tuple(sequences)
        try:
            rows = self.asked.get(names)
        except TypeError:  # one of them is a list, say, which is no sequence
            rows = None
        if rows is None:
            self.check_known(sequences)
            rows = self.asked[names] = self.rows_of(
                tuple(map(self.row.__getitem__, names)), captured
            )
        if captured:
            self.captured.append(rows)
        return rows, max(map(self.length.__getitem__, names))

    def rows_of(self, batch: tuple[int, ...], captured: bool) -> Tensor:
        """Rows of the table, on the device, where they were put at the first call with them."""
        if batch not in self.batches:
            if captured:
                raise RuntimeError(
                    "a CUDA graph is being captured, and the rows of these sequences are not on "
                    "the GPU: make the call once with them before the capture"
                )
            if len(self.batches) == MOST_BATCHES:
                self.batches.clear()
                self.asked.clear()
            self.batches[batch] = self.upload(batch)
        return self.batches[batch]

    def check_list(self, sequences: Sequence[Hashable]) -> None:
        """Raise ValueError unless `sequences` is a list of some."""
        if isinstance(sequences, str) or not isinstance(sequences, Sequence):
            raise wrong("sequences", type(sequences).__name__, "a list of sequences")
        if not sequences:
            raise wrong("sequences", "none", "one at least")

    def check_once(self, sequences: Sequence[Hashable]) -> None:
        """Raise ValueError unless each of `sequences` is there once: a step has one token of it."""
        if len(set(sequences)) < len(sequences):
            raise wrong("sequences", "one of them twice", "each once: a call appends one token")

    def check_known(self, sequences: Sequence[Hashable]) -> None:
        """Raise ValueError unless each of `sequences` has been appended to."""
        for sequence in sequences:
            try:
                known = sequence in self.row
            except TypeError:  # a list, say
                known = False
            if not known:
                got = f"{sequence!r}, which this cache doesn't hold"
                raise wrong("sequence", got, "one that was appended to and not freed")

    def check_capture(self, call: str) -> None:
        """Raise RuntimeError while a CUDA graph is captured."""
        if capturing(self.k):
            raise RuntimeError(
                f"{call}: a CUDA graph is being captured, and where tokens go is decided outside "
                "of it; append before the capture, or between replays"
            )

    def check_tokens(self, k: Tensor, v: Tensor, batch: int | None = None) -> None:
        """Raise ValueError unless k and v are (Hk, n, d) of the cache's dtype and device.

        Or (batch, Hk, 1, d), if `batch` is given.
        """
        _, Hk, _, d = self.k.shape
        letters = "(Hk, n, d)" if batch is None else "(B, Hk, 1, d)"
        for name, x in (("k", k), ("v", v)):
            check_plain(name, x, f"a torch.Tensor {letters}")
            right = (Hk, *x.shape[1:2], d) if batch is None else (batch, Hk, 1, d)
            if x.shape != right:
                numbers = f"({Hk}, n, {d})" if batch is None else f"{right}"
                raise wrong(name, f"shape {tuple(x.shape)}", f"{letters} = {numbers}")
            self.check_kind(name, x)
        if batch is None and k.shape[1] != v.shape[1]:
            raise wrong("v", f"{v.shape[1]} tokens", f"k's {k.shape[1]}")

    def check_queries(self, stage: Stage, q: Tensor, batch: int, causal: bool) -> None:
        """Raise ValueError unless q (batch, H, Nq, d) fits the cache, and `stage` takes it."""
        check_plain("q", q, "a torch.Tensor (B, H, Nq, d)")
        if q.ndim != 4:
            raise wrong("q", f"shape {tuple(q.shape)}", "a torch.Tensor (B, H, Nq, d)")
        (B, H, _, d), (_, Hk, _, cache_d) = q.shape, self.k.shape
        if batch != B:
            raise wrong("q", f"batch B = {B}", f"one for each of {batch}")
        if d != cache_d:
            raise wrong("q", f"head dimension d = {d}", f"the cache's {cache_d}")
        if H % Hk or not H:
            raise wrong("q", f"{H} heads", f"a multiple of the cache's {Hk}")
        self.check_kind("q", q)
        # the shape tells all else that is checked; a stage's id is its own, as it lives for good
        kind = id(stage), q.shape, causal
        if not isinstance(causal, bool) or kind not in self.passed:
            like_keys = self.k[:1].expand(batch, -1, -1, -1)
            check_inputs(stage, q, like_keys, like_keys, causal=causal)
            if len(self.passed) == MOST_BATCHES:
                self.passed.clear()
            self.passed.add(kind)

    def check_kind(self, name: str, x: Tensor) -> None:
        """Raise ValueError unless `x` has the cache's dtype and device, and wants no gradient."""
        dtype, device = self.k.dtype, self.k.device
        if x.dtype != dtype:
            raise wrong(name, f"dtype {dtype_name(x.dtype)}", f"the cache's {dtype_name(dtype)}")
        if x.device != device:
            raise wrong(name, f"device {x.device}", f"the cache's {device}")
        if transformed(x):
            got = "a tensor inside torch.func (grad, vmap, jvp) or forward_ad"
            raise wrong(name, got, "a plain one: a cache has no way back")
        if torch.is_grad_enabled() and x.requires_grad:
            way = "none: a cache has no way back; call it under torch.no_grad()"
            raise wrong(name, "requires_grad=True", way)
