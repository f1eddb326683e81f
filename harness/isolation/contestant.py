"""What runs in the process of a comparison: one stage alone, or several that take turns.

Each stage is loaded, called for the first time (which compiles) and once more under the memory
meter where there is one, and its outputs go to a file for the judge, another process. Only those
that the judge has found right (or wrong by design) go on to be timed: an unchecked time is never
taken. After its timing each is asked again with v and dO changed, so that one which remembers its
answer is found out (measured_call.py says how).

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
from harness.isolation.child import hear, say
from harness.isolation.measured_call import Call, PagedCall, Watched, ask_again, prepare
from harness.problems.problem import Problem

SETUP = 1 << 27  # bytes that importing Triton and first calls may leave behind: no workspace
MEMORY_SLACK = 1 << 29  # bytes: stacks of torch's threads, the interpreter's own growth


class RaisedInTurn(Exception):
    """A contestant raised an error in its turn; the cause is that error."""

    def __init__(self, contestant: "Contestant") -> None:
        super().__init__()
        self.contestant = contestant


class Contestant:
    """One stage in a comparison: the call that is measured, and where its outputs go.

    `problem` has a page size where it reads from a paged cache.
    """

    def __init__(self, module: ModuleType, problem: Problem, out: str, held: int | None) -> None:
        self.held = held  # bytes that the process held before it loaded any stage
        self.module, self.problem, self.out = module, problem, out
        self.attend = bind(module.attend, problem)
        # where it works says how it is measured: a CPU stage takes a GPU's tensors
        self.device = module.STAGE.computes_on(problem.device)
        self.call: Call | None = None
        self.timed: Watched | None = None

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
            give_back()  # what that has freed would be taken again unseen
            kept = (status_bytes("VmRSS") or 0) - self.held if self.held else 0
            (outputs, call_ms), peak, meter = measure_peak(once, self.device)
            if peak is not None and kept > max(SETUP, 2 * peak):
                peak = kept  # it was made beforehand, and is there during the call
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
            "interpreted": was_interpreted(),
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

    def watched(self, given: Given) -> Watched:
        """Its call for the timer (measured_call.py), one for all its samples."""
        if self.timed is None:
            x = given.tensors[3 if self.problem.direction == "bwd" else 0]
            self.timed = Watched(self.prepared(given), x)
        return self.timed

    def again(self, given: Given) -> None:
        """Write what it answered to a call that was timed, and to others with inputs changed."""
        assert self.timed is not None, "it has been timed"
        write_outputs(tuple(self.timed.kept), self.problem, given.tensors, f"{self.out}.timed")
        self.timed.kept = ()
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

    Says 'loads' and 'ready'; when told to start, 'checked' or 'out' for each, in order; when told
    who goes on and for how many seconds they are sampled, 'done' with a timing each, then 'called'
    after as many calls of a stage as it is asked for; asked for none, 'counted' with the skip
    ratios. Where the turns are taken between processes, 'warm' comes before them, then 'turn' after
    each that it is told of. Or 'failed' at any point.
    """
    import torch

    import stages
    from harness.measures.accuracy import set_precision
    from harness.measures.memory import status_bytes

    problem = Problem.from_json(order)
    try:
        torch.set_num_threads(1)  # timing.py says why
        given = Given(problem)
        if problem.device == "cpu":
            set_data_limit(order["memory"])
        held = status_bytes("VmRSS") if sys.platform == "linux" else None
        say(connection, "loads")
        modules = [stages.load(path) for path in paths]
        torch.set_num_threads(1)  # whatever they have set
        if problem.device == "cuda" and problem.dtype == "float32":
            set_precision(problem.precision)
        contestants = [
            Contestant(module, replace(problem, page_size=page_size), out, held)
            for module, page_size, out in zip(modules, order["page_sizes"], outs, strict=True)
        ]
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
        told = connection if order["apart"] else None
        say(connection, "done", timings=take_turns(going, given, order, turns["seconds"], told))
        while (asked := hear(connection))["calls"]:
            call_often(going[asked["index"]], given, asked["calls"])
            say(connection, "called")
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
    going: Sequence[Contestant], given: Given, order: dict[str, Any], seconds: float,
    told: Connection | None,
) -> list[dict[str, Any]]:  # fmt: skip
    """A timing for each of `going`, all from the same rounds; or why it failed before their end.

    A stage that is alone is sampled for `seconds`; in turns there are so many rounds, and more
    until `seconds` have passed. Where others are `told` of their turns, a round comes when it does.
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
            timings = [time_call(only.watched(given), only.device, seconds)]
            break
        if told is not None:
            [only] = standing
            timings = [rounds_when_told(only.watched(given), only.device, told)]
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
                "change": contestant.watched(given).change,
            }
        )
    return [found[each] for each in going]


def rounds_when_told(call: Call, device: str, told: Connection) -> Any:
    """The timing of `call`, a sample whenever its turn has come."""
    from harness.measures.timing import Timing, cpu_sampler, cuda_sampler

    sample = cuda_sampler(call) if device == "cuda" else cpu_sampler(call)
    say(told, "warm")
    samples = []
    while hear(told)["turn"]:
        samples.append(sample())
        say(told, "turn")
    return Timing(samples)


def call_often(contestant: Contestant, given: Given, calls: int) -> None:
    """Make so many calls, and wait for the device: the parent looks at its own clock."""
    from harness.measures.timing import synchronize, without_collector

    call = contestant.watched(given)
    with without_collector():
        for _ in range(calls):
            call()
    synchronize(contestant.device)


def guarded(contestant: Contestant, given: Given) -> Call:
    """The contestant's call, whose error says whose it is."""
    prepared = contestant.watched(given)

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
