"""A class: exports of Moodle and Canvas, gradebooks, several jobs, likenesses, autograders."""

import base64
import json
import os
import signal
import subprocess
import sys
import threading
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ladder_command import ROOT, Started, in_turn, installed
from test_grade import BODY, KINDS, RAW, edited, rows_of, write

from course.lab import checks, cpp, labs
from course.lab.grading import autograder, calls, grade, gradebooks, reports, similarity
from course.lab.grading.submissions import Found, Submission, submissions


def laid(folder, *names):
    """A folder with empty files; one that ends with / is a folder."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if name.endswith("/") else path.touch()
    return folder


# ---- whose a file is

MOODLE = (
    "Jane Doe_101_assignsubmission_file_/mine.py",
    "Jürgen O'Neil-Müller_102_assignsubmission_file/deep/er/mine 5.py",
    "Ada_L_103_assignsubmission_file_flat_name.py",
    "Two_104_assignsubmission_file_/a.py", "Two_104_assignsubmission_file_/b/c.py",
    "None_105_assignsubmission_file_/report.pdf", "Empty_106_assignsubmission_file_/",
    "Participant_107_assignsubmission_file_/__pycache__/x.py",
    "Participant_107_assignsubmission_file_/__MACOSX/y.py",
    "Participant_107_assignsubmission_file_/y.py",
    "Group A_assignsubmission_file_/g.py",
    "None_105_assignsubmission_onlinetext_/onlinetext.html",
    "of_the_lecturer.py",
)  # fmt: skip
CANVAS = (
    "doejane_201_9001_mine-2.py", "müllerjürgen_LATE_202_9002_my_file_3_4.py",
    "anon_x1Y2z_9003_mine.py", "LATE_anon_a1b2c_9004_mine.py", "team_7b_203_9005_mine.py",
    "two_204_9006_a.py", "two_204_9007_b.py", "pdf_205_9008_report.pdf", "grades.csv",
)  # fmt: skip


def test_each_student_of_moodles_export_is_one_submission_or_named(tmp_path):
    found = submissions(laid(tmp_path, *MOODLE), 5, tmp_path)
    assert found.origin == "Moodle"
    assert {each.name: (each.who, each.student) for each in found.submissions} == {
        "Jane Doe_101": ("Jane Doe", "101"),
        "Jürgen O'Neil-Müller_102": ("Jürgen O'Neil-Müller", "102"),
        "Ada_L_103": ("Ada_L", "103"),
        "Participant_107": ("Participant", "107"),
        "Group A": ("Group A", ""),
    }
    assert {each.path.name for each in found.submissions if each.student == "107"} == {"y.py"}
    for name, what in (("Two_104", "a.py, c.py"), ("None_105", "report.pdf"), ("Empty_106", "no")):
        assert [line for line in found.left if name in line and what in line], found.left
    assert "of_the_lecturer.py" in found.left[-1] and len(found.left) == 4


def test_each_student_of_canvass_export_is_one_submission_or_named(tmp_path):
    found = submissions(laid(tmp_path, *CANVAS), 5, tmp_path)
    assert found.origin == "Canvas"
    assert {each.name: each.student for each in found.submissions} == {
        "doejane_201": "201", "müllerjürgen_202": "202", "anon_x1Y2z": "", "anon_a1b2c": "",
        "team_7b_203": "203",
    }  # fmt: skip
    assert len(found.left) == 3 and all(
        any(name in line for line in found.left) for name in ("two_204", "report.pdf", "grades.csv")
    )


@pytest.mark.parametrize(
    "names",
    [
        ("Jane_101_assignsubmission_file_/up/value_graph.hpp",
         "Jane_101_assignsubmission_file_/up/attention.cpp",
         "Joe_102_assignsubmission_file_/value_graph.hpp"),
        ("jane_101_1_value_graph-3.hpp", "jane_101_2_attention.cpp", "joe_102_3_attention.cpp"),
    ],
)  # fmt: skip
def test_the_two_files_of_stage_2_are_one_submission(tmp_path, names):
    found = submissions(laid(tmp_path / "all", *names), 2, tmp_path / "copies")
    [one] = found.submissions
    assert one.student == "101" and {x.name for x in one.path.iterdir()} == {*cpp.FILES}
    [line] = found.left
    assert line.lower().startswith("joe_102")


def test_names_that_look_like_canvass_by_chance_stay_names(tmp_path):
    found = submissions(laid(tmp_path, "group_1_2_a.py", "group_1_3_b.py", "c.py"), 5, tmp_path)
    assert found.origin == ""
    assert [each.name for each in found.submissions] == ["c", "group_1_2_a", "group_1_3_b"]


@pytest.mark.parametrize("stage", [2, 5])
def test_an_export_that_is_still_packed_is_nobodys_submission(tmp_path, stage):
    with pytest.raises(grade.NotGraded, match="unpack"):
        submissions(laid(tmp_path, "submissions.zip") / "submissions.zip", stage, tmp_path)


# ---- gradebooks

WORKSHEET = (
    '\ufeffIdentifier,"Full name",Status,Grade,"Maximum Grade","Last modified (grade)",'
    '"Feedback comments"\r\n'
    '"Participant 101","Jane ""J"" Doe",Submitted,,"10,00","Monday, 1 June",\r\n'
    '"Participant 102",Jürgen Müller,Submitted,"3,00","10,00",-,"stays, ""this"""\r\n'
    '"Participant 103","Cheat, Er",Submitted,,"10,00",-,\r\n'
    '"Participant 104","Absent, Ada","No submission",,"10,00",-,\r\n'
    '"Participant 12","A Person",Submitted,,"10,00",-,\r\n'
).encode()
BOOK = (
    "Student;ID;SIS Login ID;Section;Lab 1 (77);Lab 2 (78);Final Score\n"
    ";;;;Manual Posting;;\n"
    "    Points Possible;;;;9.00;4.00;(read only)\n"
    '"Doe, Jane";201;jd;S;;1;50\n'
    "Muller, Jürgen;202;jm;S;EX;2;\n"
    "Student, Test;299;;S;;;"
)


def from_site(path, origin):
    return Found(path, [Submission("a", path)], [], origin)


def filled(path, data, column, people, grades, origin="Moodle"):
    path.write_bytes(data)
    book = gradebooks.read(path, column, from_site(path, origin))
    handed = [Submission(f"{who}_{student}", path, who, student) for who, student in people]
    return gradebooks.fill(book, handed, grades)


def test_a_worksheet_of_moodle_keeps_every_byte_but_the_grades(tmp_path):
    people = [("Jane J Doe", "101"), ("Jurgen Müller", "102"), ("Cheat Er", "103"), ("Team", "12")]
    grades = {
        "Jane J Doe_101": gradebooks.Grade(8.5, 10, "failed: <tile> & more"),
        "Jurgen Müller_102": gradebooks.Grade(10, 10, "passed"),
        "Team_12": gradebooks.Grade(10, 10, "passed"),
    }
    data, said = filled(tmp_path / "m.csv", WORKSHEET, None, people, grades)
    expected = WORKSHEET.replace(
        b'Submitted,,"10,00","Monday, 1 June",', b'Submitted,"8,5","10,00","Monday, 1 June",'
        b"failed: &lt;tile&gt; &amp; more"
    ).replace(b'"3,00"', b'"10"')  # fmt: skip
    assert data == expected
    assert [line.partition(":")[0] for line in said] == [
        "Jurgen Müller_102", "Cheat Er_103", "Team_12"
    ]  # fmt: skip
    assert "was 3,00, is 10" in said[0] and "another name" in said[2]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_a_gradebook_of_canvas_keeps_every_byte_but_the_grades(tmp_path, encoding):
    people = [("doejane", "201"), ("mullerjürgen", "202"), ("new", "203")]
    grades = {f"{who}_{student}": gradebooks.Grade(3, 9, "") for who, student in people}
    given = (tmp_path / "c.csv", BOOK.encode(encoding), "Lab 1", people, grades, "Canvas")
    data, said = filled(*given)
    assert data == BOOK.replace("S;;1;50", "S;3;1;50").encode(encoding)
    assert any("stays EX" in line for line in said) and any("no row" in line for line in said)
    data, said = filled(*given[:2], "Lab 2 (78)", *given[3:])
    assert data == BOOK.replace("S;;1;50", "S;;1.33;50").replace("EX;2;", "EX;1.33;").encode(
        encoding
    )
    assert "9 points here are 4 there" in said[-1]


CELLS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@given(
    st.lists(st.tuples(CELLS, CELLS, st.booleans()), min_size=1, max_size=5),
    st.sampled_from([",", ";", "\t"]), st.sampled_from(["\n", "\r\n"]), st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_any_table_is_written_as_it_was_read(tmp_path_factory, rows, separator, end, last):
    def cell(text, quoted):
        special = any(x in text for x in f'{separator}"\r\n')
        return '"' + text.replace('"', '""') + '"' if quoted or special else text

    table = [("Identifier", "Full name", "Grade")]
    table += [(f"Participant {at}", f"{a}{b}", "") for at, (a, b, _) in enumerate(rows)]
    lines = [separator.join(cell(x, rows[0][2]) for x in row) for row in table]
    data = (end.join(lines) + end * last).encode()
    path = tmp_path_factory.mktemp("book") / "m.csv"
    assert filled(path, data, None, [], {})[0] == data
    book = gradebooks.read(path, None, from_site(path, "Moodle"))
    found = [[book.value(row, at) for at in range(3)] for row in range(len(book.cells))]
    assert found == [list(row) for row in table]


@pytest.mark.parametrize(
    ("text", "column", "origin", "said"),
    [
        (BOOK, None, "Canvas", "Lab 1 (77), Lab 2 (78)"),
        (BOOK, "Lab 3", "Canvas", "Lab 1 (77), Lab 2 (78)"),
        (BOOK, None, "Moodle", "Participant 123"),
        ("Identifier,Grade\nParticipant 1,\nParticipant 1,\n", None, "Moodle", "two rows"),
        ("Identifier,Grade\nParticipant 1\n", None, "Moodle", "row 2 has 1 cells"),
        ("ID,Punkte\nTeilnehmer 1,\n", None, "Moodle", "--column"),
        ("", None, "Canvas", "no column 'ID'"),
    ],
)
def test_a_gradebook_that_is_none_is_refused(tmp_path, text, column, origin, said):
    (tmp_path / "b.csv").write_text(text, encoding="utf-8")
    with pytest.raises(grade.NotGraded) as error:
        gradebooks.read(tmp_path / "b.csv", column, from_site(tmp_path, origin))
    assert said in str(error.value) and "--gradebook" in str(error.value)


@pytest.mark.slow
def test_one_line_grades_an_export_and_fills_its_gradebook(tmp_path):
    folder = laid(tmp_path / "all", "Jane J Doe_101_assignsubmission_file_/mine.py")
    (tmp_path / "sheet.csv").write_bytes(WORKSHEET)
    asked = ("lab", "grade", "all", "--stage", 3, "--gradebook", "sheet.csv")
    done = in_turn(*asked, cwd=tmp_path)
    assert done.returncode == 0 and "as Moodle exports" in done.stdout, done
    assert (tmp_path / "sheet.csv").read_bytes() == WORKSHEET
    data = (tmp_path / "grades-sheet.csv").read_bytes()
    assert data.startswith(WORKSHEET[:110]) and b'Submitted,0,"10,00"' in data
    (folder / "mine.py").touch()
    done = in_turn("lab", "grade", folder / "mine.py", *asked[3:], cwd=tmp_path)
    assert done.returncode == 2 and "as Moodle or Canvas exports" in done.stderr


def test_gradescope_is_for_one_submission(tmp_path):
    write(tmp_path / "all", a="", b="")
    asked = ("lab", "grade", "all", "--stage", 3, "--gradescope", "g.json")
    done = in_turn(*asked, cwd=tmp_path)
    assert done.returncode == 2 and "2 submissions" in done.stderr and "autograder" in done.stderr
    assert not (tmp_path / "g.json").exists() and not (tmp_path / "grades.csv").exists()
    assert in_turn(*asked, "--only", "a", cwd=tmp_path).returncode == 0
    assert json.loads((tmp_path / "g.json").read_text(encoding="utf-8"))["score"] == 0


# ---- several at a time


def test_a_submission_that_its_neighbours_cost_time_is_graded_again_alone(tmp_path, monkeypatch):
    folder = write(tmp_path / "all", **dict.fromkeys("abcdef", ""))
    seen, lock, together = [], threading.Lock(), threading.Barrier(3, timeout=60)

    def check(path, stage, seed, tell=None, **named):
        [first, *_] = checks.checks(stage, seed)
        if threading.current_thread() is not threading.main_thread():
            together.wait()
            if path.stem in "bd":
                raise OSError(12, "Cannot allocate memory")
            if path.stem in "ae":
                mark = checks.Mark(first, "timeout", "took more than 30 s")
                return checks.Result(stage, "timeout", [mark], "", (), "sha")
        with lock:
            seen.append(path.stem)
        status = "wrong" if path.stem == "c" else "ok"
        verdict = "failed" if path.stem == "c" else "passed"
        return checks.Result(
            stage, verdict, [checks.Mark(first, status, "")], "no max: x", (), "sha"
        )

    monkeypatch.setattr(checks, "check", check)
    tables = []
    for jobs in (1, 3):
        table = grade.Table(tmp_path / f"{jobs}.csv", {"a few keys": 1.0}, 1)
        found = submissions(folder, 1, tmp_path).submissions
        grade.grade_all(
            found, table, 1, 1, False, calls.USUAL, lambda row, result: None, False, jobs
        )
        tables.append({name: grade.replace(row, seconds=0) for name, row in table.rows.items()})
    assert tables[0] == tables[1] and len(tables[0]) == 6
    assert seen[-4:] == ["a", "b", "d", "e"]


def test_a_class_is_summed_up():
    def row(name, verdict, said, **statuses):
        return grade.Row(name, 1, 0, 0, verdict, said, 0, "", "", 0.0, statuses)

    points = {"one": 1.0, "two": 2.0}
    rows = [
        row("a", "passed", "", one="ok", two="ok"),
        row("b", "failed", "no max: exp overflows", one="wrong", two="wrong"),
        row("c", "failed", "no max: exp overflows, too", one="ok", two="wrong"),
        row("d", "failed", "no known mistake gives just this; look at: x", one="ok", two="wrong"),
        row("e", "cheated", "not allowed: torch", one="cheated", two="ok"),
        row("f", "not-written", "not written yet"),
        row("g", "failed", "g.py:8: Python's max of two tiles", one="wrong", two="ok"),
        row("h", "failed", "h.py:9: Python's max of two tiles", one="wrong", two="ok"),
    ]
    said = reports.of_class([each.worth(points) for each in rows], points)
    assert "8 submissions: 5 failed, 1 passed, 1 cheated, 1 not-written." in said
    assert "median 1 of 3" in said
    assert said.index("| one | 4 |") < said.index("| two | 3 |") and "| no max | 2 |" in said
    assert "| Python's max of two tiles | 2 |" in said
    assert "no known" not in said and "not allowed" not in said and "\n1 was not checked: " in said
    said = reports.of_class([each.worth(points) for each in (*rows, rows[5])], points)
    assert "\n2 were not checked: " in said


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 3])
def test_a_ctrl_c_ends_all_jobs_and_keeps_the_rows_that_are_done(tmp_path, jobs):
    folder = write(tmp_path / "all", a=RAW, b=KINDS["timeout"], c=KINDS["timeout"], d=RAW)
    out = tmp_path / "grades.csv"
    asked = ("lab", "grade", folder, "--stage", 1, "--out", out, "--jobs", jobs)
    with Started(*asked, log=tmp_path / "log") as run:
        run.wait_for(lambda: out.exists() and "a" in rows_of(out), "the first row")
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait() == 130
        assert run.wait_until_gone() == [] and "Traceback" not in run.text()
    rows = rows_of(out)
    assert rows["a"]["verdict"] == "passed" and not {"b", "c"} & {*rows}


# ---- how alike


def test_a_likeness_is_blind_to_names_and_comments_and_sees_what_a_student_wrote(tmp_path):
    stub = labs.stubs(1, "small")
    renamed = RAW.replace("heads", "hydras").replace("# ", "# so ")
    other = edited(
        BODY, "    heads = list(map(list, zip(*[list(x.flatten(0, 1)) for x in (q, k, v)])))\n"
    )
    write(tmp_path, raw=RAW, renamed=renamed, other=other, stub=next(iter(stub.values())), bad="(")
    found = similarity.likenesses({x.stem: x for x in tmp_path.iterdir()}, 1, False)
    assert (found["raw"].another, found["raw"].name) == ("100", "renamed")
    assert 50 < int(found["other"].another) < 100
    assert found["stub"] == found["bad"] == similarity.Likeness()
    ours = similarity.likenesses({"ours": labs.source(1)}, 1, False)["ours"]
    assert ours == similarity.Likeness("100", "", "")
    assert int(found["raw"].ours) < 60


def test_a_likeness_of_cpp_is_blind_to_names(tmp_path):
    for name, old, new in (("a", "", ""), ("b", "scale", "factor")):
        (tmp_path / name).mkdir()
        for file in cpp.FILES:
            text = (ROOT / "csrc" / file).read_text(encoding="utf-8")
            (tmp_path / name / file).write_text(text.replace(old, new) if old else text)
    found = similarity.likenesses({x.name: x for x in tmp_path.iterdir()}, 2, False)
    assert found["b"] == similarity.Likeness("100", "100", "a")


# ---- autograders


def test_an_autograder_has_tracked_files_its_settings_and_a_workflow(tmp_path):
    (tmp_path / "p.toml").write_text("default = 2\n", encoding="utf-8")
    asked = ("lab", "autograder", "--stage", 5, "--to", tmp_path / "a.zip", "--points")
    done = in_turn(*asked, tmp_path / "p.toml", "--seed", 7, "--budget", 9, "--cpu")
    assert done.returncode == 0, done
    with zipfile.ZipFile(tmp_path / "a.zip") as made:
        names = made.namelist()
        told = json.loads(made.read("settings.json"))
        modes = {name: made.getinfo(name).external_attr >> 16 & 0o777 for name in names}
    assert told["options"] == ["--stage=5", "--seed=7", "--budget=9", "--memory=2G", "--cpu"]
    assert modes["setup.sh"] == modes["run_autograder"] == 0o755 and "points.toml" in names
    ours = {name.removeprefix("ladder/") for name in names if name.startswith("ladder/")}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    assert ours <= {*tracked.stdout.splitlines()} and "stages/s05_triton_online.py" in ours
    assert not {name.split("/")[0] for name in ours} & {"tests", "docs", "results", "notebooks"}
    yaml = pytest.importorskip("yaml")
    flow = yaml.safe_load((tmp_path / "classroom.yml").read_text(encoding="utf-8"))
    *_, graded, reported = flow["jobs"]["run-autograding-tests"]["steps"]
    assert "for file in mine_5.py;" in graded["run"] and reported["with"]["runners"] == "ladder"
    assert graded["id"] == "ladder" and "LADDER_RESULTS" in reported["env"]
    (tmp_path / "p.toml").write_text("[speed]\npoints = 2\n", encoding="utf-8")
    done = in_turn(*asked, tmp_path / "p.toml")
    assert done.returncode == 2 and "[speed]" in done.stderr


@pytest.mark.slow
def test_an_autograder_grades_what_is_handed_in_and_says_so_to_both_sites(tmp_path):
    settings = autograder.Settings(1, 7, 30.0, "2G", False)
    autograder.write(tmp_path / "a.zip", settings, None)
    home, submission = tmp_path / "home", tmp_path / "home" / "submission"
    with zipfile.ZipFile(tmp_path / "a.zip") as made:
        made.extractall(home / "source")
    ladder = home / "source" / "ladder" / ".venv" / "bin" / "ladder"  # as setup.sh makes it
    ladder.parent.mkdir(parents=True)
    (home / "site").mkdir()
    env = installed(home / "site")  # its sitecustomize alone
    for name in autograder.PACKAGES[:5]:
        subprocess.run(["rm", "-r", str(home / "site" / name)], check=True)
    path = os.pathsep.join([str(home / "site"), str(home / "source" / "ladder")])
    ladder.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m harness "$@"\n')
    ladder.chmod(0o755)
    submission.mkdir()
    env |= {"PYTHONPATH": path, "AUTOGRADER": str(home), "GITHUB_OUTPUT": str(tmp_path / "out")}

    def run():
        (tmp_path / "out").unlink(missing_ok=True)
        asked = [sys.executable, str(home / "source" / "run_autograder")]
        done = subprocess.run(asked, env=env, cwd=home, capture_output=True, text=True)
        assert done.returncode == 0, done
        text = (tmp_path / "out").read_text().removeprefix("result=")
        results = json.loads((home / "results" / "results.json").read_text())
        return results, json.loads(base64.b64decode(text))

    for text, verdict in ((KINDS["passed"], "pass"), (KINDS["failed"], "fail")):
        (submission / "mine.py").write_text(text, encoding="utf-8")
        results, told = run()
        assert told["status"] == verdict and told["max_score"] == 9 == len(told["tests"])
        assert sum(test["score"] for test in told["tests"]) == results["score"]
        assert (results["score"] == 9) == (verdict == "pass")
        assert {"name", "score", "max_score", "status", "output"} <= results["tests"][0].keys()
        assert {test["status"] for test in results["tests"]} <= {"passed", "failed"}
        assert results["output_format"] == "md" and results["visibility"] == "visible"
    (submission / "second.py").touch()
    results, told = run()
    assert results["score"] == 0 and "second.py" in results["output"] and told["status"] == "fail"
