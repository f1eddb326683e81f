"""The process of a comparison, from the child's side: it holds one stage, or several.

Each stage is loaded, called for the first time (which compiles) and called once more under the
memory meter where there is one. Its outputs go to a file for the judge, another process. Only
stages that the judge has found right (or wrong by design) are timed: no stage is timed unchecked.
After its timing each stage is called again with v and dO changed, to detect a stage that caches its
outputs (changes.py says how). What is said when is listed in messages.py.

An error in a stage makes only that stage fail. Where the device is lost with it (an illegal access
ends all CUDA work of a process), the whole comparison fails.
"""

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, Final, cast

from harness.isolation import messages
from harness.isolation.call import (
    Call,
    WrongOutput,
    bind,
    blame,
    launch_configs,
    prepare_for,
    start_afresh,
    warm_up,
    was_interpreted,
    write_outputs,
)
from harness.isolation.changes import STRIDED, Given, Watched, ask_again
from harness.isolation.child import one_line
from harness.isolation.messages import (
    Checked,
    CountTiles,
    Finish,
    Finished,
    Order,
    Out,
    Turn,
    tell,
    told,
)
from harness.isolation.processes import set_data_limit
from harness.measures.samples import Plan, Sampled
from harness.problems.problem import Problem

LAUNCH_ROWS: Final = 5
SETUP: Final = 1 << 27  # bytes that importing Triton and first calls keep: no memory of a stage


class MeasuredStage:
    """One stage in the process of a comparison: its call, and the files for its outputs.

    `problem` has a page size where the stage reads from a paged cache.
    """

    def __init__(
        self, module: ModuleType, problem: Problem, out: str, base: int | None, graph: bool
    ) -> None:
        self.base = base  # resident bytes of the process before it loaded any stage
        self.module, self.problem, self.out = module, problem, out
        self.attend = bind(module.attend, problem)
        # it is measured where it computes: a CPU stage also takes a GPU's tensors
        self.device = module.STAGE.computes_on(problem.device)
        self.graph = graph and self.device == "cuda"
        self.call: Call | None = None
        self.timed: Watched | None = None
        self.take: Callable[[Plan], Sampled] | None = None

    def prepared(self, given: Given) -> Call:
        """The call, prepared once; for 'bwd' that includes the forward pass."""
        if self.call is None:
            self.call = prepare_for(self.problem, self.module, self.attend, given.tensors)
        return self.call

    def check(self, given: Given, alone: bool, strided: Given | None) -> Checked:
        """Call the stage for the first time and write its outputs; returns what was measured.

        The process's resident memory is measured only where the stage is `alone` in it. It is then
        called with the same inputs `strided`, where they are given.
        """
        from harness.measures.memory import give_back, measure_peak, status_bytes
        from harness.measures.timing import time_once

        def once() -> tuple[Any, float]:
            return time_once(lambda: self.prepared(given)(), self.device)

        peak = meter = None
        start_afresh(self.problem)
        if alone and self.device == "cpu":
            warm_up(self.module.attend, self.problem, given.tensors)
            start_afresh(self.problem)  # after the tiny call
            self.prepared(given)
            give_back()  # a call that reuses freed pages would not be measured
            kept = (status_bytes("VmRSS") or 0) - self.base if self.base else 0
            (outputs, call_ms), peak, meter = measure_peak(once, self.device)
            if peak is not None and kept > max(SETUP, 2 * peak):
                peak = kept  # allocated before the call, and used during it
            first_ms = call_ms
        else:
            if alone:
                self.prepared(given)
            outputs, first_ms = once()
            call_ms = first_ms
            if self.device == "cuda":
                # not the first call, which also compiles and allocates cuBLAS's workspace
                outputs = None
                (outputs, call_ms), peak, meter = measure_peak(once, self.device)
        write_outputs(outputs, self.problem, given.tensors, self.out)
        given.check_unwritten()
        if strided is not None:
            outputs = None
            self.check_strided(strided)
        return Checked(
            first_ms, call_ms, peak, meter, launch_configs(), interpreted=was_interpreted()
        )

    def check_strided(self, given: Given) -> None:
        """Call the stage with the strided inputs, and write its outputs.

        Any error is a wrong output: the contract allows any strides, and the stage was able to
        compute the same shapes before.
        """
        try:
            outputs = prepare_for(self.problem, self.module, self.attend, given.tensors)()
            write_outputs(outputs, self.problem, given.tensors, f"{self.out}.strided")
            given.check_unwritten()
        except Exception as error:
            raise WrongOutput(f"with {STRIDED}: {one_line(error)}") from None

    def answer(self, given: Given, request: Turn | Finish) -> Sampled | Finished:
        """Take one sample of its timed call, which is made for the first one; or finish."""
        from harness.measures.timing import sampler

        if isinstance(request, Finish):
            return self.finish(given, request)
        if self.take is None:
            start_afresh(self.problem)
            self.take = sampler(self.watched(given), self.device)
        return self.take(Plan(request.untimed, request.calls, request.head_start))

    def watched(self, given: Given) -> Watched:
        """The call for the timer (changes.py), the same object for all samples."""
        if self.timed is None:
            x = given.tensors[3 if self.problem.direction == "bwd" else 0]
            call = self.prepared(given)
            self.timed = Watched(self.captured(call) if self.graph else call, x, self.graph)
        return self.timed

    def captured(self, call: Call) -> Call:
        """The call as a CUDA graph; StageUnavailable where it can't be captured."""
        from harness.measures.timing import captured
        from stages.contract import StageUnavailable

        try:
            return captured(call)
        except Exception as error:
            raise StageUnavailable(f"not captured as a CUDA graph: {one_line(error)}") from error

    def finish(self, given: Given, asked: Finish) -> Finished:
        """Make the calls after the samples. Of the rows of launches the fastest counts.

        Whatever else the CPU does makes a row slower; nothing makes one faster.
        """
        from harness.measures.timing import sm_clock_mhz, time_launches

        clock = launch_ms = None
        if self.device == "cuda":
            clock = sm_clock_mhz(self.prepared(given), asked.clock_calls)
            call = self.watched(given).call
            launch_ms = min(time_launches(call, asked.launches) for _ in range(LAUNCH_ROWS))
        self.call_again(given)
        return Finished(clock, launch_ms, list(self.watched(given).change or ()))

    def call_again(self, given: Given) -> None:
        """Write the outputs of one timed call, and of further calls with changed inputs."""
        assert self.timed is not None, "only a stage that was timed is called again"
        write_outputs(tuple(self.timed.kept), self.problem, given.tensors, f"{self.out}.timed")
        if self.timed.overwritten():
            raise WrongOutput("an output changed after it was returned")
        self.timed.kept = self.timed.returned = ()
        call = self.timed.call if self.graph else self.prepared(given)
        changed = ask_again(call, self.problem.direction, *given.tensors[2:])
        # closed here, so that the inputs are restored at once where a call raises
        with contextlib.closing(cast("Generator[Call, None, None]", changed)) as calls:
            for index, call in enumerate(calls):
                write_outputs(call(), self.problem, given.tensors, f"{self.out}.again{index}")
        given.check_unwritten()

    def skip_ratio(self, given: Given) -> float | None:
        """The share of (q block, KV tile) pairs that the stage never visits; None if unknown.

        An error is printed to the log and ignored, as is a number outside 0 to 1: neither
        invalidates the times.
        """
        count = getattr(self.module, "skip_ratio", None)
        if count is None:
            return None
        try:
            ratio = float(bind(count, self.problem)(*given.tensors[:3]))
        except Exception as error:
            print(f"{self.module.STAGE.name}: skip_ratio: {error!r}", flush=True)
            return None
        return ratio if 0.0 <= ratio <= 1.0 else None


def serve(connection: Connection, order: Order) -> None:
    """Run one comparison; messages.py lists what it sends, and what the parent does."""
    import torch

    import stages
    from harness.measures.memory import status_bytes

    problem = order.problem
    try:
        torch.set_num_threads(1)  # timing.py says why
        given = Given(problem)
        strided = Given(problem, strided=True, changed=True) if order.strided else None
        if problem.device == "cpu":
            set_data_limit(order.memory)
        base = status_bytes("VmRSS") if sys.platform == "linux" else None
        tell(connection, messages.Loads())
        files = zip(order.paths, order.sha256, strict=True)
        modules = [stages.load(path, sha256=digest) for path, digest in files]
        measured = [
            MeasuredStage(module, asked, out, base, order.graph)
            for module, asked, out in zip(modules, order.problems, order.outs, strict=True)
        ]
        tell(connection, messages.Ready())
        told(connection, messages.Start)
        for stage in measured:
            check = functools.partial(stage.check, given, order.alone, strided)
            tell(connection, outcome_of(check, stage, given))
        going = told(connection, messages.Keep).going
        for index, stage in enumerate(measured):
            if index not in going:
                stage.call = None
        finished = False
        while True:
            request = told(connection, Turn, Finish, CountTiles)
            stage = measured[request.stage]
            if isinstance(request, CountTiles):
                tell(connection, messages.Counted(stage.skip_ratio(given)))
                continue
            if isinstance(request, Finish) and not finished:
                given.check_unwritten()
                finished = True
            tell(
                connection,
                outcome_of(functools.partial(stage.answer, given, request), stage, given),
            )
    except BaseException as error:
        tell(connection, messages.Failed(**blame(error)))


def outcome_of(work: Callable[[], object], stage: MeasuredStage, given: Given) -> object:
    """The result of `work`; where the stage fails at it, its memory is freed and it is Out.

    The error is let go with its traceback, whose frames keep tensors alive: S of stage 3 may take
    most of a GPU's memory, which the next stage needs.
    """
    try:
        return work()
    except BaseException as error:
        error.__cause__ = error.__context__ = None
        failed = error.with_traceback(None)
    return drop_out(failed, stage, given)


def drop_out(error: BaseException, stage: MeasuredStage, given: Given) -> Out:
    """Free the memory of a stage that failed; returns its status and reason.

    Raises the device's error where the device is lost.
    """
    import torch

    from stages.common.contract import StageUnavailable

    stage.call = stage.timed = stage.take = None
    gc.collect()
    if stage.problem.device == "cuda":
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            if not isinstance(error, StageUnavailable):
                raise
            raise error from None  # a capture that failed ends the process, for its own reason
    with contextlib.suppress(WrongOutput):  # it has failed already; this restores the inputs
        given.check_unwritten()
    return Out(**blame(error), refused=isinstance(error, ValueError))
