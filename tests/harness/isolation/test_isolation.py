"""Stages that misbehave in every way cost their own cell, and nothing else."""

import os
import re
import signal
import subprocess
import sys

import pytest
from ladder_command import PATIENCE, YARDSTICK, environ, fakes, gone, measured

NORMAL = ("--inputs", "normal")
# a budget that decides nothing, however busy the machine; where nobody answers, one to wait for
QUICK = (*NORMAL, "--n", "32,48", "--budget", "60", "--memory", "300M")
HASTY = (*QUICK, "--budget", "2")


def fail_alone(folder, arguments, expected, sizes=(32, 48)):
    """`ladder run` of the fakes in `expected`: what it said, and its cells.

    `expected`: name -> status, or several with | between, and a pattern of the reason, for the
    cells at each N of `sizes`. Stage 3, before, between and after the others, is unharmed.
    """
    done, cells = measured(folder, "run", "--stages", 3, *arguments, *fakes(*expected), code=1)
    assert cells.keys() == {YARDSTICK, *expected}
    for name, (status, pattern) in {YARDSTICK: ("ok", "^$"), **expected}.items():
        assert [cell["nk"] for cell in cells[name]] == [*sizes]
        for cell in cells[name]:
            assert cell["status"] in status.split("|"), f"{name}: {cell['status']}"
            assert re.search(pattern, cell["reason"]), f"{name}: {cell['reason']}"
            # an unchecked time is not kept
            timed = cell["time_ms"] is not None and cell["time_ms"] > 0 and cell["samples"] >= 1
            assert timed == (cell["status"] in ("ok", "wrong-by-design")), name
    return done, cells


@pytest.mark.slow
def test_stages_that_hang_or_write_to_the_pipe_fail_alone(tmp_path):
    """Whatever a stage sends down the pipe, whole, half or forged, it sends for itself alone.

    Whether it is the pipe or the clock that ends a half message is no matter.
    """
    names = ("garbage", "endlessly", "hugely", "half", "forged")
    expected = {f"talks_{name}": ("crashed|timeout", ".") for name in names}
    fail_alone(tmp_path, HASTY, {"hangs": ("timeout", "2 s"), **expected})


@pytest.mark.slow
def test_stages_that_exit_exhaust_memory_or_write_everywhere_fail_alone(tmp_path):
    """The last of these comes first: the judge of its problem must survive it."""
    expected = {
        "writes_everywhere": ("crashed", "."),
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
    fail_alone(tmp_path, QUICK, expected)
    text = (tmp_path / "run.jsonl").read_text()
    lines = [line for line in text.splitlines() if "writes_everywhere" in line]
    assert len(lines) == 3  # the plan and its two cells: nothing of what it forged


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
        "remembers_versions": ("wrong", "after v changed"),
        "ignores_v": ("wrong", "max error"),
        "claims_too_much": ("wrong", "max error"),
        "modest": ("wrong-by-design", "exact up to Nk = 16"),
        "barely_wrong": ("wrong", "max error"),
        "barely_right": ("ok", "^$"),
        "faintly_wrong": ("wrong", "relative error"),
        "faintly_right": ("ok", "^$"),
    }
    _, cells = fail_alone(tmp_path, (*QUICK, "--n", 48), expected, sizes=[48])
    # what could be compared at all keeps its errors, so that the table can show how wrong it is
    assert all(cell["err_f64_max"] > 1e-3 for cell in cells["claims_too_much"])
    assert all(cell["err_f64_max"] is None for cell in cells["gives_nan"] + cells["gives_inf"])


@pytest.mark.slow
def test_what_a_stage_prints_is_its_own_and_what_it_starts_ends_with_its_cell(tmp_path):
    wrong = ("wrong", "max error")
    names = ("prints_records", "leaves_a_child", "leaves_a_daemon")
    done, _ = fail_alone(tmp_path, QUICK, dict.fromkeys(names, wrong))
    assert "1e-9" not in (tmp_path / "run.jsonl").read_text() and "1e-9" not in done.stdout
    printed = [line for line in done.stderr.splitlines() if "1e-9" in line]
    assert printed and all(line.startswith("prints_records | ") for line in printed)
    assert "\x1b" not in done.stderr + done.stdout
    pids = [int(pid) for pid in re.findall(r"lingers as (\d+)", done.stderr)]
    assert len(pids) == 8  # two cells each, and a call with strided inputs for each
    left = [pid for pid in pids if not gone(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


# arguments and fakes -> exit code (what is ok, skipped or wrong by design is no failure); name ->
# the statuses of its cells and what the reason of the last one says
EXCUSED = {
    "exact up to 16": (
        ("--n", "16,17,48", *NORMAL), ("modest",), 0,
        {"modest": (["ok", *["wrong-by-design"] * 2], "exact up to"), YARDSTICK: (["ok"] * 3, "")},
    ),
    "wrong below its own N": (
        ("--n", "32,128", *NORMAL), ("claims_too_much",), 1,
        {"claims_too_much": (["wrong", "wrong-by-design"], "exact up to")},
    ),
    "takes no such option": (
        ("--n", 16, "--causal", *NORMAL), ("modest", "aborts"), 0,
        {"modest": (["skipped"], "takes no causal"), "aborts": (["skipped"], "takes no causal"),
         YARDSTICK: (["ok"], "")},
    ),
    **{
        f"rounds its scores: {inputs} {dtype}": (
            ("--n", 128, "--inputs", inputs, "--dtype", dtype), (), 0, {YARDSTICK: ([status], why)},
        )
        for inputs, dtype, status, why in (
            ("peaky", "float16", "wrong-by-design", "round its scores"),
            ("peaky", "float32", "ok", ""), ("normal", "float16", "ok", ""),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "names", "code", "expected"), EXCUSED.values(), ids=EXCUSED)
def test_a_stage_is_excused_where_it_declares_that_it_is(
    tmp_path, arguments, names, code, expected
):
    _, cells = measured(tmp_path, "run", "--stages", 3, *arguments, *fakes(*names), code=code)
    for name, (statuses, reason) in expected.items():
        assert [cell["status"] for cell in cells[name]] == statuses
        assert reason in cells[name][-1]["reason"] and bool(cells[name][-1]["reason"]) == bool(
            reason
        )


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
