"""The judge: compares outputs with the oracles of a problem, in a process that runs no stage."""

import contextlib
import functools
import os
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from harness.isolation.call import blame
from harness.isolation.changes import AGAIN
from harness.isolation.child import (
    NO_MESSAGE,
    START_LIMIT,
    Child,
    ChildFailed,
    hear,
    starts_nothing,
)
from harness.isolation.messages import Failed, Ready, Verdict, tell
from harness.isolation.session import Session
from harness.problems.problem import ITEMSIZE, Problem

JUDGE_LIMIT: Final = 600.0  # seconds for the oracles, and for one comparison

ERRORS: Final = ("err_f64_max", "err_f64_rel", "err_stage3_max", "err_stage3_rel")


class NoVerdict(ChildFailed):
    """The judge can't make its oracles."""


class Judge(Session):
    """The parent's side of the judge of one problem at a time. It reads the outputs from files."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(judge, problem.to_json())

    def open(self) -> None:
        """Wait until the oracles are made. Raises NoVerdict where they can't be."""
        try:
            self.ready(START_LIMIT + JUDGE_LIMIT, f"the oracle took more than {JUDGE_LIMIT:g} s")
        except ChildFailed as error:
            raise NoVerdict(error.status, f"can't be checked: {error.reason}") from None

    def turn_to(self, problem: Problem) -> None:
        """Judge outputs of `problem` from now on. Raises NoVerdict as `open` does."""
        order = problem.to_json()
        self.begin = functools.partial(Child, judge, order)
        if self.child is not None:
            late = f"the oracle took more than {JUDGE_LIMIT:g} s"
            with contextlib.suppress(ChildFailed):  # a stage may have killed it: start another
                self.ask({"problem": order}, Ready, seconds=JUDGE_LIMIT, late=late)
                return
        self.open()

    def verdict(
        self, path: Path, again: int | None = None, change: list[int] | None = None
    ) -> Verdict:
        """The judge's verdict on the outputs in the file `path`, which is then removed.

        `again`: the index in changes.AGAIN of the change that they were computed after;
        `change`: the changed element (changes.Watched). Raises ChildFailed where the stage has not
        written the file, and where the judge fails twice.
        """
        if not path.is_file():  # announced, but never written
            raise ChildFailed("crashed", NO_MESSAGE)
        late = f"comparing its output took more than {JUDGE_LIMIT:g} s"
        order = {"path": str(path), "again": again, "change": change}
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


@starts_nothing
def judge(connection: Connection, order: dict[str, Any]) -> None:
    """In the judge's process: compare outputs of a problem with their oracles.

    `order` is the problem. Sends 'ready' once the oracles are made; then, for each order {'path',
    'again', 'change'}, a 'verdict' (below). An order {'problem'} turns to another problem.
    """
    import torch

    from harness.measures.accuracy import set_precision
    from harness.measures.oracle import make_oracles

    while True:
        problem = Problem.from_json(order)
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
        inputs: list[Any] = []  # q, k, v, dO: drawn once, for all verdicts with a change
        while "problem" not in (asked := hear(connection)):
            tell(connection, verdict(asked, problem, oracles, inputs))
        order = asked["problem"]


def verdict(
    order: Mapping[str, Any], problem: Problem, oracles: Mapping[str, Any], inputs: list[Any]
) -> Verdict:
    """The errors of the outputs in a file, whether they are finite and exact, and why not.

    `order`: 'path', the file; 'again', the index in AGAIN (changes.py) of the change that they were
    computed after, or None; 'change', the change of one element (changes.Watched), or None.
    """
    import torch

    from harness.measures.accuracy import judge_outputs
    from harness.measures.oracle import undo
    from harness.problems.directions import make_output_gradient
    from harness.problems.inputs import make_inputs

    sizes = [oracle.out64.numel() for oracle in oracles.values()]
    data = read_output(order["path"], sum(sizes) * ITEMSIZE[problem.dtype])
    if data is None:
        return Verdict(True, False, "its output was cut short")
    # compared on the oracles' device: on a GPU that takes milliseconds
    flat = data.view(getattr(torch, problem.dtype)).to(problem.device).double()
    factors = [1.0] * len(sizes)
    if order["again"] is not None:
        factors = list(AGAIN[problem.direction][order["again"]][1])
    outputs = [
        part.view(oracle.out64.shape) / factor
        for part, oracle, factor in zip(flat.split(sizes), oracles.values(), factors, strict=True)
    ]
    if order["change"] is not None:
        if not inputs:
            inputs += [*make_inputs(problem), make_output_gradient(problem)]
        truths = [oracle.out64 for oracle in oracles.values()]
        outputs = undo(outputs, truths, problem, inputs, order["change"])
    return Verdict(**judge_outputs(outputs, oracles))


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
