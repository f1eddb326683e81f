"""Grading takes the folders, names and files that students and lecturers really give it."""

import csv
import json
import os
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from ladder_command import in_turn
from test_grade import PATIENT, RAW, of_some, rows_of, write

from course.lab import labs
from course.lab.grading import calls, grade, reports, submissions
from harness.records import files

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


def test_a_report_has_the_points_of_now(tmp_path):
    folder = write(tmp_path / "all", a="", b="")
    assert graded(folder).returncode == 0
    (tmp_path / "points.toml").write_text("default = 3\n", encoding="utf-8")
    before = (tmp_path / "grades-reports" / "b.md").read_text(encoding="utf-8")
    done = graded(folder, "--only", "a", "--points", "points.toml", "--gradescope", "g.json")
    assert done.returncode == 0, done
    most = rows_of(tmp_path / "grades.csv")["b"]["max_points"]
    after = (tmp_path / "grades-reports" / "b.md").read_text(encoding="utf-8")
    assert f"0 of {most} points." in after and "| 0 of 3 |" in after and "0 of 1" not in after
    assert before.split("## What")[1] == after.split("## What")[1]
    output = json.loads((tmp_path / "g.json").read_text(encoding="utf-8"))["output"]
    assert f"of {most} points" in output


@posix
def test_any_file_name_has_a_row_that_no_spreadsheet_or_parser_trips_over(tmp_path):
    folder = write(tmp_path / "all", a="", z="")
    odd = {
        b"bad\xff.py": "bad%FF", b"bad\xfe.py": "bad%FE", b"c\x01d.py": "c%01d",
        b"new\nline.py": "new%0Aline", b"=1+2.py": "%3D1+2", b"-dash.py": "%2Ddash",
        "Ünï|x.py".encode(): "Ünï|x", b'a,b"c.py': 'a,b"c',
    }  # fmt: skip
    for name in odd:
        (folder / os.fsdecode(name)).touch()
    done = graded(folder, "--junit", "j.xml")
    assert done.returncode == 0, done.stderr
    expected = {"a", "z", *odd.values()}
    assert rows_of(tmp_path / "grades.csv").keys() == expected
    assert {path.stem for path in (tmp_path / "grades-reports").iterdir()} == expected
    suites = ElementTree.parse(tmp_path / "j.xml").getroot().iter("testsuite")
    assert {suite.get("name") for suite in suites} == expected
    for only in ("=1+2", "=1+2.py", "%3D1+2", "a"):
        done = graded(folder, f"--only={only}")
        assert done.returncode == 0 and "1 graded" in done.stdout, done
    assert graded(folder).stdout.count("(kept)") == len(expected)


def test_a_diagnosis_is_no_formula(tmp_path):
    row = grade.Row("a", 3, 0, 0, "crashed", "=1+2: none of that", 0, "", "", 0.0, {})
    table = grade.Table(tmp_path / "grades.csv", {}, 3)
    table.put(row)
    assert rows_of(table.path)["a"]["diagnosis"] == "'=1+2: none of that"


@posix
def test_a_name_that_grows_too_long_for_a_file_has_its_row_and_report(tmp_path):
    folder = write(tmp_path / "all", a="", **{"x" * 252: ""})
    for last in (b"0", b"1"):
        (folder / os.fsdecode(b"\xe4" * 150 + last + b".py")).touch()
    done = graded(folder)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "grades.csv")
    reports = {path.stem for path in (tmp_path / "grades-reports").iterdir()}
    assert len(rows) == 4 and rows.keys() == reports
    assert graded(folder).stdout.count("(kept)") == 4


@posix
def test_two_submissions_of_one_name_are_refused(tmp_path):
    folder = write(tmp_path / "all", **{"a%01": "", "a\x01": ""})
    refused(graded(folder), "a%01", "rename")


@pytest.mark.parametrize(
    "other",
    [
        {"twin": True},
        {"limits": calls.Limits(seconds=60.0)},
        {"limits": calls.Limits(memory=1 << 30)},
        {"seed": 2},
    ],
)
def test_other_options_grade_again_and_equal_ones_do_not(other, tmp_path):
    given = submissions.submissions(write(tmp_path, a=""), 5, tmp_path).submissions
    usual = {"seed": 1, "twin": False, "limits": calls.Limits()}
    kept = []
    for options in (usual, usual, usual | other, usual | other, usual):
        table = grade.Table(tmp_path / "grades.csv", {}, 5)
        tell = lambda row, result: kept.append(result is None)  # noqa: E731
        grade.grade_all(given, table, 5, **options, tell=tell, anew=False)
    assert kept == [False, True, False, True, False]


def test_a_row_of_another_seed_is_graded_again_and_those_of_the_class_are_kept(tmp_path):
    folder, out = write(tmp_path / "all", a="", b="", c=""), tmp_path / "grades.csv"
    assert graded(folder, "--seed", 5).returncode == 0
    assert graded(folder, "--only", "a", "--seed", 7).returncode == 0
    assert [row["seed"] for row in rows_of(out).values()] == ["7", "5", "5"]
    assert graded(folder, "--seed", 5).stdout.count("(kept)") == 2
    assert {row["seed"] for row in rows_of(out).values()} == {"5"}


def test_submissions_that_are_graded_alone_get_the_same_inputs(tmp_path):
    folder = write(tmp_path / "all", a="", b="")
    for name in "ab":
        assert graded(folder / f"{name}.py", "--out", f"{name}.csv").returncode == 0
    seeds = [rows_of(folder / f"{name}.csv")[name]["seed"] for name in "ab"]
    assert seeds == ["3", "3"]


def test_a_row_of_an_older_table_is_graded_again(tmp_path):
    folder, out = write(tmp_path / "all", a=""), tmp_path / "grades.csv"
    assert graded(folder).returncode == 0
    [row] = rows_of(out).values()
    del row["options"]
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerow(row)
    done = graded(folder)
    assert done.returncode == 0 and "(kept)" not in done.stdout
    again = rows_of(out)["a"]
    assert again["seed"] == row["seed"] and again["options"]


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
    row, _ = grade.grade(path, 3, 1, False, PATIENT)
    assert row.verdict == "passed", row
    path.write_bytes(f"{first}def attend(q, k, v):\n    pass  # Jürgen\n".encode(encoding))
    assert grade.grade(path, 3, 1, False, PATIENT)[0].verdict == "not-written"


def test_what_is_graded_is_what_the_row_names_though_the_file_changes_meanwhile(
    tmp_path, monkeypatch
):
    """It may be uploaded again just then."""
    of_some(monkeypatch, "a few keys", "batch, heads and strides")
    path = write(tmp_path, a=RAW) / "a.py"
    first = grade.checks.digest(path)
    marks = []

    def tell(mark):
        if not marks:
            path.write_text("", encoding="utf-8")
        marks.append(mark.status)

    found = grade.checks.check(path, 1, tell=tell)
    assert marks == ["ok"] * len(marks) and len(marks) > 1
    assert (found.verdict, found.sha256) == ("passed", first) != ("", grade.checks.digest(path))


def test_a_file_that_could_not_be_read_is_graded_when_it_can(tmp_path, monkeypatch):
    path = write(tmp_path, a="") / "a.py"
    with monkeypatch.context() as patched:
        patched.setattr(grade.cpp, "LARGEST", -1)
        row, _ = grade.grade(path, 3, 1, False, PATIENT)
    assert (row.verdict, row.sha256) == ("crashed", "")
    again = grade.grade(path, 3, 1, False, PATIENT)[0]
    assert (again.verdict, again.sha256) == ("not-written", grade.checks.digest(path))


def test_a_submission_may_not_look_where_it_was_copied_from(tmp_path, monkeypatch):
    of_some(monkeypatch, "a few keys")
    for act in (
        f"open({str(tmp_path / 'b.py')!r})",
        f"__import__('os').listdir({str(tmp_path)!r})",
    ):
        path = write(tmp_path, a=f"{act}\n{RAW}", b=RAW) / "a.py"
        found = grade.checks.check(path, 1)
        assert found.verdict == "cheated" and "looks for the answer" in found.diagnosis, found


def test_no_name_lets_a_submission_import_what_others_may_not(tmp_path):
    path = tmp_path / "stage_2.py"  # as the file that is made around C++ is called
    path.write_text(f"import harness.measures.oracle\n{RAW}", encoding="utf-8")
    found = grade.checks.check(path, 1)
    assert found.verdict == "crashed" and "imports harness" in found.diagnosis, found


def test_two_commands_do_not_lose_each_others_rows(tmp_path):
    row = grade.Row("a", 3, 0, 0, "passed", "", 0, "", "", 0.0, {})
    here, there = (grade.Table(tmp_path / "grades.csv", {}, 3) for _ in range(2))
    with here.alone():
        for name in ("a", "b"):  # the file is replaced with each, and stays ours
            here.put(replace(row, submission=name))
            with pytest.raises(grade.NotGraded, match="another `ladder lab grade` is writing it"):
                there.alone().__enter__()
    with there.alone():
        there.put(replace(row, submission="c"))
    assert rows_of(tmp_path / "grades.csv").keys() == {"a", "b", "c"}


def test_a_file_that_can_not_be_read_or_parsed_costs_no_other(tmp_path):
    odd = {
        "deep": "a" + ".b" * 200_000, "long": "x = " + "-" * 300_000 + "1",
        "large": "#" * (2 << 20), "codec": "# -*- coding: rot13 -*-\nk = 1\n",
    }  # fmt: skip
    folder = write(tmp_path / "all", **odd, z="")
    if sys.platform == "linux":
        (folder / "memory.py").symlink_to("/proc/self/mem")  # reading it fails
    done = graded(folder)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "grades.csv")
    assert rows.pop("z")["verdict"] == "not-written" and len(rows) >= len(odd)
    assert {row["verdict"] for row in rows.values()} == {"crashed"}
    assert "1 MiB" in rows["large"]["diagnosis"]


@pytest.mark.skipif(sys.platform == "win32", reason="no locks")
@pytest.mark.parametrize("option", ["--junit", "--gradescope"])
def test_an_output_that_another_command_writes_is_refused(tmp_path, option):
    folder, output = write(tmp_path / "all", a=""), tmp_path / "output"
    another = files.Owned(output)
    done = graded(folder, option, output)
    another.close()
    refused(done, option, "another command is writing it")
    output.unlink()
    assert graded(folder, option, output).returncode == 0 and output.stat().st_size


def test_a_folder_for_other_outputs_is_made_before_anything_is_graded(tmp_path):
    folder = write(tmp_path / "all", a="")
    done = graded(folder, "--junit", "new/j.xml", "--gradescope", "more/deep/g.json")
    assert done.returncode == 0 and (tmp_path / "new" / "j.xml").is_file()
    assert (tmp_path / "more" / "deep" / "g.json").is_file()
    for option in ("--junit", "--gradescope"):
        for taken in ("all", "all/a.py/x"):  # a folder, and a file where a folder is to be
            done = graded(folder, "--out", "fresh.csv", option, taken)
            refused(done, option)
            assert done.stdout == "" and not (tmp_path / "fresh.csv").exists()


def test_what_is_not_graded_is_named(tmp_path):
    folder = write(tmp_path / "all", a="")
    (folder / "upper.PY").write_text("", encoding="utf-8")
    (folder / "notes.txt").write_text("", encoding="utf-8")
    (folder / "late").mkdir()
    (folder / "__pycache__").mkdir()
    done = graded(folder)
    assert done.returncode == 0 and "1 graded" in done.stdout
    [said] = done.stderr.splitlines()
    assert all(name in said for name in ("late", "notes.txt", "upper.PY", "*.py"))
    assert "__pycache__" not in said


def test_a_folder_in_place_of_a_file_is_told_what_is_expected(tmp_path):
    folder = write(tmp_path / "all", a="")
    (folder / "b.py").mkdir()
    assert graded(folder).returncode == 0
    row = rows_of(tmp_path / "grades.csv")["b"]
    assert row["verdict"] == "crashed" and "b.py: a folder" in row["diagnosis"]
    assert "one .py file" in row["diagnosis"]
    refused(in_turn("lab", "check", folder / "b.py", "--stage", 3), "one .py file")


KEYS = ("[speed]", "points", "factor", "b", "h", "n", "d", "dtype")
BAD_VALUES = ("n = -3", "b = true", "d = 64.0", "factor = 0", "factor = nan", 'dtype = "int8"')


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("speed = 3", KEYS),
        ("[speed]\npoints = 4\nm = 512", KEYS),
        ("[speed]\nfactor = 2", KEYS),
        *((f"[speed]\npoints = 4\n{x}", (f"[speed]: {x.split()[0]}: got ",)) for x in BAD_VALUES),
    ],
)
def test_speed_with_other_keys_or_values_names_those_expected(table, said, tmp_path):
    path = tmp_path / "points.toml"
    path.write_text(f"{table}\n", encoding="utf-8")
    with pytest.raises(grade.NotGraded) as told:
        grade.read_points(5, path)
    assert all(each in str(told.value) for each in said)
    assert "Speed()" not in str(told.value) and "__init__" not in str(told.value)


@pytest.mark.parametrize("twin", [False, True])
def test_a_report_names_the_hints_of_the_lab_that_was_graded(tmp_path, twin):
    path = tmp_path / "mine.py"
    labs.start(5, path, "small", twin)
    row, result = grade.grade(path, 5, 1, twin, PATIENT)
    text = reports.report(row, result, {"a few keys": 1.0})
    assert ("`ladder lab hint 5 --cpu --level 1`" in text) == twin
