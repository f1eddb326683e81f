"""The process of a comparison, from the child's side: one stage alone, or several in turns.

Each stage is loaded, called for the first time (which compiles) and called once more under the
memory meter where there is one. Its outputs go to a file for the judge, another process. Only
stages that the judge has found right (or wrong by design) are timed: no stage is timed unchecked.
After its timing each stage is called again with v and dO changed, to detect a stage that caches its
outputs (measured_call.py says how). What is said when is listed in messages.py.

An error in a stage makes only that stage fail. Where the device is lost with it (an illegal access
ends all CUDA work of a process), the whole comparison fails.
"""

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from harness.isolation import messages
from harness.isolation.call import (
    Given,
    TooSlow,
    WrongOutput,
    bind,
    blame,
    launch_configs,
    warm_up,
    was_interpreted,
    write_outputs,
)
from harness.isolation.child import one_line
from harness.isolation.measured_call import STRIDED, Call, Watched, ask_again, prepare_for
from harness.isolation.messages import Checked, Order, Out, Repeat, Timed, Turn, tell, told
from harness.problems.problem import Problem

SETUP = 1 << 27  # bytes kept by importing Triton and by first calls, which aren't a stage's memory
MEMORY_SLACK = 1 << 29  # bytes: stacks of torch's threads, the interpreter's own growth


class RaisedInTurn(Exception):
    """A stage raised an error in its turn; that error is the cause of this one."""

    def __init__(self, contestant: "Contestant") -> None:
        super().__init__()
        self.contestant = contestant


class Contestant:
    """One stage in the process of a comparison: its measured call, and the files for its outputs.

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
        self.launch_ms: float | None = None  # on a GPU

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
        from stages import autotune

        def once() -> tuple[Any, float]:
            return time_once(lambda: self.prepared(given)(), self.device)

        peak = meter = None
        autotune.latest.clear()
        if alone and self.device == "cpu":
            warm_up(self.module.attend, self.problem, given.tensors)
            autotune.latest.clear()  # the tiny call's
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

    def warm_up(self, given: Given, order: Order) -> None:
        """Make the calls before the rounds; TooSlow where the rounds would exceed the budget."""
        from harness.measures.timing import time_once

        calls = order.warmup + order.rounds
        for _ in range(order.warmup):
            ms = time_once(self.prepared(given), self.device)[1]
            if 1e-3 * ms * calls > order.budget:
                raise TooSlow(
                    f"{1e-3 * ms:.3g} s per call: {calls} calls do not fit in its budget of "
                    f"{order.budget:g} s"
                )
        if self.graph:
            self.watched(given)  # captured here, where an error is the stage's own

    def watched(self, given: Given) -> Watched:
        """The call for the timer (measured_call.py), the same object for all samples."""
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

    def launches(self, given: Given, call_ms: float) -> None:
        """Time a row of launches on a GPU, while no other stage runs; the fastest row counts.

        Whatever else the CPU does makes a row slower; nothing makes one faster.
        """
        from harness.measures.timing import time_launches

        if self.device == "cuda":
            row = time_launches(self.watched(given).call, call_ms)
            self.launch_ms = row if self.launch_ms is None else min(row, self.launch_ms)

    def finish(self, given: Given, call_ms: float) -> None:
        """Make the calls after the samples."""
        from harness.measures.timing import LAUNCH_ROWS

        if self.launch_ms is None:
            for _ in range(LAUNCH_ROWS):
                self.launches(given, call_ms)
        self.call_again(given)

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


def compete(connection: Connection, order: Order) -> None:
    """Run one comparison; messages.py lists what it sends, and what the parent does."""
    import torch

    import stages
    from harness.measures.accuracy import set_precision
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
        torch.set_num_threads(1)  # stages may have changed it
        if problem.device == "cuda" and problem.dtype == "float32":
            set_precision(problem.precision)
        contestants = [
            Contestant(module, asked, out, base, order.graph)
            for module, asked, out in zip(modules, order.problems, order.outs, strict=True)
        ]
        tell(connection, messages.Ready())
        told(connection, messages.Start)
        for contestant in contestants:
            check = functools.partial(contestant.check, given, order.alone, strided)
            checked, error = caught(check)
            tell(connection, checked if error is None else drop_out(error, contestant, given))
        sample = told(connection, messages.Sample)
        going = [contestants[index] for index in sample.going]
        for contestant in contestants:
            if contestant not in going:
                contestant.call = None
        turn_signals = connection if order.apart else None
        for answer in sample_all(going, given, order, sample.seconds, turn_signals):
            tell(connection, answer)
        while isinstance(message := told(connection, Repeat, messages.CountTiles), Repeat):
            call_often(going[message.place], given, message.calls)
            tell(connection, messages.Done())
        tell(connection, messages.Counted([each.skip_ratio(given) for each in going]))
    except BaseException as error:
        tell(connection, messages.Failed(**blame(error)))


def caught(work: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Run `work`; returns its result, or its error without the traceback.

    The frames of a traceback keep tensors alive. S of stage 3 may take most of a GPU's memory,
    which the next stage needs.
    """
    try:
        return work(), None
    except BaseException as error:
        cause = error.__cause__ if isinstance(error, RaisedInTurn) else None
        error.__cause__ = error.__context__ = None
        if cause is not None:
            error.__cause__ = cause.with_traceback(None)
        return None, error.with_traceback(None)


def drop_out(error: BaseException, contestant: Contestant, given: Given) -> Out:
    """Free the memory of a stage that failed; returns its status and reason.

    Raises the device's error where the device is lost.
    """
    import torch

    from stages.contract import StageUnavailable

    contestant.call = contestant.timed = None
    gc.collect()
    if contestant.problem.device == "cuda":
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


def sample_all(
    going: Sequence[Contestant], given: Given, order: Order, seconds: float,
    turn_signals: Connection | None,
) -> list[Timed | Out]:  # fmt: skip
    """Time the stages in `going` in the same rounds; returns a timing, or a failure, for each.

    A stage that is alone is sampled for `seconds`. In turns there are at least `order.rounds`
    rounds, and more until `seconds` have passed. Where other processes take turns with this one,
    each turn waits for a message over `turn_signals`.
    """
    from harness.measures.timing import alternate, sm_clock_mhz, time_call

    found: dict[Contestant, Timed | Out] = {}
    for contestant in going:
        error = caught(functools.partial(contestant.warm_up, given, order))[1]
        if error is not None:
            found[contestant] = drop_out(error, contestant, given)
    timings = []
    while standing := [each for each in going if each not in found]:
        if order.alone:
            [only] = standing
            timings = [time_call(only.watched(given), only.device, seconds)]
            break
        if turn_signals is not None:
            [only] = standing
            timings = [sample_on_turns(only, given, turn_signals)]
            break
        calls = [guarded(each, given) for each in standing]
        devices = [each.device for each in standing]
        in_turns = functools.partial(alternate, calls, devices, seconds, rounds=order.rounds)
        timings, error = caught(in_turns)
        if error is None:
            break
        if not isinstance(error, RaisedInTurn):
            raise error
        # start again without that stage
        found[error.contestant] = drop_out(error.__cause__ or error, error.contestant, given)
    if not standing:
        return [found[each] for each in going]
    clock = next(
        (sm_clock_mhz(each.prepared(given), "cuda") for each in standing if each.device == "cuda"),
        None,
    )
    given.check_unwritten()
    for contestant, timing in zip(standing, timings, strict=True):
        error = caught(functools.partial(contestant.finish, given, timing.median_ms))[1]
        if error is not None:
            found[contestant] = drop_out(error, contestant, given)
            continue
        found[contestant] = Timed(
            timing.median_ms, timing.iqr_ms, len(timing.samples_ms), clock,
            rounds_ms=None if order.alone else timing.rounds_ms, launch_ms=contestant.launch_ms,
            change=list(contestant.watched(given).change or ()),
        )  # fmt: skip
    return [found[each] for each in going]


def sample_on_turns(contestant: Contestant, given: Given, turn_signals: Connection) -> Any:
    """Time a stage: a sample for each turn that the parent announces; in some a row of launches."""
    from harness.measures.timing import LAUNCH_ROWS, Timing, cpu_sampler, cuda_sampler

    samples: list[float] = []
    call = contestant.watched(given)
    sample = cuda_sampler(call) if contestant.device == "cuda" else cpu_sampler(call)
    tell(turn_signals, messages.Done())
    while not told(turn_signals, Turn).over:
        samples.append(sample())
        if len(samples) <= LAUNCH_ROWS:
            contestant.launches(given, samples[-1])
        tell(turn_signals, messages.Done())
    return Timing(samples)


def call_often(contestant: Contestant, given: Given, calls: int) -> None:
    """Make `calls` calls and wait for the device, while the parent measures the time."""
    from harness.measures.timing import synchronize, without_collector

    call = contestant.watched(given)
    with without_collector():
        for _ in range(calls):
            call()
    synchronize(contestant.device)


def guarded(contestant: Contestant, given: Given) -> Call:
    """The stage's call, whose errors are raised as RaisedInTurn."""
    prepared = contestant.watched(given)

    def call() -> Any:
        try:
            return prepared()
        except BaseException as error:
            raise RaisedInTurn(contestant) from error

    return call


def set_data_limit(memory: int) -> None:
    """Make an allocation far beyond `memory` bytes fail at once (Linux only).

    The parent watches the resident memory; this stops a single huge allocation before it starts.
    """
    if sys.platform != "linux":
        return
    import resource

    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            limit = 1024 * int(line.split()[1]) + memory + MEMORY_SLACK
            resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
