"""`ladder list` and `ladder diff`: the stages in a line each, and the lesson between two."""

import difflib
import re

import pytest
from ladder_command import ROOT, in_turn

from harness.isolation.roster import built_in_files


def test_list_names_every_stage_and_its_idea():
    done = in_turn("list")
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    text = " ".join(done.stdout.split())
    for path in built_in_files():
        number = int(path.stem[1:3])
        assert any(re.match(rf" *{number} ", line) for line in lines), number
    for words in ("torch, three GEMMs", "fuse:", "running max"):
        assert words in text


def test_diff_4_5_is_the_lesson():
    done = in_turn("diff", 4, 5)
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0].startswith("--- s04_") and lines[1].startswith("+++ s05_")
    added = [line[1:] for line in lines[2:] if line.startswith("+")]
    removed = [line[1:] for line in lines[2:] if line.startswith("-")]
    assert 0 < len(added) + len(removed) <= 60
    for name in ("m_i", "l_i", "alpha"):
        assert any(re.search(rf"\b{name}\b", line) for line in added), name
    assert any("acc" in line and "alpha" in line for line in added)
    # it's a true diff: applied to the one file it gives the other
    old, new = (next((ROOT / "stages").glob(f"s0{n}_*.py")).read_text() for n in (4, 5))
    whole = list(difflib.ndiff(old.splitlines(), new.splitlines()))
    assert [line[2:] for line in whole if line.startswith("+ ")] == added
    assert [line[2:] for line in whole if line.startswith("- ")] == removed


def test_diff_of_a_stage_with_itself_is_nothing():
    done = in_turn("diff", 3, 3)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("line", ["x" * 300, "[bold]not markup[/bold]"])
def test_diff_leaves_lines_as_they_are(tmp_path, line):
    from harness.lessons.diff import changes

    old, new = tmp_path / "old.py", tmp_path / "new.py"
    old.write_text("same\n")
    new.write_text(f"same\n{line}\n")
    found = list(changes(old, new))
    assert found[-1].plain == f"+{line}"
    assert str(found[-1].style) == "green"
