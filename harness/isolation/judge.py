"""The judge: a process that no stage ever enters compares outputs with the oracles of a problem."""

import contextlib
import os
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness.isolation.call import blame
from harness.isolation.child import NO_MESSAGE, START_LIMIT, ChildFailed, Message, hear, say
from harness.isolation.session import Session, is_bool, is_number, is_text, optional
from harness.isolation.watched import undo
from harness.problems.problem import ITEMSIZE, Problem

JUDGE_LIMIT = 600.0  # seconds for an oracle, and for a comparison

ERRORS = ("err_f64_max", "err_f64_rel", "err_stage3_max", "err_stage3_rel")
VERDICT = {
    "verdict": {
        "finite": is_bool, "exact": is_bool, "why": is_text,
        **dict.fromkeys(ERRORS, optional(is_number)),
    }
}  # fmt: skip


class NoVerdict(Exception):
    """The judge can't say what is right; `status` is a record's, `reason` says why."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class Judge(Session):
    """The process that holds one problem's oracles. Outputs come to it as files."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(judge, problem.to_json())

    def open(self) -> None:
        """Wait until the oracles are made, once. Raises NoVerdict where they can't be."""
        try:
            self.ready(START_LIMIT + JUDGE_LIMIT, f"the oracle took more than {JUDGE_LIMIT:g} s")
        except ChildFailed as error:
            raise NoVerdict(error.status, f"can't be checked: {error.reason}") from None

    def verdict(
        self, path: Path, again: int | None = None, change: list[int] | None = None,
        seed: int | None = None,
    ) -> Message:  # fmt: skip
        """What the judge finds of the outputs in the file `path`, which is then removed.

        `again`: which of the changes in directions.AGAIN they were computed after; `change`: the
        one of watched.py; `seed`: of their inputs, where it is not the problem's. Raises
        ChildFailed where the stage has not written the file, and where the judge fails twice.
        """
        if not path.is_file():  # announced, and never written
            raise ChildFailed("crashed", NO_MESSAGE)
        late = f"comparing its output took more than {JUDGE_LIMIT:g} s"
        order = {"path": str(path), "again": again, "change": change, "seed": seed}
        try:
            try:
                return self.ask(order, VERDICT, JUDGE_LIMIT, late)
            except ChildFailed:  # a stage may have ended it: another one judges
                self.open()
                return self.ask(order, VERDICT, JUDGE_LIMIT, late)
        except (ChildFailed, NoVerdict) as error:
            raise ChildFailed(error.status, f"the judge of its output failed: {error}") from None
        finally:
            with contextlib.suppress(OSError):
                path.unlink()  # outputs are large


def judge(connection: Connection, problem_json: dict[str, Any]) -> None:
    """In the judge's process: compare outputs of one problem with their oracles.

    Says 'ready' once the oracles are made; then 'verdict', for each order, with the errors, whether
    all is finite, whether it is exact, and why not. An order has a 'path'; `again`: which of
    AGAIN's changes (harness/problems/directions.py) the outputs were computed after, or None;
    `change`: the change of one element (watched.py), or None; `seed`: of their inputs, or None
    where it is that of the last.
    """
    import torch

    from harness.measures.accuracy import judge_outputs, set_precision
    from harness.measures.oracle import make_oracles
    from harness.problems.directions import AGAIN, make_output_gradient
    from harness.problems.inputs import make_inputs

    problem = Problem.from_json(problem_json)
    try:
        if problem.device == "cuda" and problem.dtype == "float32":
            set_precision(problem.precision)
        oracles = make_oracles(problem)
        if problem.device == "cuda":
            torch.cuda.empty_cache()  # what making them took is the contestants' again
    except BaseException as error:
        say(connection, "failed", **blame(error, problem))
        return
    say(connection, "ready")
    sizes = [oracle.out64.numel() for oracle in oracles.values()]
    none = dict.fromkeys(ERRORS)
    given: list[Any] = []  # q, k, v, dO: drawn once, for all who are asked with a change
    while True:
        order = hear(connection)
        if order["seed"] not in (None, problem.seed):
            problem, given = replace(problem, seed=order["seed"]), []
            oracles = make_oracles(problem)
        data = read_output(order["path"], sum(sizes) * ITEMSIZE[problem.dtype])
        if data is None:
            why = "its output was cut short"
            say(connection, "verdict", finite=True, exact=False, why=why, **none)
            continue
        # compared where the oracles are: on a GPU that takes milliseconds
        flat = data.view(getattr(torch, problem.dtype)).to(problem.device).double()
        factors = [1.0] * len(sizes)
        if order["again"] is not None:
            factors = list(AGAIN[problem.direction][order["again"]][1])
        outputs = [
            part.view(oracle.out64.shape) / factor
            for part, oracle, factor in zip(
                flat.split(sizes), oracles.values(), factors, strict=True
            )
        ]
        if order["change"] is not None:
            given = given or [*make_inputs(problem), make_output_gradient(problem)]
            truths = [oracle.out64 for oracle in oracles.values()]
            outputs = undo(outputs, truths, problem, given, order["change"])
        say(connection, "verdict", **(none | judge_outputs(outputs, oracles)))


def read_output(path: str, size: int) -> Any:
    """The bytes of a file of that size, a tensor; None where it isn't one."""
    import numpy
    import torch

    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # it may be a pipe
        with os.fdopen(handle, "rb") as file:
            if os.fstat(handle).st_size == size:
                data = numpy.fromfile(file, dtype=numpy.uint8)
                return torch.from_numpy(data) if data.size == size else None
    return None
