"""Each pitfall that the walkthrough tells of is one: the shipped stage is right, the change wrong.

The committed record is what comes out here, too: the same text changed, gone wrong the same way.
"""

import importlib.util
from pathlib import Path

import pitfalls
import pytest
import torch

from harness.measures.accuracy import judge_outputs
from harness.measures.oracle import make_oracles
from harness.records.jsonl import read
from stages import by_number

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "results" / "cpu" / "pitfalls.jsonl"

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no wheel of triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled, some mistakes would crash it"),
]

_, RECORDS = read(RECORD, "pitfall")
NAMES = [record["name"] for record in RECORDS]


def test_every_pitfall_has_its_record():
    assert list(pitfalls.PITFALLS) == NAMES


@pytest.mark.slow
@pytest.mark.parametrize("record", RECORDS, ids=NAMES)
def test_a_pitfall_is_wrong_and_its_record_is_true(record, tmp_path):
    found = pitfalls.measure(record["name"], tmp_path)
    for field in ("source", "lesson", "stage", "changes"):
        assert found[field] == record[field]
    assert found["exact"] is record["exact"] is False
    assert bool(found["raised"]) is bool(record["raised"])
    # by the rule: which of its bounds it misses, or how many NaN
    assert found["reason"].split(" error ")[0] == record["reason"].split(" error ")[0]
    if record["err_f64_max"] is not None:
        assert found["err_f64_max"] == pytest.approx(record["err_f64_max"], rel=0.05)
        assert found["rows_wrong"] == pytest.approx(record["rows_wrong"], abs=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_shipped_stage_is_right_on_the_same_problem(name):
    pitfall = pitfalls.PITFALLS[name]
    oracles = make_oracles(pitfall.problem)
    verdict = judge_outputs(pitfalls.ask(by_number(pitfall.stage), pitfall.problem), oracles)
    assert verdict["exact"], verdict["why"]
