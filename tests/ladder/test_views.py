"""`ladder diff`: the lesson between two stages."""

import difflib
import itertools
import re

import pytest
from ladder_command import ROOT, in_turn
from rich.console import Console

from harness.records.code import files_of, first_file, label
from ladder import pages


def difference(*arguments):
    """The lines that `ladder diff` prints, those that come, and those that go."""
    done = in_turn("diff", *arguments)
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    come, go = ([line[1:] for line in lines[2:] if line.startswith(sign)] for sign in "+-")
    return lines, come, go


def test_diff_4_5_is_the_lesson():
    """Nine lines of the kernel come, two go; and the files' own lines are numbered."""
    lines, added, removed = difference(4, 5)
    assert lines[:2] == ["- only in s04_triton_lite.py", "+ only in s05_triton_online.py"]
    assert (len(added), len(removed)) == (9, 2)
    for name in ("m_i", "l_i", "alpha"):
        assert any(re.search(rf"\b{name}\b", line) for line in added), name
    assert "9 lines come, 2 go" in lines[-1] and "--whole" in lines[-1]
    files = [next((ROOT / "stages").glob(f"s0{n}_*.py")).read_text().splitlines() for n in (5, 4)]
    places = 0
    for index, line in enumerate(lines):
        if found := re.match(r"s05\S+, lines (\d+) to \d+ \(s04\S+, lines (\d+) to \d+\):$", line):
            here = [file[int(at) - 1] for file, at in zip(files, found.groups(), strict=True)]
            assert here == [lines[index + 1][1:]] * 2
            places += 1
    assert places and not any("@@" in line for line in lines)


def test_diff_cuts_long_lines_in_a_window_and_says_so(monkeypatch, capsys):
    """A comment broken in its middle, without its sign, reads as code."""
    monkeypatch.setattr(Console, "is_terminal", True)

    def shown_in(columns):
        monkeypatch.setenv("COLUMNS", columns)
        pages.diff_command(4, 5)
        return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()

    wide, narrow = shown_in("120"), shown_in("60")
    assert max(map(len, wide)) > 60 and not any("…" in line for line in wide)
    *shown, _, said = narrow
    assert len(shown) == len(wide) - 1 and max(map(len, shown)) == 60
    assert "60 columns" in said


@pytest.mark.parametrize(("old", "new"), [*itertools.permutations((0, 2, 3, 5, 6, 7), 2)])
def test_every_pair_has_a_diff_of_what_computes(old, new):
    lines, added, _ = difference(old, new)
    theirs = "\n".join(path.read_text() for path in files_of(new)).splitlines()
    assert {*added} <= {*theirs, ""}
    assert not any(line.startswith(("import ", "from ", "STAGE = ")) for line in added)
    for number, kernels in ((old, old > 3), (new, new > 3)):
        name = label(first_file(number))
        assert (f"{name}" in lines[-1]) == (not kernels)  # all its code, and it is said so


def test_diff_of_whole_files():
    _, added, removed = difference(4, 5, "--whole")
    assert 11 < len(added) + len(removed) <= 60
    # it's a true diff: applied to the one file it gives the other
    old, new = (next((ROOT / "stages").glob(f"s0{n}_*.py")).read_text() for n in (4, 5))
    whole = list(difflib.ndiff(old.splitlines(), new.splitlines()))
    assert [line[2:] for line in whole if line.startswith("+ ")] == added
    assert [line[2:] for line in whole if line.startswith("- ")] == removed


@pytest.mark.parametrize("line", ["x" * 300, "[bold]not markup[/bold]"])
def test_diff_leaves_lines_as_they_are(line):
    from course.lessons.diff import changes

    lines = {4: [("old.py", 1, "same")], 5: [("new.py", 1, "same"), ("new.py", 2, line)]}
    found = list(changes(4, 5, lines.__getitem__))
    assert found[-1].plain == f"+{line}"
    assert str(found[-1].style) == "green"
