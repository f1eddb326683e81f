"""Wherever a command is started, it ends with one line at the most, and no traceback."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from itertools import product
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil
import pytest
from ladder_command import PATIENCE, Started, command, environ, in_turn, one_process
from made_up import make_cell, make_env, write_run
from marks import slowly
from rich.console import Console

from harness import ending
from harness.isolation.child import Child
from ladder import app, arguments

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="shells, limits and signals")

RUN = "run --stages 3 --n 8 --d 8 --device cpu --out o.jsonl"
PYTHON_STARTS = 0.3  # seconds of processor time, more than it takes
PLAIN = ("list", "diff 4 5", "trace --n 8", "--help", "run --help", "--version")


def shell(line, folder, **changes):
    """What comes of a line of bash in `folder`, in which `ladder` is our command."""
    ladder = f'ladder() {{ {shlex.join(command())} "$@"; }}\n'
    env = environ(PYTHONUNBUFFERED="", **changes)  # what is printed waits, as a user's does
    return subprocess.run(
        ["bash", "-c", ladder + line], cwd=folder, env=env, capture_output=True,
        timeout=PATIENCE, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def handles_signals(pid):
    """Whether a command handles signals already: SIGTERM is the system's before."""
    if sys.platform != "linux":
        return sum(psutil.Process(pid).cpu_times()[:2]) > PYTHON_STARTS
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(re.search(r"^SigCgt:\s*(\w+)", status, re.M)[1], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def one_line(done, code, says=""):
    """The command ended with that exit code and one line, which holds `says`."""
    err = done.stderr.decode()
    assert done.returncode == code, (done.returncode, err)
    assert err.startswith("ladder: ") and err.count("\n") == 1, err
    assert says in err


@pytest.mark.parametrize("options", ["list", "show run.jsonl", *slowly(*PLAIN[1:], "doctor")])
def test_a_full_disk_behind_stdout_is_one_line(tmp_path, options):
    cells = [make_cell()]
    write_run(tmp_path / "run.jsonl", make_env(cells), cells)
    done = shell(f"ladder {options} > /dev/full", tmp_path)
    one_line(done, 2, "No space left on device")


@pytest.mark.slow
def test_a_low_limit_is_raised_and_a_stderr_that_takes_nothing_costs_no_measurement(tmp_path):
    done = shell(f"ulimit -S -n 12; ladder {RUN} 2> /dev/full", tmp_path)
    assert done.returncode == 0 and b"torch, three GEMMs" in done.stdout
    assert (tmp_path / "o.jsonl").read_bytes().count(b"\n") == 2


@pytest.mark.slow
def test_closed_streams_are_no_files_of_ours(tmp_path):
    done = shell(f"ladder {RUN} >&- 2>&- <&-", tmp_path)
    assert done.returncode == 0 and b"Traceback" not in done.stderr
    lines = (tmp_path / "o.jsonl").read_bytes().splitlines()
    assert len(lines) == 2 and all(line.startswith(b"{") for line in lines)


@pytest.mark.parametrize("options", ["list", *slowly("--help", "doctor")])
def test_a_reader_that_has_read_enough_is_no_failure(tmp_path, options):
    done = shell(f"ladder {options} | true; exit ${{PIPESTATUS[0]}}", tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    "options", [RUN, *slowly("doctor", "bench --n 16 --causal on", "ceilings")]
)
def test_a_folder_that_is_gone_is_one_line(tmp_path, options):
    done = shell(f"mkdir g && cd g && rmdir ../g && ladder {options} --device cpu"
                 .replace("doctor --device cpu", "doctor"), tmp_path)  # fmt: skip
    one_line(done, 2, "the folder that you are in is gone")


@pytest.mark.parametrize("files", [12, *slowly(8, 24)])
@pytest.mark.parametrize("options", ["doctor", RUN, "list"])
def test_too_few_open_files_are_one_line(tmp_path, options, files):
    done = shell(f"ulimit -n {files}; ladder {options}", tmp_path)
    one_line(done, 2, f"allows {files} open files")


C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
C_LOCALE["PYTHONIOENCODING"] = ""  # a command in this process may have set it


ENCODINGS = {"PYTHONIOENCODING": "latin-1"}, {**C_LOCALE, "PYTHONIOENCODING": "ascii"}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [C_LOCALE, *ENCODINGS])
def test_a_terminal_without_utf_8_shows_what_it_can(tmp_path, changes):
    cells = [make_cell()]
    env = make_env(cells)
    env["rungs"][0]["title"] = "naïve → \N{SNOWMAN}"
    write_run(tmp_path / "run.jsonl", env, cells)
    with one_process(environ(PYTHONUNBUFFERED="", **changes)) as run:
        for options in ("show run.jsonl", "list", "diff 4 5", "trace --n 8", "--help"):
            done = run(*options.split(), cwd=tmp_path)
            assert (done.returncode, done.stderr) == (0, "") and done.stdout
            assert "show" not in options or re.search(r"na(\?|\\xef)ve \? \?", done.stdout)
        if changes is C_LOCALE:
            done = run("readme", "--check", cwd=tmp_path)
            assert done.returncode in (0, 1) and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_stage_prints_and_is_read_in_utf_8_whatever_the_locale(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom stages.contract import Stage\n"
        "STAGE = Stage(number=90, name='mine', title='naïve →', idea='→')\n"
        "def attend(q, k, v):\n"
        "    print('naïve →')\n"
        "    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v\n",
        encoding="utf-8",
    )
    changes = {**C_LOCALE, "PYTHONIOENCODING": "ascii"}
    done = shell(f"ladder {RUN} --stage mine.py", tmp_path, **changes)
    assert done.returncode == 0, done.stderr
    assert b"mine | na?ve ?" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "whom", "wait"),
    [*product([signal.SIGTERM], ("command", "all", "twice"), (0, 1.5, 4)),
     *product([signal.SIGHUP], ["group"], (0, 1.5, 4)),
     *product([signal.SIGINT], ["group"], (0, 0.5, 1.1, 1.7, 3.2))],
)  # fmt: skip
def test_a_scheduler_or_a_terminal_ends_all_and_leaves_nothing(
    tmp_path, monkeypatch, wait, number, whom
):
    """Some send the signal to the command, others to each of its processes, as Ctrl-C does.

    Not before it handles them: while Python starts, Ctrl-C is a traceback of its own.
    """
    temporary, out = tmp_path / "tmp", tmp_path / "o.jsonl"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with Started("run", "--stages", "0,3", "--n", 64, "--device", "cpu", "--out", out,
                 log=tmp_path / "log", group=True) as run:  # fmt: skip
        run.wait_for(lambda: handles_signals(run.process.pid), "it handled signals")
        time.sleep(wait)
        if whom == "all":
            for process in run.left_behind():
                with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself
                    process.send_signal(number)
        elif whom == "group":
            os.killpg(run.process.pid, number)
        else:
            for each in (number, number, signal.SIGINT)[: 1 if whom == "command" else 3]:
                run.process.send_signal(each)
        codes = (128 + number, -number, 0, *((130, -2) if whom == "twice" else ()))
        assert run.process.wait(PATIENCE) in codes, run.text()
        assert run.wait_until_gone() == []
        assert "Traceback" not in run.text() and "warn" not in run.text(), run.text()
    assert [*temporary.iterdir()] == []
    assert not out.exists() or b"crashed" not in out.read_bytes()  # no fault of the stage's


def test_a_process_that_a_scheduler_ended_is_no_crash_of_its_stage():
    """It ends all processes of a job: this one hears it a moment after the stage's."""

    soon = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))

    class Ended:
        exitcode = -signal.SIGTERM

        def join(self, seconds):
            soon.start()

    def stop(number, frame):
        raise ending.Stopped(number)

    child = object.__new__(Child)
    child.process = Ended()
    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with pytest.raises(ending.Stopped):
            child.how_it_ended()
            soon.cancel()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert app.exit_code(ending.Stopped(signal.SIGTERM)) == 143


def blocked():
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_ctrl_c_while_the_fork_server_starts_is_heard_by_the_command_alone(monkeypatch):
    """It was ignored for those milliseconds, and a whole run went on that was told to end."""
    started = []

    def server():
        signal.raise_signal(signal.SIGINT)
        started.append(("server", blocked()))

    def tracker():
        started.append(("tracker", blocked()))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # as in Python 3.11

    monkeypatch.setattr(forkserver, "ensure_running", server)
    monkeypatch.setattr(resource_tracker, "ensure_running", tracker)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            arguments.prepare_children(None)
    finally:
        signal.signal(signal.SIGINT, before)
    # what is started inherits what is blocked
    assert started == [("tracker", False), ("server", True)]
    assert not blocked()


# as pydantic does, with which typer parses options: what is raised in it may come to nothing
SWALLOWED = """
import contextlib, signal, sys
import ladder.help
from harness.__main__ import main

def parse(context):
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
ladder.help.check_together = parse
sys.argv = ["ladder", "list"]
main()
"""


def test_a_ctrl_c_while_options_are_parsed_ends_the_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SWALLOWED], cwd=tmp_path, env=environ(), capture_output=True,
        timeout=PATIENCE, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_a_ctrl_c_in_the_middle_of_an_import_is_no_traceback():
    class Field:
        def __set_name__(self, owner, name):
            raise KeyboardInterrupt

    with pytest.raises(BaseException) as raised:
        type("Imported", (), {"field": Field()})
    assert app.exit_code(raised.value) == 130


@pytest.mark.parametrize("columns", [20, 39, 8, 1])
def test_no_figure_is_cut_on_a_narrow_terminal(tmp_path, columns, monkeypatch, capsys):
    times = {3: 12.345678, 5: 0.0123456, 6: 123.456}
    cells = [make_cell(number, f"stage{number}", time_ms=ms) for number, ms in times.items()]
    path = write_run(tmp_path / "run.jsonl", make_env(cells), cells)
    monkeypatch.setattr(Console, "is_terminal", True)
    for name, value in (("COLUMNS", str(columns)), ("TERM", "xterm"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="0"):
        app.main(["show", str(path)])
    shown = capsys.readouterr().out
    for figure in ("12.3 ms", "12.3 us", "123 ms"):
        assert figure in shown, shown
    assert not re.search(r"\d…", shown)


def test_a_skipped_cell_is_not_called_interpreted(tmp_path):
    """bfloat16 is what Triton's interpreter can't do."""
    done = in_turn("run", "--stages", "3,5", "--n", 8, "--dtype", "bf16", "--device", "cpu",
                   "--out", tmp_path / "o.jsonl")  # fmt: skip
    line = next(line for line in done.stderr.splitlines() if " 5 triton" in line)
    assert line.endswith("skipped -")
