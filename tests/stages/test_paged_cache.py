"""The paged cache against plain lists of keys and values, and against the contiguous kernel."""

import math
import re
import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from stage_checks import assert_close, device_of, guarded_outputs, in_nan, normal, rounding, truth

from stages import s08_triton_split_kv as stage
from stages.common import machine
from stages.common.contract import StageUnavailable
from stages.common.machine import has_module
from stages.s08_triton_split_kv.paged_cache import PAGE_SIZES, PagedCache

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" and not has_module("triton"), reason="no triton for this machine"
)

DEVICE = device_of(stage) if has_module("triton") else "cpu"
HK, D = 2, 8


def cache_of(pages=8, page_size=16, dtype=torch.float32, **options):
    return PagedCache(pages, page_size, HK, D, dtype, DEVICE, **options)


def tokens(n, seed=0, dtype=torch.float32, d=D):
    """k and v (HK, n, d) ~ N(0, 1)."""
    _, k, v, _ = normal((1, HK, 1, max(n, 1), d), seed, dtype, DEVICE)
    return k[0, :, :n], v[0, :, :n]


def a_token_to_each(sequences, seed, dtype=torch.float32):
    """k and v (sequences, HK, 1, D) ~ N(0, 1)."""
    return [x.transpose(0, 1)[:, :, None] for x in tokens(sequences, seed, dtype)]


def queries(sequences, nq=1, group=2, seed=99, dtype=torch.float32, d=D):
    return normal((sequences, HK * group, nq, 1, d), seed, dtype, DEVICE)[0]


def hidden_from(nq, nk, causal):
    late = nk - nq if causal else nk
    rows = torch.arange(nq, device=DEVICE)[:, None]
    return (torch.arange(nk, device=DEVICE) > rows + late)[None, None]


def poison(cache):
    """NaN in all that no sequence holds: free pages, and what lies beyond the lengths."""
    for x in (cache.k, cache.v):
        x[cache.free_pages] = math.nan
        for name, pages in cache.pages.items():
            if filled := cache.length[name] % cache.page_size:
                x[pages[-1], :, filled:] = math.nan


class Both:
    """A cache, and `held`: by name, the keys and values (Hk, n, d) that were appended to it."""

    def __init__(self, cache, **tokens):
        self.cache, self.held = cache, {}
        for name, pair in tokens.items():
            self.append(name, pair)

    def append(self, name, pair):
        self.cache.append(name, *pair)
        self.grow(name, pair)

    def append_many(self, names, k, v):
        """k and v (B, Hk, 1, d)."""
        self.cache.append_many(names, k, v)
        for name, *pair in zip(names, k, v, strict=True):
            self.grow(name, pair)

    def grow(self, name, pair):
        old = self.held.get(name, tokens(0, dtype=self.cache.k.dtype))
        self.held[name] = [torch.cat(each, 1) for each in zip(old, pair, strict=True)]

    def check(self, sequences, nq=1, causal=True):
        """attend_paged is what float64 says of the keys and values that were appended."""
        q = in_nan(queries(len(sequences), nq, dtype=self.cache.k.dtype))
        with guarded_outputs():
            o = stage.attend_paged(q, self.cache, sequences, causal=causal)
        self.check_output(o, q, sequences, causal)

    def check_output(self, o, q, sequences, causal):
        assert (o.shape, o.dtype) == (q.shape, q.dtype)
        for row, name in enumerate(sequences):
            k, v = self.held[name]
            one = q[row : row + 1]
            if not k.shape[1]:
                assert (o[row] == 0).all()
                continue
            hidden = hidden_from(q.shape[2], k.shape[1], causal)
            want = truth(one, k[None], v[None], hidden)
            assert_close(o[row : row + 1], want, rounding(one, k[None], v[None]))
            assert (o[row][:, hidden[0, 0].all(-1)] == 0).all()


def snapshot(cache):
    """All that a cache holds, its unused memory included."""
    lists = cache.free_pages, cache.free_rows, cache.row, cache.pages, cache.length
    stored = cache.k, cache.v, cache.table, cache.lengths
    return repr(lists), [x.clone().nan_to_num(nan=7.0) for x in stored]


@contextmanager
def unchanged(cache):
    lists, stored = snapshot(cache)
    yield
    after, now = snapshot(cache)
    assert after == lists
    assert all(map(torch.equal, now, stored))


# ---- what it computes


@settings(max_examples=8, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(data=st.data(), page_size=st.sampled_from([16, 64]), causal=st.booleans())
def test_any_order_of_appending_and_freeing(data, page_size, causal):
    cache = cache_of(5, page_size, torch.float16)
    both = Both(cache)
    held = both.held
    for step in range(data.draw(st.integers(3, 8), label="steps")):
        name = data.draw(st.sampled_from("abc"), label="sequence")
        if name in held and data.draw(st.integers(0, 3), label="free?") == 0:
            cache.free(name)
            del held[name]
            continue
        if data.draw(st.booleans(), label="a token to each?"):
            names = data.draw(st.permutations(sorted(held)), label="order")
            full = sum(held[each][0].shape[1] % page_size == 0 for each in names)
            if names and full <= len(cache.free_pages):
                both.append_many(names, *a_token_to_each(len(names), step, torch.float16))
                continue
        n = data.draw(st.sampled_from([0, 1, 2, page_size - 1, page_size, page_size + 1, 40]))
        pair, sizes = (
            tokens(n, step, torch.float16),
            {key: x.shape[1] for key, (x, _) in held.items()},
        )
        sizes[name] = sizes.get(name, 0) + n
        if sum(-(-size // page_size) for size in sizes.values()) > 5:
            says = r"pages more, but .* are free"
            with unchanged(cache), pytest.raises(RuntimeError, match=says):
                cache.append(name, *pair)
            continue
        both.append(name, pair)
    poison(cache)
    assert {name: x.shape[1] for name, (x, _) in held.items()} == cache.length
    if held:
        both.check(sorted(held, reverse=True), data.draw(st.integers(1, 3)), causal)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_every_page_size(page_size):
    sizes = {"a": 2 * page_size + 1, "b": page_size, "c": 3}
    both = Both(cache_of(6, page_size), **{name: tokens(n, n) for name, n in sizes.items()})
    poison(both.cache)
    both.check(["c", "a", "b", "a"], 2)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("page_size", [16, 32])
def test_scattered_pages_give_the_bits_of_contiguous_keys(page_size, splits):
    """The same parts in the same tiles: a page table adds no rounding."""
    n, tile = 90, 16
    k, v = tokens(n)
    cache = cache_of(20, page_size)
    cache.free_pages = [(7 * page + 3) % 20 for page in range(20)]
    cache.append("other", *tokens(page_size + 3, 1))
    cache.append("mine", k[:, :33], v[:, :33])
    cache.append("other", *tokens(page_size, 2))
    cache.append("mine", k[:, 33:], v[:, 33:])
    assert sorted(pages := cache.pages["mine"]) != pages
    q = queries(1, 3)
    config = {"BLOCK_M": 16, "BLOCK_N": tile, "BLOCK_D": 16, "num_warps": 4, "num_stages": 2}
    chosen = {"splits": splits, "config": config}
    rows, longest = cache.rows(["mine"])
    assert longest == n
    got = stage.forward(
        q, cache.k, cache.v, True, cache.lengths, table=cache.table, rows=rows, longest=n, **chosen
    )
    assert torch.equal(got, stage.forward(q, k[None], v[None], True, None, **chosen))


@pytest.mark.parametrize("splits", [1, 2, 3, 6])
def test_a_dominant_key_at_both_ends_of_each_page(splits):
    d, n, page_size = 32, 90, 16
    _, k, v, _ = normal((1, 1, 1, n, d), 0, device=DEVICE)
    k = k / k.norm(dim=-1, keepdim=True)
    ends = sorted({min(n - 1, x) for at in range(0, n, page_size) for x in (at, at + 15)})
    q = 40 * math.sqrt(d) * k[:, :, ends]
    cache = PagedCache(9, page_size, 1, d, torch.float32, DEVICE)
    cache.append(0, k[0], v[0])
    poison(cache)
    rows, longest = cache.rows([0])
    config = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_D": d, "num_warps": 4, "num_stages": 2}
    o = stage.forward(
        q, cache.k, cache.v, False, cache.lengths, table=cache.table, rows=rows,
        longest=longest, splits=splits, config=config,
    )  # fmt: skip
    assert_close(o, truth(q, k, v), rounding(q, k, v))
    nearest = torch.cdist(o[0, 0].double(), v[0, 0].double()).argmin(-1)
    assert nearest.tolist() == ends


def test_a_freed_page_is_taken_again():
    cache = cache_of(2)
    cache.append("a", *tokens(32))
    cache.free("a")
    both = Both(cache, b=tokens(20, 1), c=tokens(0))
    assert not cache.free_pages
    both.check(["b", "c"])


def test_a_name_that_was_freed_and_begun_again_has_the_row_that_it_has_now():
    cache = cache_of()
    for turn, names in enumerate(("ab", "ba", "ab")):
        both = Both(cache, **{name: tokens(9, 2 * turn + i) for i, name in enumerate(names)})
        both.check(["a", "b"])
        for name in "ab":
            cache.free(name)


def test_nothing_is_copied_from_the_host_where_it_decides_nothing(monkeypatch):
    """A token that fits into a page, and a batch that was asked for before."""
    copied, upload = [], PagedCache.upload
    monkeypatch.setattr(PagedCache, "upload", lambda *a: copied.append(a[1]) or upload(*a))
    both = Both(cache_of(), a=tokens(17), b=tokens(20, 1))
    both.check(["a", "b"])
    copied.clear()
    both.append("a", tokens(1, 50))  # the row of "a" alone, once
    assert len(copied) == 1
    for step in range(11):
        if step % 2:
            both.append_many(["a", "b"], *a_token_to_each(2, step))
        else:
            for seed, name in enumerate("ab"):
                both.append(name, tokens(1, 20 * seed + step))
        both.check(["a", "b"])
    assert len(copied) == 2  # and that of "b"
    both.append("b", tokens(1, 60))
    both.append("b", tokens(1, 61))  # begins a page
    both.check(["b"])
    assert both.cache.length == {"a": 29, "b": 33} and len(copied) == 3


def test_tokens_of_any_stride_stay_as_they_are():
    both, plain = Both(cache_of()), tokens(19, 3)
    for name, order in (("a", (2, 0, 3, 1)), ("b", (3, 1, 2, 0))):
        pair = [in_nan(x[None], order, (1, 2, 1, 2))[0] for x in plain]
        both.append(name, pair)
        assert all(map(torch.equal, pair, plain))
    both.append("c", [torch._neg_view(-x) for x in tokens(5, 4)])
    each = (in_nan(x, (3, 1, 2, 0), (1, 2, 1, 2)) for x in a_token_to_each(2, 5))
    both.append_many(["a", "b"], *each)
    both.check(["a", "b", "c"], 2)


def test_reserved_pages_are_used_and_freed_like_others():
    both = Both(cache_of(5), a=tokens(15), b=tokens(3, 1))
    cache = both.cache
    cache.reserve("a", 18)  # 33 tokens: two pages more
    cache.reserve("a", 1)  # which has a page
    table = cache.table[cache.row["a"], :3].tolist()
    assert table == cache.pages["a"] and len({*table}) == 3 and len(cache.free_pages) == 1
    for n in (1, 0, 14, 2, 1):  # to 33, past the end of each page
        both.append("a", tokens(n, 10 + n))
        poison(cache)
        both.check(["b", "a"])
    assert cache.table[cache.row["a"], :3].tolist() == table == cache.pages["a"]
    cache.free("a")
    assert len(cache.free_pages) == 4


def test_a_replay_is_counted_only_where_its_token_has_a_place():
    cache = cache_of(3)
    for name in "ab":
        cache.append(name, *tokens(15))
    cache.advance(["a", "b"])
    assert cache.length == {"a": 16, "b": 16}
    cache.reserve("a", 1)
    with unchanged(cache), pytest.raises(RuntimeError, match=r"^advance: sequence 'b' has no page"):
        cache.advance(["a", "b"])
    with (
        unchanged(cache),
        pytest.raises(RuntimeError, match=r"^reserve: 17 tokens .* take 1 pages"),
    ):
        cache.reserve("a", 17)
    for n in (-1, 1.0, True):
        with unchanged(cache), pytest.raises(ValueError, match=r"^n: got"):
            cache.reserve("a", n)


# ---- what it refuses


def refusals():
    """What is asked of a cache of "a" and "b", and what it says: {case: (call, message)}."""
    k, v = tokens(3)
    bad_tokens = {
        "k a list": ([1.0], v, "k: got list, expected a torch.Tensor"),
        "k of rank 2": (k[0], v, "k: got shape (3, 8), expected (Hk, n, d) = (2, n, 8)"),
        "k's heads": (k[:1], v[:1], "k: got shape (1, 3, 8), expected (Hk, n, d) = (2, n, 8)"),
        "v's d": (k, v[:, :, :7], "v: got shape (2, 3, 7), expected (Hk, n, d) = (2, n, 8)"),
        "v's n": (k, v[:, :2], "v: got 2 tokens, expected k's 3"),
        "v's dtype": (k, v.half(), "v: got dtype float16, expected the cache's float32"),
        "float64": (k.double(), v.double(), "k: got dtype float64, expected the cache's float32"),
        "v's device": (k, v.to("meta"), "v: got a tensor on meta"),
        "k's gradient": (k.clone().requires_grad_(), v, "k: got requires_grad=True, expected none"),
    }
    q = queries(2)
    bad_queries = {
        "q of rank 3": (q[0], "q: got shape (4, 1, 8), expected a torch.Tensor (B, H, Nq, d)"),
        "q a list": ([1.0], "q: got list, expected a torch.Tensor"),
        "q's batch": (q[:1], "q: got batch B = 1, expected one for each of 2"),
        "q's d": (queries(2, d=9), "q: got head dimension d = 9, expected the cache's 8"),
        "q's heads": (q[:, :3], "q: got 3 heads, expected a multiple of the cache's 2"),
        "q's rows": (q[:, :, :0], "q: got shape (2, 4, 0, 8), expected N to be at least 1"),
        "q's dtype": (q.half(), "q: got dtype float16, expected the cache's float32"),
        "q's device": (q.to("meta"), "q: got a tensor on meta"),
        "q's gradient": (q.clone().requires_grad_(), "q: got requires_grad=True, expected none"),
    }
    made = {
        f"{case}, {name}": (partial(PagedCache.append, sequence=name, k=x, v=y), says)
        for case, (x, y, says) in bad_tokens.items()
        for name in ("a", "new")
    }
    for case, (x, says) in bad_queries.items():
        made[case] = lambda cache, x=x: stage.attend_paged(x, cache, ["a", "b"]), says
    for causal in (1, None, []):
        ask = lambda cache, causal=causal: stage.attend_paged(q, cache, ["a", "b"], causal=causal)  # noqa: E731
        made[f"causal {causal}"] = ask, f"causal: got {causal}, expected True or False"
    for names in ("ab", 3, None, {"a"}, []):
        ask = lambda cache, names=names: stage.attend_paged(q, cache, names)  # noqa: E731
        made[f"sequences {names}"] = ask, "sequences: got "
    for name in ("unknown", "freed", ["a"]):
        ask = lambda cache, name=name: stage.attend_paged(q, cache, ["a", name])  # noqa: E731
        made[f"asked for {name}"] = ask, "sequence: got ... doesn't hold"
        made[f"free {name}"] = partial(PagedCache.free, sequence=name), made[f"asked for {name}"][1]
    step = a_token_to_each(2, 0)
    bad_steps = {
        "one twice": (["a", "a"], step, "sequences: got one of them twice, expected each once"),
        "a new one": (["a", "new"], step, "sequence: got 'new', which this cache doesn't hold"),
        "two tokens": (
            ["a", "b"], [x.expand(2, 2, 2, 8) for x in step],
            "k: got shape (2, 2, 2, 8), expected (B, Hk, 1, d) = (2, 2, 1, 8)",
        ),
        "of one": (["a"], step, "k: got shape (2, 2, 1, 8), expected (B, Hk, 1, d) = (1, 2, 1, 8)"),
    }  # fmt: skip
    bad_lists = {
        f"{type(names).__name__}": (names, step, "sequences: got ")
        for names in ("ab", 3, None, {"a"}, [], (x for x in "ab"))
    }
    for case, (names, _, says) in {**bad_steps, **bad_lists}.items():
        if case not in ("two tokens", "of one"):
            made[f"counted, {case}"] = partial(PagedCache.advance, sequences=names), says
    for case, (names, pair, says) in bad_steps.items():
        ask = lambda cache, names=names, pair=pair: cache.append_many(names, *pair)  # noqa: E731
        made[f"a token to each, {case}"] = ask, says
    made["no hash"] = (
        lambda cache: cache.append([1], k, v), "sequence: got a list, expected",
    )  # fmt: skip
    made["no cache"] = (
        lambda cache: stage.attend_paged(q, {}, ["a"]), "cache: got dict, expected a PagedCache",
    )  # fmt: skip
    return made


def test_what_torch_transforms_is_refused_and_changes_nothing():
    """Written to the cache, it would have no way back."""
    cache, (k, v) = cache_of(), tokens(3)
    cache.append("a", k, v)

    def append(k):
        cache.append("a", k, v)
        return k.sum()

    for transformed in (
        lambda: torch.func.grad(append)(k),
        lambda: torch.func.vmap(append)(k[None]),
        lambda: torch.func.jvp(append, (k,), (k,)),
    ):
        says = r"^k: got a tensor inside torch\.func"
        with unchanged(cache), pytest.raises(ValueError, match=says):
            transformed()


@pytest.mark.parametrize("case", refusals() if has_module("triton") else ())
def test_what_is_refused_changes_nothing(case):
    call, says = refusals()[case]
    cache = cache_of()
    for name in ("a", "b", "freed"):
        cache.append(name, *tokens(5))
    cache.free("freed")
    stage.attend_paged(queries(2), cache, ["a", "b"])  # what passes once hides nothing
    says = ".*".join(map(re.escape, says.split("...")))
    with unchanged(cache), pytest.raises(ValueError, match=f"^{says}"):
        call(cache)


def test_what_one_stage_takes_another_one_may_refuse():
    cache = cache_of()
    cache.append("a", *tokens(5))
    other = replace(stage.STAGE, dtypes=("float16",))
    for _ in range(2):
        stage.attend_paged(queries(1), cache, ["a"])
        with pytest.raises(ValueError, match=r"^q: got dtype float32"):
            cache.check_queries(other, queries(1), 1, True)


def test_rows_run_out():
    cache = cache_of(sequences=2)
    for name in "ab":
        cache.append(name, *tokens(5))
    with unchanged(cache), pytest.raises(RuntimeError, match="holds 2 sequences, the most"):
        cache.append("c", *tokens(5))
    cache.append("a", *tokens(5))
    cache.free("b")
    cache.append("c", *tokens(5))


def test_pages_run_out():
    both = Both(cache_of(4), **{name: tokens(16, ord(name)) for name in "abc"})
    with unchanged(both.cache), pytest.raises(RuntimeError, match="take 3 pages more, but 1 of 4"):
        both.append("a", tokens(40))
    says = r"3 of .* begin a page, but 1 of 4"
    with unchanged(both.cache), pytest.raises(RuntimeError, match=says):
        both.append_many(["a", "b", "c"], *a_token_to_each(3, 9))
    both.append_many(["b"], *a_token_to_each(1, 9))
    both.check(["a", "b", "c"])


def test_a_launch_that_fails_changes_nothing(monkeypatch):
    cache = cache_of()
    cache.append("a", *tokens(5))

    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(cache, "upload", fail)
    for name in "ab":
        with unchanged(cache), pytest.raises(RuntimeError, match="out of memory"):
            cache.append(name, *tokens(40))
    with unchanged(cache), pytest.raises(RuntimeError, match="out of memory"):
        cache.append_many(["a"], *(x[None] for x in tokens(1)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, x) for name in ("pages", "Hk", "d") for x in (0, -1, 2.0, True, "3", 1 << 31)],
        *[("page_size", x) for x in (0, 8, 17, 48, 512, 16.0, 16.5, None, True)],
        ("d", 257),
        *[("dtype", x) for x in (torch.float64, torch.int32, "float32", None)],
        *[("device", x) for x in ("meta", "nowhere", 3.5)],
        ("sequences", 0),
    ],
)
def test_bad_sizes(name, value):
    good = {
        "pages": 4, "page_size": 16, "Hk": 2, "d": 8, "dtype": torch.float32, "device": DEVICE,
    }  # fmt: skip
    with pytest.raises(ValueError, match=f"^{name}: got "):
        PagedCache(**(good | {name: value}))


def test_a_gpu_that_is_not_there_is_no_place(monkeypatch):
    monkeypatch.setattr(machine, "why_no_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(StageUnavailable, match="no GPU 3: torch sees 1"):
            PagedCache(8, 16, 2, 16, dtype, "cuda:3")


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU takes bfloat16")
def test_bfloat16_is_refused_in_the_interpreter():
    with pytest.raises(ValueError, match=r"^dtype: got bfloat16: .*interpreter"):
        cache_of(dtype=torch.bfloat16)


# ---- on a GPU


@pytest.mark.skipif(DEVICE != "cuda", reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("n", [40, 4000])
def test_a_captured_graph_reads_what_was_appended_since(n):
    some = {name: tokens(n, ord(name), torch.float16) for name in "ab"}
    both = Both(cache_of(1000, 16, torch.float16), **some)
    cache = both.cache
    q, late = queries(2, 2, dtype=torch.float16), tokens(1, dtype=torch.float16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="before the capture"):
        stage.attend_paged(q, cache, ["a", "b"])
    stage.attend_paged(q, cache, ["a", "b"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = stage.attend_paged(q, cache, ["a", "b"])
        with pytest.raises(RuntimeError, match="a CUDA graph is being captured"):
            cache.append("a", *late)
    for step in range(20):
        both.append("a", tokens(3, step, torch.float16))
        graph.replay()
        both.check_output(o, q, "ab", causal=True)
