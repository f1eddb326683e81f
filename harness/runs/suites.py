"""Named suites: the problems behind the sources' tables and pictures, all sized for a GPU.

For `ladder run --suite NAME`:

table-4.1   every stage at d = 16, full work and one query row (the source's Python columns are
            one row, its GPU columns all rows)
table-4.2   time and memory at d = 64, one head as in the source, and 32; precision matched
table-4.3   the error of Lite and Online as N grows, in IEEE and TF32
table-4.4   arithmetic intensity of three kernels and of one

For `ladder bench --suite NAME`, in float16, with and without the mask:

001-forward, 001-train, 001-memory   the shapes of source 001
004                                  the shapes of source 004: 16384 tokens, 2048 hidden
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from harness.isolation.roster import StageInfo
from harness.problems.problem import PEERS_FROM, Problem
from harness.runs.plan import Cell, Sizes, make_problems, plan_grid

IEEE, TF32, HALF = ("float32", "ieee"), ("float32", "tf32"), ("float16", "float16")
SOURCE_001 = Sizes(tokens=0, hidden=0, b=2, h=4)
SOURCE_004 = Sizes(tokens=16384, hidden=2048)
SHORT, LONG = (512, 1024, 2048, 4096, 8192), (512, 1024, 2048, 4096, 8192, 16384)
OURS = range(PEERS_FROM)


@dataclass(frozen=True)
class Suite:
    """A suite of `command`: its problems, and for `ladder run` who is measured on them, and how."""

    command: str
    problems: Callable[[Problem], list[Problem]]  # from one that gives inputs, seed and device
    stages: Collection[int] = OURS
    peers: bool = False
    paired: bool = True

    def cells(self, stages: Sequence[StageInfo], base: Problem) -> list[Cell]:
        """The cells of those of `stages` that take part; `base` gives seed and device."""
        peers = [stage for stage in stages if self.peers and stage.number >= PEERS_FROM]
        chosen = [stage for stage in stages if stage.number in self.stages] + peers
        cells = plan_grid(chosen, self.problems(base), self.paired)
        return [cell for cell in cells if cell.stage not in peers or like_for_like(cell)]


def like_for_like(cell: Cell) -> bool:
    """Whether a peer is compared: it takes the problem, and at the precision asked for.

    No fused peer follows torch's TF32 switch: the one that takes float32 is the same with it and
    without. SDPA's math backend does, being torch's own products, as stage 3 is: IEEE is enough.
    """
    return cell.stage.why_skip(cell.problem) is None and cell.problem.precision != "tf32"


def sized(
    base: Problem, ns: Sequence[int], d: int = 64, nqs: Sequence[int | None] = (None,),
    hs: Sequence[int] = (1,), dtypes: Sequence[tuple[str, str]] = (IEEE,),
) -> list[Problem]:  # fmt: skip
    """`base` with each number of heads, dtype and precision, nq (None: N), and N."""
    return [
        replace(base, nq=nq or n, nk=n, d=d, h=h, hk=h, dtype=dtype, precision=precision)
        for h, (dtype, precision), nq, n in product(hs, dtypes, nqs, ns)
    ]


def halves(
    directions: Sequence[str], ds: Sequence[int], ns: Sequence[int], sizes: Sizes, base: Problem
) -> list[Problem]:
    """`base` in float16, in each direction, with and without the mask, at each d and N."""
    half = replace(base, dtype="float16", precision="float16")
    return make_problems(half, directions, (False, True), ds, ns, sizes)


SUITES = {
    "table-4.1": Suite("run", partial(sized, ns=(8, 16, 32, 64), d=16, nqs=(None, 1))),
    "table-4.2": Suite(
        "run", partial(sized, ns=LONG[1:], hs=(1, 32), dtypes=(IEEE, TF32, HALF)), (3, 5), True
    ),
    "table-4.3": Suite(
        "run", partial(sized, ns=(64, 128, 256, 512, 1024), dtypes=(IEEE, TF32)), (3, 4, 5),
        paired=False,
    ),
    "table-4.4": Suite("run", partial(sized, ns=SHORT[1:]), (3, 5)),
    "001-forward": Suite("bench", partial(halves, ("fwd",), (64,), SHORT, SOURCE_001)),
    "001-train": Suite("bench", partial(halves, ("fwd", "bwd", "train"), (64,), SHORT, SOURCE_001)),
    "001-memory": Suite("bench", partial(halves, ("fwd", "train"), (64,), SHORT, SOURCE_001)),
    "004": Suite("bench", partial(halves, ("fwd",), (64, 128), LONG, SOURCE_004)),
}  # fmt: skip


def names(command: str) -> list[str]:
    """The suites of `command`."""
    return [name for name, suite in SUITES.items() if suite.command == command]
