"""Stubs are the stages with parts taken out; each has hints; no check ends in a traceback."""

import ast
import re
import shutil
import sys

import pytest
from ladder_command import ROOT, in_turn

from course.lab import checks, cpp, gaps, labs
from course.lessons import side_by_side
from harness.isolation.roster import BadStage, read_stages

STAGES = [*range(9), "cpu"]
SIZES = list(gaps.KINDS)


def solution(stage):
    """The name and the text of the file with a stage's gaps."""
    found = labs.solution(5, twin=True) if stage == "cpu" else labs.solution(stage)
    return next(iter(found.items()))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_stub_filled_with_the_solution_is_the_stage(stage, size):
    name, text = solution(stage)
    found = gaps.find(text, size)
    stub = labs.stubs(5 if stage == "cpu" else stage, size, stage == "cpu")[name]
    assert found and all(gap.says for gap in found)
    for gap in found:
        line = gap.lines[0]
        assert stub.splitlines().count(line) < text.splitlines().count(line)
    assert [name for name, _ in gaps.unwritten(stub)] == [gap.name for gap in found]
    filled = gaps.replaced(stub, size, [gap.lines for gap in found])
    if formulas := gaps.told(text, size):
        line = next(line for line in stub.splitlines() if line.strip() == gaps.UNTOLD)
        filled = filled.replace(line, formulas)
    assert filled == text
    assert not list(gaps.unwritten(text))
    if name.endswith(".py"):
        compile(stub, name, "exec")


@pytest.mark.parametrize("stage", [5, "cpu"])
@pytest.mark.parametrize("size", SIZES)
def test_a_stubs_docstring_does_not_tell_what_is_to_be_written(stage, size):
    name, text = solution(stage)
    stub = labs.stubs(5, size, stage == "cpu")[name]
    header, stage_header = (ast.get_docstring(ast.parse(x)) for x in (stub, text))
    assert "alpha" in stage_header and gaps.UNTOLD in header
    assert not {"m_new", "alpha", "exp", "acc / l_i"} & {*re.findall(r"acc / l_i|\w+", header)}
    kept = ast.get_docstring(ast.parse(labs.stubs(6, "small")[solution(6)[0]]))
    assert "m_new = max(" in kept  # its small gaps are others


def test_a_small_gap_is_one_statement_and_a_large_one_the_whole_loop():
    text = solution(5)[1]
    assert {len(gap.lines) for gap in gaps.find(text, "small")} == {1}
    [large] = gaps.find(text, "large")
    assert large.lines[0].startswith("    for start_n") and "acc / l_i" in large.lines[-1]


@pytest.mark.parametrize("left", ["", "        pass", "        ...", "        # alpha = 1"])
def test_a_gap_that_holds_no_code_is_not_written(left):
    text = solution(5)[1]
    found = gaps.find(text, "small")
    bodies = [[left] if gap.name == "alpha" else gap.lines for gap in found]
    [(name, line)] = gaps.unwritten(gaps.replaced(text, "small", bodies))
    assert name == "alpha" and text.splitlines()[line - 1].lstrip().startswith("# step alpha")


@pytest.mark.parametrize("stage", STAGES)
def test_every_gap_has_hints_that_come_nearer_to_the_line(stage):
    number, twin = (5, True) if stage == "cpu" else (stage, False)
    found = gaps.find(solution(stage)[1], "small")
    levels = [list(labs.hints(number, level, twin)) for level in (1, 2, 3)]
    for gap, question, idea, nearly in zip(found, *levels, strict=True):
        assert "?" in question and question != idea
        assert gaps.BLANK in nearly and not {line.strip() for line in gap.lines} & {
            line.strip() for line in nearly.splitlines()
        }
    said = labs.about()[number]
    assert said["goal"] and said["minutes"].keys() == set(SIZES)
    hinted = {x for x in said if isinstance(said[x], list)} - {"files"}
    # the twin in torch has no ragged tile to mask
    assert hinted - {gap.name for gap in found} == ({"tail"} if twin else set())


@pytest.mark.parametrize("size", SIZES)
def test_a_stub_is_written_once_and_checks_as_not_written(size, tmp_path):
    for stage in range(9):
        to = tmp_path / (f"lab{stage}" if stage == 2 else f"lab{stage}.py")
        asked = ("lab", "start", stage, "--to", to, "--size", size)
        done = in_turn(*asked)
        assert done.returncode == 0 and "minutes" in done.stdout and str(to) in done.stdout
        again = in_turn(*asked)
        assert again.returncode == 2 and "not overwritten" in again.stderr
        done = in_turn("lab", "check", to)
        assert (done.returncode, done.stderr) == (1, "")
        assert f"stage {stage}: not-written" in done.stdout and "Traceback" not in done.stdout


def test_the_twin_needs_no_triton(tmp_path):
    to = tmp_path / "mine.py"
    assert in_turn("lab", "start", 5, "--cpu", "--to", to).returncode == 0
    assert "triton" not in to.read_text(encoding="utf-8").lower().replace("without triton", "")


@pytest.mark.parametrize(
    ("text", "verdict", "said"),
    [
        ("STAGE = Stage(number=1, name='x')\nthis is no Python", None, "mine.py:2: not Python: "),
        ("STAGE = Stage(number=1, name='x')\n\0", None, "mine.py: not Python: "),
        ("import nothing_such\nSTAGE = Stage(number=1, name='x')\n", "crashed", "nothing_such"),
        ("def attend(q, k, v):\n    return q\n", None, "mine.py: no STAGE"),
        ("STAGE = Stage(number=one)\n", None, "mine.py: malformed node or string on line 1; --st"),
    ],
)
def test_a_file_that_is_no_stage_ends_in_one_line(text, verdict, said, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(text)
    done = in_turn("lab", "check", path)
    assert done.returncode == (2 if verdict is None else 1)
    assert (done.stderr + done.stdout).count("mine.py") <= 1
    assert said in done.stderr + done.stdout and "Traceback" not in done.stderr + done.stdout


@pytest.mark.slow
def test_what_a_file_says_of_itself_excuses_nothing(tmp_path):
    text = solution(1)[1].replace("m_i = max(s)", "m_i = 0.0 * len(s)")
    text = text.replace("* scale for", "for").replace(
        "    number=1,", "    number=1, exact_up_to=0,"
    )
    path = tmp_path / "mine.py"
    path.write_text(text)
    done = in_turn("lab", "check", path, "--seed", 3)
    assert done.returncode == 1 and "stage 1: failed" in done.stdout
    assert "wrong scale" in done.stdout and "got | expected" in done.stdout


def test_a_folder_that_is_no_submission_is_told_what_one_is(tmp_path):
    (tmp_path / "mine.py").write_text("")
    for named in cpp.FILES:
        with pytest.raises(BadStage, match=f"a folder without.* {named}.* name the .py file"):
            checks.check(tmp_path)
    (tmp_path / cpp.FILES[1]).write_text("")
    with pytest.raises(BadStage, match=f"{cpp.FILES[0]}: no such file"):
        checks.check(tmp_path)


@pytest.mark.slow
def test_a_filled_cpp_folder_passes_and_a_wrong_one_fails(tmp_path):
    to = tmp_path / "cpp"
    assert in_turn("lab", "start", 2, "--to", to).returncode == 0
    text = solution(2)[1]
    (to / "value_graph.hpp").write_text(text, encoding="utf-8")
    done = in_turn("lab", "check", to)
    assert done.returncode == 0 and "stage 2: passed" in done.stdout
    first = "node->parents[0]->grad += node->local_grads[0] * grad;"
    wrong = text.replace(first, first.replace("+= ", "= "))
    (to / "value_graph.hpp").write_text(wrong, encoding="utf-8")
    done = in_turn("lab", "check", to)
    assert done.returncode == 1 and "gradients" in done.stdout
    (to / "value_graph.hpp").write_text(text.replace("Value* end", "Valu end"), encoding="utf-8")
    done = in_turn("lab", "check", to)
    assert done.returncode == 1 and "does not compile" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("other", ["../solved", "/proc/self/cwd/csrc", ROOT / "csrc"])
def test_cpp_of_another_folder_is_no_submission(other, tmp_path, monkeypatch):
    if cpp.compiler() is None or (sys.platform != "linux" and "/proc" in str(other)):
        pytest.skip("there is no compiler, or no /proc")
    monkeypatch.chdir(ROOT)
    for name in ("solved", "mine"):
        shutil.copytree(ROOT / "csrc", tmp_path / name)
    header = tmp_path / "mine" / "value_graph.hpp"
    header.write_text(f'struct Mine {{}};\n#include "{other}/value_graph.hpp"\n', encoding="utf-8")
    found = checks.check(tmp_path / "mine")
    assert found.verdict == "cheated" and "another folder" in found.diagnosis


def test_a_file_with_a_stages_number_and_name_runs_beside_it_as_yours(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(solution(1)[1], encoding="utf-8")
    found = [stage for stage in read_stages([path]) if stage.number == 1]
    assert [(stage.name, stage.path == path) for stage in found] == [
        ("raw_python", False),
        ("yours", True),
    ]
    with pytest.raises(BadStage, match="another number or name"):
        read_stages([path, path])


def test_what_compares_stages_leaves_the_marks_out_and_keeps_the_numbers_of_lines():
    shown = in_turn("diff", 4, 5).stdout
    assert "alpha = tl.exp(" in shown and "# step" not in shown and "# exercise" not in shown
    code = side_by_side.code(5)
    whole = solution(5)[1].splitlines()
    assert [whole[number - 1] for number in code.numbers] == list(code.lines)
    left_out = {*range(1, len(whole) + 1)} - {*code.numbers}
    marked = len(gaps.find("\n".join(whole), "small")) + 2
    assert len(left_out) == marked and all("# " in whole[number - 1] for number in left_out)
