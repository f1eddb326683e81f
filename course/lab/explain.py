"""Find the cause of a submission's first failure: from its message, its numbers, its tiles.

This only explains: no mark depends on it. The submission answers once more in its own process; when
that has ended, another compares the answer with the expected one and with those of known mistakes.
"""

import ast
import contextlib
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

from course.lab.gaps import UNPARSED
from course.lab.grading.endings import REFUSED
from harness.isolation.call import bind, blame, prepare_for, write_outputs
from harness.isolation.child import ChildFailed, say, starts_nothing
from harness.isolation.session import Session
from harness.problems.problem import Problem

LIMIT = 60.0  # seconds for each of the two processes
CORNER = 4  # how many rows and columns of a failing case are shown
SPANS = 4  # how many spans of wrong rows are named at most
NEAR = 0.01  # an output this much nearer to a mistake's than to the truth has that mistake
ROUNDED = 2.0**-7  # of an output's size: one rounding to bfloat16 is off by 2^-9 at most
# a function that walks tiles -> its loop's variable; and the state that such a loop carries
WALKS = dict.fromkeys(("attention_kernel", "visit_tiles", "attend_head"), "start_n")
WALKS["walk_q_tiles"] = "start_m"
NOTHING = (
    "no number of the output is finite: 0 / 0, where the loop visits no tile or l stays 0, or an "
    "exponential that overflows"
)
# the gradients that are wrong -> where to look; ds is made of p and delta, dv of p alone
ONLY = {
    ("dq",): ". Look at the ds that dq is made of, and at its product with k",
    ("dk",): ". Look at the ds that dk is made of, and at its product with q",
    ("dv",): ". Look at the product of p and dO that makes dv",
    ("dq", "dk"): ". So p is right: look at delta and ds",
    ("dk", "dv"): ". Look at the p that both are made of",
}
FIRST_TILE = "first tile that differs"
STATES = {"start_n": ("m_i", "l_i", "acc"), "start_m": ("dv", "dk")}


@dataclass(frozen=True)
class Said:
    """The diagnosis, '' where none is known, and lines that show the case."""

    diagnosis: str
    case: Sequence[str]


@dataclass(frozen=True)
class Ready:
    """The message of the process that diagnoses: the fields of Said."""

    diagnosis: str
    case: list[str]


def from_words(reasons: Sequence[tuple[str, str]], reason: str) -> str:
    """Return the cause of a failure by its `reason` alone, from pairs of pattern and cause; or ''.

    The line of the student's code that a reason may begin with is ignored. What guard.py refuses
    explains itself.
    """
    if REFUSED in reason:
        return ""
    words = re.sub(r"^\S+:\d+: `.*?`: ", "", reason)
    return next((text for pattern, text in reasons if re.search(pattern, words)), "")


def python_max(path: Path, of: str = "") -> str:
    """Say where a Triton kernel in `path` calls Python's max or min, and what that does; or ''.

    `of`: only where it is given what this text computes.
    """
    tree = ast.Module([], [])
    with contextlib.suppress(*UNPARSED):
        tree = ast.parse(path.read_bytes())
    for kernel in ast.walk(tree):
        jitted = getattr(kernel, "decorator_list", [])
        if not any("triton.jit" in ast.unparse(each) for each in jitted):
            continue
        for call in ast.walk(kernel):
            if not (isinstance(call, ast.Call) and of in ast.unparse(call)):
                continue
            if (name := ast.unparse(call.func)) in ("max", "min"):
                return (
                    f"{path.name}:{call.lineno}: Python's {name} of two tiles, interpreted, takes "
                    f"one of them whole; tl.{name}imum goes element by element"
                )
    return ""


def from_numbers(
    path: Path, problem: Problem, layout: str, folder: Path, watched: tuple[str, dict[str, Any]]
) -> Said:
    """Find the cause of the wrong answer of the stage in `path` to a problem.

    `watched`: the submission's own file, and the rules of its lab (grading/guard.py).
    """
    out, order = folder / "answer", problem.to_json()
    try:
        with Session(answer, str(path), order, str(out), *watched) as session:
            session.ready(LIMIT)
        with Session(diagnose, order, layout, str(out), greeting=Ready) as session:
            found = session.ready(LIMIT)
    except ChildFailed as error:
        return Said("", [f"asked once more, it failed in another way: {error.reason}"])
    return Said(found.diagnosis, found.case)


# ---- in the submission's process


def answer(
    connection: Connection, path: str, order: dict[str, Any], out: str, own: str,
    rules: dict[str, Any],
) -> None:  # fmt: skip
    """Write the answer of the stage in `path`, and its state after each tile. Says 'ready'."""
    import numpy as np

    import stages
    from course.lab.grading.guard import Guard
    from course.lab.layouts import make_given

    problem = Problem.from_json(order)
    try:
        guard, given = Guard(connection, own, rules), make_given(problem)
        with guard.watching(loading=True):
            module = stages.load(path, alone=True)
        with guard.watching():
            call = prepare_for(problem, module, bind(module.attend, problem), given.tensors)
            with watching() as states:
                outputs = call()
        write_outputs(outputs, problem, given.tensors, out)
        np.savez(f"{out}.npz", **states)
        say(connection, "ready")
    except BaseException as error:
        say(connection, "failed", **blame(error))


@contextmanager
def watching() -> Iterator[dict[str, Any]]:
    """Note m_i, l_i, acc (dk, dv) after each tile of the first program that keeps the stubs' names.

    In Triton's interpreter a kernel is Python. 'acc 64' is acc after the tile of key 64, 'rows'
    which queries they belong to, 'keys' which keys dk and dv belong to.
    """
    import numpy as np

    states: dict[str, Any] = {}
    last = dict.fromkeys(STATES, -1)  # the tile noted last; an earlier one belongs to another loop

    def value(x: Any) -> Any:
        return np.array(getattr(getattr(x, "handle", None), "data", x))

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        variable = WALKS.get(frame.f_code.co_name, "")
        if not variable:
            return None
        before, head = frame.f_lineno, 0  # the line of the last event; the loop's first line

        def line(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal before, head
            names = frame.f_locals
            if event == "line" and variable in names:
                start = int(value(names[variable]))
                if not head:
                    head = before if start > last[variable] else -1
                if frame.f_lineno == head:
                    last[variable] = start
                    known = {
                        "rows": names.get("rows", names.get("offs_m")),
                        "keys": names.get("keys"),
                    }
                    if "qk_scale" in names:  # stage 6 keeps m_i in base 2
                        known["base_2"] = 1
                    known |= {f"{x} {start}": names.get(x) for x in STATES[variable]}
                    states.update({x: value(y) for x, y in known.items() if y is not None})
            before = frame.f_lineno
            return line

        return line

    with programs_traced(enter, lambda: len(states)):
        yield states


@contextmanager
def programs_traced(trace: Callable[..., Any], noted: Callable[[], int]) -> Iterator[None]:
    """Trace the block, but of each launch of Triton's interpreter only some programs.

    Those of a kernel beside a function of WALKS, up to the first one in which `noted()` has grown:
    a traced program takes three times as long.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    executor = getattr(interpreter, "GridExecutor", None)
    builder = getattr(interpreter, "InterpreterBuilder", None)
    walks, before = False, 0

    def launch(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal walks, before
        walks, before = not WALKS.keys().isdisjoint(self.fn.__globals__), noted()
        try:
            return execute(self, *args, **options)
        finally:
            sys.settrace(trace)

    def program(self: Any, *at: int) -> None:
        begin(self, *at)
        sys.settrace(trace if walks and noted() == before else None)

    if executor is not None and builder is not None:
        execute, begin = executor.__call__, builder.set_grid_idx
        executor.__call__, builder.set_grid_idx = launch, program
    sys.settrace(trace)
    try:
        yield
    finally:  # the interpreter stays as it is: the process ends
        sys.settrace(None)


# ---- in a process that no submission enters


@starts_nothing
def diagnose(connection: Connection, order: dict[str, Any], layout: str, out: str) -> None:
    """Say 'ready' with the mistake in an answer, and with lines that show it."""
    import numpy as np
    import torch

    from course.lab import mistakes
    from harness.measures.oracle import make_oracles

    problem = Problem.from_json(order)
    oracles = make_oracles(problem)
    flat = torch.from_numpy(np.fromfile(out, np.uint8)).view(getattr(torch, problem.dtype))
    parts = flat.double().split([each.out64.numel() for each in oracles.values()])
    got = {
        name: part.view(each.out64.shape)
        for (name, each), part in zip(oracles.items(), parts, strict=True)
    }
    wrong = {x: y for x, y in got.items() if not oracles[x].error(y).within(oracles[x].bound)}
    if not wrong:
        say(connection, "ready", diagnosis="", case=["asked once more, it was right"])
        return
    name = next(iter(wrong))
    known = mistakes.forward if name == "o" else mistakes.gradients
    judged = ["o"] if name == "o" else list(wrong)
    best, diagnosis = NEAR, ""
    for says, made in known(problem, layout):
        off = max(distance(got[x], made[x], oracles[x].out64) for x in judged)
        if off < 0.9 * best:  # the first of mistakes that give the same here
            best, diagnosis = off, says
    if not diagnosis and problem.dtype == "float32":
        diagnosis = rounded(got[name], oracles[name].out64)
    case = show(problem, name, got[name], oracles[name].out64, oracles[name].bound.max)
    if len(got) > 1:
        right = ", ".join(x for x in got if x not in wrong) or "none"
        case.insert(1, f"wrong: {', '.join(wrong)}; right: {right}{ONLY.get(tuple(wrong), '')}")
    with np.load(f"{out}.npz") as states:
        case += (tile := first_tile(problem, layout, dict(states), backward=name != "o"))
    if best == 0 and tile and f"{FIRST_TILE}: keys 0 " not in tile[0]:
        diagnosis = ""  # its output has no finite number, so any such output fits
    if not diagnosis and not tile and not got[name].isfinite().any():
        diagnosis = NOTHING
    say(connection, "ready", diagnosis=diagnosis, case=case)


def distance(got: Any, made: Any, truth: Any) -> float:
    """Return an output's distance from a mistake's, relative to its distance from the truth.

    Where `made` is NaN anything may stand; infinity stands for what isn't finite.
    """
    known = ~made.isnan()
    over = made.isinf()
    if bool(((~got.isfinite()) & known).ne(over).any()):
        return float("inf")
    known &= ~over
    if not bool(known.any()):
        return 0.0 if over.any() else float("inf")
    off = (got - truth)[known].norm()
    return float((got - made)[known].norm() / off) if off or over.any() else float("inf")


def rounded(got: Any, truth: Any) -> str:
    """Say that a float32 output is right to a few digits only; '' where it is not."""
    off = float((got - truth).norm() / truth.norm())
    if not off < ROUNDED:  # NaN is not
        return ""
    return (
        f"precision lowered: the output is off by {off:.0e} of its size, as if something on the "
        "way were rounded to float16 or bfloat16; in float32 convert nothing to another dtype"
    )


def show(problem: Problem, name: str, got: Any, truth: Any, bound: float) -> list[str]:
    """Return lines: the shapes, where an output is wrong, a corner of it and the expected one."""
    from course.tracing.trace_text import number

    off = (got - truth).abs().nan_to_num(float("inf"), float("inf"))
    bad = off > bound
    b, h, i, j = (int(x) for x in (off == off.max()).nonzero()[0])
    rows, columns = (sorted(set(bad.nonzero()[:, axis].tolist())) for axis in (2, 3))
    shape = f"q {(problem.b, problem.h, problem.nq, problem.d)}, k and v "
    shape += f"{(problem.b, problem.hk, problem.nk, problem.d)}, {problem.dtype}, {problem.inputs}"
    if problem.causal or problem.seqlens_k:
        shape += f", causal {problem.causal}, seqlens_k {problem.seqlens_k}"
    lines = [
        shape,
        f"{name} {tuple(got.shape)} is wrong in {spans('row', rows, got.shape[2])} and "
        f"{spans('column', columns, got.shape[3])}",
        f"most at batch {b}, head {h}, row {i}, column {j}: got {number(got[b, h, i, j])}, "
        f"expected {number(truth[b, h, i, j])}",
    ]
    top, left = (max(0, min(x, n - CORNER)) for x, n in zip((i, j), got.shape[2:]))
    corner = (b, h, slice(top, top + CORNER), slice(left, left + CORNER))
    lines.append(f"rows from {top}, columns from {left}: got | expected")
    for mine, right in zip(got[corner], truth[corner], strict=True):
        cells = (" ".join(f"{short(x):>8}" for x in row) for row in (mine, right))
        lines.append(" | ".join(cells))
    return lines


def short(x: Any) -> str:
    """A number in 8 characters or fewer, but for an exponent of three digits."""
    from course.tracing.trace_text import number

    text = number(x)
    return text if len(text) <= 8 else f"{float(x):.1e}"


def spans(kind: str, numbers: Sequence[int], of: int) -> str:
    """Which of `of` rows: 'rows 0-4 (all 5)', 'row 7 (1 of 9)', 'rows 0-2, 5 (4 of 9)'.

    Of many spans, the first and the last: 'rows 0, 2, 4, ..., 62 (32 of 64)'; 'no row' of none.
    """
    if not numbers:
        return f"no {kind}"
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    said = [f"{each[0]}-{each[-1]}" if len(each) > 1 else f"{each[0]}" for each in found]
    if len(said) > SPANS:
        said[SPANS - 1 : -1] = ["..."]
    count = f"all {of}" if len(numbers) == of else f"{len(numbers)} of {of}"
    return f"{kind}{'s' * (len(numbers) > 1)} {', '.join(said)} ({count})"


def first_tile(problem: Problem, layout: str, states: Any, backward: bool) -> list[str]:
    """Return a line on the first tile after which m_i, l_i, acc (or dk, dv) is wrong.

    Empty where the stub's names or its tile size are not kept. `states`: what `watching` noted.
    """
    import numpy as np

    from course.lab import mistakes
    from course.tracing.trace_text import number

    names = STATES["start_m" if backward else "start_n"]
    starts = sorted({int(x.split()[1]) for x in states if x.split()[0] in names})
    if not starts:
        return []
    size = starts[1] - starts[0] if len(starts) > 1 else max(64, problem.nk)
    reference = backward_tiles if backward else forward_tiles
    for start, of, which, right in reference(problem, layout, states, starts, size):
        inside = which < (problem.nk if backward else problem.nq)
        for name, expected in right.items():
            mine = states.get(f"{name} {start}")
            if mine is None or len(mine) != len(inside):
                continue
            mine = mine[inside][:, : expected.shape[-1]] if mine.ndim == 2 else mine[inside]
            if mine.shape != expected.shape:
                continue
            with np.errstate(invalid="ignore"):
                bad = ~(np.abs(mine - expected) <= 1e-3 * (1 + np.abs(expected)))
            if bad.any():
                at = tuple(np.argwhere(bad)[0])
                return [
                    f"{FIRST_TILE}: {of} {start} to {start + size - 1}, after which "
                    f"{name} of row {which[inside][at[0]]} is {number(mine[at])}, expected "
                    f"{number(expected[at])}"
                    + (
                        mistakes.likely(name, start, mine[at], "base_2" in states)
                        if "m_i" in right
                        else ""
                    )
                ]
    return []


def forward_tiles(
    problem: Problem, layout: str, states: Any, starts: Sequence[int], size: int
) -> Iterator[Any]:
    """Yield for each tile its first key, 'keys', the program's rows and the reference states."""
    import numpy as np

    from course.lab import mistakes
    from course.tracing.trace import walk

    a = mistakes.ask(problem, layout)
    which = states.get("rows", np.arange(problem.nq))
    rows = which[which < problem.nq]
    seen = (~a.hidden)[0, 0].sum(-1).numpy()[rows]
    k, v = (x[0, 0].numpy() for x in a.spread())
    unit = math.log2(math.e) if "base_2" in states else 1.0
    for step in walk(a.q[0, 0].numpy()[rows], k, v, size, seen):
        lite = {"acc": step.lite}  # a step without l has stage 4's own mistake
        online = {"m_i": step.m_i * unit, "l_i": step.l_i, "acc": step.acc}
        yield step.start, "keys", which, online if "l_i 0" in states else lite


def backward_tiles(
    problem: Problem, layout: str, states: Any, starts: Sequence[int], size: int
) -> Iterator[Any]:
    """Yield for each tile its first row, 'rows', the program's keys, unscaled dk and dv so far."""
    from course.lab import mistakes

    a = mistakes.ask(problem, layout)
    which, s, (_, v) = states["keys"], a.scores(), a.spread()
    p = mistakes.exp_from(s, s.amax(-1, keepdim=True))
    p = p / p.sum(-1, keepdim=True).clamp_min(1e-300)
    ds = p * (a.dO @ v.mT - ((p @ v) * a.dO).sum(-1, keepdim=True))
    keys = which[which < problem.nk]
    for start in starts:
        rows = slice(0, start + size)
        parts = {"dv": (p, a.dO), "dk": (ds, a.q)}
        yield start, "rows", which, {
            name: (x[0, 0, rows][:, keys].T @ y[0, 0, rows]).numpy()
            for name, (x, y) in parts.items()
        }  # fmt: skip
