"""Time a stage in turns with one matrix product that has as many FLOPs, without a mask.

    python tools/product.py --out results/h200/hopper-product.jsonl

How fast could attention be if it were only its products? A GPU's rate depends on its power and its
temperature, so the two take turns. The product is no contestant of `ladder bench`, which times no
one who computes something else.
"""

import argparse
import math
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))

HEADS_TIMES_D, BATCH_TIMES_N = 2048, 16384  # as in source 004
WARMUP, ROUNDS = 100, 100  # so many that the clock settles under the power that both take


def shape_of(outputs: int, nk: int) -> tuple[int, int, int]:
    """(rows, inner, columns) of a product that takes 4 `outputs` nk FLOPs, as square as can be.

    Attention takes those for `outputs` numbers without a mask: 2 nk for each in P V, and, with
    Q K^T, which has d for each of nk scores of a row, as many again.
    """
    entries = 2 * outputs
    rows = next(side for side in range(math.isqrt(entries), 0, -1) if entries % side == 0)
    return rows, nk, entries // rows


def measure(stage: ModuleType, n: int, d: int, device: str) -> dict[str, object]:
    """The record of a stage at N = n."""
    import torch

    from harness.measures.timing import alternate
    from harness.problems.cost import flops
    from harness.problems.inputs import make_inputs
    from harness.problems.problem import Problem

    b, h = max(1, BATCH_TIMES_N // n), HEADS_TIMES_D // d
    problem = Problem("normal", 0, b, h, h, n, n, d, "bfloat16", "bfloat16", False, None, device)
    q, k, v = make_inputs(problem)
    rows, inner, columns = shape_of(q.numel(), n)
    # normal numbers, as the inputs: how much power a product takes depends on them
    left, right = (
        torch.randn(*x, device=device).to(q.dtype) for x in ((rows, inner), (inner, columns))
    )
    calls = [lambda: stage.attend(q, k, v), lambda: torch.mm(left, right)]
    for call in calls * WARMUP:
        call()
    ours, product = alternate(calls, [device] * 2, rounds=ROUNDS)
    return {
        "kind": "share", "stage": stage.STAGE.number, "name": stage.STAGE.name, **problem.to_json(),
        "flops": flops(problem), "product": [rows, inner, columns],
        "time_ms": ours.median_ms, "rounds_ms": ours.rounds_ms,
        "product_ms": product.median_ms, "product_rounds_ms": product.rounds_ms,
    }  # fmt: skip


def main(number: int, ns: list[int], ds: list[int], device: str, out: Path) -> None:
    """Write an env line, and a record for each d and N, to `out`.

    Ends with a message where the stage can't run on `device`, or `out` is there already.
    """
    import stages
    from harness.isolation.roster import describe_files
    from harness.records import environment
    from harness.records.jsonl import Writer
    from stages.common.contract import why_not

    try:
        stage = stages.by_number(number)
    except KeyError:
        raise SystemExit(f"product: got stage {number}, expected one of stages/") from None
    if reason := why_not(stage.STAGE, device):
        raise SystemExit(f"product: stage {number}: {reason}")
    if out.exists():
        raise SystemExit(f"product: {out} is there already; give another name, or remove it")
    rungs = [described.to_json() for described in describe_files([Path(str(stage.__file__))])]
    env = environment.make_env(device, [], rungs, {"command": "tools/product.py"})
    with Writer.create(out, env) as writer:
        for d in ds:
            for n in ns:
                record = measure(stage, n, d, device)
                writer.append(record)
                ours, product = record["time_ms"], record["product_ms"]
                print(f"d = {d}, N = {n}: {ours:.3g} ms, one product {product:.3g} ms", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stage", type=int, default=9)
    parser.add_argument("--n", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--d", type=int, nargs="+", default=[64, 128], choices=[64, 128])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    main(given.stage, given.n, given.d, given.device, given.out)
