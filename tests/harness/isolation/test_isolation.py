"""Stages that misbehave in every way cost their own cell, and nothing else."""

import os
import re
import signal
import subprocess
import sys

import pytest
from ladder_command import PATIENCE, YARDSTICK, by_name, environ, fakes, gone, in_turn

NORMAL = ("--inputs", "normal")
# a budget that decides nothing, however busy the machine; where nobody answers, one to wait for
QUICK = (*NORMAL, "--n", "32,48", "--budget", "60", "--memory", "300M")
HASTY = (*QUICK, "--budget", "2")


def hold_to(path, expected, sizes=(32, 48)):
    """Each stage's cells, at each N of `sizes`, have the status expected and a reason that matches.

    `expected`: name -> (status, pattern of the reason). Stage 3, before, between and after the
    others, is unharmed.
    """
    cells = by_name(path)
    assert cells.keys() == {YARDSTICK, *expected}
    assert [cell["nk"] for cell in cells[YARDSTICK]] == [*sizes]
    for cell in cells[YARDSTICK]:
        assert (cell["status"], cell["reason"]) == ("ok", "")
        assert cell["time_ms"] > 0 and cell["samples"] >= 1
    got = {name: [cell["status"] for cell in cells[name]] for name in expected}
    assert got == {name: [status] * len(sizes) for name, (status, _) in expected.items()}
    for name, (status, pattern) in expected.items():
        for cell in cells[name]:
            assert re.search(pattern, cell["reason"]), f"{name}: {cell['reason']}"
            # an unchecked time is not kept
            assert (cell["time_ms"] is None) == (status not in ("ok", "wrong-by-design")), name


@pytest.mark.slow
def test_a_stage_that_hangs_fails_alone(tmp_path):
    out = tmp_path / "run.jsonl"
    done = in_turn("run", "--stages", 3, *HASTY, *fakes("hangs"), "--out", out)
    assert done.returncode == 1, done.stderr
    hold_to(out, {"hangs": ("timeout", "2 s")})
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_stages_that_exit_or_exhaust_memory_fail_alone(tmp_path):
    expected = {
        "aborts": ("crashed", "SIGABRT"),
        "segfaults": ("crashed", "SIGSEGV"),
        "hoards": ("out-of-memory", "300 MB|MemoryError"),
        "hoards_shared": ("out-of-memory", "300 MB"),
        "asks_too_much": ("out-of-memory", "can't allocate memory|300 MB"),
        "exits_well": ("crashed", "SystemExit"),
        "exits_at_once": ("crashed", "exit code 0"),
        "exits_with_3": ("crashed", "exit code 3"),
        "interrupts": ("crashed", "KeyboardInterrupt"),
        "raises": ("crashed", "FileNotFoundError: no such kernel"),
    }
    out = tmp_path / "run.jsonl"
    done = in_turn("run", "--stages", 3, *QUICK, *fakes(*expected), "--out", out)
    assert done.returncode == 1, done.stderr
    hold_to(out, expected)
    assert "Traceback" not in done.stderr


def test_stages_that_answer_wrongly_are_wrong_with_the_reason(tmp_path):
    """One that claims to be exact up to 64 and isn't is `wrong`; one that is infinite is, too."""
    expected = {
        "gives_nan": ("wrong", "1 of (2048|3072) outputs are NaN"),
        "gives_inf": ("wrong", "NaN or infinite"),
        "wrong_shape": ("wrong", r"shape \(1, 1, (32|48), 63\), expected \(1, 1, (32|48), 64\)"),
        "wrong_dtype": ("wrong", "dtype float64, expected float32"),
        "gives_a_list": ("wrong", "list, expected a tensor"),
        "writes_to_q": ("wrong", "changed its input q"),
        "writes_to_k": ("wrong", "changed its input k"),
        "writes_to_v": ("wrong", "changed its input v"),
        "remembers": ("wrong", "after v changed"),
        "ignores_v": ("wrong", "max error"),
        "claims_too_much": ("wrong", "max error"),
        "modest": ("wrong-by-design", "exact up to Nk = 16"),
        "barely_wrong": ("wrong", "max error"),
        "barely_right": ("ok", "^$"),
        "faintly_wrong": ("wrong", "relative error"),
        "faintly_right": ("ok", "^$"),
    }
    out = tmp_path / "run.jsonl"
    done = in_turn("run", "--stages", 3, *QUICK, "--n", 48, *fakes(*expected), "--out", out)
    assert done.returncode == 1, done.stderr
    hold_to(out, expected, [48])
    cells = by_name(out)
    # what could be compared at all keeps its errors, so that the table can show how wrong it is
    assert all(cell["err_f64_max"] > 1e-3 for cell in cells["claims_too_much"])
    assert all(cell["err_f64_max"] is None for cell in cells["gives_nan"] + cells["gives_inf"])
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_stage_that_remembers_by_torchs_own_version_counter(tmp_path):
    out = tmp_path / "run.jsonl"
    in_turn("run", "--stages", 3, *QUICK, *fakes("remembers_versions"), "--out", out)
    hold_to(out, {"remembers_versions": ("wrong", "after v changed")})


@pytest.mark.slow
def test_stages_that_write_to_the_pipe_fail_alone(tmp_path):
    """Whatever a stage sends down the pipe, whole, half or forged, it sends for itself alone."""
    names = ("garbage", "endlessly", "hugely", "half", "forged")
    expected = {f"talks_{name}": ("crashed|timeout", ".") for name in names}
    out = tmp_path / "run.jsonl"
    done = in_turn("run", "--stages", 3, *HASTY, *fakes(*expected), "--out", out)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    cells = by_name(out)
    # whether it is the pipe or the clock that ends a half message is no matter
    found = {name: (cells[name][0]["status"], ".") for name in expected}
    assert {status for status, _ in found.values()} <= {"crashed", "timeout"}
    hold_to(out, found)


@pytest.mark.slow
def test_a_stage_that_writes_into_every_open_file_fails_alone(tmp_path):
    """It comes first: the judge of its problem, and what the others print, must survive it."""
    out = tmp_path / "run.jsonl"
    done = in_turn("run", "--stages", 3, *QUICK, *fakes("writes_everywhere"), "--out", out)
    assert done.returncode == 1, done.stderr
    hold_to(out, {"writes_everywhere": ("crashed", ".")})
    lines = [line for line in out.read_text().splitlines() if "writes_everywhere" in line]
    assert len(lines) == 3  # the plan and its two cells: nothing of what it forged
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_what_a_stage_prints_is_shown_as_its_own_and_never_recorded(tmp_path):
    out = tmp_path / "run.jsonl"
    done = in_turn("run", "--stages", 3, *QUICK, *fakes("prints_records"), "--out", out)
    hold_to(out, {"prints_records": ("wrong", "max error")})
    assert "1e-9" not in out.read_text() and "1e-9" not in done.stdout
    printed = [line for line in done.stderr.splitlines() if "1e-9" in line]
    assert printed and all(line.startswith("prints_records | ") for line in printed)
    assert "\x1b" not in done.stderr + done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["leaves_a_child", "leaves_a_daemon"])
def test_what_a_stage_starts_ends_with_its_cell(tmp_path, name):
    out = tmp_path / "run.jsonl"
    done = in_turn("run", "--stages", 3, *QUICK, *fakes(name), "--out", out)
    hold_to(out, {name: ("wrong", "max error")})
    pids = [int(pid) for pid in re.findall(r"lingers as (\d+)", done.stderr)]
    assert len(pids) == 4  # two cells, and a call with strided inputs for each
    left = [pid for pid in pids if not gone(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def test_a_stage_declared_inexact_is_judged_below_its_n_and_excused_above(tmp_path):
    """Exit code 0: what is ok, skipped or wrong by design is no failure."""
    out = tmp_path / "run.jsonl"
    done = in_turn("run", "--stages", 3, *NORMAL, "--n", "16,17", *fakes("modest"), "--out", out)
    assert done.returncode == 0, done.stderr
    statuses = [cell["status"] for cell in by_name(out)["modest"]]
    assert statuses == ["ok", "wrong-by-design"]


@pytest.mark.parametrize(
    ("inputs", "dtype", "status"),
    [
        ("peaky", "float16", "wrong-by-design"),
        ("peaky", "float32", "ok"),
        ("normal", "float16", "ok"),
    ],
)
def test_a_stage_that_rounds_its_scores_is_excused_where_they_are_large(
    tmp_path, inputs, dtype, status
):
    out = tmp_path / "run.jsonl"
    asked = ("--stages", 3, "--n", 128, "--d", 64, "--inputs", inputs, "--dtype", dtype)
    done = in_turn("run", *asked, "--out", out)
    assert done.returncode == 0, done.stderr
    cells = by_name(out)[YARDSTICK]
    assert [cell["status"] for cell in cells] == [status]
    assert ("round its scores" in (cells[0]["reason"] or "")) == (status != "ok")


def test_a_stage_is_skipped_where_it_takes_no_such_option(tmp_path):
    out = tmp_path / "run.jsonl"
    done = in_turn(
        "run",
        "--stages",
        3,
        *NORMAL,
        "--n",
        16,
        "--causal",
        *fakes("modest", "aborts"),
        "--out",
        out,
    )
    assert done.returncode == 0, done.stderr
    cells = by_name(out)
    assert [cell["status"] for cell in cells[YARDSTICK]] == ["ok"]
    for name in ("modest", "aborts"):
        assert [(cell["status"], cell["reason"]) for cell in cells[name]] == [
            ("skipped", "takes no causal")
        ]


@pytest.mark.slow
def test_a_stage_wrong_below_its_declared_n_fails_and_is_excused_above(tmp_path):
    out = tmp_path / "run.jsonl"
    done = in_turn(
        "run", "--stages", 3, *NORMAL, "--n", "32,128", *fakes("claims_too_much"), "--out", out
    )
    assert done.returncode == 1
    statuses = [cell["status"] for cell in by_name(out)["claims_too_much"]]
    assert statuses == ["wrong", "wrong-by-design"]


# a Ctrl-C comes when the fork server has been asked for a process, before that one is told anything
INTERRUPTED = """
import os, signal, sys, threading, time
from multiprocessing import forkserver
from pathlib import Path
from harness.isolation import child, fork_server

deaf, heard, at_once = [], threading.Event(), []

def connect(handles, connect=forkserver.connect_to_new_process):
    deaf.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
    asked = connect(handles)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        at_once.append(heard.wait(30))
    except KeyboardInterrupt:
        sys.exit("the process was not told")
    return asked

signal.signal(signal.SIGINT, signal.default_int_handler)
forkserver.connect_to_new_process = connect
fork_server.PRELOADED = ()
log = Path(sys.argv[1])
try:
    child.begin(print, str(log), ("told",))
except KeyboardInterrupt:
    heard.set()
    while "told" not in log.read_text():
        time.sleep(0.02)
else:
    sys.exit("the Ctrl-C was lost")
if at_once != [True]:
    sys.exit("the Ctrl-C had to wait for the process")
if deaf != [True]:
    sys.exit("a fork server that is started anew would hear a Ctrl-C")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork server")
def test_a_ctrl_c_leaves_no_process_that_was_not_told_what_to_run(tmp_path):
    log = tmp_path / "log"
    log.touch()
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(log)], cwd=tmp_path, env=environ(),
        capture_output=True, timeout=PATIENCE, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
