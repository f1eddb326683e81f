"""When an output counts as exact: its errors, and their bounds.

The truth is stage 3 in float64, for gradients through torch's autograd. The error that rounding
alone explains is measured with a yardstick on the same inputs: stage 3 itself in float32; in half
precision the *mixed* yardstick (float32 scores and softmax, P rounded to the dtype, float32 P V,
the output rounded). With u the dtype's eps and s_max the largest |scaled score|, an output is exact
when both its maximum and its relative error are within a multiple of the yardstick's plus a floor:

                       o                                  dq, dk, dv
    multiple           2                                  3
    float32, float64   4 u (1 + s_max)                    4 u (1 + s_max)
    float16, bfloat16  u                                  2 u
    times              max|v| for the maximum             the largest of `magnitudes`

The rounding error of a gradient is not proportional to the gradient, since dS = P (dP - delta)
cancels: its floor is proportional to the terms of the sum before they cancel (`magnitudes`).
harness/measures/oracle.py computes the references that outputs are compared with.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Error:
    """max|a - b| and ||a - b|| / ||b||."""

    max: float
    rel: float

    @staticmethod
    def between(a: torch.Tensor, b: torch.Tensor, norm: float | None = None) -> "Error":
        """The error of `a` against `b`, in float64 and where `b` is; NaN where `a` has one.

        `norm`: divides ||a - b|| instead of ||b||, where b has cancelled to almost nothing.
        """
        a, b = a.to(b.device).double(), b.double()
        difference = a - b
        norm = b.norm().item() if norm is None else norm
        distance = difference.norm().item()
        rel = distance / norm if norm else (0.0 if distance == 0 else math.inf)
        return Error(difference.abs().max().item(), rel)

    def larger(self, other: "Error") -> "Error":
        """The larger of the two, for each figure."""
        return Error(max(self.max, other.max), max(self.rel, other.rel))

    def within(self, bound: "Error") -> bool:
        """Whether both figures are within `bound`; NaN never is."""
        return self.max <= bound.max and self.rel <= bound.rel


@dataclass(frozen=True)
class Oracle:
    """The reference that one output of a problem, o or a gradient, is compared with.

    out64 and out3, of its shape: stage 3 in float64, and in the problem's own dtype and precision.
    bound: the largest errors against out64 that an exact stage may have.
    norm: divides absolute errors to relative ones where out64 cancels; None: out64's own norm.
    """

    out64: torch.Tensor
    out3: torch.Tensor
    bound: Error
    norm: float | None = None

    def error(self, o: torch.Tensor) -> Error:
        """The error of `o` against the truth."""
        return Error.between(o, self.out64, self.norm)

    def error3(self, o: torch.Tensor) -> Error:
        """The error of `o` against stage 3."""
        return Error.between(o, self.out3, self.norm)


def set_precision(precision: str) -> None:
    """Set how torch multiplies float32 matrices on a GPU: 'ieee' or 'tf32'."""
    switch = torch.backends.cuda.matmul
    if hasattr(switch, "fp32_precision"):
        switch.fp32_precision = precision
    else:
        switch.allow_tf32 = precision == "tf32"


def explain(error: Error, bound: Error) -> str:
    """Say which bound `error` exceeds, and by how much."""
    if not error.max <= bound.max:
        return f"max error {error.max:.2g}, exact is {bound.max:.2g} at most"
    return f"relative error {error.rel:.2g}, exact is {bound.rel:.2g} at most"


def judge_outputs(outputs: Sequence[torch.Tensor], oracles: Mapping[str, Oracle]) -> dict[str, Any]:
    """Compare one call's outputs with their oracles; returns the fields of a verdict.

    `finite`, `exact`, and `why` it is not exact, which names the output where there are several;
    and the largest of each error over all outputs, None where it is not finite.
    """
    error64 = error3 = Error(0.0, 0.0)
    why = ""
    for x, (name, oracle) in zip(outputs, oracles.items(), strict=True):
        prefix = "" if tuple(oracles) == ("o",) else f"{name}: "
        if bad := int((~torch.isfinite(x)).sum()):
            why = f"{prefix}{bad} of {x.numel()} outputs are NaN or infinite"
            return {"finite": False, "exact": False, "why": why}
        error = oracle.error(x)
        if not why and not error.within(oracle.bound):
            why = prefix + explain(error, oracle.bound)
        error64, error3 = error64.larger(error), error3.larger(oracle.error3(x))
    figures = {
        "err_f64_max": error64.max, "err_f64_rel": error64.rel,
        "err_stage3_max": error3.max, "err_stage3_rel": error3.rel,
    }  # fmt: skip
    # a distance can overflow float64, and JSON knows no infinity
    found = {name: x if math.isfinite(x) else None for name, x in figures.items()}
    return {"finite": True, "exact": not why, "why": why, **found}
