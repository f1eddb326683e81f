"""Runs the `ladder` command as a user would, in a process of its own, and finds what it leaves."""

import contextlib
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

from harness.results import read

ROOT = Path(__file__).parents[2]
RUNGS = Path(__file__).parent / "rungs"
MARK = "LADDER_TEST_RUN"
PATIENCE = 120  # seconds; a safety net, no test is decided by it


def environ(**changes):
    """This process's environment, with the checkout importable from any folder.

    One thread a process: tests run side by side, and two threads that wait for each other on a busy
    machine take a thousand times as long as one.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    usual = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return {**os.environ, **usual, **changes}


def command(*arguments):
    return [sys.executable, "-m", "harness", *map(str, arguments)]


def ladder(*arguments, cwd=ROOT, env=None):
    """`ladder ARGUMENTS`, finished: returncode, stdout and stderr as text."""
    return subprocess.run(
        command(*arguments),
        cwd=cwd,
        env=env or environ(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        stdin=subprocess.DEVNULL,
    )


def fakes(*names):
    """--stage options for fake rungs in rungs/."""
    return [text for name in names for text in ("--stage", str(RUNGS / f"{name}.py"))]


class Started:
    """A `ladder` command that is still running, and the processes that it starts.

    All of them carry a mark in their environment, so that they are found wherever they hang.
    """

    def __init__(self, *arguments, log):
        self.mark = uuid.uuid4().hex
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command(*arguments),
                cwd=ROOT,
                env=environ(**{MARK: self.mark}),
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def text(self):
        return self.log.read_text()

    def wait_for(self, condition, what):
        """Wait until `condition()`; fail where the command ends or patience does before it."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.poll() is None, f"it ended before {what}:\n{self.text()}"
            assert time.monotonic() < deadline, f"waited too long for {what}:\n{self.text()}"
            time.sleep(0.02)

    def left_behind(self):
        """The processes of this run that are there now."""
        found = []
        for process in psutil.process_iter():
            try:
                mine = process.environ().get(MARK) == self.mark
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                pass
        return found

    def wait_until_gone(self, seconds=15):
        """The processes that are still there `seconds` after the command has ended."""
        deadline = time.monotonic() + seconds
        while (found := self.left_behind()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [f"{process.pid}: {' '.join(process.cmdline())}" for process in found]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        for process in self.left_behind():
            with contextlib.suppress(psutil.Error):
                process.kill()


def alive(pid):
    """Whether process `pid` still runs: a zombie that nobody has reaped doesn't."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pid, seconds=10):
    """Whether process `pid` ends within `seconds`."""
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


def by_name(path):
    """name -> the cells of a results file, in order."""
    found = {}
    for cell in read(path)[1]:
        found.setdefault(cell["name"], []).append(cell)
    return found
