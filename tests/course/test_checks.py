"""A right stage passes each check of the labs that shows a mistake (mistakes.toml)."""

import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from ladder_command import ROOT, environ
from test_grade import PATIENT, of_some, of_stage
from test_lab_diagnoses import MISTAKES

from course.lab import checks, cpp, explain, labs
from course.lab.grading import grade


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 3, 4, 5, 6, 7, 8, "cpu"])  # 2: test_lab.py builds one
def test_a_right_stage_passes_the_checks_that_show_mistakes(stage, monkeypatch, tmp_path):
    number, twin = (5, True) if stage == "cpu" else (stage, False)
    [text] = labs.solution(number, twin).values()
    path = tmp_path / "right.py"
    path.write_text(text, encoding="utf-8")
    if not twin:
        of_stage(labs.source(number))
    shows = {check for of, _, check, _ in MISTAKES.values() if of == stage}
    of_some(monkeypatch, "a few keys", "batch, heads and strides", "gradients", *shows)
    row, result = grade.grade(path, number, None, twin, PATIENT)
    assert row.verdict == "passed" and {*row.checks} >= shows, result


ONCE = """
from dataclasses import replace
from course.lab import checks, labs

every = checks.checks
checks.checks = lambda *at: (
    replace(x, calls=(1, 1)) for x in every(*at) if x.name == "gradients of large scores"
)
if __name__ == "__main__":
    found = checks.check(labs.source(3))
    print(found.verdict, found.diagnosis)
"""


@pytest.mark.slow
def test_what_a_first_call_imports_is_not_taken_for_work_that_the_next_one_remembers(tmp_path):
    """With a fork server that has not imported what gradients take, as `ladder lab` has it."""
    (tmp_path / "once.py").write_text(ONCE, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, tmp_path / "once.py"], env=environ(), capture_output=True, text=True
    )
    assert done.stdout == "passed \n", done


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([1, 4], "rows 1, 4 (2 of 9)"),
        ([7], "row 7 (1 of 9)"),
        ([0, 1, 2, 5], "rows 0-2, 5 (4 of 9)"),
        ([0, 2, 4, 7, 8], "rows 0, 2, 4, 7-8 (5 of 9)"),
        ([0, 2, 4, 6, 8], "rows 0, 2, 4, ..., 8 (5 of 9)"),
        ([*range(9)], "rows 0-8 (all 9)"),
    ],
)
def test_the_rows_that_are_wrong_are_named_and_no_others(rows, says):
    problem = replace(checks.BASE, nq=9, d=2)
    truth = torch.zeros(1, 1, 9, 2)
    got = truth.clone()
    got[0, 0, rows, 1] = 1.0
    line = explain.show(problem, "o", got, truth, 0.1)[1]
    assert line == f"o (1, 1, 9, 2) is wrong in {says} and column 1 (1 of 2)"


@pytest.mark.slow
def test_a_full_chunk_of_nodes_is_seen(tmp_path, monkeypatch):
    if cpp.compiler() is None:
        pytest.skip("there is no compiler")
    of_some(monkeypatch, "gradients of many nodes")
    shutil.copytree(ROOT / "csrc", tmp_path / "mine")
    assert checks.check(tmp_path / "mine").verdict == "passed"
    header = tmp_path / "mine" / "value_graph.hpp"
    text = header.read_text(encoding="utf-8")
    wrong = text.replace("if (next_ == end_) grow();", "if (next_ == nullptr) grow();")
    assert wrong != text
    header.write_text(wrong, encoding="utf-8")
    assert checks.check(tmp_path / "mine").verdict in ("failed", "crashed")
