"""Time how long Python takes for a call, in turns with SDPA's on cuDNN: attention and the cache.

    python tools/host_times.py --out results/h200/host.jsonl

A step of decoding launches a few small kernels in each layer: where they take the GPU less time
than Python, Python decides how fast a token is. The calls: `attend` of stages; `attend_paged`,
`append` and `append_many` of stage 8 for as many sequences of a paged cache; and the backward pass
of stages that train. Each is measured as `ladder bench` measures `launch_ms`
(harness/measures/timing.py): medians of a row of launches, of all rounds the fastest.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))

LAUNCHES, WARMUP, ROUNDS = 20, 10, 15
H, NK, D, PAGE_SIZE = 8, 256, 64, 16
TRAIN = 4, 512  # B and N of the backward pass
CUDNN = "harness/peers/p101_sdpa_cudnn.py"
Calls = dict[str, Callable[[], Any]]  # by the stage's number and what is called


def forward_calls(
    numbers: list[int], reference: ModuleType, b: int, device: str, dtype: Any
) -> Calls:
    """What is called with one query row for each of b sequences; '0' is the reference."""
    import torch

    import stages

    q = torch.randn(b, H, 1, D, device=device).to(dtype)
    k, v = (torch.randn(b, H, NK, D, device=device).to(dtype) for _ in range(2))
    calls: Calls = {"0 attend": partial(reference.attend, q, k, v)}
    for number in numbers:
        stage = stages.by_number(number)
        calls[f"{number} attend"] = partial(stage.attend, q, k, v)
        if "paged" in stage.STAGE.options:
            for name, call in paged_calls(stage, q, k, v).items():
                calls[f"{number} {name}"] = call
    return calls


def paged_calls(stage: ModuleType, q: Any, k: Any, v: Any) -> Calls:
    """The calls of a paged cache of k's and v's sequences."""
    names = [*range(len(q))]
    pages = len(q) * -(-(NK + ROUNDS * LAUNCHES + WARMUP) // PAGE_SIZE)

    def filled() -> Any:  # one for each call: what is appended makes no other call slower
        sizes = pages, PAGE_SIZE, H, D, k.dtype, k.device
        cache = stage.PagedCache(*sizes, sequences=len(q))
        for name in names:
            cache.append(name, k[name], v[name])
        return cache

    tokens = k[:, :, :1], v[:, :, :1]
    return {
        "attend_paged": partial(stage.attend_paged, q, filled(), names),
        "append": partial(filled().append, 0, *(x[0] for x in tokens)),
        "append_many": partial(filled().append_many, names, *tokens),
    }


def backward_calls(numbers: list[int], reference: ModuleType, device: str, dtype: Any) -> Calls:
    """The backward pass of each stage that trains, and of the reference, '0'."""
    import torch

    import stages

    calls: Calls = {}
    B, N = TRAIN
    for number in (0, *numbers):
        stage = stages.by_number(number) if number else reference
        if stage.STAGE.gradients:
            leaves = [
                torch.randn(B, H, N, D, device=device).to(dtype).requires_grad_() for _ in range(3)
            ]
            o = stage.attend(*leaves)
            grad = partial(torch.autograd.grad, retain_graph=True)
            calls[f"{number} backward"] = partial(grad, o, leaves, torch.randn_like(o))
    return calls


def in_turns(calls: Calls) -> dict[str, float]:
    """Call -> how long Python takes for it, ms: of ROUNDS rounds, in which they take turns."""
    from harness.measures.timing import time_launches

    for call in calls.values():
        for _ in range(WARMUP):
            call()
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            took[name].append(time_launches(call, LAUNCHES))
    return {name: min(times) for name, times in took.items()}


def main(numbers: list[int], batches: list[int], device: str, peer: Path, out: Path) -> None:
    """Write an env line, and a record for each call, to `out`.

    Ends with a message where a stage can't run on `device`, or `out` is there already.
    """
    import torch

    import stages
    from harness.isolation.roster import describe_files
    from harness.problems.problem import Problem
    from harness.records import environment
    from harness.records.jsonl import Writer
    from stages.common.contract import why_not

    reference = stages.load(peer)
    contestants = [*map(stages.by_number, numbers), reference]
    for stage in contestants:
        if reason := why_not(stage.STAGE, device):
            raise SystemExit(f"host_times: stage {stage.STAGE.number}: {reason}")
    if out.exists():
        raise SystemExit(f"host_times: {out} is there already; give another name, or remove it")
    half = torch.bfloat16 if device == "cuda" else torch.float32
    dtype = str(half).removeprefix("torch.")
    rungs = [x.to_json() for x in describe_files([Path(str(s.__file__)) for s in contestants])]
    env = environment.make_env(device, [], rungs, {"command": "tools/host_times.py"})
    with Writer.create(out, env) as writer:
        for b in (*batches, None):
            if b is None:
                (B, nq), nk, direction = TRAIN, TRAIN[1], "bwd"
                times = in_turns(backward_calls(numbers, reference, device, half))
            else:
                B, nq, nk, direction = b, 1, NK, "fwd"
                times = in_turns(forward_calls(numbers, reference, b, device, half))
            precision = "ieee" if dtype == "float32" else dtype
            masks = False, None
            problem = Problem(
                "normal", 0, B, H, H, nq, nk, D, dtype, precision, *masks, device, direction
            )
            base = next(iter(times.values()))
            for name, ms in times.items():
                number, _, call = name.partition(" ")
                who = stages.by_number(int(number)) if number != "0" else reference
                paged = PAGE_SIZE if call in ("attend_paged", "append", "append_many") else None
                writer.append(
                    {"kind": "host", "stage": who.STAGE.number, "name": who.STAGE.name}
                    | problem.to_json()
                    | {"page_size": paged, "call": call, "launch_ms": ms, "reference_ms": base}
                )
                print(
                    f"B = {B}: {who.STAGE.number:3} {call:12} {1e3 * ms:6.1f} us, {ms / base:.2f}x"
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[6, 7, 8, 9])
    parser.add_argument("--b", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--reference", type=Path, default=ROOT / CUDNN)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    main(given.stages, given.b, given.device, given.reference, given.out)
