"""What runs in the process of a comparison: one stage alone, or several that take turns.

Each stage is loaded, called for the first time (which compiles) and once more under the memory
meter where there is one, and its outputs go to a file for the judge, another process. Only those
that the judge has found right (or wrong by design) go on to be timed: an unchecked time is never
taken. After its timing each is asked again with v and dO changed, so that one which remembers its
answer is found out (harness/problems/directions.py says how).

What a stage raises costs itself only. Where the device is lost with it (an illegal access ends all
CUDA work of a process) the whole comparison has failed.
"""

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from harness.isolation.call import (
    TooSlow,
    WrongOutput,
    bind,
    blame,
    launch_configs,
    warm_up,
    write_outputs,
)
from harness.isolation.child import hear, say
from harness.isolation.paged import PagedCall
from harness.problems.directions import Call, ask_again, prepare
from harness.problems.problem import Problem

MEMORY_SLACK = 1 << 29  # bytes: stacks of torch's threads, the interpreter's own growth
NAMES = ("q", "k", "v", "dO")


class RaisedInTurn(Exception):
    """A contestant raised an error in its turn; the cause is that error."""

    def __init__(self, contestant: "Contestant") -> None:
        super().__init__()
        self.contestant = contestant


class Given:
    """What every contestant is given: q, k, v and dO (None for a forward pass), and copies."""

    def __init__(self, problem: Problem) -> None:
        from harness.problems.directions import make_output_gradient
        from harness.problems.inputs import make_inputs

        dO: Any = None if problem.direction == "fwd" else make_output_gradient(problem)
        self.tensors: tuple[Any, ...] = (*make_inputs(problem), dO)
        self.copies = [None if x is None else x.clone() for x in self.tensors]

    def check_unwritten(self) -> None:
        """Raise WrongOutput where one is not, bit for bit, what it was; and restore it.

        The next contestant must not pay for the last. In place: calls that have been prepared read
        it where it was.
        """
        import torch

        changed = []
        for name, x, copy in zip(NAMES, self.tensors, self.copies, strict=True):
            if copy is not None and (x.shape != copy.shape or not torch.equal(x, copy)):
                changed.append(name)
                if x.shape != copy.shape:
                    x.resize_(copy.shape)
                x.data.copy_(copy)  # past the version counter: their graphs are good again
        if changed:
            raise WrongOutput(f"changed its input {changed[0]}")


class Contestant:
    """One stage in a comparison: the call that is measured, and where its outputs go.

    `problem` has a page size where it reads from a paged cache.
    """

    def __init__(self, module: ModuleType, problem: Problem, out: str) -> None:
        self.module, self.problem, self.out = module, problem, out
        self.attend = bind(module.attend, problem)
        # where it works says how it is measured: a CPU stage takes a GPU's tensors
        self.device = module.STAGE.computes_on(problem.device)
        self.call: Call | None = None

    def prepared(self, given: Given) -> Call:
        """Its call; for 'bwd' the forward pass is done where the call is made, once."""
        if self.call is None and self.problem.page_size:
            self.call = PagedCall(self.module, self.problem, *given.tensors[:3])
        elif self.call is None:
            self.call = prepare(self.attend, self.problem.direction, *given.tensors)
        return self.call

    def check(self, given: Given, alone: bool) -> dict[str, Any]:
        """Call it for the first time, write what it returns, say what was measured.

        The resident memory of a process is a stage's own only where it is `alone` in it.
        """
        from harness.measures.memory import give_back, measure_peak
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
            give_back()  # what that has freed would be taken again unseen
            (outputs, call_ms), peak, meter = measure_peak(once, self.device)
            first_ms = call_ms
        else:
            if alone:
                self.prepared(given)
            outputs, first_ms = once()
            call_ms = first_ms
            if self.device == "cuda":
                # the first call compiles and fetches cuBLAS's workspace, which aren't its memory
                outputs = None
                (outputs, call_ms), peak, meter = measure_peak(once, self.device)
        write_outputs(outputs, self.problem, given.tensors, self.out)
        given.check_unwritten()
        return {
            "first_call_ms": first_ms,
            "call_ms": call_ms,
            "peak_bytes": peak,
            "memory_meter": meter,
            "launch_configs": launch_configs(),
        }

    def warm_up(self, given: Given, order: dict[str, Any]) -> None:
        """The calls before the rounds; TooSlow where the rounds would take more than its budget."""
        from harness.measures.timing import time_once

        calls = order["warmup"] + rounds_of(order)
        for _ in range(order["warmup"]):
            ms = time_once(self.prepared(given), self.device)[1]
            if 1e-3 * ms * calls > order["budget"]:
                raise TooSlow(
                    f"{1e-3 * ms:.3g} s a call: {calls} calls do not fit in its budget of "
                    f"{order['budget']:g} s"
                )

    def again(self, given: Given) -> None:
        """Ask once more with its inputs changed, and write the answers."""
        asked = ask_again(self.prepared(given), self.problem.direction, *given.tensors[2:])
        # closed by hand: where a call raises, the inputs are changed back now and not some day
        with contextlib.closing(cast("Generator[Call, None, None]", asked)) as calls:
            for index, call in enumerate(calls):
                write_outputs(call(), self.problem, given.tensors, f"{self.out}.again{index}")
        given.check_unwritten()

    def skip_ratio(self, given: Given) -> float | None:
        """The share of (q block, KV tile) pairs that it never visits; None where it doesn't count.

        What it raises, or a figure that is no share, goes to the log: it is no reason to lose the
        times.
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


def compete(
    connection: Connection, paths: list[str], order: dict[str, Any], outs: list[str]
) -> None:
    """One comparison: the stages in the files `paths`, each writing to its file of `outs`.

    Says 'ready'; when told to start, 'checked' or 'out' for each, in order; when told who goes on
    and for how many seconds they are sampled, 'done' with a timing each, then 'counted' with the
    skip ratios. Or 'failed' at any point.
    """
    import torch

    import stages
    from harness.measures.accuracy import set_precision

    problem = Problem.from_json(order)
    try:
        modules = [stages.load(path) for path in paths]
        torch.set_num_threads(1)  # timing.py says why
        if problem.device == "cuda" and problem.dtype == "float32":
            set_precision(problem.precision)
        given = Given(problem)
        contestants = [
            Contestant(module, replace(problem, page_size=page_size), out)
            for module, page_size, out in zip(modules, order["page_sizes"], outs, strict=True)
        ]
        if all(contestant.device == "cpu" for contestant in contestants):
            set_data_limit(order["memory"])
        say(connection, "ready")
        hear(connection)
        for contestant in contestants:
            measured, error = caught(functools.partial(contestant.check, given, order["alone"]))
            if error is None:
                say(connection, "checked", **measured)
            else:
                say(connection, "out", **drop_out(error, contestant, given))
        turns = hear(connection)
        going = [contestants[index] for index in turns["going"]]
        for contestant in contestants:
            if contestant not in going:
                contestant.call = None
        if not going:
            return
        say(connection, "done", timings=take_turns(going, given, order, turns["seconds"]))
        say(connection, "counted", skip_ratios=[each.skip_ratio(given) for each in going])
    except BaseException as error:
        say(connection, "failed", **blame(error, problem))


def caught(work: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What `work` returns, or what it raises: less the traceback, whose frames hold tensors.

    S of stage 3 may be most of a GPU's memory; the next contestant wants it back.
    """
    try:
        return work(), None
    except BaseException as error:
        cause = error.__cause__ if isinstance(error, RaisedInTurn) else None
        error.__cause__ = error.__context__ = None
        if cause is not None:
            error.__cause__ = cause.with_traceback(None)
        return None, error.with_traceback(None)


def drop_out(error: BaseException, contestant: Contestant, given: Given) -> dict[str, Any]:
    """Status and reason of a contestant that failed, its memory given back.

    Raises what the device says where it is lost for all.
    """
    import torch

    contestant.call = None
    gc.collect()
    if contestant.problem.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    with contextlib.suppress(WrongOutput):  # it is out; the inputs are themselves again
        given.check_unwritten()
    return {**blame(error, contestant.problem), "refused": isinstance(error, ValueError)}


def rounds_of(order: dict[str, Any]) -> int:
    """How many rounds there are at the least."""
    from harness.measures.timing import LEAST_ROUNDS

    return int(order["rounds"] or LEAST_ROUNDS)


def take_turns(
    going: Sequence[Contestant], given: Given, order: dict[str, Any], seconds: float
) -> list[dict[str, Any]]:
    """A timing for each of `going`, all from the same rounds; or why it failed before their end.

    A stage that is alone is sampled for `seconds`; in turns there are so many rounds, and more
    until `seconds` have passed.
    """
    from harness.measures.timing import alternate, sm_clock_mhz, time_call

    found: dict[Contestant, dict[str, Any]] = {}
    for contestant in going:
        error = caught(functools.partial(contestant.warm_up, given, order))[1]
        if error is not None:
            found[contestant] = drop_out(error, contestant, given)
    timings = []
    while standing := [each for each in going if each not in found]:
        if order["alone"]:
            [only] = standing
            timings = [time_call(only.prepared(given), only.device, seconds)]
            break
        calls = [guarded(each, given) for each in standing]
        devices = [each.device for each in standing]
        timings, error = caught(
            functools.partial(alternate, calls, devices, seconds, rounds_of(order))
        )
        if error is None:
            break
        if not isinstance(error, RaisedInTurn):
            raise error
        # without it, from the beginning
        found[error.contestant] = drop_out(error.__cause__ or error, error.contestant, given)
    if not standing:
        return [found[each] for each in going]
    clock = next(
        (sm_clock_mhz(each.prepared(given), "cuda") for each in standing if each.device == "cuda"),
        None,
    )
    given.check_unwritten()
    for contestant, timing in zip(standing, timings, strict=True):
        error = caught(functools.partial(contestant.again, given))[1]
        found[contestant] = (
            drop_out(error, contestant, given)
            if error is not None
            else {
                "time_ms": timing.median_ms,
                "time_iqr_ms": timing.iqr_ms,
                "samples": len(timing.samples_ms),
                "sm_clock_mhz": clock,
                "rounds_ms": None if order["alone"] else timing.rounds_ms,
            }
        )
    return [found[each] for each in going]


def guarded(contestant: Contestant, given: Given) -> Call:
    """The contestant's call, whose error says whose it is."""
    prepared = contestant.prepared(given)

    def call() -> Any:
        try:
            return prepared()
        except BaseException as error:
            raise RaisedInTurn(contestant) from error

    return call


def set_data_limit(memory: int) -> None:
    """Let an allocation far beyond `memory` bytes fail at once, where the kernel can (Linux).

    The parent watches the resident set; this keeps a single huge allocation from being tried.
    """
    if sys.platform != "linux":
        return
    import resource

    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            limit = 1024 * int(line.split()[1]) + memory + MEMORY_SLACK
            resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
