"""The arithmetic of the page, in JavaScript, against the Python that it repeats."""

import itertools
import json
import math
import re
from dataclasses import replace
from urllib.parse import urlencode

import numpy as np
import pytest
import torch
from in_node import in_node, needs_node
from ladder_command import ROOT, run_here

from course.lab import mistakes
from course.page import ladder_data
from course.report.course import CLUSTER
from course.tracing import trace
from harness.problems import ring_cost
from harness.problems.problem import ONE_GPU, Problem
from harness.problems.ring_cost import Machine
from stages import s08_triton_split_kv as split_kv
from stages.s10_ring import schedule

pytestmark = needs_node
EPS = np.finfo(np.float32).eps
# (n, tile): one key, one tile, whole tiles, a ragged one, tiles of one key
SIZES = ((1, 1), (8, 2), (7, 3), (5, 8), (64, 16), (65, 64), (24, 1), (33, 7))


def near(found, want, bound):
    """Whether all are as near as `bound` allows, or the same where they aren't finite."""
    found, want = (np.array(x, float) for x in (found, want))  # "NaN" is read as one
    same = (found == want) | (np.isnan(found) & np.isnan(want))
    return bool((same | (np.abs(found - want) <= bound)).all())


def bounds(n, step, v, lite):
    """How far the same float32 formulas, summed in another order, may be apart: by name.

    An exp differs by less than 4 roundings, a sum of n terms by n of the sum of their sizes.
    """
    past = (n + 8) * EPS
    sizes = dict.fromkeys(("p", "alpha", "lite_p"), 1.0) | {"m_i": 0.0, "l_i": step["l_i"]}
    sizes |= {"acc": step["l_i"] * np.abs(v).max(), "o": np.abs(v).max()}
    sizes |= {"lite": lite * np.abs(v).max(), "lite_weight": lite}
    return {name: past * size for name, size in sizes.items()}


@pytest.mark.parametrize("inputs", ["normal", "peaky"])
def test_the_player_computes_what_ladder_trace_does(capsys, inputs):
    """Its row has d = 1: the columns of v are walked one by one, with the same scores."""
    generator = np.random.default_rng(38)
    cases = []
    for n, tile in SIZES:
        d, row, seed = (
            int(generator.integers(low, high)) for low, high in ((1, 5), (0, n), (0, 99))
        )
        asked = {"n": n, "d": d, "tile": tile, "row": row, "seed": seed, "inputs": inputs}
        options = [word for name, x in asked.items() for word in (f"--{name}", str(x))]
        code, out, _ = run_here(capsys, "trace", "--format", "json", *options)
        assert code == 0
        v = trace.make_trace(n, d, tile, row, inputs=inputs, seed=seed).v
        cases.append((json.loads(out), v))
    given = []
    for traced, v in cases:
        s = [x for step in traced["tiles"] for x in step["s"]]
        given.append({"s": s, "v": v.T.tolist(), "tile": traced["tile"]})
    both = "[softmax.walk(s, one, tile), softmax.exact(s, one)]"
    call = f"data.map(({{s, v, tile}}) => v.map((one) => {both}))"
    found = in_node(["softmax"], call, given)
    compared = 0
    for (traced, v), columns in zip(cases, found, strict=True):
        for c, (steps, exact) in enumerate(columns):
            assert [step["start"] for step in steps] == [step["start"] for step in traced["tiles"]]
            for tiles, (mine, theirs) in enumerate(zip(steps, traced["tiles"], strict=True), 1):
                for name, bound in bounds(traced["n"], theirs, v, tiles).items():
                    want = theirs[name][c] if name in ("acc", "o", "lite") else theirs[name]
                    assert near(mine[name], want, bound), (name, mine[name], want, bound)
                    compared += 1
            scores = max(abs(x) for step in traced["tiles"] for x in step["s"])  # float32 there
            bound = (traced["d"] + 10) * EPS * (1 + scores) * np.abs(v).max()
            assert near(exact["o"], traced["truth"][c], bound)
    assert compared > 500


@pytest.mark.parametrize("mistake", ["rescale", "tail"])
def test_a_mistake_gives_what_the_lab_predicts(mistake):
    generator = np.random.default_rng(38)
    slip = next(words for words in mistakes.SLIPS if words.startswith("no rescale: acc"))
    given, want = [], []
    for n, tile in SIZES:
        s, v = (generator.standard_normal(n).astype(np.float32) for _ in range(2))
        given.append({"s": s.tolist(), "v": v.tolist(), "tile": tile})
        s, v = (torch.from_numpy(x).double() for x in (s, v[:, None]))
        if mistake == "tail":
            o = mistakes.padded_keys(s[None], v, -n % tile)
        else:
            o = mistakes.online(s[None], v, tile, mistakes.SLIPS[slip])
        want.append(float(o))
    call = f"data.map(({{s, v, tile}}) => softmax.walk(s, v, tile, '{mistake}').at(-1).o)"
    found = in_node(["softmax"], call, given)
    sizes = np.array([n for n, _ in SIZES])
    largest = max(abs(x) for each in given for x in each["v"])
    assert near(found, want, (sizes + 10) * EPS * largest * np.maximum(sizes, np.abs(want)))


def test_a_max_that_begins_at_0_is_nan_only_far_below_it():
    call = "data.map((by) => softmax.walk([by, by - 1], [1, 2], 1, 'zero').at(-1).o)"
    far, near_by, above = in_node(["softmax"], call, [-110, -50, 30])
    right = (1 + 2 * math.exp(-1)) / (1 + math.exp(-1))
    assert far == "NaN" and near([near_by, above], right, 50 * EPS)


def test_mistakes_are_called_what_the_lab_calls_them():
    problem = Problem("normal", 0, 1, 1, 1, 5, 65, 4, "float32", "ieee", False, None, "cpu")
    said = [re.sub(r" \(tiles of \d+ keys\)", "", words)
            for words, _ in mistakes.forward(problem, "contiguous")]  # fmt: skip
    assert {*in_node(["softmax"], "softmax.MISTAKES", None).values()} <= {*said}


def test_lites_error_is_that_of_the_trace():
    """At one tile, at the 65th key, and at a few tiles; with flat and with sharp scores."""
    rows, most, sizes = 3, 200, (1, 64, 65, 128, 200)
    found = in_node(
        ["errors"],
        "data.map((by) => { const drawn = errors.draw(3, 200); return [drawn,"
        " Array.from(errors.liteErrors(drawn, by, 64, 200)),"
        " [1, 64, 65, 128, 200].map((n) => errors.onlineError(drawn, by, 64, n))]; })",
        [0.5, 8.0],
    )
    for by, (drawn, lite, online) in zip((0.5, 8.0), found, strict=True):
        scores, values = (np.array(drawn[name]) for name in ("scores", "values"))
        assert scores.shape == (rows, most) and abs(scores.std() - 1) < 0.1
        for n, theirs in zip(sizes, online, strict=True):
            mine, largest = [], np.abs(values).max()
            for s, v in zip(by * scores[:, :n], values[:, :n], strict=True):
                k, q = s[:, None], np.ones(1)
                truth = trace.attention(q, k, v[:, None])
                mine.append(trace.max_error(trace.walk(q, k, v[:, None], 64)[-1].lite, truth))
            mean_square = np.square(mine).mean() ** 0.5
            assert near(lite[n - 1], mean_square, 1e3 * n * np.finfo(float).eps * largest)
            assert theirs <= (n + 10) * EPS * (1 + by * np.abs(scores).max()) * largest
        assert max(lite[:64]) < 1e-12 < 1e-3 < lite[64]


def kind(nq, nk, causal, rows, keys):
    """What the page calls a tile, straight from the contract: query i sees keys to i + Nk - Nq."""
    seen = {j < nk and (not causal or j <= i + nk - nq) for i in rows for j in keys if i < nq}
    return {(True,): "full", (False,): "never", (False, True): "masked"}[tuple(sorted(seen))]


def test_a_tile_is_skipped_if_no_query_sees_a_key_of_it():
    generator = np.random.default_rng(38)
    names = ("nq", "nk", "block_m", "block_n")
    cases = [
        dict(zip(names, map(int, generator.integers(1, 20, 4)), strict=True))
        | {"causal": bool(generator.integers(4))}
        for _ in range(60)
    ]
    want = [
        [[kind(case["nq"], case["nk"], case["causal"], range(row, row + case["block_m"]),
               range(key, key + case["block_n"])) for key in range(0, case["nk"], case["block_n"])]
         for row in range(0, case["nq"], case["block_m"])]
        for case in cases
    ]  # fmt: skip
    assert in_node(["tiles"], "data.map(tiles.kinds)", cases) == want


def test_keys_are_split_as_stage_8_splits_them():
    generator = np.random.default_rng(38)
    cases, want = [], []
    for _ in range(80):
        batch, heads, keys = (int(2 ** generator.uniform(0, most)) for most in (6, 6, 17))
        rows = keys if generator.integers(2) else int(2 ** generator.uniform(0, 9))
        cases.append({"batch": batch, "heads": heads, "rows": rows, "keys": keys})
        q = torch.empty(batch, heads, rows, 64, dtype=torch.float16, device="meta")
        want.append(split_kv.plan(q, heads, keys)[0])
    rule = json.loads(json.dumps(ladder_data.splits()))
    call = "data[0].map((each) => split_plan.plan(each, data[1]).splits)"
    assert in_node(["split_plan"], call, [cases, rule]) == want
    assert len({*want}) > 5


def test_three_bfloat16_hold_a_float32():
    generator = np.random.default_rng(38)
    x = generator.standard_normal(200) * 2.0 ** generator.integers(-60, 60, 200)
    x = [*x.astype(np.float32).tolist(), 1.0, 1 + 2**-8, 1 + 2**-23, -1 / 3]
    x = np.array(x, np.float32)
    pieces = np.array(in_node(["bfloat16"], "data.map((x) => bfloat16.split(x))", x.tolist()))
    assert (pieces.sum(1) == x).all()
    kept = torch.from_numpy(pieces).to(torch.bfloat16).double().numpy()
    assert (kept == pieces).all()
    assert (np.abs(x - pieces[:, 0]) <= 2.0**-8 * np.abs(x)).all()
    pairs = [*zip(x.tolist(), x[::-1].tolist(), strict=True)]
    call = "data.map(([a, b]) => [1, 3, 6, 9].map((n) => bfloat16.error(a, b, n)))"
    errors = np.array(in_node(["bfloat16"], call, pairs))
    # what is left out is below half the last bit of a piece that is kept, of a and of b
    assert (errors <= [4 * 2.0**-8, 8 * 2.0**-16, 16 * 2.0**-24, 0]).all()
    assert (errors.max(0)[:3] > [2.0**-9, 2.0**-18, 2.0**-27]).all()


def test_the_products_that_are_kept_are_those_that_the_kernels_compute():
    text = (ROOT / "stages" / "common" / "products.py").read_text()
    computed = re.findall(r"tl\.dot\(a_(\w+), b_(\w+)", text)
    names, order = in_node(["bfloat16"], "[bfloat16.PIECES, bfloat16.ORDER]", None)
    kept = {(names[i], names[j]) for i, j in order[:6]}
    assert len(computed) == len({*computed}) == len(kept) and {*computed} == kept
    sizes = [names.index(a) + names.index(b) for a, b in computed]
    assert sizes == sorted(sizes, reverse=True)  # the smallest are summed first


def rings():
    """Problems of a ring, as the page has them, each with its Problem, zigzag and overlap."""
    generator = np.random.default_rng(38)
    data = ladder_data.ring()
    for causal, zigzag, overlap in itertools.product((False, True), repeat=3):
        for world in range(2, 9):
            keys = int(generator.integers(1, 2**14)) * 2 * world
            problem = replace(CLUSTER, nq=keys, nk=keys, world=world, causal=causal)
            settings = {"keys": keys, "world": world} | {
                "causal": causal, "zigzag": zigzag, "overlap": overlap
            }  # fmt: skip
            yield data["heads"] | settings, problem, zigzag, overlap


def test_the_rings_slowest_rank_does_what_the_cost_model_says():
    links = ladder_data.ring()["links"]
    machine = {name: x for name, x in ladder_data.ring().items() if name not in ("links", "heads")}
    found = in_node(
        ["ring_cost"],
        "data[0].flatMap((problem) => data[1].map((machine) => ["
        "ring_cost.schedule(problem, machine), ring_cost.alone(problem, machine)]))",
        [[settings for settings, *_ in rings()], [machine | link for link in links]],
    )
    cases = itertools.product(rings(), links)
    for (ranks, alone), ((_, problem, zigzag, overlap), link) in zip(found, cases, strict=True):
        rates = machine | {name: link[name] for name in ("link", "latency")}
        want = list(ring_cost.ring_pass(problem, Machine(**rates), zigzag, overlap, 1.0, 0.0))
        ends = [max(span["end"] for span in spans) for spans in ranks]
        slowest = ranks[-1]  # in order; in zigzag all are alike
        assert [span["what"] for span in slowest] == [span.what for span in want]
        times = [(span.start, span.end) for span in want]
        bound = 20 * len(want) * np.finfo(float).eps * max(ends)
        assert near([(span["start"], span["end"]) for span in slowest], times, bound)
        assert near(max(ends), max(span.end for span in want), bound)
        assert near(alone, ring_cost.seconds(problem, Machine(**rates), ONE_GPU), bound)
        for spans in ranks:  # each computes one thing at a time
            computes = [span for span in spans if span["what"] != "send"]
            assert all(a["end"] <= b["start"] for a, b in itertools.pairwise(computes))


def test_each_rank_of_the_ring_computes_what_its_schedule_says():
    cases = list(rings())
    found = in_node(["ring_cost"], "data.map(ring_cost.pairs)", [case[0] for case in cases])
    for seen, (settings, problem, zigzag, _) in zip(found, cases, strict=True):
        held = schedule.spans(settings["keys"], problem.world, zigzag)
        for rank, hops in enumerate(seen):
            n = schedule.length(held[rank])
            for step, pairs in enumerate(hops):
                hop = schedule.hop(rank, step, held, held, problem.causal)
                rows = len(range(n)[hop.rows])
                triangle = n * (n + 1) / 2  # of a rank's own keys
                assert pairs == (triangle if hop.causal else rows * hop.keys.stop)


def test_an_example_survives_the_address():
    state = {
        "s": [1.5, -2, 0],
        "v": [1, 0.1, 7],
        "tile": 2,
        "sharp": 0.5,
        "mistake": "tail",
        "step": 2,
    }
    call = "example.fromAddress(new URLSearchParams(example.toAddress(data)))"
    assert in_node(["example"], call, state) == {"example": state, "problems": []}


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"s": "1,x", "v": "1,2"}, "s"),
        ({"s": "1,,2", "v": "1,2,3"}, "s"),
        ({"s": "1,2"}, "s and v"),
        ({"v": ",".join(["1"] * 25)}, "v"),
        ({"s": "1e9,0", "v": "1,2"}, "s"),
        ({"tile": "0"}, "tile"),
        ({"tile": "1.5"}, "tile"),
        ({"sharp": "Infinity"}, "sharp"),
        ({"step": "5"}, "step"),
        ({"break": "constructor"}, "break"),
    ],
)
def test_a_malformed_address_is_named_and_the_rest_is_shown(asked, named):
    call = "[example.fromAddress(new URLSearchParams(data)), example.FIRST]"
    found, first = in_node(["example"], call, urlencode(asked))
    assert [words.split(":")[0] for words in found["problems"]] == [named]
    assert found["example"] == first
