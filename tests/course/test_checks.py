"""Each check of the labs finds the mistake that it is about, and a right stage passes it."""

import shutil

import pytest
from ladder_command import ROOT
from test_grade import of_some, of_stage

from course.lab import checks, cpp, labs
from course.lab.grading import calls, grade


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "check", "old", "new"),
    [
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
        (5, "large scores", "m_new = tl.maximum(m_i, tl.max(s, 1))", "m_new = tl.max(s, 1)"),
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
    ],
)
def test_a_mistake_in_a_whole_stage_fails_the_check_that_is_about_it(
    stage, check, old, new, tmp_path, monkeypatch
):
    source = labs.source(stage)
    of_stage(source)
    of_some(monkeypatch, check)
    text = source.read_text(encoding="utf-8")
    assert old in text
    wrong = tmp_path / "wrong.py"
    wrong.write_text(text.replace(old, new, 1), encoding="utf-8")
    row, result = grade.grade(wrong, stage, None, False, calls.Limits())
    assert row.verdict in ("failed", "crashed")
    assert not any("it was right" in line for line in result.case), result  # the case is explained
    assert grade.grade(source, stage, None, False, calls.Limits())[0].verdict == "passed"


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
