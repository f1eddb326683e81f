"""Grades: cheats get nothing, honest variants pass, and no submission costs another its row."""

import csv
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from ladder_command import PATIENCE, ROOT, Started, environ, in_turn, ladder
from marks import quickly
from stage_files import Table

from course.edits import replace_once
from course.lab import checks, gaps, labs
from course.lab.grading import calls, grade, guard, reports, speed
from harness.records.code import read_declared

PATIENT = calls.Limits(seconds=PATIENCE)  # where no verdict hangs on time
SUBMISSIONS = Table(Path(__file__).with_name("submissions.toml"))
COLUMNS = "submission,stage,points,max_points,verdict,diagnosis"
# the checks in which a watched submission does all that it does in any
ALARMS = "a few keys", "many keys", "batch, heads and strides", "float16", "one pass, tile by tile"
QUICK = ("cached_by_pointer", "sdpa_called", "exp2")  # in everyday's lane
# what an honest student leaves in a file, at its end or within attend -> a word of the error's
# message, or '' where it does no harm
LEFT = {
    'raise SystemExit("my kernel needs a GPU")': "needs a GPU",
    "import sys; sys.exit(1)": "ends its process",
    "import os; os._exit(0)": "has ended without an answer",
    "import os; os._exit(86)": "has ended without an answer",
    "import unittest; unittest.main(exit=False)": "",
    "import unittest; unittest.main()": "ends its process",
    "import argparse; x = argparse.ArgumentParser(); x.add_argument('--n'); x.parse_args()": "",
    "import cProfile; cProfile.run('1 + 1')": "",
    "import __main__": "",
    "breakpoint()": "debugger",
    "import sys; sys.settrace(None)": "debugger",
    "n = input()": "waits for input",
    "import doctest, timeit; doctest.testmod(); timeit.timeit('1 + 1', number=3)": "",
    "import traceback; traceback.print_stack()": "",
    "import logging, warnings; logging.warning('x'); warnings.warn('y')": "",
    "import logging; logging.basicConfig(filename='run.log')": "writes to a file (run.log)",
    "import numpy as np": "imports numpy",
    "import pytest": "imports pytest",
    "from harness.problems.inputs import make_inputs": "imports harness",
    "import time, atexit; atexit.register(print); time.sleep(0.01)": "",
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)": "",
    "import threading; threading.Thread(target=print).start()": "starts a thread",
    "import subprocess; subprocess.run(['nvidia-smi'])": "starts or ends processes",
    "import multiprocessing; multiprocessing.Pool(2)": "daemonic",
    "import urllib.request; urllib.request.urlopen('http://localhost:1')": "connects",
    "print('x' * 2_000_000, open(__file__).read())": "",
    "import os; os.environ['X'] = '1'; os.chdir('/')": "",
    "open(__import__('os').devnull, 'w').write('x')": "",
    "torch.set_default_dtype(torch.float64); torch.manual_seed(0)": "",
    "import builtins, sys; builtins.print = len; sys.excepthook = print": "",
    "torch.cuda.nothing_such": "no such name",
    "[1][2]": "past the end",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "if __name__ == '__main__': raise SystemExit": "",
}

RAW = SUBMISSIONS.text("raw_python")


def expected(*verdicts):
    """(name, what is expected) of the submissions with one of `verdicts`, slow but for QUICK."""
    return [
        pytest.param(
            name, entry["expected"], id=name, marks=[] if name in QUICK else pytest.mark.slow
        )
        for name, entry in SUBMISSIONS.entries.items()
        if entry["expected"]["verdict"] in verdicts
    ]


def of_stage(path):
    """The number of the stage that a file is about; its lab is left out without Triton."""
    number = read_declared(path)["number"]
    if number in range(4, 9):
        pytest.importorskip("triton", reason="no wheel of triton")
    return number


def of_some(monkeypatch, *names):
    """Only the checks `names` are asked for, or all where none is named; with the fewest calls."""
    every = checks.checks

    def few(*at):
        for each in every(*at):
            if each.name in names or not names:
                yield replace(each, calls=(each.calls[0], each.calls[0]))

    monkeypatch.setattr(checks, "checks", few)


@pytest.mark.parametrize(("name", "expected"), expected("cheated", "crashed", "failed"))
def test_a_cheat_gets_nothing_for_what_it_gains(name, expected, tmp_path, monkeypatch):
    path, other = SUBMISSIONS.write(tmp_path, name), write(tmp_path, other=RAW) / "other.py"
    path.write_text(path.read_text(encoding="utf-8").replace("FOLDER", str(tmp_path)), "utf-8")
    number, shown = of_stage(path), expected.get("shown", "a few keys")
    of_some(monkeypatch, shown)
    row, result = grade.grade(path, number, 5, False, PATIENT)
    assert "ok" not in row.checks.values(), result
    assert row.verdict == expected["verdict"], result
    assert expected.get("says", "") in row.diagnosis, row.diagnosis
    assert row.worth({shown: 3.0}).points == 0
    reason = row.diagnosis.removeprefix("not allowed: ")
    assert row.verdict == "failed" or reports.report(row, result, {shown: 3.0}).count(reason) == 1
    assert other.read_text(encoding="utf-8") == RAW


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("line", quickly(2, LEFT))
def test_what_an_honest_student_leaves_in_a_file_is_no_cheat(line, within, tmp_path, monkeypatch):
    of_some(monkeypatch, "a few keys")
    text = edited(BODY, f"    {line}\n{BODY}") if within else f"{RAW}\n{line}\n"
    path = write(tmp_path, mine=text) / "mine.py"
    row, result = grade.grade(path, 1, 5, False, PATIENT)
    assert row.verdict == ("crashed" if LEFT[line] else "passed"), result
    assert LEFT[line] in " ".join((row.diagnosis, *result.case)), result


def test_a_cheat_in_one_check_loses_the_points_of_all():
    row = grade.Row("x", 1, 0, 0, "cheated", "", 0, "", "", 0.0, {"a": "ok", "b": "cheated"})
    points = {"a": 2.0, "b": 3.0}
    row = row.worth(points)
    assert (row.points, row.max_points) == (0, 5)
    assert [(name, got, status) for name, got, status, _ in reports.cases(row, points)] == [
        ("a", 0, "cheated"), ("b", 0, "cheated"),
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "expected"), expected("passed"))
def test_an_honest_variant_passes(name, expected, tmp_path, monkeypatch):
    path = SUBMISSIONS.write(tmp_path, name)
    of_some(monkeypatch, *(ALARMS[:2] if name in QUICK else ALARMS))
    row, result = grade.grade(path, of_stage(path), None, False, PATIENT)
    assert row.verdict == "passed" and {*row.checks.values()} == {"ok"}, result


def test_the_twin_is_graded_only_where_it_is_asked_for(monkeypatch):
    of_some(monkeypatch, "a few keys")
    twin = labs.source(5, twin=True)
    assert grade.grade(twin, 5, None, True, PATIENT)[0].verdict == "passed"
    row, _ = grade.grade(twin, 5, None, False, PATIENT)
    assert row.verdict == "failed" and "--cpu" in row.diagnosis


IN_TORCH = """import torch
from stages.contract import Stage, check_inputs
STAGE = Stage(number=5, name="mine", title="mine", idea="mine", devices=("cpu",))
def attend(q, k, v):
    check_inputs(STAGE, q, k, v)
    k, tiles = k.transpose(-2, -1) * q.shape[-1] ** -0.5, range(0, k.shape[2], 64)  # k: allowed
"""
ONLINE = """    m, l, acc = -torch.inf, 0.0, 0.0
    for n in tiles:
        s = q @ k[..., n : n + 64]
        new = s.amax(-1, keepdim=True).clamp(min=m)
        alpha, p = (torch.as_tensor(m) - new).exp(), (s - new).exp()
        l, acc = l * alpha + p.sum(-1, keepdim=True), acc * alpha + p @ v[:, :, n : n + 64]
        m = new
    return acc / l
"""


LARGE = "    tiles = range(0, v.shape[2], 1024)\n" + ONLINE.replace("n + 64", "n + 1024")
PADDED = "    q = torch.nn.functional.pad(q, (0, 0, 0, 15))\n" + ONLINE.replace(
    "return acc / l", "return (acc / l)[:, :, :-15]"
)
JOINED = (
    ONLINE.replace("in tiles", "in range(0, v.shape[2], 1280)")
    .replace(
        "q @ k[..., n : n + 64]", "torch.cat([q @ k[..., i : i + 640] for i in (n, n + 640)], -1)"
    )
    .replace(
        "p @ v[:, :, n : n + 64]",
        "p[..., :640] @ v[:, :, n : n + 640] + p[..., 640:] @ v[:, :, n + 640 : n + 1280]",
    )
)
MERGED = """    parts = []
    for n in range(0, v.shape[2], 32):
        s = q @ k[..., n : n + 32]
        m = s.amax(-1, keepdim=True)
        p = (s - m).exp()
        parts.append((m, p.sum(-1, keepdim=True), p @ v[:, :, n : n + 32]))
    m = torch.stack([x for x, _, _ in parts]).amax(0)
    l = sum((x - m).exp() * y for x, y, _ in parts)
    return sum((x - m).exp() * z for x, _, z in parts) / l
"""
IN_FLOAT64 = """    l, acc = 0.0, 0.0
    for n in tiles:
        p = (q.double() @ k[..., n : n + 64].double()).exp()
        l, acc = l + p.sum(-1, keepdim=True), acc + p @ v[:, :, n : n + 64].double()
    return (acc / l).to(q)
"""
A_ROW_MORE = """    more = torch.cat([q, q[:, :, :1]], 2)
    p = torch.softmax(torch.cat([more @ k[..., n : n + 64] for n in tiles], -1) * 1.0, -1)
    return sum(p[..., n : n + 64] @ v[:, :, n : n + 64] for n in tiles)[:, :, :-1]
"""
BIAS = """    bias = (torch.arange(k.shape[3] + 64) >= k.shape[3]) * -1e30
    k, v = torch.nn.functional.pad(k, (0, 64)), torch.nn.functional.pad(v, (0, 0, 0, 64))
""" + ONLINE.replace("s = q @ k[..., n : n + 64]", "s = q @ k[..., n : n + 64] + bias[n : n + 64]")
VIEWS = """    s = []
    for n in tiles:
        s.append(q @ k[..., n : n + 64])
        s[-1][..., :1]
    m = torch.stack([x.amax(-1, keepdim=True) for x in s]).amax(0)
    l = sum((x - m).exp().sum(-1, keepdim=True) for x in s)
    return sum((x - m).exp() @ v[:, :, n : n + 64] for x, n in zip(s, tiles)) / l
"""
FOLDED = """    s = torch.cat([q @ k[..., n : n + 64] for n in tiles], 1)  # (1, tiles, 1, 64)
    p = torch.exp(s - s.amax())
    acc = sum(p[:, i : i + 1] @ v[:, :, 64 * i : 64 * i + 64] for i in range(s.shape[1]))
    return acc / p.sum()
"""
NAMES = LARGE.replace(
    "s = q @ k[..., n : n + 1024]",
    "raw = q @ k[..., n : n + 1024]; scaled = raw * 1.0; s = scaled + 0.0; other = s - s.amax()",
)
SUMS_IN_V = """    parts, v = [], torch.nn.functional.pad(v, (0, 1), value=1.0)
    for n in tiles:
        s = q @ k[..., n : n + 64]
        m = s.amax(-1, keepdim=True)
        parts.append((m, (s - m).exp() @ v[:, :, n : n + 64]))
    m = torch.stack([x for x, _ in parts]).amax(0)
    o = sum((x - m).exp() * y for x, y in parts)
    return o[..., :-1] / o[..., -1:]
"""
BODIES = {  # of stage 5 in torch -> what its diagnosis begins with
    ONLINE: "", LARGE: "", PADDED: "", MERGED: "", BIAS: "",
    A_ROW_MORE: "S or P is made whole", VIEWS: "S or P is made whole",
    FOLDED: "S or P is made whole", NAMES: "", SUMS_IN_V: "",
    "    return torch.softmax(q @ k, -1) @ v\n": "one tile has all the keys",
    "    k, v = (x.unflatten(2, (4, -1)) for x in (k.mT, v))\n"
    "    p = (q[..., None, :] * k).sum(-1).exp()\n"
    "    return ((p / p.sum())[..., None] * v).sum((2, 3))[:, :, None]\n":
    "one tile has all the keys",
    "    p = torch.softmax(torch.cat([q @ k[..., n : n + 64] for n in tiles], -1), -1)\n"
    "    return sum(p[..., n : n + 64] @ v[:, :, n : n + 64] for n in tiles)\n":
    "S or P is made whole",
    JOINED: "S or P is made whole",
    "    return torch.nn.functional.scaled_dot_product_attention(q, k.mT, v, scale=1)\n":
    "not allowed: line 7: torch's scaled_dot_product_attention",
}  # fmt: skip


@pytest.mark.parametrize(
    "body",
    BODIES,
    ids=["online", "large tiles", "rows padded", "merged", "keys padded", "a row more", "views",
         "folded scores", "many names", "sums in v", "one product", "folded", "put together",
         "joined", "fused"],
)  # fmt: skip
def test_in_torch_a_whole_s_is_refused_however_it_is_made(body, tmp_path, monkeypatch):
    """And the keys may be scaled first."""
    of_some(monkeypatch, "one pass, tile by tile", *["many keys"] * (body == ONLINE))
    path = tmp_path / "mine.py"
    path.write_text(IN_TORCH + body, encoding="utf-8")
    row, result = grade.grade(path, 5, None, True, PATIENT)
    assert (row.verdict == "passed") == (not BODIES[body]), result
    assert row.diagnosis.startswith(BODIES[body])


def test_who_replaces_what_finds_its_line_is_ended_all_the_same(monkeypatch):
    ended = []
    watch = guard.Guard.__new__(guard.Guard)
    watch.loading, watch.made, watch.path, watch.end = False, False, __file__, ended.append
    with pytest.raises(TypeError), monkeypatch.context() as patch:
        patch.setattr(sys, "_getframe", None)
        watch.gains("it does")
    assert ended == ["it does"]
    watch.gains("it does")
    assert ended[1].startswith("line ")


def test_float64_is_no_max(tmp_path, monkeypatch):
    """It holds exp of any score but those past 700."""
    of_some(monkeypatch, "large scores")
    path = tmp_path / "mine.py"
    path.write_text(IN_TORCH + IN_FLOAT64, encoding="utf-8")
    row, result = grade.grade(path, 5, None, True, PATIENT)
    assert row.verdict == "failed", result


def test_a_file_of_another_lab_is_told_to_be_one(tmp_path, monkeypatch):
    of_some(monkeypatch, "a few keys")
    path = tmp_path / "mine.py"
    path.write_text(IN_TORCH + ONLINE, encoding="utf-8")
    row, _ = grade.grade(path, 6, None, False, PATIENT)
    assert row.verdict == "cheated" and "its STAGE says that it is stage 5's file" in row.diagnosis


def write(folder, **texts):
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return folder


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return {row["submission"]: row for row in csv.DictReader(file)}


def edited(old, new):
    return replace_once(RAW, old, new, "raw_python")


BODY = "    heads = zip(*(x.flatten(0, 1).tolist() for x in (q, k, v)), strict=True)\n"
KINDS = {
    "passed": RAW,
    "failed": edited(" * len(x) ** -0.5", ""),
    "cheated": edited(BODY, "    return (q @ k.mT).softmax(-1) @ v\n" + BODY),
    "not_written": edited(BODY, "    raise NotImplementedError('not written yet: s')\n" + BODY),
    "crashed": edited(BODY, "    raise RuntimeError('none of that')\n" + BODY),
    "segfault": edited(BODY, "    __import__('signal').raise_signal(11)\n" + BODY),
    "timeout": edited(BODY, "    __import__('time').sleep(600)\n" + BODY),
    "out_of_memory": edited(BODY, "    held = [b'1' * (100 << 20) for _ in range(40)]\n" + BODY),
    "syntax": "STAGE = Stage(number=1)\nthis is no Python\n",
    "empty": "",
}
VERDICTS = dict(zip(KINDS, KINDS)) | {"segfault": "crashed", "syntax": "crashed"}
VERDICTS["empty"] = "not_written"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_verdict_has_its_row_and_costs_no_other(tmp_path):
    folder = write(tmp_path / "all", **KINDS)
    junit, scope = tmp_path / "junit.xml", tmp_path / "results.json"
    points = tmp_path / "points.toml"
    points.write_text('default = 2\n"large scores" = 5\n', encoding="utf-8")
    out = tmp_path / "new" / "grades.csv"
    files = ("--out", out, "--junit", junit, "--points", points)
    asked = ("lab", "grade", folder, "--stage", 1, "--budget", 5, "--memory", "300M", *files)
    # with some seeds all of a check's rows see one large score only, where any scale is right
    done = in_turn(*asked, "--seed", 1)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert out.read_text(encoding="utf-8").startswith(COLUMNS)
    rows = rows_of(out)
    found = {name: row["verdict"].replace("-", "_") for name, row in rows.items()}
    assert found == VERDICTS
    full = 2 * len(list(checks.checks(1, 0))) + 3
    assert {row["max_points"] for row in rows.values()} == {str(full)}
    assert {name for name, row in rows.items() if row["points"] != "0"} == {"passed"}
    assert rows["passed"]["points"] == str(full)
    assert "wrong scale" in rows["failed"]["diagnosis"]
    assert rows["not_written"]["diagnosis"] == gaps.NOT_WRITTEN
    assert len({row["seed"] for row in rows.values()}) == 1
    for name in KINDS:
        text = (out.parent / "grades-reports" / f"{name}.md").read_text(encoding="utf-8")
        assert text.startswith(f"# {name}: stage 1") and "Traceback" not in text
        late, untried = text.count("| timeout |"), text.count("| not tried after ")
        assert (late, untried) == ((1, (full - 5) // 2) if name == "timeout" else (0, 0))
    root = ElementTree.parse(junit).getroot()
    suites = {suite.get("name"): suite for suite in root.iter("testsuite")}
    assert root.tag == "testsuites" and suites.keys() == rows.keys()
    for name, suite in suites.items():
        cases = suite.findall("testcase")
        failed = [case for case in cases if case.find("failure") is not None]
        assert len(cases) == int(suite.get("tests")) and len(failed) == int(suite.get("failures"))
        assert bool(failed) == (name != "passed")
    summary = (out.parent / "grades-class.md").read_text(encoding="utf-8")
    assert summary.rstrip() in done.stdout and "| wrong scale | 1 |" in summary
    # what is there is kept, with points of another kind; one can be graded again, and by Gradescope
    points.write_text("default = 1\n", encoding="utf-8")
    done = in_turn(*asked)
    assert done.stdout.count("(kept)") == len(KINDS)
    assert rows_of(out)["passed"]["points"] == str(full // 2 - 1)
    for text, verdict in ((KINDS["failed"], "failed"), (RAW, "passed")):
        (folder / "failed.py").write_text(text, encoding="utf-8")
        done = in_turn(*asked, "--only", "failed", "--gradescope", scope)
        assert done.stdout.count("(kept)") == 0
        again = rows_of(out)
        assert again["failed"]["verdict"] == verdict and again.keys() == rows.keys()
        assert again["failed"]["seed"] == rows["failed"]["seed"]
        told = json.loads(scope.read_text(encoding="utf-8"))
        assert sum(test["score"] for test in told["tests"]) == told["score"]
        assert told["score"] == float(again["failed"]["points"])
        assert ("failed" in {test["status"] for test in told["tests"]}) == (verdict == "failed")
        assert all(test["max_score"] == 1 for test in told["tests"])


@pytest.mark.slow
def test_rows_that_are_done_outlive_a_command_that_is_killed(tmp_path):
    folder = write(tmp_path / "all", a=RAW, b=KINDS["timeout"], c="")
    out = tmp_path / "grades.csv"
    asked = ("lab", "grade", folder, "--stage", 1, "--out", out)
    with Started(*asked, log=tmp_path / "log") as run:
        run.wait_for(lambda: out.exists() and "a" in rows_of(out), "the first row")
        run.process.kill()
        run.process.wait()
        assert run.wait_until_gone() == []
    assert rows_of(out)["a"]["verdict"] == "passed" and "c" not in rows_of(out)
    write(folder, b="")
    done = in_turn(*asked)
    assert "a: passed, 9 of 9 (kept)" in done.stdout and done.stdout.count("(kept)") == 1
    assert "b: not-written, 0 of 9: " in done.stdout  # and why, where no check was made
    assert [row["verdict"] for row in rows_of(out).values()] == ["passed", *["not-written"] * 2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param(("--stage", 5), "no triton", marks=pytest.mark.slow),
        (("--stage", 1, "--points", "points.toml"), "no check 'a few kees'"),
        pytest.param(
            ("--stage", 5, "--points", "speed.toml"),
            "--device: got cuda, but no GPU",
            marks=pytest.mark.slow,
        ),
        (("--stage", 1, "--out", "other.csv"), "is no table"),
        (("--stage", 1, "--only", "nobody"), "no submission 'nobody'"),
        (("--stage", 2), "no submission in it"),
    ],
)
def test_what_can_not_be_graded_costs_nobody_points(tmp_path, options, said):
    folder = write(tmp_path / "all", a=RAW)
    (tmp_path / "points.toml").write_text('"a few kees" = 2\n', encoding="utf-8")
    (tmp_path / "speed.toml").write_text("[speed]\npoints = 4\n", encoding="utf-8")
    (tmp_path / "other.csv").write_text("name,age\nx,3\n", encoding="utf-8")
    changes = {"CUDA_VISIBLE_DEVICES": ""}
    if said == "no triton":  # as on a machine where it can't be found
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "sitecustomize.py").write_text(
            "import sys\n\n\nclass Away:\n"
            "    def find_spec(name, path=None, target=None):\n"
            "        if name.split('.')[0] == 'triton':\n"
            "            raise ModuleNotFoundError(name, name='triton')\n\n\n"
            "sys.meta_path.insert(0, Away)\n",
            encoding="utf-8",
        )
        changes["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "site"), str(ROOT)])
    asked = ("lab", "grade", folder, *options)
    if said == "no triton" or (torch.cuda.is_available() and "no GPU" in said):
        done = ladder(*asked, cwd=tmp_path, env=environ(**changes))
    else:
        done = in_turn(*asked, cwd=tmp_path)
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1
    assert (tmp_path / "other.csv").read_text(encoding="utf-8") == "name,age\nx,3\n"
    assert not (tmp_path / "grades.csv").exists()


@pytest.mark.timing
def test_speed_gives_points_only_for_a_fast_and_right_submission(tmp_path):
    text = labs.source(3).read_text(encoding="utf-8")
    slow = text.replace(
        "    check_inputs(", "    __import__('time').sleep(0.05)\n    check_inputs("
    )
    wrong = text.replace("torch.softmax(", "1.001 * torch.softmax(")
    assert text not in (slow, wrong)
    write(tmp_path, fast=text, slow=slow, wrong=wrong)
    asked = speed.Speed(5, factor=4.0, b=1, h=2, n=64, d=16, dtype="float32")
    found = {
        path.stem: speed.judged(path, 3, asked, 7, device="cpu")
        for path in sorted(tmp_path.glob("*.py"))
    }
    assert found == {"fast": "ok", "slow": speed.SLOW, "wrong": "wrong"}


def test_speed_is_one_more_check(tmp_path):
    path = tmp_path / "points.toml"
    path.write_text("[speed]\npoints = 4\nn = 512\n", encoding="utf-8")
    points, asked = grade.read_points(5, path)
    assert points["speed"] == 4 and asked == speed.Speed(4, n=512)
    row = grade.Row("x", 5, 0, 0, "passed", "", 0, "", "", 0.0, dict.fromkeys(points, "ok"))
    assert row.with_speed("ok").worth(points).points == len(points) + 3
    assert row.with_speed(speed.SLOW).worth(points).points == len(points) - 1
    assert row.with_speed("cheated").worth(points).points == 0
    with pytest.raises(grade.NotGraded, match="from 4 on"):
        grade.read_points(1, path)


S5, S1 = (labs.source(stage).read_text(encoding="utf-8") for stage in (5, 1))
PAST = "        acc = acc * alpha[:, None]\n"
ACC = "        acc += dot("
GRID = "        grid = ("
TAIL = '        s = tl.where(in_range[None, :], s, float("-inf"))\n'
SCALED = "PRECISION) * scale  # (BLOCK_M, BLOCK_N)\n"
RAISES = '        raise NotImplementedError("not written yet: past")\n'
STEPS = [line for line in S1.splitlines() if line.lstrip().startswith("# step")]
LINES = [line for line in S1.splitlines() if line not in STEPS[1:]]
LAST = next(at for at, line in enumerate(LINES) if "# end of" in line)
ELSEWHERE = {  # work of a gap that stands in another one
    "one line for two": (S5.replace(PAST, "").replace(ACC, f"{PAST[:-1]} + dot("), "passed"),
    "a comment": (
        S5.replace(PAST, "        # below\n").replace(ACC, f"{PAST[:-1]} + dot("), "passed",
    ),
    "tail within s": (
        S5.replace(TAIL, "").replace(SCALED, f"{SCALED}{TAIL}"), "passed",
    ),
    "all in the first": ("\n".join((*LINES[:LAST], *STEPS[1:], *LINES[LAST:])), "passed"),
    "nowhere": (S5.replace(PAST, ""), "failed"),
    "pass": (S5.replace(PAST, "        pass\n"), "failed"),
    "raises": (S5.replace(PAST, RAISES), "not-written"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_empty_gap_is_no_mistake_where_another_line_does_its_work(name, tmp_path, monkeypatch):
    of_some(monkeypatch, "a few keys", "many keys")
    text, verdict = ELSEWHERE[name]
    assert text not in (S5, S1)
    path = write(tmp_path, mine=text) / "mine.py"
    stage = of_stage(path)
    row, result = grade.grade(path, stage, 1, False, PATIENT)
    assert row.verdict == verdict, result
    told = [line for line in result.case if "no code in the gap past" in line]
    assert len(told) == (verdict == "failed")


SUBMITTED = {  # of stage 1, then of stage 5
    "right": RAW,
    "without scale": KINDS["failed"],
    "scaled by the keys": edited("len(x) ** -0.5", "len(k_head) ** -0.5"),
    "last key left out": edited("for y in k_head]", "for y in k_head[:-1]]"),
    "cheat": KINDS["cheated"],
    "leftover": f"{RAW}\nraise SystemExit(3)\n",
    "half written": KINDS["not_written"],
    "crashes": KINDS["crashed"],
    "no rescale": S5.replace(PAST, ""),
    "one tile": S5.replace(GRID, f"        config['BLOCK_N'] = 1 << Nk.bit_length()\n{GRID}"),
    "no max": S5.replace("m_new = tl.maximum(m_i, tl.max(s, 1))", "m_new = m_i * 0"),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SUBMITTED)
def test_the_points_of_a_submission_do_not_hang_on_the_seed(name, tmp_path, monkeypatch):
    of_some(monkeypatch)  # all checks with their fewest calls, which show a mistake the least
    path = write(tmp_path, mine=SUBMITTED[name]) / "mine.py"
    stage = of_stage(path)
    worth = grade.read_points(stage, None)[0]
    first, second = (
        grade.grade(path, stage, seed, False, PATIENT)[0].worth(worth) for seed in (1, 2)
    )
    assert (first.checks, first.verdict) == (second.checks, second.verdict)
    assert (first.points == first.max_points) == (first.verdict == "passed") == (name == "right")


@pytest.mark.slow
def test_a_report_shows_no_folder_of_the_machine_that_graded(tmp_path):
    line = "open('/nowhere/of/the/student')"
    for at, text in enumerate((
        edited(BODY, f"    print(__file__, torch.__file__); raise OSError(__file__)\n{BODY}"),
        f"{RAW}\nraise OSError(__file__)\n",
        f"{RAW}\n{line}\n",
    )):  # fmt: skip
        path = write(tmp_path / str(at), mine=text) / "mine.py"
        row, result = grade.grade(path, 1, 1, False, PATIENT)
        shown = "\n".join((row.diagnosis, *result.case))
        assert row.verdict == "crashed" and "mine.py" in shown
        assert str(tmp_path) not in shown and str(ROOT) not in shown, shown


@pytest.mark.parametrize(
    "body", ["pass", "...", '"""What it does."""', "raise NotImplementedError"]
)
def test_a_bare_attend_is_not_written(tmp_path, body):
    text = f"STAGE = Stage(number=1, name='x')\n\n\ndef attend(q, k, v):\n    {body}\n"
    assert list(gaps.missing(text)) == [("attend", 4)]
    assert list(gaps.missing(text.replace(body, "return q"))) == []


def test_what_torch_made_from_a_kernels_output_stays_known_where_memory_is_used_again():
    from torch import empty
    from torch._C._autograd import _disable_profiler_legacy

    from course.lab.grading import work

    rules = {"torch": ["*"], "scale": [], "least": 2, "imports": [], "kernels": []}
    watched = work.Work("mine.py", rules, pytest.fail, lambda: False)
    _disable_profiler_legacy()
    rules["kernels"] = ["o"]
    acc, first, second = (empty(64) for _ in range(3))
    watched.stored.add(acc.data_ptr())
    assert "no Triton kernel" in watched.suspect({"o": first})
    watched.operation("mul", [acc], [first])
    watched.operation("nan_to_num", [first], [second])
    watched.operation("_to_copy", [second], [first])  # a new tensor, where the first was
    assert watched.suspect({"o": first}) == ""
