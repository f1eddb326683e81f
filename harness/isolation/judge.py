"""The judge: compares outputs with the oracles of a problem, in a process that runs no stage."""

import contextlib
import os
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from harness.isolation.call import blame
from harness.isolation.changes import AGAIN
from harness.isolation.child import NO_MESSAGE, START_LIMIT, ChildFailed, hear
from harness.isolation.messages import Failed, Ready, Verdict, tell
from harness.isolation.session import Session
from harness.problems.problem import ITEMSIZE, Problem

JUDGE_LIMIT: Final = 600.0  # seconds for the oracles, and for one comparison

ERRORS: Final = ("err_f64_max", "err_f64_rel", "err_stage3_max", "err_stage3_rel")


class NoVerdict(ChildFailed):
    """The judge can't make its oracles."""


class Judge(Session):
    """The parent's side of the judge of one problem. It reads the outputs from files."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(judge, problem.to_json())

    def open(self) -> None:
        """Wait until the oracles are made. Raises NoVerdict where they can't be."""
        try:
            self.ready(START_LIMIT + JUDGE_LIMIT, f"the oracle took more than {JUDGE_LIMIT:g} s")
        except ChildFailed as error:
            raise NoVerdict(error.status, f"can't be checked: {error.reason}") from None

    def verdict(
        self, path: Path, again: int | None = None, change: list[int] | None = None,
        seed: int | None = None,
    ) -> Verdict:  # fmt: skip
        """The judge's verdict on the outputs in the file `path`, which is then removed.

        `again`: the index in changes.AGAIN of the change that they were computed after;
        `change`: the changed element (changes.Watched); `seed`: of their inputs, where it is
        not the last one's. Raises ChildFailed where the stage has not written the file, and where
        the judge fails twice.
        """
        if not path.is_file():  # announced, but never written
            raise ChildFailed("crashed", NO_MESSAGE)
        late = f"comparing its output took more than {JUDGE_LIMIT:g} s"
        order = {"path": str(path), "again": again, "change": change, "seed": seed}
        try:
            try:
                return self.ask(order, Verdict, seconds=JUDGE_LIMIT, late=late)
            except ChildFailed:  # a stage may have killed the judge: start another
                self.open()
                return self.ask(order, Verdict, seconds=JUDGE_LIMIT, late=late)
        except ChildFailed as error:
            raise ChildFailed(error.status, f"the judge of its output failed: {error}") from None
        finally:
            with contextlib.suppress(OSError):
                path.unlink()  # outputs are large


def judge(connection: Connection, problem_json: dict[str, Any]) -> None:
    """In the judge's process: compare outputs of one problem with their oracles.

    Sends 'ready' once the oracles are made; then, for each order {'path', 'again', 'change',
    'seed'}, a 'verdict': the errors, whether the outputs are finite and exact, and why not.
    `again`: the index in AGAIN (changes.py) of the change that the outputs were computed
    after, or None; `change`: the change of one element (changes.Watched), or None; `seed`: of
    their inputs, or None where it is that of the last.
    """
    import torch

    from harness.measures.accuracy import judge_outputs, set_precision
    from harness.measures.oracle import make_oracles, undo
    from harness.problems.directions import make_output_gradient
    from harness.problems.inputs import make_inputs

    problem = Problem.from_json(problem_json)
    try:
        if problem.device == "cuda" and problem.dtype == "float32":
            set_precision(problem.precision)
        oracles = make_oracles(problem)
        if problem.device == "cuda":
            torch.cuda.empty_cache()  # the stages need the memory that this took
    except BaseException as error:
        tell(connection, Failed(**blame(error)))
        return
    tell(connection, Ready())
    sizes = [oracle.out64.numel() for oracle in oracles.values()]
    inputs: list[Any] = []  # q, k, v, dO: drawn once, for all verdicts with a change
    while True:
        order = hear(connection)
        if order["seed"] not in (None, problem.seed):
            problem, inputs = replace(problem, seed=order["seed"]), []
            oracles = make_oracles(problem)
        data = read_output(order["path"], sum(sizes) * ITEMSIZE[problem.dtype])
        if data is None:
            tell(connection, Verdict(True, False, "its output was cut short"))
            continue
        # compared on the oracles' device: on a GPU that takes milliseconds
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
            inputs = inputs or [*make_inputs(problem), make_output_gradient(problem)]
            truths = [oracle.out64 for oracle in oracles.values()]
            outputs = undo(outputs, truths, problem, inputs, order["change"])
        tell(connection, Verdict(**judge_outputs(outputs, oracles)))


def read_output(path: str, size: int) -> Any:
    """Read a file of `size` bytes as a tensor; None where it is missing or of another size."""
    import numpy
    import torch

    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # it may be a pipe
        with os.fdopen(handle, "rb") as file:
            if os.fstat(handle).st_size == size:
                data = numpy.fromfile(file, dtype=numpy.uint8)
                return torch.from_numpy(data) if data.size == size else None
    return None
