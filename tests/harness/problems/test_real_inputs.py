"""The committed real inputs: shapes, order, bounds, and what their note says of them."""

import re

import numpy as np
import pytest

from harness.problems import real_inputs


def test_a_problem_has_a_slice_of_the_whole_for_itself():
    full = real_inputs.load(2, 12, 512, 512)
    for x in full:
        assert x.shape == (real_inputs.LAYERS, real_inputs.HEADS, real_inputs.MAX_N, real_inputs.D)
        assert x.dtype == np.float32 and x.flags.c_contiguous
        assert np.isfinite(x).all() and x.std() > 0.1
    q, k, v = real_inputs.load(1, 3, 5, 77)
    for x, whole, n in zip((q, k, v), full, (5, 77, 77), strict=True):
        np.testing.assert_array_equal(x, whole[:1, :3, :n])
    q[:] = 0
    assert real_inputs.load(1, 1, 4, 4)[0].any()


def test_heads_come_sharpest_first():
    q, k, _ = real_inputs.load(2, 12, 512, 512)
    measured = _sharpness(q, k)
    assert (np.diff(measured, axis=1) <= 0).all()
    assert measured[0, 0] == measured.max()
    with np.load(real_inputs.FIXTURE) as fixture:
        told, stored = fixture["sharpness"], fixture["q"]
    order = np.argsort(-told, axis=1, kind="stable")
    np.testing.assert_allclose(
        measured, np.take_along_axis(told, order, axis=1), rtol=np.finfo(np.float32).eps
    )
    for b, heads in enumerate(order):
        np.testing.assert_array_equal(q[b], stored[b, heads].astype(np.float32))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 1, 8, 8), "--b: got 3, real inputs have at most 2 layers"),
        ((1, 13, 8, 8), "--h: got 13, real inputs have at most 12 heads"),
        ((1, 1, 1024, 1024), "--n: got 1024, real inputs have at most 512 tokens"),
        ((1, 1, 513, 8), "--nq: got 513, real inputs have at most 512 tokens"),
        ((0, 1, 8, 8), "--b: got 0, expected 1 to 2 layers of real inputs"),
        ((1, -1, 8, 8), "--h: got -1, expected 1 to 12 heads of real inputs"),
        ((1, 1, 8, 0), "--n: got 0, expected 1 to 512 tokens of real inputs"),
        ((1, 1, 0, 8), "--nq: got 0, expected 1 to 512 tokens of real inputs"),
    ],
)
def test_out_of_range_says_what_came_and_what_was_expected(arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        real_inputs.load(*arguments)


def test_the_fixture_is_what_the_note_says():
    note = (real_inputs.FIXTURE.parent / "README.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (\d) \| ([\d.]+) \(head (\d+)\) \| ([\d.]+) \(head (\d+)\) \| as batch", note, re.M
    )
    told = [(int(a), b, int(c), d, int(e)) for a, b, c, d, e in rows]
    with np.load(real_inputs.FIXTURE) as fixture:
        assert told == [
            (layer, f"{each.max():.1f}", each.argmax(), f"{each.min():.1f}", each.argmin())
            for layer, each in zip(fixture["layers"], fixture["sharpness"], strict=True)
        ]


def test_the_file_is_small_and_made_of_the_promised_arrays():
    assert real_inputs.FIXTURE.stat().st_size <= 3_000_000
    with np.load(real_inputs.FIXTURE) as fixture:
        assert {name: (x.shape, x.dtype.name) for name, x in fixture.items()} == {
            "layers": ((2,), "int64"),
            "sharpness": ((2, 12), "float32"),
            "q": ((2, 12, 512, 32), "float16"),
            "k": ((2, 12, 512, 32), "float16"),
            "v": ((2, 12, 512, 32), "float16"),
        }


def test_the_input_does_its_job_softmax_per_tile_fails_on_it():
    """What the fixture is for: Lite's mistake must show on real input, more so with every tile."""
    errors = []
    for n in (64, 128, 256, 512):
        q, k, v = (x[0, 0].astype(np.float64) for x in real_inputs.load(1, 1, n, n))
        s = q @ k.T * real_inputs.D**-0.5  # (n, n)
        tiles = [_softmax(s[:, t : t + 64]) @ v[t : t + 64] for t in range(0, n, 64)]
        errors.append(np.abs(sum(tiles) - _softmax(s) @ v).max())
    assert errors[0] == 0
    assert errors[1] > 1
    assert (np.diff(errors) > 1).all()


def _sharpness(q, k):
    """(B, H, N, d) twice -> (B, H): the largest |q.k| * d**-0.5 in float64."""
    s = q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2)  # (B, H, N, N)
    return np.abs(s).max(axis=(-2, -1)) * q.shape[-1] ** -0.5


def _softmax(s):
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)
