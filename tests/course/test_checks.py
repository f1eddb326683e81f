"""Each check of the labs finds the mistake that it is about, and a right stage passes it."""

import shutil
import subprocess
import sys

import pytest
from ladder_command import ROOT, environ
from test_grade import of_some, of_stage
from test_lab_diagnoses import MISTAKES

from course.lab import checks, cpp, labs
from course.lab.grading import calls, grade

FIRST_PASS = """    for start_n in range(0, Nk, BLOCK_N):
        seen = (start_n + offs_n < Nk)[:, None] & (offs_d[None, :] < d)
        k = tl.load(k_ptrs + start_n * stride_kn, mask=seen, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        s = tl.where((start_n + offs_n < Nk)[None, :], s, float("-inf"))
        m_i = tl.maximum(m_i, tl.max(s, 1))
"""
LAUNCH = "    config = launch_config(d, q.dtype, precision)\n"
FULL = "tl.maximum(start_m + shift + 1, 0)"
END = "tl.minimum(start_m + BLOCK_M, Nq) + shift"
WRONG = [
    (5, "one pass, tile by tile", "    # exercise tiles", f"{FIRST_PASS}    # exercise tiles"),
    (
        5,
        "one pass, tile by tile",
        LAUNCH,
        f'{LAUNCH}    config["BLOCK_N"] = triton.next_power_of_2(Nk)\n',
    ),
    (6, "tiles that need no mask", "full // BLOCK_N * BLOCK_N", "0"),
    (6, "causal, more queries", FULL, FULL.replace(" + shift", "")),
    (6, "causal, fewer queries", END, f"{END} - 1"),
    (0, "scores of 1000", "m_i = max(x.data for x in s)", "m_i = s[0].data"),
    (
        5,
        "large scores",
        "tl.full((BLOCK_M,), -3.4028234663852886e38",
        "tl.full((BLOCK_M,), 0.0",
    ),
    (6, "causal, fewer queries", "start_m + shift + 1, 0", "start_m + shift + 2, 0"),
    (6, "lengths alone", "if HAS_SEQLENS:", "if HAS_SEQLENS and CAUSAL:"),
    (7, "gradients under lengths alone", "range(group)", "range(group if CAUSAL else 1)"),
    (7, "gradients", "offs_m[:, None] * stride_dom", "offs_m[:, None] * d"),
    (7, "gradients of rows that see nothing", "(0, 0, blind, 0)", "(0, 0, 0, blind)"),
    (0, "gradients of large scores", "return dq, dk, dv", "dk[1:] = 0; return dq, dk, dv"),
    (
        3,
        "large scores",
        "p = torch.softmax(s, dim=-1)",
        "p = (s - s.max()).exp(); p = p / p.sum(-1, keepdim=True)",
    ),
    (
        5,
        "float16",
        "s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale",
        "s = tl.dot((q * scale).to(q.dtype), tl.trans(k), input_precision=PRECISION)",
    ),
    (6, "tiles that no row sees", "tl.minimum(start_m + BLOCK_M, Nq)", "Nk"),
    (
        8,
        "parts that weigh nothing",
        "m_new = tl.maximum(m_i, tl.max(m_s, 0))",
        "m_new = tl.max(m_s, 0)",
    ),
    (8, "float16", "l_i * alpha + tl.sum", "l_i + tl.sum"),
    (8, "large pages", "(start_n + BLOCK_N) // PAGE", "start_n // PAGE"),
    (8, "small pages", "table_ptr += entry * stride_table", "table_ptr += 0"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "check", "old", "new"), WRONG)
def test_a_mistake_in_a_whole_stage_fails_the_check_that_is_about_it(
    stage, check, old, new, tmp_path, monkeypatch
):
    of_stage(labs.source(stage))
    of_some(monkeypatch, check)
    [text] = labs.solution(stage).values()
    assert old in text
    wrong = tmp_path / "wrong.py"
    wrong.write_text(text.replace(old, new, 1), encoding="utf-8")
    row, result = grade.grade(wrong, stage, None, False, calls.Limits())
    assert row.verdict in ("failed", "crashed")
    assert not any("it was right" in line for line in result.case), result  # the case is explained


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 3, 4, 5, 6, 7, 8, "numpy"])  # 2: test_lab.py builds one
def test_a_right_stage_passes_the_checks_that_show_mistakes(stage, monkeypatch, tmp_path):
    number, numpy = (5, True) if stage == "numpy" else (stage, False)
    [text] = labs.solution(number, numpy).values()
    path = tmp_path / "right.py"
    path.write_text(text, encoding="utf-8")
    if not numpy:
        of_stage(labs.source(number))
    shows = {check for of, check, _, _ in WRONG if of == stage}
    shows |= {check for of, _, check, _ in MISTAKES.values() if of == stage}
    of_some(monkeypatch, "a few keys", "batch, heads and strides", "gradients", *shows)
    row, result = grade.grade(path, number, None, numpy, calls.Limits())
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
