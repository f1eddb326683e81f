"""Make the typical mistakes of a FlashAttention kernel, and write down what comes out of each.

    python tools/pitfalls.py --out results/cpu/pitfalls.jsonl

A wrong kernel is the shipped stage with some text replaced, each found exactly once, so that it is
wrong in that one way and can't fall behind the stage unnoticed. It is held to the same float64
oracle as every stage, and the shipped stage beside it. Triton interprets them: what is written down
is what comes out, no time. Tensors lie in a storage of NaN, so that who reads what lies beyond
them gets a NaN for it; on a GPU it would be a neighbour's numbers, or an illegal access.

The mistakes are those that sources 001 and 003 warn of or make; docs/walkthrough shows the table.

Fields: `name` is the mistake's, `raised` the last line of the error, empty where it ran, `exact` by
the rule for stages (harness/measures/accuracy.py), `rows_wrong` those whose error is above the
bound for exact stages.
"""

import argparse
import math
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import stages
from course.edits import write_changed
from harness.isolation.call import prepare
from harness.measures.accuracy import judge_outputs
from harness.measures.oracle import make_oracles
from harness.problems.directions import make_output_gradient
from harness.problems.inputs import make_inputs
from harness.problems.problem import SEED, Problem
from harness.records.environment import make_env
from harness.records.jsonl import Writer
from stages.common import machine

MARGIN = 1 << 15  # elements of NaN around a tensor: further than any mistake here reaches

NORMAL = Problem(
    "normal", SEED, 1, 1, 1, 128, 128, 64, "float32", "ieee", False, None, "cpu"
)  # fmt: skip
RAGGED = replace(NORMAL, nq=100, nk=100)
HALF = replace(NORMAL, dtype="float16", precision="float16")
LONG = replace(HALF, nq=32, nk=16384)
SHARP = replace(HALF, inputs="peaky")
BLIND = replace(NORMAL, nq=40, nk=20, d=16, causal=True)  # rows 0 to 19 see no key


@dataclass(frozen=True)
class Pitfall:
    """One mistake: the stage that it is made in, by which replacements, and a problem it shows on.

    source: who warns of it or makes it. changes: (the stage's text, the wrong one), ...
    """

    source: str
    lesson: str
    stage: int
    changes: tuple[tuple[str, str], ...]
    problem: Problem = NORMAL


SCORES = "s = dot(q, tl.trans(k), PRECISION) * scale"
SUM_P = "l_i = l_i * alpha + tl.sum(p, 1)"
RESCALE = "        acc = acc * alpha[:, None]\n"
ADD = "        acc += dot(p.to(v.dtype), v, PRECISION)  # (BLOCK_M, BLOCK_D)\n"
MASK_S = '        s = tl.where(in_range[None, :], s, float("-inf"))\n'
SAVED = "ctx.save_for_backward(q, k, v, o, lse, seqlens_k)"
MAX_IN_BASE_2 = "(q @ k.mT).amax(-1).float() * q.shape[-1] ** -0.5 * LOG2_E"

STEP = "        # step ds_row"  # of stage 7, after the mask
PITFALLS: dict[str, Pitfall] = {
    "K not transposed": Pitfall(
        "003",
        "With BLOCK_D = BLOCK_N both are square, so it runs; elsewhere the shapes don't fit, and "
        "Triton says so. Test with a d that isn't the tile.",
        5, (("tl.trans(k)", "k"),)),
    "dot of float32 and float16": Pitfall(
        "003",
        "P comes out of the softmax in float32, V is float16. Round P to V's dtype: the "
        "product still adds up in float32.",
        5, (("p.to(v.dtype)", "p"),), HALF),
    "scores in float16": Pitfall(
        "003",
        "A float16 score of some hundreds is rounded to a multiple of a quarter or a half, and "
        "exp makes a factor of what is off. tl.dot adds up in float32: leave it at that.",
        5,
        ((SCORES, SCORES.replace("PRECISION)", "PRECISION).to(tl.float16)")),), SHARP,
    ),
    "sums in float16": Pitfall(
        "003",
        "Each tile's sum is rounded to 11 bits, and the error grows with the number of tiles: "
        "look at the relative error, and at long N.",
        5,
        (
            (RESCALE, "        acc = (acc * alpha[:, None]).to(tl.float16)\n"),
            (ADD, ADD.replace("PRECISION)", "PRECISION).to(tl.float16)")),
            (SUM_P, "l_i = (l_i * alpha + tl.sum(p, 1)).to(tl.float16)"),
        ),
        LONG,
    ),
    "rescaled after adding": Pitfall(
        "003",
        "alpha is what the past is worth under the new max. The new tile is under it already; "
        "and in the first tile alpha is 0.",
        5, ((RESCALE, ""), (ADD, ADD + RESCALE))),
    "not rescaled at all": Pitfall(
        "003",
        "Right as long as the first tile holds the row's max, and so for many rows. Test with "
        "inputs whose max comes late.",
        5, ((RESCALE, ""),)),
    "mask on the wrong axis": Pitfall(
        "003",
        "in_range is about keys, the second axis of S. On the first it hides queries and lets "
        "padded keys in. It fits only where BLOCK_M = BLOCK_N.",
        5,
        (
            ("in_range[None, :], s", "in_range[:, None], s"),
            ("precision, card)[0]", 'precision, card)[0] | {"BLOCK_M": BLOCK_N}'),
        ),
        RAGGED,
    ),
    "m kept for the backward pass, not the LSE": Pitfall(
        "003",
        "P is exp(S - LSE), and LSE = m + log l. exp(S - m) is not divided by the sum: the "
        "forward output is right, every gradient wrong.",
        7,
        ((SAVED, SAVED.replace("lse", MAX_IN_BASE_2)),),
        replace(NORMAL, direction="bwd"),
    ),
    "the q block's offset twice": Pitfall(
        "003's skeleton",
        "offs_m has the block's offset already. Block 0 is right, block 1 answers for block "
        "2's queries, the last ones read beyond the tensor.",
        5,
        (("q_ptrs = q_ptr + ", "q_ptrs = q_ptr + tl.program_id(0) * BLOCK_M * stride_qm + "),),
    ),
    "K and V masked by the local offset": Pitfall(
        "003's skeleton",
        "offs_n counts from 0 in each tile, so that the mask is always open. P is 0 for what "
        "lies beyond V, and 0 times NaN is NaN: with harmless numbers there it looks right.",
        5, (("kv_mask = in_range[:, None]", "kv_mask = (offs_n < Nk)[:, None]"),),
        RAGGED,
    ),
    "padded keys' scores not -inf": Pitfall(
        "003's skeleton",
        "K is loaded as 0 there, so the score is 0, not -inf: each padded key gets the weight "
        "of a score of 0, and the others have less.",
        5, ((MASK_S, ""),), RAGGED),
    "-inf minus -inf": Pitfall(
        "001",
        "A row that has seen nothing yet has m = -inf, and alpha = exp(-inf - -inf) is NaN. It "
        "must be 0 or 1: let m begin with the lowest number instead.",
        6,
        (("(BLOCK_M,), -3.4028234663852886e38", '(BLOCK_M,), float("-inf")'),), BLIND,
    ),
    "0 / 0 in a row that saw no key": Pitfall(
        "001",
        "l is 0 for it, and acc / l is NaN. Divide by 1: its output is 0, its LSE -inf.",
        6, (("    l_i = tl.where(seen > 0, l_i, 1.0)", "    l_i = l_i"),), BLIND
    ),
    "P made again without the mask": Pitfall(
        "001",
        "The backward pass masks P, not S: a hidden key's exp(S - LSE) is a number like any "
        "other. (In a row that saw none it is inf: stage 7 cuts such rows off beforehand.)",
        7, ((f"            p = tl.where(visible, p, 0.0)\n{STEP}", STEP),),
        replace(BLIND, direction="bwd"),
    ),
}  # fmt: skip


def load_wrong(name: str, folder: Path) -> ModuleType:
    """The stage with the mistake `name`, written to `folder` and imported.

    Raises ValueError where a text that the mistake replaces isn't there once.
    """
    pitfall, file = PITFALLS[name], f"pitfall_{list(PITFALLS).index(name)}"
    return stages.load(write_changed(pitfall.stage, pitfall.changes, folder, file))


def in_nan(x: torch.Tensor) -> torch.Tensor:
    """`x`'s values between margins of NaN."""
    storage = torch.full((x.numel() + 2 * MARGIN,), math.nan, dtype=x.dtype)
    return storage[MARGIN : MARGIN + x.numel()].view(x.shape).copy_(x)


def ask(stage: ModuleType, problem: Problem) -> Sequence[torch.Tensor]:
    """What `stage` answers to `problem`: o, or the gradients."""
    attend = partial(stage.attend, causal=True) if problem.causal else stage.attend
    dO = None if problem.direction == "fwd" else make_output_gradient(problem)
    q, k, v = (in_nan(x) for x in make_inputs(problem))
    return prepare(attend, problem.direction, q, k, v, dO)()


def measure(name: str, folder: Path) -> dict[str, Any]:
    """The record of the mistake `name`: what comes out, beside what the shipped stage gives."""
    pitfall = PITFALLS[name]
    problem = pitfall.problem
    shipped = stages.by_number(pitfall.stage)
    oracles = make_oracles(problem)
    right = list(zip(ask(shipped, problem), oracles.values(), strict=True))
    record = {
        "kind": "pitfall", "name": name, "source": pitfall.source, "lesson": pitfall.lesson,
        "stage": pitfall.stage,
        **problem.to_json(),
        "mode": shipped.STAGE.mode("cpu"), "changes": [list(pair) for pair in pitfall.changes],
        "raised": "", "exact": False, "reason": "", "rows": 0, "rows_wrong": 0, "err_f64_max": None,
        "shipped_err_f64_max": max(oracle.error(x).max for x, oracle in right),
    }  # fmt: skip
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of NaN and overflow: they are the point
            outputs = ask(load_wrong(name, folder), problem)
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # the interpreter wraps what each kernel raised
            cause = cause.__cause__
        record["raised"] = str(cause).strip().splitlines()[-1]
        return record
    verdict = judge_outputs(outputs, oracles)
    record["exact"], record["reason"] = verdict["exact"], verdict["why"]
    record["err_f64_max"] = verdict.get("err_f64_max")  # none where one isn't finite
    for x, oracle in zip(outputs, oracles.values(), strict=True):
        off = (x.double() - oracle.out64).abs()
        record["rows"] += x[..., 0].numel()
        record["rows_wrong"] += int((~(off <= oracle.bound.max)).any(-1).sum())
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a new file for the records")
    out = parser.parse_args().out
    if torch.cuda.is_available():  # there, stages/ has kernels compiled
        print("pitfalls: got a GPU, expected none: CUDA_VISIBLE_DEVICES= hides it", file=sys.stderr)
        return 2
    if reason := machine.why_no_triton("cpu"):
        print(f"pitfalls: Triton is needed, but {reason}", file=sys.stderr)
        return 2
    try:
        writer = Writer.create(out, make_env("cpu", [], [], {"command": "pitfalls"}))
    except FileExistsError as error:
        print(f"--out: {error}: name another", file=sys.stderr)
        return 2
    with writer, tempfile.TemporaryDirectory() as folder:
        for name in PITFALLS:
            record = measure(name, Path(folder))
            writer.append(record)
            said = record["raised"] or record["reason"]
            print(f"{name}: {said}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
