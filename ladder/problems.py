"""Make and check the problem that a command's options describe."""

from harness.problems.problem import REAL_D, SEED, Problem
from harness.problems.real_inputs import HEADS, LAYERS, MAX_N
from ladder.options import UserError, key_lengths, long_dtype


def make_base(
    device: str, dtype: str, *, d: int = 1, b: int = 1, h: int = 1, hk: int | None = None,
    inputs: str = "normal", seed: int = SEED, precision: str = "ieee", causal: bool = False,
    seqlens: str | None = None, direction: str = "fwd",
) -> Problem:  # fmt: skip
    """Make the problem that options describe, with N = 1 for the caller to replace."""
    dtype = long_dtype(dtype)
    if dtype != "float32":
        if precision == "tf32":
            raise UserError(f"--precision: got tf32 with {dtype}, expected it with float32")
        precision = dtype
    return Problem(
        inputs=inputs, seed=seed, b=b, h=h, hk=h if hk is None else hk, nq=1, nk=1, d=d,
        dtype=dtype, precision=precision, causal=causal, seqlens_k=key_lengths(seqlens),
        device=device, direction=direction,
    )  # fmt: skip


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
