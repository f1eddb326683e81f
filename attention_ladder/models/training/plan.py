"""The plan of `ladder train`: the model's shape, the batches, the seeds, and the trainees.

A trainee is a stage, or one of SDPA's backends, with which the model is trained. Imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.isolation.roster import StageInfo
from harness.problems.problem import Problem
from harness.records.schema import Record

DTYPES = ("bfloat16", "float32")
DEFAULT_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
DEFAULT_SIZES = {"cpu": "tiny", "cuda": "small"}
DEFAULT_STEPS = {"cpu": 300, "cuda": 500}
INTERPRETED_STEPS = 3  # where a trainee's kernels are interpreted: a step takes seconds
DEFAULT_SEEDS = {"cpu": 1, "cuda": 3}
UNTIMED_STEPS = 10  # the first ones, whose time includes compilation
# `ladder generate`: keys per page; first tokens not timed, which fill the cache and may compile
PAGE_SIZE, UNTIMED = 16, 2

# SDPA's backends (torch.nn.attention.SDPBackend) as trainees: number, name, title, backend
FLASH = (100, "sdpa_flash", "SDPA, flash", "FLASH_ATTENTION")
CUDNN = (101, "sdpa_cudnn", "SDPA, cuDNN", "CUDNN_ATTENTION")
EFFICIENT = (102, "sdpa_efficient", "SDPA, efficient", "EFFICIENT_ATTENTION")
MATH = (104, "sdpa_math", "SDPA, math", "MATH")
BACKENDS = {"cpu": (FLASH, MATH), "cuda": (FLASH, CUDNN, EFFICIENT, MATH)}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and its batches: `batch` windows of `block` characters; `lr`: peak rate."""

    layers: int
    heads: int
    head_dim: int
    block: int
    batch: int
    lr: float

    @property
    def width(self) -> int:
        """D, the width of the residual stream."""
        return self.heads * self.head_dim


SHAPES = {
    # for a GPU: 3.3 M parameters, 8192 characters per step
    "small": Shape(layers=4, heads=4, head_dim=64, block=256, batch=32, lr=5e-4),
    # for a CPU: a step takes milliseconds with stage 3, seconds where interpreted
    "tiny": Shape(layers=2, heads=2, head_dim=32, block=64, batch=8, lr=1e-3),
}


@dataclass(frozen=True)
class Trainee:
    """A stage with its file, or one of SDPA's backends."""

    stage: int
    name: str
    mode: str
    declared: Record  # its entry in the env line
    path: Path | None = None
    backend: str | None = None
    skip: str | None = None  # why a model can't be trained with it
    info: StageInfo | None = None  # of a stage, which is checked before training
    by_rows: bool = False  # it takes no causal mask: called row by row (loop.row_by_row)
    save: Path | None = None  # where the model of its first seed is kept


@dataclass(frozen=True)
class Plan:
    """The training, the same for all trainees."""

    size: str
    steps: int
    seeds: Sequence[int]
    problem: Problem  # the attention of each layer

    def to_json(self, trainees: Sequence[Trainee]) -> list[Record]:
        """The plan in an env line: one dict for each trainee and seed."""
        return [
            {"stage": trainee.stage, "name": trainee.name, "seed": seed}
            for trainee in trainees
            for seed in self.seeds
        ]


def from_backends(device: str) -> list[Trainee]:
    """SDPA's backends for `device`; each one's process finds out whether it takes the problem."""
    return [
        Trainee(
            number, name, "native", {"stage": number, "name": name, "title": title}, None, backend
        )
        for number, name, title, backend in BACKENDS[device]
    ]


def from_stage(stage: StageInfo, problem: Problem) -> Trainee:
    """A stage as a trainee, skipped where it can't be trained with on this machine."""
    by_rows = "causal" not in stage.options
    skip = stage.why_skip(replace(problem, causal=False) if by_rows else problem)
    if stage.failed is not None:
        skip = f"{stage.failed[0]}: {stage.failed[1]}"
    mode, declared = stage.modes[problem.device], stage.to_json()
    return Trainee(stage.number, stage.name, mode, declared, stage.path, None, skip, stage, by_rows)


def make_problem(size: str, dtype: str, device: str) -> Problem:
    """The attention problem of a layer of the model of that size."""
    shape = SHAPES[size]
    sizes = (shape.batch, shape.heads, shape.heads, shape.block, shape.block, shape.head_dim)
    precision = "ieee" if dtype == "float32" else dtype
    return Problem("normal", 0, *sizes, dtype, precision, True, None, device, "train")
