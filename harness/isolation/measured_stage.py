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
from collections.abc import Callable, Generator
from multiprocessing.connection import Connection
from typing import Any, Final, cast

from harness.isolation import messages, ranks
from harness.isolation.call import (
    Call,
    WrongOutput,
    bind,
    blame,
    launch_configs,
    prepare_for,
    products,
    start_afresh,
    warm_up,
    was_interpreted,
    write_outputs,
)
from harness.isolation.changes import STRIDED, Given, Kept, Watched, ask_again
from harness.isolation.child import one_line
from harness.isolation.messages import Asked, Checked, Finish, Finished, Order, Turn, tell, told
from harness.isolation.processes import set_data_limit
from harness.measures.samples import Plan, Sampled
from harness.problems.judged import judged_heads

SETUP: Final = 1 << 27  # bytes that importing Triton and first calls keep: no memory of a stage


class MeasuredStage:
    """One stage in the process of a comparison: its call on `given`, and how it is measured."""

    def __init__(self, asked: Asked, order: Order, given: Given) -> None:
        import stages

        self.problem, self.out = asked.problem, asked.out
        self.order, self.whole, self.given = order, given, given
        self.module = stages.load(asked.path, sha256=asked.sha256)
        self.attend = bind(self.module.attend, self.problem)
        # it is measured where it computes: a CPU stage also takes a GPU's tensors
        self.device = self.module.STAGE.computes_on(self.problem.device)
        self.graph = order.graph and self.device == "cuda"
        # each is made when it is first needed
        self.call: Any = None
        self.timed: Any = None  # a Watched, or a Kept
        self.take: Callable[[Plan], Sampled] | None = None

    def prepare(self) -> Call:
        """The call, prepared once; for 'bwd' that includes the forward pass."""
        if self.call is None:
            self.call = prepare_for(self.problem, self.module, self.attend, self.given.tensors)
        return cast("Call", self.call)

    def write(self, outputs: Any, ending: str = "") -> None:
        """Write outputs for the judge, to the stage's file with this ending of its name.

        The ranks of a world put together what they have of the heads that are judged, and the
        first one writes it.
        """
        given = self.whole.tensors
        if self.problem.world > 1:
            outputs = tuple(x if x is None else self.gathered(x.detach()) for x in outputs)
            given = tuple(x if x is None else judged_heads(self.problem, x) for x in given)
        if self.order.rank == 0:
            write_outputs(outputs, self.problem, given, self.out + ending)

    def gathered(self, x: Any) -> Any:
        """The whole of which `x` is this rank's part, of the heads that are judged."""
        return self.module.unshard(judged_heads(self.problem, x), causal=self.problem.causal)

    def shard(self, x: Any) -> Any:
        """This rank's part of `x`."""
        return self.module.shard(x, causal=self.problem.causal)

    def check(self, strided: Given | None, base: int) -> Checked:
        """Call the stage for the first time and write its outputs; returns what was measured.

        The process's resident memory, `base` before it loaded any stage, is measured only where the
        stage is alone in it. It is then called with the same inputs `strided`, if there are any.
        """
        from harness.measures.memory import give_back, measure_peak, status_bytes
        from harness.measures.timing import time_once

        def once() -> tuple[Any, float]:
            return time_once(lambda: self.prepare()(), self.device)

        peak = meter = None
        start_afresh(self.problem)
        if self.problem.world > 1:
            self.given = self.whole.part(self.shard)
        if self.order.alone and self.device == "cpu":
            warm_up(self.module.attend, self.problem, self.given.tensors)
            start_afresh(self.problem)  # after the tiny call
            self.prepare()
            give_back()  # a call that reuses freed pages would not be measured
            kept = (status_bytes("VmRSS") or 0) - base
            (outputs, call_ms), peak, meter = measure_peak(once, self.device)
            if peak is not None and kept > max(SETUP, 2 * peak):
                peak = kept  # allocated before the call, and used during it
            first_ms = call_ms
        else:
            if self.order.alone:
                self.prepare()
            outputs, first_ms = once()
            call_ms = first_ms
            if self.device == "cuda":
                # not the first call, which also compiles and allocates cuBLAS's workspace
                outputs = None
                (outputs, call_ms), peak, meter = measure_peak(once, self.device)
        self.write(outputs)
        self.given.check_unwritten()
        if strided is not None:
            outputs = None
            self.check_strided(strided)
        return Checked(
            first_ms,
            call_ms,
            peak,
            meter,
            launch_configs(),
            products(),
            interpreted=was_interpreted(),
        )

    def check_strided(self, given: Given) -> None:
        """Call the stage with strided inputs, and write its outputs.

        Any error is a wrong output: the contract allows any strides, and the stage was able to
        compute the same shapes before.
        """
        try:
            self.write(
                prepare_for(self.problem, self.module, self.attend, given.tensors)(), ".strided"
            )
            given.check_unwritten()
        except Exception as error:
            raise WrongOutput(f"with {STRIDED}: {one_line(error)}") from None

    def sample(self, turn: Turn) -> Sampled:
        """Take one sample of the timed call (changes.py), which is the same for all samples."""
        from harness.measures.timing import sampler

        if self.take is None:
            start_afresh(self.problem)
            x = self.given.tensors[3 if self.problem.direction == "bwd" else 0]
            call = self.captured() if self.graph else self.call
            if self.problem.world > 1:
                self.timed = Kept(call)
                self.take = sampler(self.timed, self.device, ranks.aligner(self.device))
            else:
                self.timed = Watched(call, x, self.graph)
                self.take = sampler(self.timed, self.device)
        return self.take(turn)

    def captured(self) -> Call:
        """The call as a CUDA graph; StageUnavailable where it can't be captured."""
        from harness.measures.timing import captured
        from stages.contract import StageUnavailable

        try:
            return captured(self.prepare())
        except Exception as error:
            raise StageUnavailable(f"not captured as a CUDA graph: {one_line(error)}") from error

    def finish(self, asked: Finish) -> Finished:
        """Make the calls after the samples. Of the rows of launches the fastest counts.

        Whatever else the CPU does makes a row slower; nothing makes one faster.
        """
        from harness.measures.timing import sm_clock_mhz, time_launches

        clock = launch_ms = None
        if self.device == "cuda":
            clock = sm_clock_mhz(self.call, asked.clock_calls)
            call = self.timed.call
            launch_ms = min(time_launches(call, asked.launches) for _ in range(asked.rows))
        skip_ratio = None if self.order.alone else self.skip_ratio()
        self.call_again()
        return Finished(clock, launch_ms, list(self.timed.change or ()), skip_ratio)

    def call_again(self) -> None:
        """Write the outputs of one timed call, and of further calls with changed inputs."""
        self.write(tuple(self.timed.kept), ".timed")
        if self.timed.overwritten():
            raise WrongOutput("an output changed after it was returned")
        self.timed.kept = self.timed.returned = ()
        call = self.timed.call if self.graph else self.call
        changed = ask_again(call, self.problem.direction, *self.given.tensors[2:])
        # closed here, so that the inputs are restored at once where a call raises
        with contextlib.closing(cast("Generator[Call, None, None]", changed)) as calls:
            for index, call in enumerate(calls):
                self.write(call(), f".again{index}")
        self.given.check_unwritten()

    def skip_ratio(self) -> float | None:
        """The share of (q block, KV tile) pairs that the stage never visits; None if unknown.

        An error is printed to the log and ignored, as is a number outside 0 to 1: neither
        invalidates the times.
        """
        count = getattr(self.module, "skip_ratio", None)
        if count is None:
            return None
        try:
            ratio = float(bind(count, self.problem)(*self.given.tensors[:3]))
        except Exception as error:
            print(f"{self.module.STAGE.name}: skip_ratio: {error!r}", flush=True)
            return None
        return ratio if 0.0 <= ratio <= 1.0 else None


def serve(connection: Connection, order: Order) -> None:
    """Run one comparison; messages.py lists what it sends, and what the parent does."""
    import torch

    from harness.measures.memory import status_bytes

    try:
        torch.set_num_threads(1)  # timing.py says why
        if order.problem.world > 1:
            ranks.join(order)
        given = Given(order.problem)
        strided = Given(order.problem, strided=True, changed=True) if order.strided else None
        if order.problem.device == "cpu":
            set_data_limit(order.memory)
        base = status_bytes("VmRSS") or 0
        tell(connection, messages.Loads())
        measured = [MeasuredStage(asked, order, given) for asked in order.stages]
        tell(connection, messages.Ready())
        told(connection, messages.Start)
        for stage in measured:
            tell(connection, outcome_of(functools.partial(stage.check, strided, base), stage))
        going = told(connection, messages.Keep).going
        for index, stage in enumerate(measured):
            if index not in going:
                stage.call = None
        if order.problem.world > 1:
            tell(connection, ranks.measure_link(order.problem.device))
        while True:
            request = told(connection, Turn, Finish)
            stage = measured[request.stage]
            if isinstance(request, Finish):
                given.check_unwritten()  # the samples of all: whoever wrote there isn't known
                work = functools.partial(stage.finish, request)
            else:
                work = functools.partial(stage.sample, request)
            tell(connection, outcome_of(work, stage))
    except BaseException as error:
        tell(connection, messages.Failed(**blame(error)))


def outcome_of(work: Callable[[], object], stage: MeasuredStage) -> object:
    """The result of `work`, or Out where the stage fails at it, whose memory is then freed.

    The error is let go with its traceback, whose frames keep tensors alive: S of stage 3 may take
    most of a GPU's memory, which the next stage needs. Raises the device's error where the device
    is lost.
    """
    import torch

    from stages.common.contract import StageUnavailable

    try:
        return work()
    except BaseException as error:
        error.__cause__ = error.__context__ = None
        failed = error.with_traceback(None)
    stage.call = stage.timed = stage.take = None
    gc.collect()
    # a rank that failed alone would wait for the others here; all are ended then
    if stage.problem.device == "cuda" and stage.problem.world == 1:
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            if not isinstance(failed, StageUnavailable):
                raise
            raise failed from None  # a capture that failed ends the process, for its own reason
    with contextlib.suppress(WrongOutput):  # it has failed already; this restores the inputs
        stage.given.check_unwritten()
    return messages.Out(**blame(failed), refused=isinstance(failed, ValueError))
