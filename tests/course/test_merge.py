"""Stage 8's merge in NumPy against the plain formula, and what `ladder trace --splits` shows."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ladder_command import run_here
from test_trace import assert_closing, assert_shown, normal, rounding, same, walks

from course.tracing import merge, merge_views, trace
from course.tracing.trace import make_trace
from course.tracing.trace_plots import TooMuch
from harness.views.look import LIGHT
from stages.common.machine import has_module


@settings(max_examples=100, deadline=None)
@given(walks(), st.integers(1, 7))
def test_the_parts_come_to_the_softmax_over_all_keys(given, splits):
    q, k, v, tile, visible = given
    seen = np.broadcast_to(k.shape[-2] if visible is None else visible, q.shape[:-1])
    found, bound = merge.split(q, k, v, tile, splits, visible), rounding(q, k, v)
    truth = trace.attention(q, k, v, visible)
    np.testing.assert_allclose(found.o, truth, rtol=0, atol=bound)
    whole = merge.split(q, k, v, tile, 1, visible)
    np.testing.assert_allclose(whole.m_i, found.m_i, rtol=0, atol=bound)
    np.testing.assert_allclose(found.l_i, whole.l_i, rtol=bound, atol=0)
    assert len(found.parts) == len(found.w) == splits
    # the parts' keys follow each other, in whole tiles, up to the last that any row sees
    ends = [0, *(part.stop for part in found.parts)]
    assert [part.start for part in found.parts] == ends[:-1]
    assert all(part.start % tile == 0 for part in found.parts if part.stop > part.start)
    assert int(seen.max()) <= ends[-1] < int(seen.max()) + tile
    for part, w in zip(found.parts, found.w, strict=True):
        here = np.clip(seen - part.start, 0, part.stop - part.start)
        assert np.array_equal(np.isneginf(part.m_s), here == 0)
        counts = here > 0
        assert (w[~counts] == 0).all()
        want = np.exp(part.m_s[counts] - found.m_i[counts])
        np.testing.assert_array_equal(w[counts], want)
        assert (part.l_s[here == 0] == 0).all() and (part.acc_s[here == 0] == 0).all()
        if part.stop > part.start:
            alone = trace.attention(
                q, k[..., part.start : part.stop, :], v[..., part.start : part.stop, :], here
            )
            np.testing.assert_allclose(part.o, alone, rtol=0, atol=bound)


@given(st.integers(0, 40), st.integers(1, 50))
def test_tiles_are_shared_out_evenly(tiles, splits):
    found = [end - start for start, end in merge.shares(tiles, splits)]
    assert sum(found) == tiles and max(found) - min(found) <= 1
    assert found == sorted(found, reverse=True)  # the first parts have one more


def test_without_weights_a_part_of_small_scores_counts_as_much_as_any():
    k, v = np.array([[0.0], [5000.0]]), np.array([[1.0], [10.0]])
    found = merge.split(np.ones(1), k, v, 1, 2)
    assert (found.o, found.unweighted) == (10.0, 5.5)
    assert [float(w) for w in found.w] == [0.0, 1.0]


def test_no_part_is_refused():
    q, k, v = normal((4,), (8, 4), (8, 4))
    with pytest.raises(ValueError, match=r"^splits: got 0, expected 1 part or more"):
        merge.split(q, k, v, 2, 0)


# the command's views

ASKED = {
    "plain": ({"n": 8, "d": 4, "tile": 2, "row": 3}, 2),
    "one part": ({"n": 8, "d": 4, "tile": 2, "row": 3}, 1),
    "an empty part": ({"n": 8, "d": 4, "tile": 2, "row": 3, "causal": True}, 3),
    "peaky": ({"n": 33, "d": 16, "tile": 5, "row": 2, "inputs": "peaky"}, 4),
    "all that text shows": ({"n": 64, "d": 16, "tile": 1, "row": 63, "inputs": "peaky"}, 64),
}
asked = pytest.mark.parametrize("name", ASKED)


@asked
def test_the_text_is_the_merge(name):
    made, splits = make_trace(**ASKED[name][0]), ASKED[name][1]
    found, text = merge_views.merged(made, splits), merge_views.to_text(made, splits)
    blocks = [block for block in text.split("\n\n") if block.startswith("part ")]
    assert len(blocks) == splits
    for part, block in zip(found.parts, blocks, strict=True):
        for label in ("s", "m_s", "l_s", "acc_s"):
            assert_shown(block, label, getattr(part, label))
    merged = next(block for block in text.split("\n\n") if block.startswith("the merge"))
    for label, want in (("m_i", found.m_i), ("l_i", found.l_i), ("acc", found.acc)):
        assert_shown(merged, label, want)
    for index, w in enumerate(found.w):
        assert_shown(merged, f"w_{index}", w)
    closing = assert_closing(text, made.truth(), (found.o, found.unweighted))
    assert_shown(closing, "acc / l_i", found.o)
    assert_shown(closing, "unweighted", found.unweighted)
    scratch = 2 * 4 * splits * (made.q.size + 2)
    assert text.endswith(f": {scratch}") == (splits > 1)


@asked
def test_json_has_every_number(name):
    made, splits = make_trace(**ASKED[name][0]), ASKED[name][1]
    found, data = merge_views.merged(made, splits), json.loads(merge_views.to_json(made, splits))
    assert len(data["parts"]) == splits
    for shown, part, w in zip(data["parts"], found.parts, found.w, strict=True):
        assert shown.keys() == {*vars(part), "w"}
        assert all(same(shown[field], value) for field, value in vars(part).items())
        assert same(shown["w"], w)
    assert all(same(data[field], getattr(found, field)) for field in ("m_i", "l_i", "acc"))
    assert data["truth"] == made.truth().tolist()
    for which, o in (("merged", found.o), ("unweighted", found.unweighted)):
        error = trace.max_error(o, made.truth())
        assert data["outputs"][which] == {"o": o.tolist(), "max_error": error}


def test_the_command(capsys):
    options = ["--n", "8", "--tile", "2", "--row", "3", "--causal", "--splits", "2"]
    made = make_trace(8, 4, 2, 3, causal=True)
    assert run_here(capsys, "trace", *options) == (0, merge_views.to_text(made, 2) + "\n", "")
    as_json = run_here(capsys, "trace", *options, "--format", "json")
    assert as_json == (0, merge_views.to_json(made, 2) + "\n", "")


@pytest.mark.skipif(not has_module("matplotlib"), reason="no matplotlib")
def test_the_picture_shows_the_merge():
    made = make_trace(n=8, d=4, tile=2, row=3)
    found = merge_views.merged(made, 2)
    figure = merge_views.picture(found, made.truth(), LIGHT)
    scores, weights, outputs = figure.axes
    heights = sorted(bar.get_height() for bar in scores.patches)
    assert heights == pytest.approx(sorted(np.concatenate([part.s for part in found.parts])))
    filled = [bar.get_height() for bar in weights.patches if bar.get_fill()]
    assert sum(filled) == pytest.approx(found.l_i, rel=1e-6)
    hollow = [bar.get_height() for bar in weights.patches if not bar.get_fill()]
    assert sum(hollow) == pytest.approx(sum(part.l_s for part in found.parts), rel=1e-6)
    lines = {line.get_label(): line.get_ydata() for line in outputs.get_lines()}
    assert np.array_equal(lines["merged"], found.o)
    assert np.array_equal(lines["unweighted"], found.unweighted)
    for index, part in enumerate(found.parts):
        assert np.array_equal(lines[f"part {index} alone"], part.o)


def test_what_is_too_much_for_a_picture_is_said():
    q, k, v = np.ones((2, 4)), np.ones((70, 4)), np.ones((70, 4))
    for found in (
        merge.split(q[0], k, v, 2, 2),
        merge.split(q[0], k[:8], v[:8], 2, 4),
        merge.split(q, k[:4], v[:4], 2, 2),
        merge.split(q[0], k, v, 2, 2, 0),
    ):
        with pytest.raises(TooMuch, match=r"^parts: got .*, expected"):
            merge_views.picture(found, np.ones(4))
