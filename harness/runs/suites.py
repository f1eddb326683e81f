"""Named suites: the problems behind the sources' tables and pictures.

For `ladder run --suite NAME`, each a list of cells:

table-4.1   every stage at d = 16, full work and one query row (the source's Python columns are
            one row, its GPU columns all rows)
table-4.2   time and memory at d = 64, one head as in the source, and 32; precision matched
table-4.3   the error of Lite and Online as N grows, in IEEE and TF32
table-4.4   arithmetic intensity of three kernels and of one

For `ladder bench --suite NAME`, each a list of problems in float16, with and without the mask:

001-forward, 001-train, 001-memory   the shapes of source 001
004                                  the shapes of source 004: 16384 tokens, 2048 hidden
decode                               few query rows, many keys (harness/runs/decode.py)
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from harness.isolation.roster import StageInfo
from harness.problems.problem import PEERS_FROM, Problem
from harness.runs import decode
from harness.runs.plan import Cell, Sizes, make_problems, plan_grid

IEEE, TF32, HALF = ("float32", "ieee"), ("float32", "tf32"), ("float16", "float16")
SOURCE_001 = Sizes(tokens=0, hidden=0, b=2, h=4)
SOURCE_004 = Sizes(tokens=16384, hidden=2048)
SHORT, LONG = (512, 1024, 2048, 4096, 8192), (512, 1024, 2048, 4096, 8192, 16384)


def sized(base: Problem, sizes: Iterable[int], **fields: object) -> list[Problem]:
    """`base` at each N, with other fields as given."""
    return [replace(base, **{"nq": n, "nk": n, **fields}) for n in sizes]  # type: ignore[arg-type]


def some(stages: Sequence[StageInfo], *numbers: int) -> list[StageInfo]:
    """The stages of those numbers."""
    return [stage for stage in stages if stage.number in numbers]


def table_4_1(stages: Sequence[StageInfo], base: Problem) -> list[Cell]:
    ours = [stage for stage in stages if stage.number < PEERS_FROM]
    sizes = (8, 16, 32, 64)
    full = sized(base, sizes, d=16)
    one_row = sized(base, sizes, d=16, nq=1)
    return plan_grid(ours, [*full, *one_row], paired=True)


def table_4_2(stages: Sequence[StageInfo], base: Problem) -> list[Cell]:
    peers = [stage for stage in stages if stage.number >= PEERS_FROM and not stage.few_queries]
    compared = some(stages, 3, 5) + peers
    problems = []
    for h in (1, 32):
        for dtype, precision in (IEEE, TF32, HALF):
            sizes = (1024, 2048, 4096, 8192, 16384)
            problems += sized(base, sizes, d=64, h=h, hk=h, dtype=dtype, precision=precision)
    cells = []
    for problem in problems:
        # one head leaves most of a GPU idle: what stage 8 is for
        idle = problem.h == 1 and problem.dtype == "float16"
        cells += plan_grid(compared + some(stages, 8) * idle, [problem], paired=True)
    return [cell for cell in cells if cell.stage.number < PEERS_FROM or like_for_like(cell)]


def like_for_like(cell: Cell) -> bool:
    """Whether a peer is compared: it takes the problem, and at the precision asked for.

    No fused peer follows torch's TF32 switch: the one that takes float32 is the same with it and
    without. SDPA's math backend does, being torch's own products, as stage 3 is: IEEE is enough.
    """
    return cell.stage.why_skip(cell.problem) is None and cell.problem.precision != "tf32"


def table_4_3(stages: Sequence[StageInfo], base: Problem) -> list[Cell]:
    problems = []
    for dtype, precision in (IEEE, TF32):
        sizes = (64, 128, 256, 512, 1024)
        problems += sized(base, sizes, d=64, dtype=dtype, precision=precision)
    return plan_grid(some(stages, 3, 4, 5), problems)


def table_4_4(stages: Sequence[StageInfo], base: Problem) -> list[Cell]:
    return plan_grid(some(stages, 3, 5), sized(base, (1024, 2048, 4096, 8192), d=64), paired=True)


# of `ladder run`: name -> its cells, from the stages and a problem that gives seed and device
CELL_SUITES: dict[str, Callable[[Sequence[StageInfo], Problem], list[Cell]]] = {
    "table-4.1": table_4_1,
    "table-4.2": table_4_2,
    "table-4.3": table_4_3,
    "table-4.4": table_4_4,
}
# of `ladder bench`, the sources' shapes: name -> directions, d, N, and how large
PROBLEM_SUITES: dict[str, tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...], Sizes]] = {
    "001-forward": (("fwd",), (64,), SHORT, SOURCE_001),
    "001-train": (("fwd", "bwd", "train"), (64,), SHORT, SOURCE_001),
    "001-memory": (("fwd", "train"), (64,), SHORT, SOURCE_001),
    "004": (("fwd",), (64, 128), LONG, SOURCE_004),
}
BENCH_SUITES = (*PROBLEM_SUITES, "decode")
SUITE_STAGES = {"decode": decode.STAGES}  # who is compared unless told, where it isn't the usual


def suite_problems(name: str, base: Problem) -> list[Problem]:
    """The problems of one of BENCH_SUITES; `base` gives inputs, seed and device."""
    if name == "decode":
        return list(decode.problems(base))
    directions, ds, ns, sizes = PROBLEM_SUITES[name]
    half = replace(base, dtype="float16", precision="float16")
    return make_problems(half, directions, (False, True), ds, ns, sizes)
