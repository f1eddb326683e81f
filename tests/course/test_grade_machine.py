"""A machine that can't grade gives nobody a row: what it spoils is never booked on a student."""

import ctypes
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
from ladder_command import ROOT, command, environ
from test_grade import KINDS, of_some, rows_of, write

from course.lab import checks, cpp, labs
from course.lab.grading import calls, grade, speed
from course.lab.grading.submissions import submissions

compiler = pytest.mark.skipif(cpp.compiler() is None, reason="no C++ compiler")


def folders(tmp_path, *names):
    """A folder of submissions of stage 2, each as our own."""
    for name in names:
        (tmp_path / "all" / name).mkdir(parents=True)
        for file in cpp.FILES:
            shutil.copy(ROOT / "csrc" / file, tmp_path / "all" / name)
    return tmp_path / "all"


def graded(folder, stage, limits=calls.USUAL, jobs=1, tell=lambda row, result: None):
    """Grade a folder here; the names of the rows in its table, whatever happens."""
    found = submissions(folder, stage, folder.parent).submissions
    table = grade.Table(folder.parent / "grades.csv", {}, stage)
    with table.alone():
        grade.grade_all(found, table, stage, 1, False, limits, tell, False, jobs)
    return rows_of(table.path)


@compiler
@pytest.mark.parametrize("jobs", [1, 2])
def test_without_a_working_compiler_nobody_gets_a_row(tmp_path, monkeypatch, jobs):
    of_some(monkeypatch, "a few keys")
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(grade.NotGraded, match=r"our own solution.*CXX"):
        graded(folders(tmp_path, "a", "b"), 2, jobs=jobs)
    assert not (tmp_path / "grades.csv").exists()


@compiler
@pytest.mark.slow
def test_a_compiler_that_is_removed_meanwhile_costs_nobody_a_row(tmp_path, monkeypatch):
    of_some(monkeypatch, "a few keys")

    def remove(row, result):
        monkeypatch.setenv("CXX", "/nowhere/g++")

    with pytest.raises(grade.NotGraded, match="CXX"):
        graded(folders(tmp_path, "a", "b"), 2, tell=remove)
    rows = rows_of(tmp_path / "grades.csv")
    assert {name: row["verdict"] for name, row in rows.items()} == {"a": "passed"}
    monkeypatch.undo()
    of_some(monkeypatch, "a few keys")
    rows = graded(tmp_path / "all", 2)
    assert {name: row["verdict"] for name, row in rows.items()} == {"a": "passed", "b": "passed"}


def test_too_little_memory_is_said_and_costs_nobody_a_row(tmp_path, monkeypatch):
    def short(path, number, *given, **named):
        said = "it took more than 1 MB of memory"
        return checks.Result(number, "out-of-memory", (), said, [], sha256="0" * 64)

    monkeypatch.setattr(checks, "check", short)
    with pytest.raises(grade.NotGraded, match=r"out-of-memory.*--memory"):
        graded(write(tmp_path / "all", a=KINDS["passed"]), 1)
    assert not (tmp_path / "grades.csv").exists()


def test_a_full_disk_is_said_and_costs_nobody_a_row(tmp_path, monkeypatch):
    def full(*given, **named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checks, "copied", full)
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # Python itself may have turned to another by now
    said = f"No space left on device: {re.escape(str(tmp_path))} is full"
    with pytest.raises(grade.NotGraded, match=said):
        graded(write(tmp_path / "all", a=KINDS["passed"]), 1)
    assert not (tmp_path / "grades.csv").exists()


@compiler
def test_a_library_is_loaded_also_where_its_folder_does_not_allow_it(tmp_path, monkeypatch):
    [folder] = folders(tmp_path, "a").iterdir()
    cpp.build(folder, tmp_path, folder)
    load = ctypes.CDLL

    def allowed(path, *given, **named):
        if str(path).startswith(str(tmp_path)):
            raise OSError(f"{path}: failed to map segment from shared object")
        return load(path, *given, **named)

    monkeypatch.setattr(ctypes, "CDLL", allowed)
    if not hasattr(cpp.os, "memfd_create"):
        pytest.skip("Linux alone has files in memory")
    assert cpp.Library(str(tmp_path / "value_graph.so")).c.graph_attend


@compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mount", "code", "said"), [("noexec", 0, "11 of 11"), ("size=32k", 2, "No space left")]
)
def test_the_folder_for_temporary_files_of_a_container(tmp_path, mount, code, said):
    folder, at = folders(tmp_path, "a"), tmp_path / "tmp"
    at.mkdir()
    inside = 'mount -t tmpfs -o "$1" tmpfs "$2" && shift 2 && exec "$@"'
    alone = ["unshare", "--map-root-user", "--mount", "sh", "-c", inside, "-", mount, str(at)]
    try:
        if subprocess.run([*alone, "true"], capture_output=True).returncode:
            pytest.skip("nothing may be mounted here")
    except FileNotFoundError:
        pytest.skip("no unshare here")
    done = subprocess.run(
        [*alone, *command("lab", "grade", folder, "--stage", 2)],
        cwd=tmp_path, env=environ(TMPDIR=str(at)), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == code and said in done.stdout + done.stderr, done
    assert (tmp_path / "grades.csv").exists() == (code == 0)


@pytest.mark.parametrize(("alone", "said"), [("ok", "crashed"), ("out-of-memory", None)])
def test_a_gpu_that_can_not_time_our_own_stage_costs_nobody_points(monkeypatch, alone, said):
    def compared(comparison, judge):
        def ended(status):
            return SimpleNamespace(status=status, reason="the GPU is full", time_ms=1.0)

        if len(comparison.stages) == 1:
            return [ended(alone)]
        return [ended("crashed"), ended("crashed")]

    monkeypatch.setattr(speed, "compare", compared)
    asked = speed.Speed(3, n=8, b=1, h=1, d=8, dtype="float32")
    if said is None:
        with pytest.raises(checks.Unchecked, match="the GPU is full"):
            speed.judged(labs.source(3), 3, asked, 1, "cpu")
    else:
        assert speed.judged(labs.source(3), 3, asked, 1, "cpu") == said
