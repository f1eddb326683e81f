"""The plan of a run: its cells, and which of them are measured together. No tensors here."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from pathlib import Path
from typing import Final

from harness.isolation.judge import JUDGE_LIMIT
from harness.isolation.roster import StageInfo
from harness.problems import cost
from harness.problems.problem import INPUTS, PEERS_FROM, REAL_D, YARDSTICK, Problem
from harness.problems.real_inputs import HEADS, LAYERS, MAX_N
from harness.records import environment
from harness.records.schema import Record, key
from harness.records.units import show_bytes, significant

# FLOP/s in float64 that no core of a CPU (two 512-bit FMAs per cycle, 6 GHz), and no GPU, exceeds
CORE_RATE, GPU_RATE = 2e11, 1e14
# FLOP/s that are fast for attention on one thread of a CPU (a stage has no more), and in Triton's
# interpreter, where a stage is called once and not timed
THREAD_RATE, INTERPRETED_RATE = 2e11, 2e9
PATIENCE: Final = 600.0  # seconds: a run that takes longer even at those rates is refused
CPU_SIZES: Final = (1024, 2048, 4096)
GPU_SIZES: Final = (1024, 2048, 4096, 8192, 16384)
SMALL_N, SMALL_D = 64, 16  # the largest N, and the d, of the small part of the tour
ROWS, MULTIPROCESSORS = 64, 132  # of a block in a fused kernel; of an H200
Takes = Callable[[StageInfo, Problem], bool]  # whether a stage is measured on a problem


@dataclass(frozen=True)
class Limits:
    """The limits of each stage of a comparison, and how stages that take turns are sampled.

    budget: seconds for a stage's check, and as many again for its rounds where stages take turns; a
    stage alone has one budget for both. memory: bytes of main memory, for the whole process.
    warmup: calls before the rounds. rounds: samples of each; None: as many as fit into a set time.
    graph: a call is captured into a CUDA graph, and replays are sampled.
    """

    budget: float = 60.0
    memory: int = 4 << 30
    warmup: int = 2
    rounds: int | None = None
    graph: bool = False


@dataclass(frozen=True)
class Cell:
    """One stage on one problem; `paired`: timed in turns with the other stages, in one process."""

    stage: StageInfo
    problem: Problem  # with a page size where the stage reads from a paged cache
    paired: bool = False

    def to_json(self) -> Record:
        """The cell in the plan of an env line."""
        identity = {"stage": self.stage.number, "name": self.stage.name, "paired": self.paired}
        return identity | self.problem.to_json()

    @property
    def key(self) -> str:
        """What its record is known by (schema.key)."""
        return key(self.to_json())


@dataclass(frozen=True)
class Comparison:
    """The cells that are measured together: one `alone` in its process, or several in turns.

    They have one problem; a cell's own may have a page size besides: then its stage reads the same
    k and v from a paged cache.
    """

    cells: Sequence[Cell]
    limits: Limits = Limits()

    @property
    def problem(self) -> Problem:
        """The problem, without a page size."""
        return replace(self.cells[0].problem, page_size=None)

    @property
    def alone(self) -> bool:
        """Whether it is one cell, whose stage takes no turns."""
        return not self.cells[0].paired

    @property
    def stages(self) -> list[StageInfo]:
        """The stage of each cell."""
        return [cell.stage for cell in self.cells]


def group(cells: Iterable[Cell], limits: Limits) -> list[Comparison]:
    """Group cells into comparisons: each by itself, or the paired ones of a problem together."""

    def together(cell: Cell) -> tuple[bool, Problem]:
        return cell.paired, replace(cell.problem, page_size=None)

    comparisons = []
    for (paired, _), each in groupby(cells, together):
        alike = [*each]
        parts = [alike] if paired else [[cell] for cell in alike]
        comparisons += [Comparison(part, limits) for part in parts]
    return comparisons


def read_cells(plan: Iterable[Record], stages: Mapping[tuple[int, str], StageInfo]) -> list[Cell]:
    """The cells in the plan of an env line, as `Cell.to_json` wrote them."""
    return [
        Cell(stages[each["stage"], each["name"]], Problem.from_json(each), each["paired"])
        for each in plan
    ]


def unfinished(comparisons: Iterable[Comparison], done: Iterable[Record]) -> list[Comparison]:
    """The comparisons that lack one of their records, or more, in `done`."""
    there = {key(record) for record in done}
    return [each for each in comparisons if any(cell.key not in there for cell in each.cells)]


def default_memory() -> int:
    """The default memory limit of a cell: the smaller of 4 GiB and half the machine's memory."""
    machine = environment.memory_bytes()
    return min(4 << 30, machine // 2) if machine else 4 << 30


def why_hopeless(problem: Problem) -> tuple[str, str] | None:
    """Status and reason where outputs of `problem` can't be checked on this machine, or None.

    Decided before anything is allocated: inputs larger than the memory would make the system kill
    some process, and an oracle that can't be ready in time would only be waited for.
    """
    machine, needed = environment.memory_bytes(), cost.checking_bytes(problem)
    if machine is not None and needed > machine // 2:
        return "out-of-memory", (
            f"can't be checked: that takes at least {show_bytes(needed)}, more than half of this "
            f"machine's {show_bytes(machine)}"
        )
    rate = GPU_RATE if problem.device == "cuda" else CORE_RATE * environment.cores()
    seconds = cost.flops(problem) / rate
    if seconds > JUDGE_LIMIT:
        return "timeout", (
            f"can't be checked: the oracle would take at least {seconds:.0f} s, more than its "
            f"limit of {JUDGE_LIMIT:g} s"
        )
    return None


def why_beyond(stage: StageInfo, problem: Problem, limits: Limits) -> tuple[str, str] | None:
    """Status and reason where `stage` can't compute `problem` within `limits` here, or None.

    For a CPU, whose limits are ours. Said beforehand: on the way there a machine swaps for minutes.
    """
    if problem.device != "cpu":
        return None
    scores = cost.score_bytes(problem)
    if stage.ours and stage.traffic == "three-kernel" and scores > limits.memory:
        return "out-of-memory", (
            f"its {problem.nq} x {problem.nk} scores alone take {show_bytes(scores)}, more than "
            f"the {show_bytes(limits.memory)} that a stage may take here"
        )
    interpreted = stage.modes["cpu"] == "interpreted"
    rate = INTERPRETED_RATE if interpreted else THREAD_RATE
    seconds = cost.flops(problem) / rate
    if seconds > limits.budget:
        how = "an interpreted kernel" if interpreted else "one thread of a CPU"
        return "timeout", (
            f"one call takes {seconds:.0f} s at {rate / 1e9:.0f} GFLOP/s, which is fast for {how}, "
            f"more than its budget of {limits.budget:g} s"
        )
    return None


def why_too_long(cells: Iterable[Cell], limits: Limits) -> str | None:
    """Why the cells of `ladder bench` would take too long, or None.

    For a CPU only: a problem for which a GPU is too slow does not fit into its memory.
    """
    seconds = 0.0
    calls = limits.warmup + (limits.rounds or 0)
    for stage, problem in ((cell.stage, cell.problem) for cell in cells):
        # what is skipped or hopeless ends at once, with a reason
        if problem.device != "cpu" or why_hopeless(problem) or stage.why_skip(problem):
            continue
        interpreted = stage.modes["cpu"] == "interpreted"  # called once
        rate = INTERPRETED_RATE if interpreted else THREAD_RATE / calls
        seconds += cost.flops(problem) / rate
    if seconds <= PATIENCE:
        return None
    minutes = f"{seconds / 60:.0f} minutes"
    wait = minutes if seconds < 5400 else f"{significant(seconds / 3600, 2)} hours"
    rates = [f"{rate / 1e9:.0f} GFLOP/s" for rate in (THREAD_RATE, INTERPRETED_RATE)]
    return (
        f"hopeless on a CPU: the calls alone would take {wait} at {rates[0]}, which "
        f"is fast for its one thread, and {rates[1]} interpreted; take a GPU, smaller sizes "
        "without --suite, or fewer --stages and a smaller --repeat"
    )


# ---- cells


def each_inputs(problems: Iterable[Problem], kinds: Sequence[str] = INPUTS) -> list[Problem]:
    """Replace each problem with inputs 'all' by one for each of `kinds`, real where they fit."""

    def of(problem: Problem) -> list[Problem]:
        if problem.inputs != "all":
            return [problem]
        b, h, n = problem.b, problem.h, max(problem.nq, problem.nk)
        real = problem.d == REAL_D and problem.hk == h and b <= LAYERS and h <= HEADS and n <= MAX_N
        return [replace(problem, inputs=kind) for kind in kinds if kind != "real" or real]

    return [each for problem in problems for each in of(problem)]


def plan_grid(
    stages: Sequence[StageInfo], problems: Iterable[Problem], paired: bool = False
) -> list[Cell]:
    """Every stage on every problem, problem by problem; with `paired`, once more in turns."""
    turns = (False, True) if paired else (False,)
    return [
        Cell(stage, problem, turn) for problem in problems for turn in turns for stage in stages
    ]


def plan_tour(stages: Sequence[StageInfo], base: Problem) -> list[Cell]:
    """Plan the tour: small problems for all stages, larger ones and real input for faster stages.

    There is one more part, with the peers: on a CPU up to N = 4096, on a GPU up to 16384. A stage
    is measured up to the N that it declares worth running, and one made for few query rows in the
    small part only (on a CPU also one that splits the keys to fill a GPU); a user's own stage also
    with peaky input. `base` gives seed, dtype and device.
    """
    sizes = [("normal", n, SMALL_D) for n in (8, 16, 32, SMALL_N)]
    sizes += [("normal", n, 64) for n in (64, 128, 256, 512, 1024)]
    sizes += [("real", n, REAL_D) for n in (128, 256, 512)]
    larger = GPU_SIZES if base.device == "cuda" else CPU_SIZES
    ds = (64, 128) if base.device == "cuda" else (64,)
    sizes += [("normal", n, d) for d in ds for n in larger if (n, d) != (1024, 64)]
    cells = []
    on_a_cpu = base.device == "cpu"
    for inputs, n, d in sizes:
        problem = replace(base, inputs=inputs, nq=n, nk=n, d=d)
        # a stage that is only worth running in the small part skips the rest
        least = n if d == SMALL_D else max(n, SMALL_N + 1)
        cells += [
            Cell(stage, variant)
            for stage in stages
            for variant in (problem, replace(problem, inputs="peaky"))
            if (variant is problem or (inputs == "normal" and not stage.ours))
            and least <= stage.worth_up_to.get(problem.device, least)
            and (n <= SMALL_N or not (stage.few_queries or (stage.splits_keys and on_a_cpu)))
            and (stage.number < PEERS_FROM or peer_joins(stage, problem))
        ]
    return cells


def peer_joins(peer: StageInfo, problem: Problem) -> bool:
    """Whether a peer has a row: for the larger problems that it can compute; on a CPU, fused."""
    joins = problem.device == "cuda" or peer.traffic == "fused"
    return joins and problem.nk >= GPU_SIZES[0] and peer.why_skip(problem) is None


# ---- comparisons


@dataclass(frozen=True)
class Sizes:
    """How many batch entries and heads a problem of N queries has.

    B = tokens // N and H = hidden // d, so that the work per token stays the same, as in source
    004; or `b`, `h` where they are given. k and v have `hk` heads, as many as q where it is None.
    """

    tokens: int
    hidden: int
    b: int | None = None
    h: int | None = None
    hk: int | None = None

    def of(self, n: int, d: int) -> tuple[int, int]:
        """b and h of a problem. Raises ValueError where `tokens` or `hidden` is too small."""
        if self.b is None and n > self.tokens:
            raise ValueError(
                f"--n: got {n}, expected at most the {self.tokens} tokens of a batch: raise "
                "--tokens, or give --b"
            )
        if self.h is None and self.hidden % d:
            raise ValueError(
                f"--d: got {d}, expected a divisor of {self.hidden}, the size of all heads: "
                "change --hidden, or give --h"
            )
        return self.b or self.tokens // n, self.h or self.hidden // d


def make_problems(
    base: Problem, directions: Sequence[str], causal: Sequence[bool], ds: Sequence[int],
    ns: Sequence[int], sizes: Sizes,
) -> list[Problem]:  # fmt: skip
    """A problem for each combination, N last; `base` gives inputs, seed, dtype and device.

    Raises ValueError where `sizes` leaves a problem no batch entry or no head.
    """
    problems = []
    for direction, masked, d, n in product(directions, causal, ds, ns):
        b, h = sizes.of(n, d)
        hk = h if sizes.hk is None else sizes.hk
        problems.append(
            replace(base, direction=direction, causal=masked, b=b, h=h, hk=hk, nq=n, nk=n, d=d)
        )
    return problems


def few_rows(problem: Problem) -> bool:
    """Whether query rows are fewer than keys, or their blocks too few to fill a GPU."""
    blocks = problem.b * problem.h * -(-problem.nq // ROWS)
    return problem.nq < problem.nk or blocks < MULTIPROCESSORS


def fits(stage: StageInfo, problem: Problem) -> bool:
    """Whether a stage can compute the problem, and declares itself exact on it and made for it."""
    made_for = few_rows(problem) if stage.splits_keys else True
    if "world" in stage.options:  # alone it is another stage
        made_for = problem.world > 1
    return made_for and stage.why_skip(problem) is None and stage.exact(problem)


def usual_stages(stages: Sequence[StageInfo], problems: Sequence[Problem]) -> list[StageInfo]:
    """The stages compared by default: stage 3, the newest stage that fits, and all the peers.

    For forward passes that is the newest of those that are forward-only or made for this generation
    of GPUs, otherwise the newest that carries gradients. Stages made for few query rows are
    included only where there are fewer queries than keys; those that split the keys join the newest
    where rows are too few to fill a GPU.
    """
    ours = [stage for stage in stages if stage.number < PEERS_FROM]
    splitting = [stage for stage in ours if stage.splits_keys]
    on_a_gpu = [problem for problem in problems if problem.device == "cuda"]
    chosen = {stage.path for stage in stages if stage.number == YARDSTICK}
    chosen |= {stage.path for stage in splitting if any(fits(stage, p) for p in on_a_gpu)}
    for trains in {problem.direction != "fwd" for problem in problems}:
        able = [
            stage
            for stage in ours
            if stage not in splitting
            and (stage.gradients if trains else not stage.gradients or stage.only_major is not None)
            and any(
                fits(stage, p) and (not stage.few_queries or p.nq < p.nk)
                for p in problems
                if (p.direction != "fwd") == trains
            )
        ]
        compiled = [
            stage
            for stage in able
            if stage.number != YARDSTICK
            and "interpreted" not in (stage.modes[problem.device] for problem in problems)
        ]
        newest = max(compiled or able, key=lambda stage: stage.number, default=None)
        chosen |= {newest.path} if newest else set()
    few = any(problem.nq < problem.nk for problem in problems)
    return [
        stage
        for stage in stages
        if stage.path in chosen or (stage.number >= PEERS_FROM and (few or not stage.few_queries))
    ]


def plan_comparisons(
    stages: Sequence[StageInfo],
    problems: Sequence[Problem],
    named: Collection[Path],
    takes: Takes = fits,
) -> list[Cell]:
    """Plan paired cells: on each problem, those of the stages for which `takes` is true.

    Stages whose files are `named` take part in each: where they can't compute the problem, their
    record says why. Problems that differ only in their page size are one comparison, side by side.
    """
    whole = {problem: replace(problem, page_size=None) for problem in problems}
    together = {each: index for index, each in enumerate(dict.fromkeys(whole.values()))}
    in_order = sorted(problems, key=lambda each: (together[whole[each]], each.page_size or 0))
    return [
        Cell(stage, problem, paired=True)
        for problem in in_order
        for stage in stages
        if stage.path in named or takes(stage, problem)
    ]
