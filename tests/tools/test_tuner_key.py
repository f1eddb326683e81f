"""The tuner's key: problems that share and that differ; what is lost is counted by hand."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from course.report import contests
from harness.records.schema import check_record
from stages.common import tuner
from stages.common.machine import has_module

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(tuner, "choose", tuner.choose)  # the tool puts another in its place
    spec = importlib.util.spec_from_file_location("tool", ROOT / "tools" / "tuner_key.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(h, n, times, kernel="attention_kernel"):
    return {
        "kernel": kernel, "b": 1, "h": h, "nq": n, "nk": n, "d": 64, "dtype": "float16",
        "precision": "float16", "causal": False, "configs": ["small", "large"], "time_ms": times,
    }  # fmt: skip


def test_what_another_problems_choice_costs():
    few, many = record(1, 1000, [2.0, 3.0]), record(32, 1024, [12.0, 10.0])
    others = [record(1, 4096, [5.0, 1.0]), record(1, 1024, [9.0, 1.0], "dq_kernel")]
    found = contests.lost([few, many, *others], contests.TUNER_KEYS["Nk"])
    assert sorted(found) == pytest.approx([0.2, 0.5])
    assert contests.lost([few, many, *others], contests.TUNER_KEYS["Nk and B H"]) == []


def test_the_problems_share_keys_and_differ_in_heads_and_queries(tool):
    for nk in (1024, 4096, 16384):
        shared = [shape for shape in tool.shapes() if tuner.bucket(shape[3]) == nk]
        assert {b * h for b, h, *_ in shared} >= {1, 8, 32}
        assert {nq for _, _, nq, _ in shared} >= {1, 128, nk}


@pytest.mark.skipif(not has_module("triton"), reason="no triton for this machine")
def test_each_kernel_has_its_times_and_the_tuners_rounds_stay(tool, monkeypatch):
    """Interpreted, with a clock of the test's: what is asked of the tuner is what is recorded."""
    randn, asked = torch.randn, []
    monkeypatch.setattr(torch, "randn", lambda *size, device, **options: randn(*size, **options))

    def time_each(candidates, launch):
        asked.append(tuner.ROUNDS)
        launch(candidates[0])
        return {index: float(len(candidates) - index) for index in range(len(candidates) - 1)}

    monkeypatch.setattr(tuner, "time_each", time_each)
    usual = tuner.ROUNDS
    records = tool.measure((16, "float16", "float16", True), (1, 2, 3, 20))
    assert [r["kernel"] for r in records] == ["attention_kernel", "dk_dv_kernel", "dq_kernel"]
    assert asked == [usual, tool.ROUNDS] * 3 and usual == tuner.ROUNDS
    for found in records:
        check_record(found)
        assert (found["h"], found["nq"], found["nk"]) == (2, 3, 20)
        assert found["time_ms"] == found["tuner_ms"] == [3.0, 2.0]
        assert len(found["configs"]) == 2
