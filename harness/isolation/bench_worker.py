"""What runs in a contest's process: all its contestants, on one problem.

Each is called once (its first call, which compiles, apart), once more under the memory meter where
there is a GPU, and its output goes to a file for the judge. Told who was right, the process warms
those up and lets them take turns; then it asks each once more, its inputs changed, and writes that
answer too: one that remembers is found out. What a contestant raises costs itself only. Only where
the device is gone with it (an illegal access ends all CUDA work of a process) is the contest over.
"""

import contextlib
import functools
import gc
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, cast

from harness.isolation.child import hear, say
from harness.isolation.worker import (
    WrongOutput,
    bind,
    blame,
    launch_configs,
    make_given,
    set_data_limit,
    write_outputs,
)
from harness.problems.directions import Call, ask_again, prepare
from harness.problems.problem import Problem

NAMES = ("q", "k", "v", "dO")


class Given:
    """What every contestant is given: q, k, v and dO (None for a forward pass), and copies."""

    def __init__(self, problem: Problem) -> None:
        self.tensors = make_given(problem)
        self.copies = [None if x is None else x.clone() for x in self.tensors]

    @property
    def qkv(self) -> tuple[Any, ...]:
        return self.tensors[:3]

    def check_unwritten(self) -> None:
        """Raise WrongOutput where one is not, bit for bit, what it was; and make it so again.

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
    """One stage in a contest: the call that is measured, and where its outputs go."""

    def __init__(self, module: ModuleType, problem: Problem, out: str) -> None:
        self.module, self.problem, self.out = module, problem, out
        self.attend = bind(module.attend, problem)
        self.device = module.STAGE.computes_on(problem.device)
        self.call: Call | None = None

    def check(self, given: Given) -> dict[str, Any]:
        """Call it for the first time, write what it returns, say what was measured."""
        from harness.measures.memory import measure_peak
        from harness.measures.timing import time_once
        from stages import autotune

        autotune.latest.clear()

        def first() -> Any:
            self.call = prepare(self.attend, self.problem.direction, *given.tensors)
            return self.call()

        outputs, first_ms = time_once(first, self.device)
        peak = meter = None
        if self.device == "cuda":  # one process holds all: a resident set would be everybody's
            outputs = None
            outputs, peak, meter = measure_peak(self.prepared(), self.device)
        write_outputs(outputs, self.problem, given.tensors, self.out)
        given.check_unwritten()
        return {
            "first_call_ms": first_ms,
            "peak_bytes": peak,
            "memory_meter": meter,
            "launch_configs": launch_configs(),
        }

    def prepared(self) -> Call:
        """The call that `check` prepared."""
        if self.call is None:
            raise RuntimeError("asked for its call before it was prepared")
        return self.call

    def warm_up(self, order: dict[str, Any]) -> None:
        """The calls before the rounds; TooSlow where the rounds would take more than its budget."""
        from harness.measures.timing import time_once

        calls = order["warmup"] + order["repeat"]
        for _ in range(order["warmup"]):
            ms = time_once(self.prepared(), self.device)[1]
            if 1e-3 * ms * calls > order["budget"]:
                raise TooSlow(
                    f"{1e-3 * ms:.3g} s a call: {calls} calls do not fit in its budget of "
                    f"{order['budget']:g} s"
                )

    def again(self, given: Given) -> None:
        """Ask once more, inputs changed, and write the answers."""
        asked = ask_again(self.prepared(), self.problem.direction, *given.tensors[2:])
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
            ratio = float(bind(count, self.problem)(*given.qkv))
        except Exception as error:
            print(f"{self.module.STAGE.name}: skip_ratio: {error!r}", flush=True)
            return None
        return ratio if 0.0 <= ratio <= 1.0 else None


class TooSlow(Exception):
    """The rounds of a contestant would take longer than its budget."""


class Fell(Exception):
    """A contestant raised an error in its turn; the cause is that error."""

    def __init__(self, contestant: Contestant) -> None:
        super().__init__()
        self.contestant = contestant


def compete(
    connection: Connection, paths: list[str], order: dict[str, Any], outs: list[str]
) -> None:
    """One contest: the stages in the files `paths`, each writing its outputs to its file of `outs`.

    Says 'ready'; when told to start, 'checked' or 'out' for each, in order; when told who goes on,
    'done' with a timing each, then 'counted' with the skip ratios. Or 'failed' at any point.
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
            Contestant(module, problem, out) for module, out in zip(modules, outs, strict=True)
        ]
        if problem.device == "cpu":
            set_data_limit(order["memory"])
        say(connection, "ready")
        hear(connection)
        for contestant in contestants:
            measured, error = caught(functools.partial(contestant.check, given))
            if error is None:
                say(connection, "checked", **measured)
            else:
                say(connection, "out", **out(error, contestant, given))
        going = [contestants[index] for index in hear(connection)["going"]]
        for contestant in contestants:
            if contestant not in going:
                contestant.call = None
        if not going:
            return
        say(connection, "done", timings=take_turns(going, given, order))
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
        cause = error.__cause__ if isinstance(error, Fell) else None
        error.__cause__ = error.__context__ = None
        if cause is not None:
            error.__cause__ = cause.with_traceback(None)
        return None, error.with_traceback(None)


def out(error: BaseException, contestant: Contestant, given: Given) -> dict[str, Any]:
    """Status and reason of a contestant that is out, its memory given back.

    Raises what the device says where it is gone for all.
    """
    import torch

    fault = {"status": "timeout", "reason": str(error)}
    if not isinstance(error, TooSlow):
        fault = blame(error, contestant.problem)
    contestant.call = None
    gc.collect()
    if contestant.problem.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    with contextlib.suppress(WrongOutput):  # it is out; the inputs are themselves again
        given.check_unwritten()
    return {**fault, "refused": isinstance(error, ValueError)}


def take_turns(
    going: Sequence[Contestant], given: Given, order: dict[str, Any]
) -> list[dict[str, Any]]:
    """A timing for each of `going`, all from the same rounds; or why it fell before their end."""
    from harness.measures.timing import alternate, sm_clock_mhz

    found: dict[Contestant, dict[str, Any]] = {}
    for contestant in going:
        error = caught(functools.partial(contestant.warm_up, order))[1]
        if error is not None:
            found[contestant] = out(error, contestant, given)
    while standing := [each for each in going if each not in found]:
        calls = [guarded(each) for each in standing]
        devices = [each.device for each in standing]
        timings, error = caught(
            functools.partial(alternate, calls, devices, rounds=order["repeat"])
        )
        if error is None:
            break
        if not isinstance(error, Fell):
            raise error
        # without it, from the beginning
        found[error.contestant] = out(error.__cause__ or error, error.contestant, given)
    if not standing:
        return [found[each] for each in going]
    clock = next(
        (sm_clock_mhz(each.prepared(), "cuda") for each in standing if each.device == "cuda"), None
    )
    given.check_unwritten()
    for contestant, timing in zip(standing, timings, strict=True):
        error = caught(functools.partial(contestant.again, given))[1]
        found[contestant] = (
            out(error, contestant, given)
            if error is not None
            else {
                "time_ms": timing.median_ms,
                "time_iqr_ms": timing.iqr_ms,
                "samples": len(timing.samples_ms),
                "sm_clock_mhz": clock,
                "rounds_ms": timing.rounds_ms,
            }
        )
    return [found[each] for each in going]


def guarded(contestant: Contestant) -> Call:
    """The contestant's call, whose error says whose it is."""
    prepared = contestant.prepared()

    def call() -> Any:
        try:
            return prepared()
        except BaseException as error:
            raise Fell(contestant) from error

    return call
