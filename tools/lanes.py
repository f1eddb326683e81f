"""Run commands on all GPUs of a machine: each GPU takes the next command when it has ended one.

    python tools/retake.py results/h200/hopper.jsonl results/h200/masks.jsonl > build/jobs
    python tools/lanes.py build/jobs --seconds 500 --limit 240 --logs build/lanes

A line that begins with `ladder` is a job. All other lines are run first, one by one. A job that
takes more than --limit seconds is ended, with all that it started; no job begins after --seconds,
and what runs then is ended. Where the file of a job's --out is there already, it is resumed: so the
same call, made again, goes on where the last one ended. A job's output is in --logs, NUMBER.log.
For a machine that is lent for minutes; it exits with 1 where a job failed or was left out.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import NamedTuple

GRACE = 5.0  # seconds that a job has to end its own children
LADDER = (sys.executable, "-m", "harness")


class Job(NamedTuple):
    """Its place in the file, from 1, and its words after `ladder`."""

    number: int
    words: Sequence[str]


def read(text: str) -> tuple[list[str], list[Job]]:
    """The lines to run first, and the jobs."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    first = [line for line in lines if shlex.split(line)[0] != "ladder"]
    jobs = [shlex.split(line)[1:] for line in lines if line not in first]
    return first, [Job(number, words) for number, words in enumerate(jobs, 1)]


def resumed(words: Sequence[str]) -> list[str]:
    """The words of a job, or those that resume it where its --out is there already."""
    if "--out" in words[:-1]:
        out = words[words.index("--out") + 1]
        if Path(out).exists():
            return [words[0], "--resume", out]
    return [*words]


def run(command: Sequence[str], seconds: float, log: Path, env: Mapping[str, str]) -> str:
    """Run a job; returns how it ended. After `seconds` its process group is ended."""
    with log.open("ab") as file:
        job = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=env,
            start_new_session=True,
        )  # fmt: skip
    try:
        return f"exit code {job.wait(seconds)}"
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGTERM)
        try:
            job.wait(GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        return f"ended after {seconds:.0f} s"


def run_all(
    jobs: Sequence[Job], devices: Sequence[str], seconds: float, limit: float, logs: Path,
    ladder: Sequence[str] = LADDER,
) -> dict[int, str]:  # fmt: skip
    """Run the jobs on the GPUs `devices`; returns how each ended, by its number."""
    end = time.monotonic() + seconds
    waiting: SimpleQueue[Job] = SimpleQueue()
    for job in jobs:
        waiting.put(job)
    ended, lock = {job.number: "not begun" for job in jobs}, Lock()

    def lane(device: str) -> None:
        while (left := end - time.monotonic()) > 0:
            try:
                job = waiting.get_nowait()
            except Empty:
                return
            command = [*ladder, *resumed(job.words)]
            env = os.environ | {"CUDA_VISIBLE_DEVICES": device}
            begun = time.monotonic()
            how = run(command, min(limit, left), logs / f"{job.number}.log", env)
            with lock:
                ended[job.number] = how
                took = f"{time.monotonic() - begun:.0f} s"
                print(f"{job.number} on GPU {device}: {how}, {took}: {shlex.join(job.words)}")
                sys.stdout.flush()

    lanes = [Thread(target=lane, args=(device,)) for device in devices]
    for each in lanes:
        each.start()
    for each in lanes:
        each.join()
    return ended


def visible() -> list[str]:
    """The GPUs that this process may use."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(i) for i in range(torch.cuda.device_count())]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("jobs", type=Path)
    parser.add_argument("--seconds", type=float, default=500.0, help="no job begins after them")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds of one job")
    parser.add_argument("--logs", type=Path, default=Path("build/lanes"))
    given = parser.parse_args()
    devices = visible()
    if not devices:
        raise SystemExit("lanes: no GPU here")
    first, jobs = read(given.jobs.read_text(encoding="utf-8"))
    given.logs.mkdir(parents=True, exist_ok=True)
    for line in first:
        subprocess.run(line, shell=True, check=True)
    ended = run_all(jobs, devices, given.seconds, given.limit, given.logs)
    left = {number: how for number, how in ended.items() if how != "exit code 0"}
    for number, how in left.items():
        print(f"{number}: {how}: see {given.logs / f'{number}.log'}")
    sys.exit(1 if left else 0)
