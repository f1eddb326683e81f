"""Jobs on two GPUs that are not there: what each is told, and how each ends."""

import sys
from pathlib import Path

import lanes
import pytest
from ladder_command import alive

# what stands in for the `ladder` command: it says its GPU and its words, then does as it is told
LADDER = """
import os, pathlib, subprocess, sys
print(os.environ["CUDA_VISIBLE_DEVICES"], *sys.argv[1:], flush=True)
if "fail" in sys.argv:
    sys.exit(3)
if "hang" in sys.argv:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path("child").write_text(str(child.pid))
    child.wait()
"""


@pytest.fixture
def ladder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ladder.py").write_text(LADDER, encoding="utf-8")
    return [sys.executable, "ladder.py"]


def log(number):
    return Path(f"{number}.log").read_text(encoding="utf-8").split()


def test_lines_that_are_no_jobs_come_first():
    text = "mkdir -p out\n# a comment\nladder bench --n 64\n\npython a.py\nladder run --out 'a b'\n"
    first, jobs = lanes.read(text)
    assert first == ["mkdir -p out", "python a.py"]
    assert jobs == [(1, ["bench", "--n", "64"]), (2, ["run", "--out", "a b"])]


def test_each_gpu_takes_the_next_job_and_a_failure_is_said(ladder):
    names = ["one", "fail", "three", "four", "five"]
    jobs = [lanes.Job(number, [name]) for number, name in enumerate(names, 1)]
    ended = lanes.run_all(jobs, ["4", "7"], 600.0, 600.0, Path(), ladder)
    assert ended == {n: f"exit code {3 if n == 2 else 0}" for n in range(1, 6)}
    said = [log(number) for number in range(1, 6)]
    assert [words[1] for words in said] == names
    assert {words[0] for words in said} == {"4", "7"}


@pytest.mark.slow
def test_a_job_that_hangs_is_ended_with_its_children_and_the_next_one_runs(ladder):
    jobs = [lanes.Job(1, ["hang"]), lanes.Job(2, ["two"])]
    ended = lanes.run_all(jobs, ["0"], 600.0, 5.0, Path(), ladder)
    assert ended == {1: "ended after 5 s", 2: "exit code 0"}
    assert not alive(int(Path("child").read_text(encoding="utf-8")))


def test_no_job_begins_when_the_time_is_over(ladder):
    ended = lanes.run_all([lanes.Job(1, ["one"])], ["0"], 0.0, 600.0, Path(), ladder)
    assert ended == {1: "not begun"}
    assert not Path("1.log").exists()


def test_a_job_whose_file_is_there_is_resumed(ladder):
    words = ["bench", "--n", "64", "--out", "kept.jsonl"]
    assert lanes.resumed(words) == words
    Path("kept.jsonl").touch()
    assert lanes.resumed(words) == ["bench", "--resume", "kept.jsonl"]
