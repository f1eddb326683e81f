"""Run the Triton stages under compute-sanitizer: memcheck, and racecheck for their shared memory.

    python tools/sanitize.py --out results/h200/sanitizer.jsonl

Needs a GPU and compute-sanitizer (it comes with CUDA). Each stage runs on small ragged problems,
with and without masks, in each of its launch configurations. Tensors are allocated one by one, not
out of torch's pool, so that a byte read past the end of one is past the end of an allocation. Exit
code 0 where nothing was found.
"""

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TOOLS = ("memcheck", "racecheck")
WITH_KERNELS = (4, 5, 6, 7)
SHAPE = {"b": 2, "h": 4, "nq": 150, "nk": 210}  # ragged in every tile that there is
SIZES = (59, 64, 128)
FOUND = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")


def launch_each(
    kernel: object, candidates: list[dict[str, int]], launch: Callable[..., None], **_: object
) -> dict[str, int]:
    """In the tuner's place: launches every candidate, and chooses the first."""
    from triton.runtime.errors import OutOfResources

    for config in candidates[1:]:
        with contextlib.suppress(OutOfResources):  # too large for this GPU
            launch(config)
    return candidates[0]


def work() -> None:
    """What is run under the sanitizer: every stage that has kernels, its gradients too."""
    sys.path.insert(0, str(ROOT))
    import torch

    import stages
    from stages import autotune

    autotune.choose = launch_each  # type: ignore[assignment]
    b, h, nq, nk = SHAPE.values()
    for number in WITH_KERNELS:
        info = stages.by_number(number)
        stage = info.STAGE
        masks: list[dict[str, Any]] = [{}]
        if stage.options:
            lengths = torch.tensor([0, nk - 13], dtype=torch.int32, device="cuda")
            masks += [{"causal": True}, {"causal": True, "seqlens_k": lengths}]
        for d in SIZES:
            for dtype in (torch.float16, torch.float32):
                for options in masks:
                    hk = h // 2 if options and "gqa" in stage.options else h
                    q, k, v = (
                        torch.randn(b, heads, n, d, device="cuda").to(dtype)
                        for heads, n in ((h, nq), (hk, nk), (hk, nk))
                    )
                    leaves = [x.requires_grad_(stage.gradients) for x in (q, k, v)]
                    o = info.attend(*leaves, **options)
                    if stage.gradients:
                        o.backward(torch.randn_like(o))
                torch.cuda.synchronize()
                print(f"stage {number}, d = {d}, {dtype}: done", flush=True)


def sanitize(tool: str, log: Path) -> dict[str, Any]:
    """The record of one run of compute-sanitizer's `tool`, its whole output in `log`."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    start = time.monotonic()
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with log.open("w") as file:
        command = [program, "--tool", tool, "--kernel-regex", "kns=_kernel"]
        command += [sys.executable, __file__, "--work"]
        done = subprocess.run(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False
        )
    text = log.read_text(errors="replace")
    found = FOUND.search(text)
    ran = [line for line in text.splitlines() if line.startswith("stage ")]
    lines = [line.lstrip("= ") for line in text.splitlines() if "SUMMARY" in line]
    return {
        "kind": "sanitizer",
        "tool": tool,
        "version": next(x for x in version.stdout.splitlines() if "ersion" in x).strip(),
        "ran": ran,
        "summary": lines[-1] if lines else f"no summary, exit code {done.returncode}",
        "errors": int(found[1] or found[2]) if found and done.returncode == 0 else None,
        "seconds": round(time.monotonic() - start, 1),
    }


def main(out: Path) -> int:
    """Run every tool and write an env line and a record a tool to `out`."""
    sys.path.insert(0, str(ROOT))
    from harness.isolation.roster import read_stages
    from harness.records import environment
    from harness.records.jsonl import Writer

    stages = [stage.to_json() for stage in read_stages() if stage.number in WITH_KERNELS]
    env = environment.make_env("cuda", [], stages, {"command": "tools/sanitize.py"})
    clean = True
    with Writer.create(out, env) as writer, ThreadPoolExecutor() as pool:
        logs = [out.with_name(f"{out.stem}-{tool}.log") for tool in TOOLS]
        for tool, record in zip(TOOLS, pool.map(sanitize, TOOLS, logs), strict=True):
            writer.append(record)
            print(f"{tool}: {record['summary']} ({record['seconds']} s)", flush=True)
            whole = len(record["ran"]) == len(WITH_KERNELS) * len(SIZES) * 2
            clean = clean and whole and record["errors"] == 0
    return int(not clean)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work()
    elif given.out is None:
        parser.error("--out: a file for the records is needed")
    else:
        sys.exit(main(given.out))
