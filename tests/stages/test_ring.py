"""Stage 10: ring attention, on processes that exchange tensors by gloo.

Held to the project's own rule, against stage 3 in float64 on the whole sequence. What it does alone
is asked in test_problems.py and the others about all stages.
"""

import dataclasses
import itertools
import math
import re
import tomllib
from pathlib import Path

import pytest
import ring_ranks
import torch
import torch.distributed as dist
from marks import quickly
from ring_ranks import RankFailed, Ranks
from stage_checks import attend, normal

import stages
from course.edits import write_changed
from harness.measures.accuracy import explain
from harness.measures.oracle import make_oracles
from harness.problems.problem import Problem
from harness.problems.ring_cost import peak_bytes
from stages import s10_ring
from stages.common.machine import has_module
from stages.s10_ring.merge import merge
from stages.s10_ring.schedule import hop, length, spans

MUTANTS = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text("utf-8"))["10"]
WORLDS = (2, 3, 4)
CAUSAL = pytest.mark.parametrize("causal", [False, True])


@pytest.fixture(scope="module")
def ranks():
    """Four ranks, of which a test may use the first ones."""
    ranks = Ranks(max(WORLDS))
    yield ranks
    ranks.end()


def problem(n=24, **fields):
    """A small problem in both directions."""
    nk = fields.pop("nk", n)
    defaults = {
        "inputs": "normal", "seed": 1, "b": 2, "h": 4, "hk": 4, "nq": n, "nk": nk, "d": 16,
        "dtype": "float32", "causal": True, "seqlens_k": None, "device": "cpu",
        "direction": "train",
    }  # fmt: skip
    fields = defaults | fields
    dtype = fields["dtype"]
    return Problem(precision="ieee" if dtype == "float32" else dtype, **fields)


def check(ranks, asked, world, **options):
    """Raise unless a ring of `world` ranks is right in a problem."""
    found = ranks.one(ring_ranks.run, asked, world, options, ranks=world)
    for x, (name, oracle) in zip(found, make_oracles(asked).items(), strict=True):
        error = oracle.error(torch.from_numpy(x))
        assert error.within(oracle.bound), f"{name}, {world} ranks: {explain(error, oracle.bound)}"


# ---- who computes what

LENGTHS = (1, 2, 3, 7, 8, 24, 29)


def pairs(n, world, zigzag, causal):
    """(rank, step) -> the pairs of a query and a key, by position, that it computes."""
    parts = spans(n, world, zigzag)
    held = [[i for start, end in part for i in range(start, end)] for part in parts]
    found = {}
    for rank, step in itertools.product(range(world), repeat=2):
        now = hop(rank, step, parts, parts, causal)
        rows, keys = held[rank][now.rows], held[now.owner][now.keys]
        assert now.owner == (rank - step) % world
        assert [i for start, end in now.spans for i in range(start, end)] == keys
        assert now.empty == (not rows or not keys)
        shift = len(keys) - len(rows) if now.causal else len(keys)  # as the contract has `causal`
        found[rank, step] = [
            (i, j) for a, i in enumerate(rows) for b, j in enumerate(keys) if b <= a + shift
        ]
    return found


@CAUSAL
@pytest.mark.parametrize("zigzag", [False, True])
def test_every_pair_that_is_seen_is_computed_once(causal, zigzag):
    for world, n in itertools.product(range(1, 7), LENGTHS):
        found = list(itertools.chain(*pairs(n, world, zigzag and causal, causal).values()))
        seen = [(i, j) for i in range(n) for j in range(n) if j <= i or not causal]
        assert sorted(found) == seen, (world, n)


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_with_zigzag_no_rank_waits_for_another(world):
    n, chunk = 6 * world, 3
    work = {at: len(found) for at, found in pairs(n, world, True, True).items()}
    for step in range(world):
        # its own triangle, then a rectangle of two chunks of rows, or of keys
        each = chunk * (2 * chunk + 1) if step == 0 else 2 * chunk * chunk
        assert {work[rank, step] for rank in range(world)} == {each}
    plain = {at: len(found) for at, found in pairs(n, world, False, True).items()}
    busy = [sum(plain[rank, step] > 0 for step in range(world)) for rank in range(world)]
    assert busy == [*range(1, world + 1)]  # the first one waits after its own block


def test_parts_of_all_ranks_are_the_sequence():
    for world, n, zigzag in itertools.product(range(1, 7), LENGTHS, (False, True)):
        parts = spans(n, world, zigzag)
        assert sorted(i for part in parts for span in part for i in range(*span)) == [*range(n)]
        assert max(map(length, parts)) - min(map(length, parts)) <= 1
        assert n < world or min(map(length, parts)) > 0
        assert all([*part] == sorted(part) for part in parts)  # a triangle needs them ascending


# ---- the merge


def in_parts(s, v, cuts):
    """(o, lse in base 2) of each part of the keys, from all scores s (1, 1, N, Nk) in float64."""
    for start, end in itertools.pairwise(cuts):
        part = s[..., start:end]
        lse = torch.logsumexp(part, -1)
        p = torch.exp(part - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
        yield p @ v[:, :, start:end], lse / math.log(2)


def merged(merge, s, v, cuts, dtype=torch.float32):
    (o, lse), *parts = [(o.to(dtype), lse.float()) for o, lse in in_parts(s, v, cuts)]
    for part, part_lse in parts:
        merge(o, lse, part, part_lse)
    return o, lse


@pytest.fixture(params=["torch", "kernel"])
def merging(request):
    if request.param == "torch":
        return merge
    pytest.importorskip("triton")
    from stages.s10_ring import merge_kernel

    return merge_kernel.launch


@pytest.mark.parametrize("spread", [1.0, 1e2, 1e4])
def test_parts_that_are_merged_are_the_whole(merging, spread):
    """Whatever the scores: exp(1e4) is far beyond float32, and its inverse, too."""
    q, k, v, _ = normal((1, 2, 7, 40, 8), 0, torch.float64)
    s = q @ k.mT * spread
    s[:, :, 0, :10] = -math.inf  # the first part has nothing for this row
    s[:, :, 1, 10:] = -math.inf  # only the first part has something for this one
    s[:, :, 2] = -math.inf  # nobody has
    o, lse = merged(merging, s, v, (0, 10, 13, 40))
    want = torch.logsumexp(s, -1) / math.log(2)
    assert (o[:, :, 2] == 0).all() and (lse[:, :, 2] == -math.inf).all()
    rows = [0, 1, 3, 4, 5, 6]
    u = torch.finfo(torch.float32).eps
    bound = 16 * u * (1 + want[:, :, rows].abs().max())  # a weight is off by as much as lse is
    assert ((lse[:, :, rows] - want[:, :, rows]).abs() <= bound).all()
    truth = torch.softmax(s[:, :, rows], -1) @ v
    assert ((o[:, :, rows] - truth).abs() <= bound * v.abs().max()).all()


def test_what_has_no_weight_may_be_anything(merging):
    o, part = torch.ones(1, 1, 2, 4), torch.full((1, 1, 2, 4), math.nan)
    lse, none = torch.zeros(1, 1, 2), torch.full((1, 1, 2), -math.inf)
    merging(o, lse, part, none)
    assert (o == 1).all() and (lse == 0).all()
    merging(part, none, o, lse)
    assert (part == 1).all() and (none == 0).all()


def test_scores_of_minus_infinity_alone_are_nan_after_the_merge(merging):
    """A row that sees no key is 0, one that has only such scores NaN, in every order."""
    parts = torch.tensor([[0.0, math.nan, 0.0, math.nan], [0.0, 0.0, math.nan, math.nan]])
    o, part = (x[None, None, :, None].repeat(1, 1, 1, 4) for x in parts)
    lse, part_lse = torch.full((2, 1, 1, 4), -math.inf)
    merging(o, lse, part, part_lse)
    assert o[0, 0].isnan().any(-1).tolist() == [False, True, True, True]
    assert (o[0, 0, 0] == 0).all() and (lse == -math.inf).all()


@pytest.mark.slow
@pytest.mark.skipif(not has_module("triton"), reason="no triton")
def test_the_kernel_is_compiled_without_spills(compiler):
    """And no warp writes lse while another has not read it: on a GPU, o was wrong now and then."""
    kinds = [(d, "bfloat16", 90) for d in (16, 64, 128, 256)]
    kinds += itertools.product((128, 256), ("float32",), (80, 90, 120))
    jobs = [("s10_ring.merge_kernel", "merge_kernel", *kind, "masked") for kind in kinds]
    for job, report in zip(jobs, compiler.answers(*jobs), strict=True):
        assert report["STACK"] + report["LOCAL"] == 0 < report["REG"] <= 255, job
        assert report["reads_before_writes"], job


# ---- right, on two to four ranks

CASES = [
    {"n": 24},
    {"n": 24, "causal": False},
    {"n": 37, "hk": 2},  # divided by no number of chunks; two query heads to a key head
    {"n": 31, "seqlens_k": (31, 3)},
    {"n": 37, "hk": 1, "causal": False, "nk": 61},  # cross attention
    {"n": 5, "d": 5},  # fewer than chunks
    {"n": 31, "seqlens_k": (0, 17), "causal": False},
    {"n": 64, "inputs": "peaky", "b": 1},
    {"n": 29, "inputs": "peaky", "causal": False, "dtype": "bfloat16"},
    {"n": 40, "dtype": "float16", "hk": 2},
    {"n": 33, "dtype": "float64"},
]
SWITCHES = [{}, {"zigzag": False}, {"overlap": False}, {"zigzag": False, "overlap": False}]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_error_is_within_the_bound(ranks, case, world):
    for switches in SWITCHES if case < 4 else SWITCHES[:1]:
        check(ranks, problem(**CASES[case]), world, **switches)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@CAUSAL
def test_half_precision_is_rounded_once_however_many_ranks(ranks, dtype, causal):
    """What is between two hops is not."""
    check_rounded_once(ranks, dtype, causal, WORLDS)


@CAUSAL
def test_the_error_does_not_grow_with_the_ranks(ranks, causal):
    """All are within one bound, which knows no number of ranks: float32's own, of one rank."""
    asked = problem(96, causal=causal, b=1)
    for world in (1, *WORLDS):
        check(ranks, asked, world)


@pytest.mark.parametrize("interpreted", [False, True])
@CAUSAL
def test_a_row_of_minus_infinity_is_nan_however_many_ranks(ranks, causal, interpreted):
    """As the contract has it; other such scores count for nothing."""
    if interpreted:
        pytest.importorskip("triton")
    for world in (1, *WORLDS):
        found, truth = ranks.one(
            ring_ranks.of_minus_infinity, world, causal, interpreted, ranks=world
        )
        o, want = map(torch.from_numpy, (found, truth))
        assert o.isnan().any(-1)[0].tolist() == [[i == 5 for i in range(16)]] * 2, world
        rest = [i for i in range(16) if i != 5]
        u = torch.finfo(torch.float32).eps
        # the scores of the other rows are sums of 6 products of about 1
        assert ((o - want)[:, :, rest].abs() <= 64 * u * want.abs().max()).all(), world


@pytest.mark.parametrize(("late", "overlap"), [(False, True), (True, True), (False, False)])
@pytest.mark.parametrize("world", WORLDS)
def test_the_copy_engine_gives_the_bits_of_the_group(ranks, world, late, overlap, tmp_path):
    """On memory that is made up; tests/gpu/test_ring_on_gpus.py has the real one."""
    asked = [
        problem(24), problem(37, hk=2, dtype="float16"), problem(24, causal=False, direction="fwd"),
        problem(70, causal=False, b=1), problem(24, b=1),
    ]  # fmt: skip
    given = asked, world, str(tmp_path), late, overlap
    found = ranks.one(ring_ranks.run_by_engine, *given, ranks=world)
    for each, outputs in zip(asked, found, strict=True):
        same = ranks.one(ring_ranks.run, each, world, {"overlap": overlap}, ranks=world)
        assert all((x == y).all() for x, y in zip(outputs, same, strict=True))


def test_memory_of_the_other_lane_is_freed_after_it_was_read(ranks, tmp_path):
    """A call on another stream, of another group, may take it at once."""
    given = problem(24), 3, str(tmp_path)
    # two halves, each of dq, and of dk and dv
    assert ranks.all(ring_ranks.unread_at_the_end, *given, ranks=3) == [(0, 4)] * 3


def test_what_is_sent_is_not_freed_before_all_is_computed(ranks, tmp_path):
    """The caller's lane, which doesn't wait for the copy, may write over what is freed."""
    given = problem(24), 3, str(tmp_path)
    assert ranks.all(ring_ranks.sent_is_there, *given, ranks=3) == [[True] * 4] * 3


@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_ranks_have_slots_alike_after_one_has_changed_its_gpu(ranks, moment, tmp_path):
    """Else that rank would reserve some alone, and all would wait."""
    asked = problem(24)
    given = asked, 3, str(tmp_path), moment
    found = ranks.all(ring_ranks.run_by_another_engine, *given, ranks=3)
    same = ranks.one(ring_ranks.run, asked, 3, {}, ranks=3)
    for *outputs, slots in found:
        for each in outputs:
            assert all((x == y).all() for x, y in zip(each, same, strict=True))
        assert slots == found[0][-1]


@pytest.mark.skipif(not has_module("triton"), reason="no triton")
@CAUSAL
@pytest.mark.parametrize("dtype", quickly(1, ["float16", "float32"]))
def test_kernels_are_given_the_lse_and_the_output_of_all_keys(ranks, dtype, causal):
    """Stage 7's, as on a GPU; their float32 gradients are summed."""
    lengths = {"seqlens_k": (20, 0)} if not causal else {}
    asked = problem(24, dtype=dtype, causal=causal, h=2, hk=1, **lengths)
    check(ranks, asked, 2, interpreted=True)
    check(ranks, asked, 3, interpreted=True)


@pytest.mark.skipif(not has_module("triton"), reason="no triton")
def test_gradients_that_are_left_in_float32_round_to_those_of_stage_7():
    s07 = stages.by_number(7)
    q, k, v, dO = normal((1, 2, 20, 33, 16), 0, torch.float16)
    o, lse = s07.PASSES.forward_with_lse(q, k, v, True, None)
    every = True, True, True
    narrow = s07.launch(q, k, v, o, lse, dO, True, None, every)
    wide = s07.launch(q, k, v, o, lse, dO, True, None, every, wide=True)
    assert all(x.dtype == torch.float32 for x in wide)
    assert all(torch.equal(x.half(), y) for x, y in zip(wide, narrow, strict=True))


def test_gradients_of_some_are_those_of_all(ranks):
    for world in WORLDS:
        assert ranks.all(ring_ranks.some_gradients, problem(24), world, ranks=world) == [[]] * world


def test_attend_takes_all_ranks(ranks):
    assert ranks.all(ring_ranks.attends, problem(24)) == [True] * 4


def test_what_is_held_does_not_grow_with_the_ranks(ranks):
    """Of what was received: two hops' keys and values at once; two hops' gradients of them, too."""
    for world in WORLDS:
        held = ranks.one(ring_ranks.most_held, problem(24), world, ranks=world)
        assert held["forward"] <= 2 * 2 and held["backward"] <= 2 * 4, world


@CAUSAL
@pytest.mark.parametrize("copies", ["group", "engine"])
@pytest.mark.parametrize("world", quickly(1, WORLDS))
def test_the_formula_says_how_much_memory_is_taken(ranks, world, copies, causal, tmp_path):
    """With stage 9's launches, which take what they do on a GPU, and compute nothing."""
    for fields in (
        {}, {"direction": "fwd"}, {"dtype": "float32"}, {"b": 1, "hk": 1}, {"b": 1, "hk": 2},
    ):  # fmt: skip
        asked = problem(96 * world, d=64, **({"dtype": "bfloat16", "causal": causal} | fields))
        found = ranks.all(ring_ranks.most_bytes, asked, world, copies, str(tmp_path), ranks=world)
        formula = peak_bytes(dataclasses.replace(asked, world=world), copies)
        assert max(found) == pytest.approx(formula, rel=0.01), fields  # the rows of numbers


# ---- refused, by all ranks alike

REFUSED = {  # what is wrong -> on which ranks, what all say
    "d": ([1], "rank 1 of 3: k: got head dimension d = 8, expected q's 16"),
    "no tensor": ([2], "rank 2 of 3: k: got NoneType"),
    "dtype": ([0], r"q: got .*float64 on rank 0, .*float32 on rank 1.* the same on all ranks"),
    "heads": ([1], "q: got "),
    "causal": ([2], "causal: got True on rank 0, True on rank 1, False on rank 2"),
    "overlap": ([2], "overlap: got True on rank 0"),
    "gradients": ([1], "requires_grad of q, k, v: got .*true|requires_grad of q, k, v: got .*True"),
    "rows": ([0], r"q: got \[10, 8, 8\] rows, by rank, expected \[9, 9, 8\], as shard cuts 26"),
    "keys": ([0, 1, 2], "causal: got True, 24 queries and 12 keys in all, expected as many"),
    "engine": ([0, 1, 2], "copies: got 'engine', expected 'group' or None"),
    "copies": ([0, 1], "rank 0 of 3: copies: got 'nvlink'"),
    "zigzag": ([1], "rank 1 of 3: zigzag: got 1, expected True or False"),
    "group": ([0, 1, 2], "group: got str, expected a torch.distributed.ProcessGroup, or None"),
    "lengths": ([0, 1, 2], r"seqlens_k: got \[25, 1\], expected each in 0..24, the number of all"),
    "another call": ([1], "call: got attend on rank 0, unshard on rank 1, attend on rank 2"),
    "other lengths": ([0], r"seqlens_k: got \[24, 1\] on rank 0, None on rank 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_of_any_rank_is_refused_by_all_in_the_same_words(ranks, case):
    where, words = REFUSED[case]
    said = ranks.all(ring_ranks.refused, case, where, 3, ranks=3)
    assert len(set(said)) == 1, said
    kind, text = said[0]
    assert kind == "ValueError" and re.search(words, text), said[0]


def test_a_ring_goes_on_after_a_refusal(ranks):
    ranks.all(ring_ranks.refused, "causal", [2], 3, ranks=3)
    check(ranks, problem(24), 3)


def test_what_a_cuda_graph_captures_is_refused_by_all(ranks, tmp_path):
    """A replay would write to the slots of the captured call, whatever is read there by then."""
    asked = problem(24)
    found = ranks.all(ring_ranks.captured, asked, 3, str(tmp_path), ranks=3)
    same = ranks.one(ring_ranks.run, asked, 3, {}, ranks=3)
    words = "ValueError: rank 1 of 3: call: got one that a CUDA graph captures, expected "
    for said, gradients in found:
        assert said == found[0][0] and len(said) == 4
        assert all(each.startswith(words) for each in said), said
        assert all((x == y).all() for x, y in zip(gradients, same[1:], strict=True))


def test_a_sequence_shorter_than_the_ring_is_refused(ranks):
    for failed in ranks.all(ring_ranks.shard, problem(3)):
        assert failed.args[0] == "ValueError"
        assert failed.args[1] == "x: got N = 3 rows, expected at least 4, one for each rank"


def test_a_gradient_of_a_gradient_is_refused(ranks):
    for said in ranks.all(ring_ranks.twice, problem(24), 2, ranks=2):
        assert said.args[0] == "RuntimeError" and "differentiated twice" in said.args[1]


def test_gradients_of_calls_in_another_order_are_refused(ranks):
    """Else the keys of one call would meet the queries of another, in silence."""
    said = ranks.all(ring_ranks.in_other_orders, problem(24), 3, ranks=3)
    assert len(set(said)) == 1, said
    words = r"^call: got the backward pass of call (\d+) on rank 0, the backward pass of call (\d+)"
    found = re.match(words, said[0])
    assert found and int(found[1]) + 1 == int(found[2])
    check(ranks, problem(24), 3)


def test_what_is_no_group_or_was_destroyed_is_refused():
    """Without a process group, too: else each rank would see its own keys only."""
    with pytest.raises(ValueError, match=r"^group: got str, expected a torch\.distributed"):
        s10_ring.world_of("x")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group, kept = dist.new_group([0]), dist.group.WORLD
        assert s10_ring.world_of(group) == s10_ring.world_of(None) == 1
        dist.destroy_process_group(group)
        with pytest.raises(ValueError, match=r"^group: got one that was destroyed"):
            s10_ring.world_of(group)
    finally:
        dist.destroy_process_group()
    with pytest.raises(ValueError, match=r"^group: got one that was destroyed"):
        s10_ring.world_of(kept)


def test_processes_without_a_group_are_refused(monkeypatch):
    """Each would see its own keys only: a smooth loss, and more speed than there can be."""
    monkeypatch.setenv("WORLD_SIZE", "")
    assert s10_ring.world_of(None) == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"no process group: call .*init_process_group"):
        attend(s10_ring, *normal((1, 1, 4, 4, 8), 0)[:3])


# ---- a rank that ends


@pytest.mark.parametrize(("when", "words"), [
    pytest.param("before", r"no answer from rank .*1\b.*: it has ended", marks=pytest.mark.slow),
    # or what rank 0 said of it, if that was first
    ("amid", r"rank 2 lost rank 1, which it|rank 0 lost .* or rank 1, which it sends"),
])  # fmt: skip
def test_a_rank_that_ends_ends_the_others_which_name_it(when, words):
    ranks = Ranks(3)
    try:
        said = ranks.all(ring_ranks.ends, problem(24), when)
    finally:
        ranks.end()
    assert [x.args[0] for x in said] == ["RuntimeError", "ended", "RuntimeError"]
    assert re.search(words, said[2].args[1]), said[2].args[1]
    assert re.search(r"\brank .*1\b", said[0].args[1]), said[0].args[1]


# ---- a call that fails midway, and two at once

ANEW = r"can't use that group any more: .*new_group"


@pytest.mark.parametrize(("hop", "error"), [
    (4, MemoryError),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in (
        (1, MemoryError), (2, KeyboardInterrupt), (3, ValueError), (6, MemoryError))),
])  # fmt: skip
def test_an_error_on_one_rank_ends_the_call_on_all(ranks, hop, error):
    """Which name it; and a later call doesn't meet what is left of this one."""
    asked = problem(24)
    found = ranks.all(ring_ranks.fails_amid, asked, hop, error)
    name = rf"rank 1 of 4 failed amid a call: {error.__name__}: made up"
    assert found[1][0] == (error.__name__, "made up")
    for rank, (first, second, third) in enumerate(found):
        assert third[0] == second[0] == "RuntimeError", found
        # one that had all it needed finds out in its next call
        later = rank != 1 and first[0] == ""
        assert rank == 1 or later or (first[0] == "RuntimeError" and re.search(name, first[1]))
        assert later or (re.search(name, second[1]) and re.search(ANEW, second[1])), second
        assert re.search(name, third[1]) and re.search(ANEW, third[1]), third
    check(ranks, asked, 3)  # other groups go on


@pytest.mark.slow
def test_a_rank_without_memory_for_slots_ends_the_call_on_all(ranks, tmp_path):
    found = ranks.all(ring_ranks.fails_to_reserve, problem(24), str(tmp_path))
    assert found[1][0] == ("MemoryError", "made up")
    for rank, (first, second) in enumerate(found):
        for kind, text in (second,) if rank == 1 else (first, second):
            assert kind == "RuntimeError" and "rank 1 of 4 failed amid a call" in text, (rank, text)
        assert re.search(ANEW, second[1])


@pytest.mark.slow
def test_a_rank_that_comes_when_others_have_given_up_gives_up():
    """It finds all that they said when they waited for it, and would wait for what they send."""
    ranks = Ranks(2)
    try:
        found = ranks.all(ring_ranks.comes_late, problem(24))
    finally:
        ranks.end()
    for first, second in found:
        for kind, text in (first, second):
            assert kind == "RuntimeError" and "no answer from rank 1: it has ended" in text, found
        assert re.search(ANEW, second[1])


def test_two_threads_at_once_are_refused(ranks):
    """On each rank either may be first, and would meet the other's keys."""
    for rank, (first, second, third) in enumerate(ranks.all(ring_ranks.by_threads, problem(24))):
        words = r"two threads of rank \d of 4 called it on one process group at once"
        for kind, text in (first, second, third):
            assert kind == "RuntimeError" and re.search(words, text), (rank, text)
        assert re.search(ANEW, second[1]) and re.search(ANEW, third[1])


def test_another_thread_may_go_back(ranks):
    """As torch's own does, on a GPU."""
    assert ranks.all(ring_ranks.back_in_a_thread, problem(24), 3, ranks=3) == [True] * 3


# ---- mistakes


def check_rounded_once(ranks, dtype, causal, worlds, **options):
    """Raise unless an output of 16 bits is that of float32, rounded."""
    asked = problem(48, dtype=dtype, causal=causal, direction="fwd")
    for world in worlds:
        [half], [single] = (
            ranks.one(ring_ranks.run, asked, world, options | {"dtype": name}, ranks=world)
            for name in (dtype, "float32")
        )
        rounded = torch.from_numpy(single).to(getattr(torch, dtype)).double()
        assert torch.equal(torch.from_numpy(half), rounded), world


def battery(ranks, stage):
    """Raise where the ring in the folder `stage` is wrong; the shipped one passes."""
    for fields in BATTERY:
        check(ranks, problem(24, **fields), 3, stage=stage)
    check_rounded_once(ranks, "bfloat16", True, [3], stage=stage)
    check(ranks, problem(24), 2, stage=stage)


# parts of the same length on all ranks: a mistake gives a wrong number there, and no hang
BATTERY = (
    {}, {"causal": False, "hk": 2}, {"inputs": "peaky", "d": 64, "b": 1}, {"seqlens_k": (20, 5)},
    {"seqlens_k": (0, 17)},
)  # fmt: skip


def test_the_shipped_stage_lives(ranks):
    battery(ranks, None)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_dies(ranks, name, tmp_path):
    words = "".join(x if x.isalnum() else "_" for x in name)
    path = write_changed(10, [MUTANTS[name]], tmp_path, f"ring_{words}")
    ranks.all(ring_ranks.make_groups)  # in others, messages of the last mutant may be left
    try:
        battery(ranks, str(path))
    except (AssertionError, RankFailed):
        return
    pytest.fail(f"a mutant of stage 10 survives: {name}")
