"""Call a stage in its own process: pass its options, write its outputs, report its errors."""

import contextlib
import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.isolation.child import one_line
from harness.isolation.measured_call import BadGradient, prepare, unlike
from harness.problems.directions import OUTPUTS
from harness.problems.problem import Problem

WARM_UP_ROWS = 16
NAMES = ("q", "k", "v", "dO")


class WrongOutput(Exception):
    """A stage returned something that is no output of the problem, or changed its inputs."""


class TooSlow(Exception):
    """The rounds of a stage would take longer than its budget."""


def bind(attend: Callable[..., Any], problem: Problem) -> Callable[..., Any]:
    """Bind the problem's options to `attend`; a problem without options calls attend(q, k, v)."""
    import torch

    options: dict[str, Any] = {"causal": True} if problem.causal else {}
    if problem.seqlens_k is not None:
        lengths = torch.tensor(problem.seqlens_k, dtype=torch.int32, device=problem.device)
        options["seqlens_k"] = lengths
    if not options:
        return attend
    return lambda q, k, v: attend(q, k, v, **options)


def start_afresh(problem: Problem) -> None:
    """Undo what the stages called before have left in this process; before each stage's own calls.

    Without it the notes of one stage's launches would be read as the next one's, and a number of
    threads, a precision or a switch that one stage sets would hold for all that follow.
    """
    import torch

    from harness.measures.accuracy import set_precision
    from stages.common import tuner

    tuner.latest.clear()
    if (builder := interpreter_builder()) is not None:
        builder.grid_idx = None
    gc.enable()
    torch.set_num_threads(1)  # timing.py says why
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    if problem.device == "cuda" and problem.dtype == "float32":
        set_precision(problem.precision)


def launch_configs() -> dict[str, dict[str, int]] | None:
    """The configurations that tuned kernels were launched with since `start_afresh`, by kernel.

    None where no tuned kernel was launched.
    """
    from stages.common import tuner

    return dict(tuner.latest) or None


def was_interpreted() -> bool:
    """Whether any kernel has run in Triton's interpreter since `start_afresh`."""
    return getattr(interpreter_builder(), "grid_idx", None) is not None


def interpreter_builder() -> Any:
    """What Triton's interpreter notes a launch in; None where it was never imported."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    return getattr(interpreter, "interpreter_builder", None)


def warm_up(attend: Callable[..., Any], problem: Problem, given: tuple[Any, ...]) -> None:
    """Make one tiny call, so that one-time setup does not count as memory of the measured call.

    Errors are ignored here: a stage may refuse tiny inputs.
    """
    with contextlib.suppress(Exception):
        tiny: list[Any] = [x if x is None else x[:1, :, :WARM_UP_ROWS].contiguous() for x in given]
        lengths = problem.seqlens_k and (min(problem.seqlens_k[0], tiny[1].shape[2]),)
        bound = bind(attend, replace(problem, seqlens_k=lengths))
        prepare(bound, problem.direction, *tiny)()


def write_outputs(
    outputs: tuple[Any, ...], problem: Problem, given: tuple[Any, ...], path: str
) -> None:
    """Write the bytes of all outputs to a file for the judge, one after the other.

    Raises WrongOutput where one has another shape, dtype or device than its input: q for o and dq,
    k for dk, v for dv.
    """
    import torch

    q, k, v, _ = given
    like = {"o": q, "dq": q, "dk": k, "dv": v}
    with Path(path).open("wb") as file:
        for name, x in zip(OUTPUTS[problem.direction], outputs, strict=True):
            prefix = "returned" if problem.direction == "fwd" else f"{name}: returned"
            if x is None and name != "o":
                raise WrongOutput(f"{name}: there is none, no gradient reaches {name[1:]}")
            if type(x) is not torch.Tensor:  # a subclass may delay its computation
                raise WrongOutput(f"{prefix} {type(x).__name__}, expected a tensor")
            check_like(x, like[name], prefix)
            flat = x.detach().cpu().resolve_neg().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().tobytes())


def check_like(x: Any, like: Any, prefix: str = "returned") -> None:
    """Raise WrongOutput where `x` has another shape, dtype or device than `like`."""
    if why := unlike(x, like):
        raise WrongOutput(f"{prefix} {why}")


def blame(error: BaseException) -> dict[str, Any]:
    """Status and reason of a stage that failed with `error`."""
    import torch

    from stages.contract import StageUnavailable

    text = one_line(error)
    if isinstance(error, TooSlow):
        return {"status": "timeout", "reason": str(error)}
    if isinstance(error, (WrongOutput, BadGradient)):
        return {"status": "wrong", "reason": str(error)}
    if isinstance(error, StageUnavailable):
        return {"status": "skipped", "reason": str(error)}
    out_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if out_of_memory or "can't allocate memory" in str(error):
        return {"status": "out-of-memory", "reason": text}
    return {"status": "crashed", "reason": text}


class Given:
    """The inputs of the stages in a process, and copies: q, k, v, dO (None for a forward pass).

    `strided`: they have strides of their own (problems/inputs.py). `changed`: v and dO are those of
    the last of measured_call.AGAIN, so that outputs of an earlier call are of no use.
    """

    def __init__(self, problem: Problem, strided: bool = False, changed: bool = False) -> None:
        from harness.problems import inputs
        from harness.problems.directions import make_output_gradient

        dO: Any = None if problem.direction == "fwd" else make_output_gradient(problem)
        self.tensors: tuple[Any, ...] = (*inputs.make_inputs(problem), dO)
        if changed:
            factors = zip(self.tensors, (1, 1, -1, 2), strict=True)
            self.tensors = tuple(None if x is None else factor * x for x, factor in factors)
        if strided:
            pairs = zip(self.tensors, inputs.STEPS, strict=True)
            self.tensors = tuple(None if x is None else inputs.strided(x, n) for x, n in pairs)
        self.copies = [None if x is None else x.clone() for x in self.tensors]

    def check_unwritten(self) -> None:
        """Raise WrongOutput where an input has changed in any bit; first restore it.

        The next stage needs the right inputs. They are restored in place, since calls that were
        prepared before read them there.
        """
        import torch

        changed = []
        for name, x, copy in zip(NAMES, self.tensors, self.copies, strict=True):
            if copy is not None and (x.shape != copy.shape or not torch.equal(x, copy)):
                changed.append(name)
                if x.shape != copy.shape:
                    x.resize_(copy.shape)
                x.data.copy_(copy)  # unseen by the version counter, so that graphs stay valid
        if changed:
            raise WrongOutput(f"changed its input {changed[0]}")
