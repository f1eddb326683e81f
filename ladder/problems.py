"""Make and check the problems that a command's options describe."""

from collections.abc import Sequence
from dataclasses import replace

from harness.problems.problem import DIRECTIONS, INPUTS, REAL_D, SEED, Problem
from harness.problems.real_inputs import HEADS, LAYERS, MAX_N
from harness.records.schema import Record
from harness.runs import plan
from ladder.options import (
    CAUSAL,
    MAX_D,
    UserError,
    integers,
    key_lengths,
    long_dtype,
    some_of,
)


def make_base(
    device: str, dtype: str, *, d: int = 1, b: int = 1, h: int = 1, inputs: str = "normal",
    seed: int = SEED, precision: str = "ieee", seqlens: str | None = None,
) -> Problem:  # fmt: skip
    """Make the problem that options describe, with N = 1 for the caller to replace."""
    dtype = long_dtype(dtype)
    if dtype != "float32":
        if precision == "tf32":
            raise UserError(f"--precision: got tf32 with {dtype}, expected it with float32")
        precision = dtype
    return Problem(
        inputs=inputs, seed=seed, b=b, h=h, hk=h, nq=1, nk=1, d=d, dtype=dtype,
        precision=precision, causal=False, seqlens_k=key_lengths(seqlens), device=device,
    )  # fmt: skip


def modes(given: Record) -> list[str]:
    """What is computed, by --mode: some of fwd, bwd, train."""
    return list(some_of(*DIRECTIONS)(given["mode"], "--mode"))


def queries(given: Record) -> list[int]:
    """The numbers of queries by --nq; none where it is not given."""
    return [] if given["nq"] is None else list(integers(1)(given["nq"], "--nq"))


def described(given: Record, device: str, kinds: Sequence[str] = INPUTS) -> list[Problem]:
    """The problems that the options of `ladder run` or `ladder bench` describe on `device`.

    One for each mode, mask, d, N, number of queries and kind of inputs, which are `kinds` where all
    are asked for. Raises UserError where an option has a bad value, or two don't go together.
    """
    base = make_base(
        device, given["dtype"], inputs=given["inputs"], seed=given["seed"],
        precision=given.get("precision", "ieee"), seqlens=given["seqlens"],
    )  # fmt: skip
    ds, ns = integers(1, MAX_D)(str(given["d"]), "--d"), integers(1)(given["n"], "--n")
    whole = given.get("tokens", 0), given.get("hidden", 0)
    sizes = plan.Sizes(*whole, given["b"], given["h"], given["hk"])
    try:
        made = plan.make_problems(base, modes(given), CAUSAL[given["causal"]], ds, ns, sizes)
    except ValueError as error:
        raise UserError(str(error)) from None
    rows = queries(given)
    made = [replace(problem, nq=nq) for problem in made for nq in rows or [problem.nk]]
    made = list(dict.fromkeys(plan.each_inputs(made, kinds)))
    for problem in made:
        check(problem)
    return made


def check(problem: Problem) -> None:
    """Raise UserError, which names the option, where a problem's sizes are inconsistent."""
    b, h, hk = problem.b, problem.h, problem.hk
    if hk < 1 or h % hk:
        raise UserError(
            f"--hk: got {hk}, expected a number that divides the {h} head{'s' * (h > 1)} of q"
        )
    if problem.inputs == "real":
        if problem.d != REAL_D:
            raise UserError(f"--d: got {problem.d}, real inputs have {REAL_D}")
        if hk != h:
            raise UserError(f"--hk: got {hk}, real inputs have as many key heads as heads: {h}")
        tokens = f"{MAX_N} tokens"
        for option, value, most, named in (
            ("--b", b, LAYERS, LAYERS), ("--h", h, HEADS, HEADS),
            ("--n", problem.nk, MAX_N, tokens), ("--nq", problem.nq, MAX_N, tokens),
        ):  # fmt: skip
            if value > most:
                raise UserError(f"{option}: got {value}, real inputs have at most {named}")
    lengths = problem.seqlens_k or ()
    if lengths and len(lengths) != b:
        raise UserError(
            f"--seqlens: got {','.join(map(str, lengths))}, expected a length for each batch "
            f"entry, and the batch size is {b}: give --b {len(lengths)}, or as many lengths"
        )
    if max(lengths, default=0) > problem.nk:
        raise UserError(
            f"--seqlens: got {max(lengths)}, expected at most N = {problem.nk}, the number of keys"
        )
