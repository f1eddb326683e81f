"""Time every launch configuration of stages 6 and 7 on many problems: what may share a choice?

    python tools/tuner_key.py --out results/h200/tuner-key.jsonl

Needs a GPU. stages/common/tuner.py makes a choice once for all calls of a kind. This times the
candidates of each kernel (forward with LSE, dk and dv, dq) on problems that differ in batch, heads,
queries and keys, so that course/report/contests.py can tell what a choice costs where it is used
for another problem of its kind. First all kernels are compiled, as many at once as there are cores.
"""

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))

STAGE = 7  # its forward pass is stage 6's kernel
ROUNDS = 15  # of the times that losses are made of; the tuner itself has fewer
MOST_KEYS = 1 << 19  # of all heads together: 32 heads of N = 16384

Kind = tuple[int, str, str, bool]  # d, dtype, precision, causal
Shape = tuple[int, int, int, int]  # b, h, nq, nk

KINDS: list[Kind] = [
    *((d, "float16", "float16", causal) for d in (64, 128) for causal in (False, True)),
    *((64, "float32", "tf32", causal) for causal in (False, True)),
    (256, "float16", "float16", False),
]


def shapes() -> Iterator[Shape]:
    """Problems that share a choice as long as it is kept by keys alone, bucket by bucket."""
    for nk in (1024, 4096, 16384):
        for b, h in ((1, 1), (1, 8), (1, 32), (4, 32), (16, 32)):
            if b * h * nk <= MOST_KEYS:
                yield b, h, nk, nk
        for b, h in ((1, 8), (4, 32)):
            yield b, h, 1, nk
            yield b, h, 128, nk
        yield 1, 32, nk * 5 // 8, nk * 5 // 8


def call(kind: Kind, shape: Shape) -> None:
    """One training step of the stage; its kernels ask the tuner, or who stands in for it."""
    import torch

    import stages
    from harness.measures.accuracy import set_precision

    d, dtype, precision, causal = kind
    b, h, nq, nk = shape
    if dtype == "float32":
        set_precision(precision)
    q, k, v = (
        torch.randn(b, h, n, d, device="cuda", dtype=getattr(torch, dtype), requires_grad=True)
        for n in (nq, nk, nk)
    )
    o = stages.by_number(STAGE).attend(q, k, v, causal=causal)
    o.backward(torch.randn_like(o))


def compile_all(kind: Kind, nq: int) -> None:
    """Compile the kernels of a kind in all configurations, onto Triton's own disk cache."""
    from stages.common import tuner

    tuner.ROUNDS = 1
    put_in(lambda kernel, candidates, launch, **_: min(tuner.time_each(candidates, launch)))
    call(kind, (1, 8, nq, 1024))


def put_in(choose: Callable[..., int]) -> None:
    """Have `choose` stand in for the tuner: it gives the index of a candidate."""
    from stages.common import tuner

    def stand_in(kernel: Any, candidates: Sequence[Any], launch: Any, **key: Any) -> Any:
        return candidates[choose(kernel, candidates, launch, **key)]

    tuner.choose = stand_in


def measure(kind: Kind, shape: Shape) -> list[dict[str, Any]]:
    """A record per kernel: the times of all its configurations, the tuner's and more exact ones."""
    from stages.common import tuner

    records = []
    d, dtype, precision, causal = kind
    b, h, nq, nk = shape
    problem = {"b": b, "h": h, "nq": nq, "nk": nk, "d": d, "dtype": dtype}
    problem |= {"precision": precision, "causal": causal}
    tuners_own = tuner.ROUNDS

    def choose(kernel: Any, candidates: Sequence[Any], launch: Any, **_: Any) -> int:
        as_tuned = tuner.time_each(candidates, launch)
        tuner.ROUNDS = ROUNDS
        try:
            times = tuner.time_each(candidates, launch)
        finally:
            tuner.ROUNDS = tuners_own
        records.append({
            "kind": "tuning", "kernel": kernel.__name__, **problem,
            "configs": [candidates[index] for index in times],
            "tuner_ms": [round(as_tuned[index], 6) for index in times],
            "time_ms": [round(times[index], 6) for index in times],
        })  # fmt: skip
        return min(times, key=lambda index: times[index])

    put_in(choose)
    call(kind, shape)
    return records


def main(out: Path) -> None:
    """Write an env line and the records of all problems to `out`, problem by problem."""
    from harness.isolation.roster import read_stages
    from harness.records import environment
    from harness.records.jsonl import Writer

    stages = [stage.to_json() for stage in read_stages() if stage.number in (6, STAGE)]
    env = environment.make_env("cuda", [], stages, {"command": "tools/tuner_key.py"})
    with ProcessPoolExecutor(
        os.cpu_count(), mp_context=multiprocessing.get_context("spawn")
    ) as pool:
        list(pool.map(compile_all, *zip(*((k, nq) for k in KINDS for nq in (1, 128)), strict=True)))
    with Writer.create(out, env) as writer:
        for kind in KINDS:
            for shape in shapes():
                writer.append(*measure(kind, shape))
            print(f"{', '.join(map(str, kind))}: done", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    main(parser.parse_args().out)
