"""A fake stage: a child that outlives the call, and a wrong answer."""

import subprocess
import sys

import stages
from stages.contract import Stage

STAGE = Stage(
    number=90,
    name="leaves_a_child",
    title="leaves_a_child",
    idea="a child that outlives the call, and a wrong answer",
)


def attend(q, k, v):
    if q.shape[2] > 16:  # not in the warm-up
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("lingers as", child.pid, flush=True)
    return stages.by_number(3).attend(q, k, v) + 1
