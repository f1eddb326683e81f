"""The tensors that a trace walks through: those of `ladder run` with the same n, d and seed."""

from harness.lessons.trace import Trace
from harness.problems.problem import Problem


def make_trace(
    n: int, d: int, tile: int, row: int, *, inputs: str = "normal", seed: int = 0,
    causal: bool = False,
) -> Trace:  # fmt: skip
    """Query `row` of a problem of n queries and n keys, one head, float32.

    `inputs` is 'normal' or 'peaky'. What comes out is checked by nobody yet: walking it is.
    """
    from harness.problems.inputs import make_inputs  # torch comes with it

    problem = Problem(inputs, seed, 1, 1, 1, n, n, d, "float32", "ieee", causal, None, "cpu")
    q, k, v = (x[0, 0].numpy() for x in make_inputs(problem))
    return Trace(row, tile, inputs, seed, causal, q[row], k, v)


def example() -> Trace:
    """The walk of the committed pictures: `ladder trace --n 8 --tile 2 --row 3`.

    The running max rises in its first three tiles and stays in the last.
    """
    return make_trace(n=8, d=4, tile=2, row=3)
