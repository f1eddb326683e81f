"""Each known mistake, made in a solution by one edit, is found, and called by its name."""

import functools
import signal as signals
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from test_lab import solution

from course.edits import replace_each
from course.lab import checks, labs
from harness.isolation.judge import Judge
from harness.isolation.roster import describe_files

pytestmark = pytest.mark.slow  # a few processes each

TABLE = tomllib.loads(Path(__file__).with_name("mistakes.toml").read_text(encoding="utf-8"))
# mistake -> stage, its edits, the check that shows it, and what the diagnosis begins with, where
# LINE stands for the line of the last edit
MISTAKES = {
    name: (int(stage) if stage.isdigit() else stage, edits, check, begins)
    for stage, shown in TABLE.items()
    for check, mistakes in shown.items()
    for name, (begins, *edits) in mistakes.items()
}
NAMED = [name for name in MISTAKES if MISTAKES[name][3]]
S5 = "s = dot(q, tl.trans(k), PRECISION) * scale"


@functools.cache
def described(stage):
    """What a solution says of itself."""
    number, twin = (5, True) if stage == "cpu" else (stage, False)
    [info] = describe_files([labs.source(number, twin)])
    return info


def judged(stage, edits, name, folder, info=None):
    """What comes of a solution with `edits`, in the check `name` alone, with its fewest calls.

    `info`: what it says of itself, where the edits change that.
    """
    number, asked, info = prepared(stage, edits, name, folder, info)
    return checks.judged(info, number, [asked], folder, lambda mark: None)


def prepared(stage, edits, name, folder, info=None, seed=1):
    """The stage's number, the check `name` from a seed, and a solution with `edits`."""
    if stage in range(4, 9):
        pytest.importorskip("triton", reason="no wheel of triton")
    path = write(stage, edits, folder)
    number = 5 if stage == "cpu" else stage
    [asked] = [each for each in checks.checks(number, seed) if each.name == name]
    asked = replace(asked, calls=(asked.calls[0], asked.calls[0]))
    return number, asked, info or replace(described(stage), path=path)


def write(stage, edits, folder):
    """The file of a solution with `edits`."""
    name, shipped = solution(stage)
    text = replace_each(shipped, edits, name)
    path = folder / "mine.py"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_and_called_by_its_name(name, tmp_path):
    stage, edits, shows, begins = MISTAKES[name]
    found = judged(stage, edits, shows, tmp_path)
    assert found.verdict in ("failed", "crashed", "out-of-memory"), found
    if "LINE" in begins:
        lines = (tmp_path / "mine.py").read_text(encoding="utf-8").splitlines()
        [line] = [i for i, text in enumerate(lines, 1) if edits[-1][1] in text]
        begins = begins.replace("LINE", str(line))
    assert found.diagnosis.startswith(begins), (found.diagnosis, found.case)
    assert begins or not any("it was right" in line for line in found.case), found


@pytest.mark.parametrize("name", NAMED)
def test_the_check_of_a_mistake_fails_it_whatever_the_seed(name, tmp_path):
    stage, edits, shows, _ = MISTAKES[name]
    number, asked, info = prepared(stage, edits, shows, tmp_path, seed=2)
    rules = checks.rules(number, stage == "cpu")
    with Judge(asked.problem) as judge:
        mark = checks.one(info, asked, rules, checks.calls.USUAL, judge)
    assert not mark.passed


def test_the_first_tile_that_differs_is_named(tmp_path):
    found = judged(*MISTAKES["no rescale of l"][:3], tmp_path)
    assert any("first tile that differs: keys 64 to 127, after which l_i" in x for x in found.case)
    edit = ("ds.to(q.dtype), q, PRECISION, dk)", "ds.to(q.dtype), q, PRECISION, dk * 0)")
    found = judged(7, (edit,), "gradients under a mask", tmp_path)
    assert any(x.startswith("wrong: dk; right: o, dq, dv. Look at the ds") for x in found.case)
    assert "first tile that differs: rows 32 to 63, after which dk" in found.diagnosis
    edit = ("l_i = l_i * alpha + tl.sum(p, 1)", "l_i = l_i * alpha + tl.sum(p, 1) * (1 + start_n)")
    found = judged(6, (edit,), "many keys", tmp_path)
    says = "no known mistake gives just this; first tile that differs: keys 64 to 127, after which"
    assert found.diagnosis.startswith(f"{says} l_i")
    assert " is wrong in rows 0-4 (all 5) and columns 0-15 (all 16)" in found.case[1]


LOW = "tl.maximum(m_i, tl.max(s, 1))", "tl.max(s, 1)"  # where all scores are low, it shows


@pytest.mark.parametrize(
    ("edit", "look"),
    [
        (LOW, "first tile that differs: keys 64 to 127, after which m_i of row"),
        (LOW, "is m_new the larger of m_i and the tile's max"),
        (("tl.exp(m_i - m_new)", "tl.exp(m_new - m_i)"), "alpha must be exp(m_i - m_new)"),
        (("tl.sum(p, 1)", "tl.sum(p, 1) * 2"), "m_i is right, so look at p"),
        (
            ("tl.sum(p, 1)", "tl.sum(p, 1) * (1 if start_n < 64 else float('inf'))"),
            "m_i is right, so look at p",
        ),
        (("acc = acc * alpha[:, None]", "acc = acc / alpha[:, None]"), "l_i is right, so look at"),
        ((S5, f"{S5} * 1.5"), "look at s, its scale and its mask"),
    ],
)
def test_of_the_first_tile_the_first_wrong_state_says_where_to_look(edit, look, tmp_path):
    found = judged(5, (edit,), "large scores" if edit == LOW else "many keys", tmp_path)
    assert look in " ".join((*found.case, found.diagnosis)), found


def test_clearing_columns_past_d_masks_no_score(tmp_path):
    product = "        s = dot(q, tl.trans(k), PRECISION)"
    cleared = "        k = tl.where(in_d, k, 0.0)\n        v = tl.where(in_d, v, 0.0)\n"
    found = judged(6, ((product, cleared + product),), "tiles that need no mask", tmp_path)
    assert found.verdict == "passed", found


def test_an_error_that_is_its_own_cause_ends_at_once(tmp_path):
    ring = "exec('try: 1 / 0\\nexcept Exception as error: raise error from error')"
    edit = ("p = [math.exp(", f"{ring}; p = [math.exp(")
    found = judged(1, (edit,), "a few keys", tmp_path)
    assert found.verdict == "crashed"
    assert "division by zero" in " ".join((found.diagnosis, *found.case)), found


@pytest.mark.parametrize("signal", ["SIGABRT", "SIGSEGV"])
def test_a_process_that_memory_ends_is_asked_for_its_masks(signal, tmp_path):
    edit = ("p = [math.exp(", f"__import__('signal').raise_signal({int(getattr(signals, signal))})")
    edit = (edit[0], f"{edit[1]}; {edit[0]}")
    found = judged(1, (edit,), "a few keys", tmp_path)
    assert found.verdict == "crashed" and "without its mask" in found.diagnosis, found


def test_the_line_of_an_error_in_a_backward_pass_is_shown(tmp_path):
    found = judged(7, (("ds = p * dp_less_delta", "ds = p * dp"),), "gradients", tmp_path)
    assert found.verdict == "crashed"
    assert "`ds = p * dp`: " in found.case[0], found.case


def test_of_a_warning_the_words_are_shown_and_not_its_folder(tmp_path):
    warns = "import warnings; warnings.warn('is it so?', RuntimeWarning)"
    edit = ("alpha = torch.exp(m_i - m_new)", f"alpha = torch.exp(m_new - m_i); {warns}")
    found = judged("cpu", (edit,), "a few keys", tmp_path)
    warned = [x for x in found.case if "Warning" in x]
    assert warned and all(x.startswith("it printed: mine.py:") for x in warned)
    assert not any("alpha = torch.exp" in x for x in found.case)


def test_the_line_that_failed_is_shown_and_its_own_words_explain_nothing(tmp_path):
    [*_, name, _] = MISTAKES["no axis for the columns"]
    edit = ("acc = acc * alpha[:, None]", "acc = acc * alpha + 0 * len('matmul')  # a note")
    found = judged(5, (edit,), name, tmp_path)
    text = (tmp_path / "mine.py").read_text(encoding="utf-8").splitlines()
    line = next(at for at, x in enumerate(text, start=1) if "'matmul'" in x)
    assert found.case[0].startswith(f"mine.py:{line}: `acc = acc * alpha + 0 * len('matmul')`: ")
    assert found.diagnosis.startswith("shapes don't fit: one number per row")


def test_numbers_of_no_known_mistake_get_no_name(tmp_path):
    edit = ("p = [math.exp(x - m_i) for x in s]", "p = [math.exp(x - m_i) + 0.01 for x in s]")
    found = judged(1, (edit,), "a few keys", tmp_path)
    assert (found.verdict, found.marks[0].status) == ("failed", "wrong")
    assert found.diagnosis.startswith("no known mistake") and "the softmax" in found.diagnosis


def test_what_a_file_prints_is_shown_with_its_first_failure(tmp_path):
    edits = ("m_i = max(s)", "m_i = max(s); print(len(s), 'scores')"), ("/ l_i for", "for")
    found = judged(1, edits, "a few keys", tmp_path)
    assert found.diagnosis.startswith("not divided by l")
    assert "it printed: 5 scores" in found.case


def test_a_lab_is_refused_where_it_can_not_run_and_not_where_the_file_says_so(tmp_path):
    asked = list(checks.checks(1, 1))[:1]
    away = {"cpu": "needs triton, which is not installed", "cuda": None}
    with pytest.raises(checks.Unchecked, match="not installed"):
        checks.judged(
            replace(described(1), unavailable=away), 1, asked, tmp_path, lambda mark: None
        )
    for less in ('devices=("cuda",)', 'needs=("flash-attn-4",)'):
        edits = (('devices=("cpu",)', less),)
        [info] = describe_files([write(1, edits, tmp_path)])
        found = judged(1, edits, "a few keys", tmp_path, info)
        assert (found.verdict, found.marks[0].status) == ("failed", "skipped")
        assert "declares less" in found.diagnosis
