"""Grading takes the folders, names and files that students and lecturers really give it."""

import sys

import pytest
from ladder_command import in_turn
from test_grade import of_some, write

from course.lab import labs
from course.lab.grading import calls, grade

posix = pytest.mark.skipif(sys.platform == "win32", reason="no such names on Windows")


def graded(folder, *options, stage=3):
    """`ladder lab grade`; an empty file is not written, and costs no process."""
    return in_turn("lab", "grade", folder, "--stage", stage, *options, cwd=folder.parent)


def refused(done, *said):
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done
    assert all(each in done.stderr for each in said), done.stderr


def test_a_table_of_another_stage_is_left_as_it_is(tmp_path):
    folder = write(tmp_path / "all", a="", b="")
    assert graded(folder).returncode == 0
    kept = ["grades.csv", "grades-reports/a.md", "grades-reports/b.md"]
    before = [(tmp_path / name).read_bytes() for name in kept]
    refused(graded(folder, stage=1), "grades.csv", "stage 3", "another --out")
    assert [(tmp_path / name).read_bytes() for name in kept] == before


@pytest.mark.parametrize(
    ("encoding", "first"),
    [("utf-8-sig", ""), ("latin-1", "# -*- coding: latin-1 -*-\n")],
)
def test_source_is_read_as_python_reads_it(encoding, first, tmp_path, monkeypatch):
    of_some(monkeypatch, "a few keys")
    path = tmp_path / "a.py"
    text = labs.source(3).read_text(encoding="utf-8")
    path.write_bytes(f"{first}{text}\n# Jürgen\n".encode(encoding))
    assert grade.checks.check(path).verdict == "passed"
    row, _ = grade.grade(path, 3, 1, False, calls.Limits())
    assert row.verdict == "passed", row
    path.write_bytes(f"{first}def attend(q, k, v):\n    pass  # Jürgen\n".encode(encoding))
    assert grade.grade(path, 3, 1, False, calls.Limits())[0].verdict == "not-written"
