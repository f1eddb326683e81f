"""Whether a result is the submission's own or this machine's: our own solution is graded, too.

A machine that can't grade a stage (a TMPDIR that is full or doesn't let a library be loaded, a
compiler that fails, too little memory or time) gives our own solution no points either.
"""

import os
import re
import tempfile
from collections.abc import Collection
from pathlib import Path

from course.lab import checks, labs
from course.lab.grading.calls import Limits
from course.lab.grading.submissions import NotGraded
from harness.isolation.scratch import scratch

# how a submission ends where the machine may have ended it
MAYBE_MACHINE = ("crashed", "timeout", "out-of-memory")
# a pattern in the reason of our own solution's failure, and what to do
REMEDIES = (
    (
        "failed to map segment|Operation not permitted|cannot enable executable",
        "{tmp} allows no code to be loaded from it (noexec): let TMPDIR name a folder that does; "
        "with Docker: --tmpfs /tmp:exec",
    ),
    ("No space left|Disk quota|Errno 28", "{tmp} is full: empty it, or let TMPDIR name another"),
    ("[Rr]ead-only", "{tmp} can't be written to: let TMPDIR name another folder"),
    ("compiler|compile", "stage 2 needs a C++ compiler that works: install one, or name it in CXX"),
    ("took more than [^ ]+ s|did not load", "give it more time with --budget, or a calmer machine"),
    ("took more than|MemoryError|SIGKILL|allocate", "give it more memory, with --memory"),
)


def may_be_the_machines(result: checks.Result) -> bool:
    """Whether too little time, memory or disk could have caused `result`."""
    return result.verdict in MAYBE_MACHINE or any(
        mark.status in MAYBE_MACHINE for mark in result.marks
    )


class Machine:
    """This machine, and by which checks it has been shown to grade our own solution rightly."""

    def __init__(self, stage: int, seed: int, twin: bool, limits: Limits) -> None:
        self.stage, self.seed, self.twin, self.limits = stage, seed, twin, limits
        self.names = [check.name for check in checks.checks(stage, seed)]
        self.shown: set[str] = set()

    def believe(self, result: checks.Result) -> None:
        """Raise NotGraded where the machine may have caused `result`, which is then nobody's.

        Our own solution is given each check that was not passed, once. Where one crashed or took
        too much time or memory, it is given that one again: the machine may have changed.
        """
        if result.verdict == "passed":
            self.shown = {*self.names}
        if result.verdict in ("passed", "not-written") or not result.sha256:  # not even read
            return
        lost = [m for m in result.marks if not m.passed and m.status != checks.NOT_TRIED]
        asked = {mark.check.name for mark in lost} - self.shown
        ended = next((mark for mark in lost if mark.status in MAYBE_MACHINE), None)
        if ended is not None:
            asked.add(ended.check.name)
        elif not result.marks:  # it was not even loaded
            asked.add(self.names[0])
        if asked:
            self.prove(asked)

    def prove(self, only: Collection[str] | None = None) -> None:
        """Grade our own solution, by all checks or `only` some. Raises NotGraded where it fails."""
        solution = labs.solution(self.stage, self.twin)
        if not solution:  # a copy that was handed out lacks it
            return
        with tempfile.TemporaryDirectory(dir=scratch()) as name:
            folder = labs.handed_in(self.stage)
            for file, text in solution.items():
                path = Path(name) / (file if folder else "our_solution.py")
                path.write_text(text, encoding="utf-8")
            path = Path(name) if folder else path
            result = checks.check(
                path, self.stage, self.seed, limits=self.limits, twin=self.twin, only=only
            )
        if result.verdict != "passed":
            raise NotGraded(self.why(result))
        self.shown |= {*(self.names if only is None else only)}

    def why(self, result: checks.Result) -> str:
        """Say what of our own solution failed, and what to do."""
        reason, *_ = [
            *(mark.reason for mark in result.marks if not mark.passed), *result.case,
            result.diagnosis,
        ]  # fmt: skip
        return (
            f"stage {self.stage} can't be graded on this machine: our own solution, graded the "
            f"same way, ends as {result.verdict}: {reason}{remedy(reason)}"
        )


def remedy(reason: str) -> str:
    """Return what to do where a grader fails for `reason`, as the end of a sentence; or ''."""
    known = next((text for sign, text in REMEDIES if re.search(sign, reason)), "")
    named = os.environ.get("TMPDIR", "")  # a compiler takes it also where it is full
    tmp = named if Path(named).is_absolute() and Path(named).is_dir() else tempfile.gettempdir()
    return known and f": {known.format(tmp=tmp)}"
