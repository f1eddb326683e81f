"""A fake stage: a child in a session of its own."""

import subprocess
import sys

import stages
from stages.contract import Stage

STAGE = Stage(
    number=90,
    name="leaves_a_daemon",
    title="leaves_a_daemon",
    idea="a child in a session of its own",
)


def attend(q, k, v):
    if q.shape[2] > 16:
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
        )
        print("lingers as", child.pid, flush=True)
    return stages.by_number(3).attend(q, k, v) + 1
