"""What runs in a cell's own process: one stage, one problem.

The contestant loads the stage, makes the inputs, calls it once under the memory meter, writes the
outputs to a file and waits. Only when the judge, another process, has found the outputs right (or
wrong by design) is it told to go on to timing: an unchecked time is never taken. After timing it
changes v and dO and calls once more, so that a stage which remembers its answer is found out
(harness/problems/directions.py says how; and what a call is in each direction).
"""

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness.isolation.child import hear, say
from harness.problems.directions import show
from harness.problems.problem import Problem

WARM_UP_ROWS = 16
WARM_UP_CALLS = 2
MEMORY_SLACK = 1 << 29  # bytes: stacks of torch's threads, the interpreter's own growth


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


def contest(connection: Connection, path: str, cell: dict[str, Any], out: str) -> None:
    """Run one cell: the stage in `path` on the problem in `cell`, outputs to files `out`.*.

    Says 'ready', then 'output' when the first outputs are written, then, when told to go on, 'done'
    with the timing; or 'failed' with a status and a reason at any point.
    """
    import torch

    from harness.measures.accuracy import set_precision
    from harness.measures.memory import give_back, measure_peak
    from harness.measures.timing import sm_clock_mhz, time_call, time_once
    from harness.problems.directions import ask_again, prepare

    problem = Problem.from_json(cell)
    try:
        import stages
        from stages import autotune

        module = stages.load(path)
        # where it works says how it is measured: a CPU stage takes a GPU's tensors
        device = module.STAGE.computes_on(problem.device)
        torch.set_num_threads(1)  # timing.py says why
        if problem.device == "cuda" and problem.dtype == "float32":
            set_precision(problem.precision)
        given = make_given(problem)
        attend = bind(module.attend, problem)
        mode = module.STAGE.mode(problem.device)
        if device == "cpu":
            set_data_limit(cell["memory"])
    except BaseException as error:
        say(connection, "failed", **blame(error, problem))
        return
    say(connection, "ready")
    hear(connection)

    try:
        first_ms = None
        if device == "cpu":
            warm_up(module.attend, problem, given)
        call = prepare(attend, problem.direction, *given)  # for 'bwd' with its forward pass
        autotune.latest.clear()  # the tiny call's
        if device == "cpu":
            give_back()  # what that has freed would be taken again unseen
        else:
            # the first call compiles and fetches cuBLAS's workspace: neither is the stage's memory
            first_ms = time_once(call, device)[1]
        (outputs, call_ms), peak, meter = measure_peak(lambda: time_once(call, device), device)
        write_outputs(outputs, problem, given, f"{out}.first")
        del outputs
        check_unwritten(problem, given)
    except BaseException as error:
        say(connection, "failed", **blame(error, problem))
        return
    measured = {
        "first_call_ms": call_ms if first_ms is None else first_ms,
        "peak_bytes": peak,
        "memory_meter": meter,
        "launch_configs": launch_configs(),
    }
    say(connection, "output", mode=mode, **measured)

    order = hear(connection)
    if not order["go"]:
        return
    try:
        samples, again = [call_ms], False
        iqr = clock = None
        if mode != "interpreted" and 1e-3 * call_ms < order["seconds_left"] / 4:
            seconds = min(max(cell["seconds"], 5e-3 * call_ms), order["seconds_left"] / 2)
            timing = time_call(call, device, seconds)
            samples, iqr, again = timing.samples_ms, timing.iqr_ms, True
            median = timing.median_ms
            clock = sm_clock_mhz(call, device)
            for index, changed in enumerate(ask_again(call, problem.direction, *given[2:])):
                outputs = time_once(changed, device)[0]
                write_outputs(outputs, problem, given, f"{out}.again{index}")
                del outputs
            check_unwritten(problem, given)
        else:
            median = call_ms
    except BaseException as error:
        say(connection, "failed", **blame(error, problem))
        return
    say(
        connection, "done", time_ms=median, time_iqr_ms=iqr, samples=len(samples),
        sm_clock_mhz=clock, again=again,
    )  # fmt: skip


def duel(connection: Connection, paths: list[str], order: dict[str, Any], outs: list[str]) -> None:
    """Time the stages in `paths` against each other: one process, in turns, on one problem.

    Each has been found right in a process of its own. Says 'ready', then 'done' with a timing a
    stage, its outputs of the last call in the file of `outs` for the judge; or 'failed'.
    """
    import torch

    import stages
    from harness.measures.accuracy import set_precision
    from harness.measures.timing import alternate, sm_clock_mhz, time_once
    from harness.problems.directions import prepare
    from stages import autotune

    problem = Problem.from_json(order)
    try:
        modules = [stages.load(path) for path in paths]
        devices = [module.STAGE.computes_on(problem.device) for module in modules]
        torch.set_num_threads(1)
        if problem.device == "cuda" and problem.dtype == "float32":
            set_precision(problem.precision)
        given = make_given(problem)
        attends = [bind(module.attend, problem) for module in modules]
        say(connection, "ready")
        hear(connection)
        calls, configs = [], []
        for attend, device in zip(attends, devices, strict=True):
            autotune.latest.clear()
            calls.append(prepare(attend, problem.direction, *given))
            for _ in range(WARM_UP_CALLS):
                time_once(calls[-1], device)
            configs.append(launch_configs())
        timings = alternate(calls, devices, order["seconds"])
        clock = sm_clock_mhz(calls[-1], devices[-1])
        for call, device, out in zip(calls, devices, outs, strict=True):
            write_outputs(time_once(call, device)[0], problem, given, out)
        check_unwritten(problem, given)
    except BaseException as error:
        say(connection, "failed", **blame(error, problem))
        return
    say(
        connection, "done",
        timings=[
            {
                "time_ms": t.median_ms,
                "time_iqr_ms": t.iqr_ms,
                "samples": len(t.samples_ms),
                "sm_clock_mhz": clock,
                "rounds_ms": t.rounds_ms,
                "launch_configs": chosen,
            }
            for t, chosen in zip(timings, configs, strict=True)
        ],
    )  # fmt: skip


def launch_configs() -> dict[str, dict[str, int]] | None:
    """What tuned kernels were launched with since the tuner's notes were last cleared, by kernel.

    None where there was no such kernel.
    """
    from stages import autotune

    return dict(autotune.latest) or None


class WrongOutput(Exception):
    """What a stage gave back is no output of this problem, or it changed its inputs."""


def bind(attend: Callable[..., Any], problem: Problem) -> Callable[..., Any]:
    """`attend` with the problem's options; without options it is called as attend(q, k, v)."""
    import torch

    options: dict[str, Any] = {"causal": True} if problem.causal else {}
    if problem.seqlens_k is not None:
        lengths = torch.tensor(problem.seqlens_k, dtype=torch.int32, device=problem.device)
        options["seqlens_k"] = lengths
    if not options:
        return attend
    return lambda q, k, v: attend(q, k, v, **options)


def make_given(problem: Problem) -> tuple[Any, ...]:
    """What a stage is given: q, k, v and dO, which is None for a forward pass."""
    from harness.problems.directions import make_output_gradient
    from harness.problems.inputs import make_inputs

    dO = None if problem.direction == "fwd" else make_output_gradient(problem)
    return (*make_inputs(problem), dO)


def warm_up(attend: Callable[..., Any], problem: Problem, given: tuple[Any, ...]) -> None:
    """One tiny call, so that what a stage sets up once is not taken for the memory of a call.

    What it raises is no matter here: a stage may have its reasons against tiny inputs.
    """
    from harness.problems.directions import prepare

    with contextlib.suppress(Exception):
        tiny: list[Any] = [x if x is None else x[:1, :, :WARM_UP_ROWS].contiguous() for x in given]
        lengths = problem.seqlens_k and (min(problem.seqlens_k[0], tiny[1].shape[2]),)
        bound = bind(attend, replace(problem, seqlens_k=lengths))
        prepare(bound, problem.direction, *tiny)()


def write_outputs(
    outputs: tuple[Any, ...], problem: Problem, given: tuple[Any, ...], path: str
) -> None:
    """Write the bytes of all outputs to a file for the judge, one after the other.

    WrongOutput where one of them is not like its input: o and dq like q, dk like k, dv like v.
    """
    import torch

    from harness.problems.directions import OUTPUTS

    q, k, v, _ = given
    like = {"o": q, "dq": q, "dk": k, "dv": v}
    with Path(path).open("wb") as file:
        for name, x in zip(OUTPUTS[problem.direction], outputs, strict=True):
            said = "returned" if problem.direction == "fwd" else f"{name}: returned"
            if x is None and name != "o":
                raise WrongOutput(f"{name}: there is none, no gradient reaches {name[1:]}")
            if not isinstance(x, torch.Tensor):
                raise WrongOutput(f"{said} {type(x).__name__}, expected a tensor")
            for what in ("shape", "dtype", "device"):
                got, expected = getattr(x, what), getattr(like[name], what)
                if got != expected:
                    raise WrongOutput(f"{said} {what} {show(got)}, expected {show(expected)}")
            flat = x.detach().cpu().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().tobytes())


def check_unwritten(problem: Problem, given: tuple[Any, ...]) -> None:
    """Raise WrongOutput where an input, q, k, v or dO, is not, bit for bit, what its seed makes."""
    import torch

    for name, now, fresh in zip(("q", "k", "v", "dO"), given, make_given(problem), strict=True):
        if fresh is not None and (now.shape != fresh.shape or not torch.equal(now, fresh)):
            raise WrongOutput(f"changed its input {name}")


def blame(error: BaseException, problem: Problem) -> dict[str, str]:
    """Status and reason of a failed cell, from what was raised."""
    import torch

    from harness.problems.directions import BadGradient
    from stages.contract import StageUnavailable

    text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    if isinstance(error, (WrongOutput, BadGradient)):
        return {"status": "wrong", "reason": str(error)}
    if isinstance(error, StageUnavailable):
        return {"status": "skipped", "reason": str(error)}
    out_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if out_of_memory or "can't allocate memory" in str(error):
        return {"status": "out-of-memory", "reason": text}
    return {"status": "crashed", "reason": text}


def judge(connection: Connection, problem_json: dict[str, Any]) -> None:
    """Hold outputs of one problem against their oracles, in a process that no stage ever enters.

    Says 'ready' once the oracles are made; then, for each {'path', 'again'}, 'verdict' with the
    errors, whether all is finite, whether it is exact, and why not. `again`: which of AGAIN's
    changes (harness/problems/directions.py) the outputs were computed after, or None.
    """
    import numpy
    import torch

    from harness.measures.accuracy import judge_outputs, make_oracles, set_precision
    from harness.problems.directions import AGAIN

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
    while True:
        order = hear(connection)
        data = torch.from_numpy(numpy.fromfile(order["path"], dtype=numpy.uint8))
        # compared where the oracles are: on a GPU that takes milliseconds
        flat = data.view(getattr(torch, problem.dtype)).to(problem.device).double()
        if flat.numel() != sum(sizes):
            say(connection, "verdict", finite=True, exact=False, why="its output was cut short")
            continue
        factors = [1.0] * len(sizes)
        if order["again"] is not None:
            factors = list(AGAIN[problem.direction][order["again"]][1])
        outputs = [
            part.view(oracle.out64.shape) / factor
            for part, oracle, factor in zip(
                flat.split(sizes), oracles.values(), factors, strict=True
            )
        ]
        say(connection, "verdict", **judge_outputs(outputs, oracles))


def describe(connection: Connection, paths: list[str]) -> None:
    """Load the stages in `paths` and say, a message each, what each is and what it can do here.

    Says 'stage' with its STAGE, where it runs and why not, or 'failed' with the reason; then 'end'.
    """
    import hashlib

    try:
        import stages
        from harness.problems.problem import DEVICES, DTYPES
        from harness.records.syntax import digest
        from stages.contract import most_on_an_axis, why_not, why_not_dtype
    except ImportError as error:
        say(connection, "failed", reason=f"nothing runs without {error.name}: {error}")
        return
    for path in paths:
        try:
            stage = stages.load(path).STAGE
            fields = asdict(stage)
            fields["worth_up_to"] = dict(stage.worth_up_to)
            say(
                connection, "stage", **fields,
                sha256=hashlib.sha256(Path(path).read_bytes()).hexdigest(),
                syntax_sha256=digest(Path(path).read_text(encoding="utf-8")),
                modes={device: stage.mode(device) for device in DEVICES},
                unavailable={device: why_not(stage, device) for device in DEVICES},
                refused={
                    device: {dtype: why_not_dtype(stage, dtype, device) for dtype in DTYPES}
                    for device in DEVICES
                },
                at_most=most_on_an_axis(stage),
            )  # fmt: skip
        except BaseException as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            say(connection, "failed", reason=text)
    say(connection, "end", seconds=time.process_time())
