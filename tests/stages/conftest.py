"""One thread a test: tensors here are small, and tests run beside each other."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Compiler:
    """cubins.py, which compiles kernels and reads what came of it: in this process they are
    interpreted.

    It is kept for the tests to come: to start it takes as long as to compile some kernels.
    """

    def __init__(self, cache, log):
        """`cache`: the folder in which Triton keeps what it compiles; `log`: one for its errors."""
        paths = [os.environ.get("LADDER_TRITON"), str(ROOT), *sys.path]
        changes = {
            "TRITON_INTERPRET": "0",
            "TRITON_CACHE_DIR": str(cache),
            "TRITON_DISABLE_LINE_INFO": "1",  # which no code depends on, and which takes its time
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }
        self.errors = log / "errors"
        self.environment, self.process = os.environ | changes, None

    def answers(self, *jobs):
        """What it says of each job; AssertionError with its last words where it ends instead."""
        if self.process is None:
            with self.errors.open("wb") as file:
                self.process = subprocess.Popen(
                    [sys.executable, "tools/cubins.py"], cwd=ROOT, env=self.environment, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file,
                )  # fmt: skip
        try:
            return [self.answer(job) for job in jobs]
        except BaseException:  # pytest's own timeout, too: it may be in the middle of a job
            self.end()
            raise

    def answer(self, job):
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        if line := self.process.stdout.readline():
            return json.loads(line)
        raise AssertionError(f"cubins.py ended at {job}:\n{self.errors.read_text()}")

    def end(self):
        """End it; the next job starts it anew."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


@pytest.fixture(scope="session")
def compiler(cubins, tmp_path_factory):
    compiler = Compiler(cubins, tmp_path_factory.mktemp("compiler"))
    yield compiler
    compiler.end()
