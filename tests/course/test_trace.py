"""The online softmax in NumPy against the plain formula, and what `ladder trace` says of it."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ladder_command import PATIENCE, ROOT, environ, run_here

from course.tracing import trace, trace_text
from course.tracing.trace import make_trace
from harness.problems.inputs import make_inputs
from harness.problems.problem import Problem


def rounding(q, k, v):
    """How far an honest output may be from the truth: tests/stages/stage_checks.py says why."""
    n = q.shape[-1] + k.shape[-2] + 10
    S = (np.abs(q) @ np.swapaxes(np.abs(k), -1, -2)).max() * q.shape[-1] ** -0.5
    return n * np.finfo(q.dtype).eps * (1 + S) * max(1.0, np.abs(v).max())


def normal(*shapes, seed=0, dtype=np.float64, by=1.0):
    generator = np.random.default_rng(seed)
    q, *others = (generator.standard_normal(shape).astype(dtype) for shape in shapes)
    return dtype(by) * q, *others


def scores(q, k):
    return q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])


@st.composite
def walks(draw):
    """q, k, v, a tile, and how many keys each row sees."""
    d, nk = draw(st.integers(1, 9)), draw(st.integers(1, 20))
    rows = draw(st.sampled_from([(), (1,), (5,), (2, 3), (2, 1, 4)]))
    shared = draw(st.booleans()) or len(rows) < 2
    keys = (nk, d) if shared else (*rows[:-1], nk, d)
    by = draw(st.sampled_from([0.0, 1.0, 30.0]))  # flat, usual and sharp scores
    q, k, v = normal((*rows, d), keys, keys, seed=draw(st.integers(0, 99)), by=by)
    visible = draw(st.sampled_from(["all", "a number", "each row its own"]))
    if visible == "all":
        seen = None
    elif visible == "a number":
        seen = draw(st.integers(0, nk))
    else:
        seen = np.random.default_rng(nk).integers(0, nk + 1, rows)
    return q, k, v, draw(st.integers(1, 22)), seen


@settings(max_examples=150, deadline=None)
@given(walks())
def test_after_every_tile_it_is_the_softmax_over_the_keys_so_far(given):
    q, k, v, tile, visible = given
    rows, nk = q.shape[:-1], k.shape[-2]
    seen = np.broadcast_to(nk if visible is None else visible, rows)
    bound = rounding(q, k, v)
    s = np.where(np.arange(nk) < seen[..., None], scores(q, k), -np.inf)
    steps = trace.walk(q, k, v, tile, visible)
    # every tile that some row sees a key of, and no other
    assert [step.start for step in steps] == list(range(0, int(seen.max()), tile))
    for step in steps:
        assert step.stop == min(step.start + tile, nk)
        so_far = s[..., : step.stop]
        m = so_far.max(-1)
        blind = np.isneginf(m)
        assert np.array_equal(blind, seen == 0)
        e = np.where(blind[..., None], 0.0, np.exp(so_far - np.where(blind, 0.0, m)[..., None]))
        finite = np.where(blind, 0.0, m), np.where(blind, 0.0, step.m_i)
        assert np.array_equal(np.isneginf(step.m_i), blind)
        np.testing.assert_allclose(*finite, rtol=0, atol=bound)
        np.testing.assert_allclose(step.l_i, e.sum(-1), rtol=bound, atol=0)
        np.testing.assert_allclose(step.p, e[..., step.start :], rtol=0, atol=bound)
        truth = trace.attention(q, k, v, np.minimum(seen, step.stop))
        np.testing.assert_allclose(step.o, truth, rtol=0, atol=bound)
        np.testing.assert_allclose(step.normalised, truth, rtol=0, atol=bound)
        np.testing.assert_allclose(
            step.acc, truth * step.l_i[..., None], rtol=0, atol=bound * max(1.0, step.l_i.max())
        )


@settings(max_examples=60, deadline=None)
@given(walks())
def test_alpha_is_between_0_and_1_and_rescales_the_sums(given):
    steps = trace.walk(*given)
    before = None
    for step in steps:
        assert ((step.alpha >= 0) & (step.alpha <= 1)).all()
        if before is None:
            assert (step.alpha == 0).all() and (step.keep == 0).all()
        else:
            stood = (step.m_i == before.m_i) & ~np.isneginf(step.m_i)
            assert (step.alpha[stood] == 1).all()
            blind = np.isneginf(before.m_i)
            assert (step.alpha[blind] == 0).all()
            want = np.exp(before.m_i[~blind] - step.m_i[~blind])
            np.testing.assert_array_equal(step.alpha[~blind], want)
            kept = step.keep[~blind] * step.l_i[~blind]
            np.testing.assert_allclose(kept, before.l_i[~blind] * want, rtol=1e-15)
        before = step


@settings(max_examples=60, deadline=None)
@given(walks())
def test_a_row_alone_has_the_states_that_it_has_in_a_block(given):
    q, k, v, tile, visible = given
    seen = np.broadcast_to(k.shape[-2] if visible is None else visible, q.shape[:-1])
    block = trace.walk(q, k, v, tile, visible)
    for row in np.ndindex(q.shape[:-1]):
        keys = [x[row[:-1]] if x.ndim > 2 else x for x in (k, v)]
        # a row may see none of the last tiles' keys
        for mine, ours in zip(trace.walk(q[row], *keys, tile, seen[row]), block):
            for name in ("m_i", "l_i", "acc", "o", "normalised", "lite", "alpha"):
                got, want = getattr(mine, name), getattr(ours, name)[row]
                np.testing.assert_allclose(got, want, rtol=0, atol=10 * rounding(q, k, v))


@settings(max_examples=60, deadline=None)
@given(walks())
def test_lite_sums_the_outputs_of_tiles(given):
    q, k, v, tile, visible = given
    seen = np.broadcast_to(k.shape[-2] if visible is None else visible, q.shape[:-1])
    total, tiles = np.zeros(q.shape), np.zeros(q.shape[:-1])
    for step in trace.walk(q, k, v, tile, visible):
        part = slice(step.start, step.stop)
        here = np.clip(seen - step.start, 0, step.stop - step.start)
        total = total + trace.attention(q, k[..., part, :], v[..., part, :], here)
        tiles = tiles + (here > 0)
        bound = rounding(q, k, v) * (1 + step.start // tile)
        np.testing.assert_allclose(step.lite, total, rtol=0, atol=bound)
        np.testing.assert_allclose(step.lite_weight, tiles, rtol=1e-14)


@pytest.mark.parametrize("by", [0.1, 1.0, 40.0])
def test_the_truth_is_torchs(by):
    q, k, v = normal((2, 5, 8), (2, 30, 8), (2, 30, 8), by=by)
    s = torch.from_numpy(q) @ torch.from_numpy(k).transpose(-2, -1) * 8**-0.5
    want = (torch.softmax(s, -1) @ torch.from_numpy(v)).numpy()
    np.testing.assert_allclose(trace.attention(q, k, v), want, rtol=0, atol=rounding(q, k, v))


@pytest.mark.parametrize(("nq", "nk"), [(5, 5), (3, 7), (7, 3), (1, 4)])
def test_causal_keys(nq, nk):
    """Query i sees key j where j <= i + Nk - Nq."""
    for i in range(nq):
        assert trace.causal_keys(i, nq, nk) == sum(j <= i + nk - nq for j in range(nk))


def test_dtypes_and_bytes():
    for dtype, computed in ((np.float16, np.float32), (np.float32, np.float32)):
        q, k, v = normal((4,), (5, 4), (5, 4), dtype=dtype)
        steps = trace.walk(q, k, v, 2)
        item = np.dtype(dtype).itemsize
        assert [step.bytes_loaded for step in steps] == [2 * keys * 4 * item for keys in (2, 2, 1)]
        assert {getattr(steps[1], name).dtype for name in ("s", "m_i", "acc", "lite", "keep")} == {
            np.dtype(computed)
        }
    # the diagonal's tile is loaded whole, those past it not at all
    q, k, v = normal((4,), (8, 4), (8, 4), dtype=np.float32)
    assert [s.bytes_loaded for s in trace.walk(q, k, v, 2, 3)] == [64, 64]


def test_inputs_are_left_alone():
    q, k, v = normal((3, 4), (8, 4), (8, 4), dtype=np.float32)
    kept = [x.copy() for x in (q, k, v)]
    for x in (q, k, v):
        x.flags.writeable = False
    trace.walk(q, k, v, 3, 5)
    assert all(np.array_equal(x, y) for x, y in zip((q, k, v), kept))


GOOD = {"q": (3, 4), "k": (8, 4), "v": (8, 4), "tile": 2, "visible": None}
BAD = {
    "q, k: got": [{"q": (3, 5)}, {"q": ()}, {"k": (4,)}, {"q": (0, 4)}],
    "k, v: got": [{"v": (7, 4)}, {"k": (0, 4), "v": (0, 4)}],
    "k: got": [{"q": (2, 3, 4), "k": (3, 8, 4), "v": (3, 8, 4)}],
    "tile: got 0": [{"tile": 0}],
    "tile: got -1": [{"tile": -1}],
    "visible: got": [{"visible": 9}, {"visible": -1}, {"visible": np.array([1, 2])}],
}


@pytest.mark.parametrize(
    ("says", "changes"), [(says, changes) for says, some in BAD.items() for changes in some]
)
def test_what_does_not_fit_is_refused(says, changes):
    given = {**GOOD, **changes}
    q, k, v = (np.ones(given[name]) for name in "qkv")
    with pytest.raises(ValueError, match=f"^{says}"):
        trace.walk(q, k, v, given["tile"], given["visible"])


def test_a_trace_has_the_inputs_of_ladder_run():
    problem = Problem("peaky", 3, 1, 1, 1, 9, 9, 5, "float32", "ieee", False, None, "cpu")
    q, k, v = (x[0, 0].numpy() for x in make_inputs(problem))
    made = make_trace(9, 5, 2, 4, inputs="peaky", seed=3)
    assert all(np.array_equal(x, y) for x, y in zip((made.q, made.k, made.v), (q[4], k, v)))


# the command's views

TRACES = {
    "plain": {"n": 8, "d": 4, "tile": 2, "row": 3},
    "causal": {"n": 8, "d": 4, "tile": 3, "row": 3, "causal": True},
    "peaky": {"n": 17, "d": 16, "tile": 5, "row": 2, "inputs": "peaky"},
    "one key": {"n": 1, "d": 1, "tile": 4, "row": 0},
    "the most that text shows": {"n": 64, "d": 16, "tile": 64, "row": 63, "inputs": "peaky"},
}


def tiles_in(text):
    """The blocks of a text that are tiles."""
    return [block for block in text.split("\n\n") if block.startswith("tile ")]


def numbers_in(block, label):
    """The numbers under a label, in their columns, down to where words begin."""
    found, on = [], False
    for line in block.splitlines():
        name, rest = line[2:12].strip(), line[12:]
        on = line.startswith("  ") and (name == label or (on and not name))
        for start in range(0, len(rest) if on else 0, trace_text.COLUMN):
            try:
                found.append(float(rest[start : start + trace_text.COLUMN]))
            except ValueError:
                break
    return found


def assert_shown(block, label, want):
    """The numbers `want` stand under a label, with four decimals or three digits."""
    found = numbers_in(block, label)
    np.testing.assert_allclose(found, np.atleast_1d(want), rtol=5e-3, atol=5.1e-5)


def assert_closing(text, truth, outputs):
    """The block after all tiles has the truth and the error of each of the outputs."""
    closing = next(block for block in text.split("\n\n") if block.startswith("After all"))
    assert_shown(closing, "truth", truth)
    said = [line.split() for line in closing.splitlines() if "max error" in line]
    errors = [trace.max_error(o, truth) for o in outputs]
    np.testing.assert_allclose([float(words[2].rstrip(":")) for words in said], errors, rtol=0.05)
    return closing


def same(got, want):
    """Whether a value of JSON, in which -inf is null, is `want`."""
    got = [-np.inf if x is None else x for x in got] if isinstance(got, list) else got
    got = -np.inf if got is None else got
    return np.array_equal(np.asarray(got, np.asarray(want).dtype), want)


@pytest.mark.parametrize("name", TRACES)
def test_the_text_is_the_walk(name):
    asked = make_trace(**TRACES[name])
    text = trace_text.to_text(asked)
    steps, blocks = asked.steps(), tiles_in(text)
    assert len(blocks) == len(steps)
    labels = {"s": "s", "m_i": "m_i", "alpha": "alpha", "p": "p", "l_i": "l_i", "acc": "acc",
              "acc / l_i": "o", "source 002": "normalised", "Lite": "lite"}  # fmt: skip
    for step, block in zip(steps, blocks):
        assert f"{step.bytes_loaded} bytes" in block.splitlines()[0]
        for label, field in labels.items():
            assert_shown(block, label, getattr(step, field))
    assert_closing(text, asked.truth(), [o for _, o in trace.outputs(steps[-1])])
    moved = sum(step.bytes_loaded for step in steps) + 2 * asked.q.nbytes
    assert text.splitlines()[-2 - ("never" in text)].endswith(f": {moved}")


@given(st.floats(-1e30, 1e30))
def test_a_number_keeps_its_size_and_its_column(x):
    shown = trace_text.number(x)
    assert len(shown) < trace_text.COLUMN
    assert float(shown) == pytest.approx(x, rel=0.05, abs=0)  # 0.00104 is 0.0010, and 1e-5 no 0
    assert trace_text.number(-np.inf) == "-inf"


@pytest.mark.parametrize("name", TRACES)
def test_json_has_every_number(name):
    asked = make_trace(**TRACES[name])
    data = json.loads(trace_text.to_json(asked))
    steps = asked.steps()
    assert len(data["tiles"]) == len(steps)
    for tile, step in zip(data["tiles"], steps):
        assert tile.keys() == vars(step).keys()
        assert [field for field, value in vars(step).items() if not same(tile[field], value)] == []
    assert data["truth"] == asked.truth().tolist()
    assert data["outputs"].keys() == {"online", "normalised", "lite"}
    assert data["outputs"]["online"]["max_error"] == trace.max_error(steps[-1].o, asked.truth())
    assert len(data["tiles"]) + data["tiles_skipped"] == -(-data["n"] // data["tile"])


def test_the_command(capsys):
    options = ["--n", "8", "--tile", "2", "--row", "3", "--causal", "--seed", "5"]
    options += ["--inputs", "peaky"]
    asked = make_trace(8, 4, 2, 3, inputs="peaky", seed=5, causal=True)
    assert run_here(capsys, "trace", *options) == (0, trace_text.to_text(asked) + "\n", "")
    assert run_here(capsys, "trace", *options, "--format", "json") == (
        0, trace_text.to_json(asked) + "\n", "",
    )  # fmt: skip
    words = "trace --n 1024 --tile 1000 --d 256 --format json"
    largest = run_here(capsys, *words.split())
    assert largest[0] == 0 and len(json.loads(largest[1])["tiles"]) == 2


def test_the_reference_and_the_command_line_need_no_torch():
    code = "import sys, course.tracing.trace, ladder.trace\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environ(), check=True, timeout=PATIENCE
    )
