"""Real inputs: q, k, v that a transformer computed on real text, read from data/real_inputs.npz.

Two layers of all-MiniLM-L6-v2 on 512 tokens, 12 heads of d = 32; data/README.md says how they were
captured and under which licences. Needs NumPy only, neither torch nor transformers.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from harness.problems.problem import REAL_D

if TYPE_CHECKING:  # the command line reads the sizes below, and needs no NumPy
    import numpy as np

D = REAL_D
MAX_N: Final = 512
HEADS: Final = 12
LAYERS: Final = 2

# inside the package, so that an installed wheel finds it as a checkout does
FIXTURE: Final = Path(__file__).parents[1] / "data" / "real_inputs.npz"


def load(b: int, h: int, nq: int, nk: int) -> "tuple[np.ndarray, np.ndarray, np.ndarray]":
    """Load the first `b` layers, `h` heads, `nq` queries and `nk` keys of the capture.

    Returns q (b, h, nq, 32), k and v (b, h, nk, 32): float32, contiguous. The batch index is
    the layer; within a layer heads are sorted by their largest |q.k| * d**-0.5, the sharpest first,
    where two are equal in the model's order. A shorter N is a slice of the 512-token run.
    Raises ValueError, naming the option, when more (or less than 1) is asked for.
    """
    import numpy as np

    limits = {"--b": (b, LAYERS, "layers"), "--h": (h, HEADS, "heads"),
              "--n": (nk, MAX_N, "tokens"), "--nq": (nq, MAX_N, "tokens")}  # fmt: skip
    for option, (got, most, unit) in limits.items():
        if got > most:
            raise ValueError(f"{option}: got {got}, real inputs have at most {most} {unit}")
        if got < 1:
            raise ValueError(f"{option}: got {got}, expected 1 to {most} {unit} of real inputs")
    with np.load(FIXTURE) as fixture:
        q, k, v = fixture["q"], fixture["k"], fixture["v"]  # (LAYERS, HEADS, MAX_N, D), float16
        order = np.argsort(-fixture["sharpness"], axis=1, kind="stable")[:b, :h]  # (b, h)
    layer = np.arange(b)[:, None]  # (b, 1)

    def pick(x: "np.ndarray", n: int) -> "np.ndarray":
        return np.ascontiguousarray(x[layer, order, :n], dtype=np.float32)  # (b, h, n, D)

    return pick(q, nq), pick(k, nk), pick(v, nk)
