"""Runs the `ladder` command as a user would, in a process of its own, and finds what it leaves.

`in_turn` runs it in a process that it shares with other tests' commands: start-up is most of what
a short one costs.
"""

import atexit
import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from functools import lru_cache, partial
from pathlib import Path

import psutil
import pytest
import torch
from stage_files import Table

from harness.isolation.fork_server import OF_GRADIENTS
from harness.records.jsonl import read

ROOT = Path(__file__).parents[2]
PACKAGES = ("stages", "harness", "attention_ladder", "course", "ladder")
HERE = Path(__file__).parent
FAKES = Table(HERE / "fakes.toml")
MARK = "LADDER_TEST_RUN"
YARDSTICK = "torch_three_gemm"  # by name, as records have it
# a file is asked with all inputs unless told: once is enough for what is no question of inputs
RUN = ("run", "--inputs", "normal")
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


def ladder(*arguments, cwd=ROOT, env=None, timeout=PATIENCE):
    """`ladder ARGUMENTS`, finished: returncode, stdout and stderr as text."""
    return subprocess.run(
        command(*arguments),
        cwd=cwd,
        env=env or environ(),
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )


def installed(folder):
    """What a wheel brings, copied into `folder`, and the environment in which it is imported."""
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    # an editable install of the checkout would come before the copy
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'Redirecting' not in type(f).__name__]\n"
    )
    return environ(PYTHONPATH=str(folder))


class Turns:
    """A process that carries out `ladder` commands, one after another (turns.py).

    What each would pay in a process of its own, importing the command line, and torch into the
    fork server, and loading our own stages, is paid once. They share what that process has in
    memory, so nothing belongs here whose point is a start, an end or a signal.
    """

    def __init__(self, env=None):
        """`env`: the environment to start in, else that of the other tests."""
        self.folder = tempfile.TemporaryDirectory(prefix="ladder-turns-")
        self.out, self.err = (Path(self.folder.name) / name for name in ("out", "err"))
        self.connection, theirs = multiprocessing.Pipe()
        # what --device cpu sets: where it hides no GPU, the fork server need not start anew for it
        preloaded = () if env else OF_GRADIENTS  # for all commands, whichever comes first
        unseen = {} if torch.cuda.is_available() else {"CUDA_VISIBLE_DEVICES": ""}
        with theirs, self.err.open("ab") as err:
            self.process = subprocess.Popen(
                [sys.executable, HERE / "turns.py", str(theirs.fileno()), *preloaded],
                cwd=ROOT,
                env=env or environ(**unseen),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=err,
                pass_fds=[theirs.fileno()],
            )
        assert self.connection.poll(PATIENCE) and self.ready(), self.err.read_text()

    def ready(self):
        """Whether the process is there and waits for a command."""
        with contextlib.suppress(OSError, EOFError):
            return self.connection.recv() == "ready"
        return False

    def run(self, arguments, cwd, briefly=True):
        """The command, finished; AssertionError with what it said where the process is lost."""
        self.out.write_bytes(b"")
        self.err.write_bytes(b"")
        try:
            self.connection.send((arguments, str(cwd), str(self.out), str(self.err), briefly))
            if not self.connection.poll(PATIENCE):
                raise TimeoutError
            code = self.connection.recv()
        except (OSError, EOFError) as error:  # TimeoutError is one
            self.process.kill()
            raise AssertionError(
                f"ladder {' '.join(arguments)}: {error!r}, exit code {self.process.wait()}:\n"
                f"{self.out.read_text()}{self.err.read_text()}"
            ) from error
        # encoded for the terminal that the environment says
        out, err = (path.read_text(errors="backslashreplace") for path in (self.out, self.err))
        return subprocess.CompletedProcess(arguments, code, out, err)

    def end(self):
        """End the process; its fork server and their cells end with it."""
        self.connection.close()
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()


def run_here(capsys, *arguments):
    """`ladder ARGUMENTS` in the test's own process: exit code, stdout and stderr."""
    from ladder import app

    with pytest.raises(SystemExit) as ended:
        app.main([str(argument) for argument in arguments])
    return ended.value.code, *capsys.readouterr()


TURNS = []  # the process of `in_turn`, where one was started


def in_turn(*arguments, cwd=ROOT, briefly=True):
    """`ladder ARGUMENTS` as `ladder` has it, in the process that earlier calls were carried out in.

    `briefly`: stages are timed for a few samples only; False where a time is looked at.
    A command that takes it along fails its own test; the next one gets a new process.
    """
    if not TURNS:
        TURNS.append(Turns())
        atexit.register(TURNS[0].end)
    try:
        return TURNS[0].run([str(argument) for argument in arguments], cwd, briefly)
    except BaseException:  # pytest's own timeout, too: the process may be in the middle of it
        ended = TURNS.pop()
        atexit.unregister(ended.end)
        ended.end()
        raise


def measured(folder, *arguments, code=0, **options):
    """`ladder ARGUMENTS`, as `in_turn`, its records in `folder`/run.jsonl; and those, `by_name`.

    It must end with the exit code `code`, whatever stages do.
    """
    out = folder / "run.jsonl"
    for written in (out, out.with_suffix(".csv")):
        written.unlink(missing_ok=True)
    done = in_turn(*arguments, "--out", out, **options)
    assert done.returncode == code and "Traceback" not in done.stderr, (done.stdout, done.stderr)
    return done, by_name(out)


def without_gpu(*arguments, cwd=ROOT):
    """`ladder ARGUMENTS` as on a machine without a GPU."""
    if torch.cuda.is_available():
        return ladder(*arguments, cwd=cwd, env=environ(CUDA_VISIBLE_DEVICES=""))
    return in_turn(*arguments, cwd=cwd)


@contextlib.contextmanager
def one_process(env):
    """A function as `ladder`, all of whose calls share a new process with the environment `env`."""
    turns = Turns(env)
    try:
        yield lambda *arguments, cwd=ROOT: turns.run([str(each) for each in arguments], cwd)
    finally:
        turns.end()


def fakes(*names):
    """--stage options for stages of fakes.toml, in files that are there until the process ends."""
    return FAKES.options(fakes_folder(), *names)


@lru_cache
def fakes_folder():
    folder = tempfile.mkdtemp(prefix="ladder-fakes-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class Started:
    """A `ladder` command that is still running, and the processes that it starts.

    All of them carry a mark in their environment, so that they are found wherever they hang.
    """

    def __init__(self, *arguments, log, group=False):
        """`group`: as a terminal has it, it leads a process group of its own."""
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
                start_new_session=group,
                # a shell has what it starts in the background ignore Ctrl-C, tests too
                preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
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

    def at_work(self):
        """Whether the command's fork server has a child: the command itself waits for that one."""
        for process in self.left_behind():
            with contextlib.suppress(psutil.Error):
                parents = [parent.pid for parent in process.parents()]
                if self.process.pid in parents[1:]:
                    return True
        return False

    def wait_until_gone(self, seconds=60):
        """The processes that are still there `seconds` after the command has ended."""
        deadline = time.monotonic() + seconds
        while (found := self.left_behind()) and time.monotonic() < deadline:
            time.sleep(0.1)
        named = []
        for process in found:
            with contextlib.suppress(psutil.Error):  # gone by now
                named.append(f"{process.pid}: {' '.join(process.cmdline())}")
        return named

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
