"""Run the Triton stages under compute-sanitizer: memcheck, and racecheck where no mbarrier is used.

    python tools/sanitize.py --out results/h200/sanitizer.jsonl

Needs a GPU and compute-sanitizer (it comes with CUDA). Each stage runs on small problems, with and
without masks, in each of its launch configurations: ragged ones, whose last tiles are loaded under
a mask, even ones, whose tiles are all whole and are loaded without one where a stage does so, and
few rows against many keys, which stage 8 splits and merges; it reads a paged cache, too.
Tensors are allocated one by one, not out of torch's pool, so that a byte read past the end of one
is past the end of an allocation. One process per stage, problem and head dimension, as many at once
as there are cores: most of the time goes to compiling. Exit code 0 where nothing was found.

Fields: `ran`, a line for each stage, head dimension and dtype that finished; `summary`, the tool's
own last line; `errors`, the number of errors or hazards, null where the tool failed.
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
WITH_KERNELS = (4, 5, 6, 7, 8, 9)
# racecheck doesn't see how mbarriers and barriers among some warps order accesses: in stage 9 it
# reports each number that a role posts for another, and how Triton itself starts the roles
TOOLS = {"memcheck": WITH_KERNELS, "racecheck": WITH_KERNELS[:-1]}
LIMIT = 400.0  # seconds for one part under one tool: a wrong barrier waits for ever
SHAPES = {
    "ragged": {"b": 2, "h": 4, "nq": 150, "nk": 210},  # in every tile that there is
    "even": {"b": 2, "h": 4, "nq": 256, "nk": 256},  # whole tiles only, of every configuration
    "few": {"b": 2, "h": 4, "nq": 3, "nk": 3000},  # in several parts
}
SIZES = {"ragged": (59, 64, 128), "even": (64, 128), "few": (64, 128)}
PAGE_SIZES = (16, 256)  # below a tile's keys, and above
DTYPES = ("float16", "float32")
FOUND = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")

Part = tuple[int, str, int]  # of the work: a stage, one of SHAPES, d


def parts(tool: str) -> list[Part]:
    """All the work of a tool, the longest first."""
    return [
        (stage, shape, d)
        for stage in reversed(TOOLS[tool])
        for shape in SHAPES
        for d in SIZES[shape]
    ]


def launch_each(
    kernel: object,
    candidates: list[dict[str, int]],
    launch: Callable[..., None],
    *_: object,
    **more: object,
) -> dict[str, int]:
    """In the tuner's place: launches every candidate, and chooses the first."""
    from triton.runtime.errors import OutOfResources

    for config in candidates[1:]:
        with contextlib.suppress(OutOfResources):  # too large for this GPU
            launch(config)
    return candidates[0]


def work(number: int, shape: str, d: int) -> None:
    """What is run under the sanitizer: one stage, its gradients and its paged cache too."""
    sys.path.append(str(ROOT))
    import torch

    import stages
    from stages.common import tuner

    tuner.choose = launch_each  # type: ignore[assignment]
    b, h, nq, nk = SHAPES[shape].values()
    info = stages.by_number(number)
    stage = info.STAGE
    masks: list[dict[str, Any]] = [{}]
    if stage.options:
        lengths = torch.tensor([0, nk - 13], dtype=torch.int32, device="cuda")
        masks += [{"causal": True}, {"causal": True, "seqlens_k": lengths}]
    for dtype in DTYPES:
        for options in masks:
            hk = h // 2 if options and "gqa" in stage.options else h
            q, k, v = (
                torch.randn(b, heads, n, d, device="cuda").to(getattr(torch, dtype))
                for heads, n in ((h, nq), (hk, nk), (hk, nk))
            )
            leaves = [x.requires_grad_(stage.gradients) for x in (q, k, v)]
            o = info.attend(*leaves, **options)
            if stage.gradients:
                dO = torch.randn_like(o)
                torch.autograd.grad(o, leaves, dO, retain_graph=True)
                if "gluon" in stage.needs:  # one kernel gives all, and is another without dq
                    torch.autograd.grad(o, leaves[1:], dO)
        for size in PAGE_SIZES if "paged" in stage.options else ():
            cache = info.PagedCache(b * -(-nk // size), size, hk, d, k.dtype, k.device)
            for entry in range(b):
                length = nk - 13 * entry
                cache.append(entry, k[entry, :, :length], v[entry, :, :length])
            info.attend_paged(q, cache, range(b))
        torch.cuda.synchronize()
        print(f"stage {number}, {shape}, d = {d}, {dtype}: done", flush=True)


def program() -> str:
    """compute-sanitizer, from the PATH or from where CUDA installs it."""
    return shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


def sanitize(tool: str, part: Part) -> tuple[str, int, float]:
    """What compute-sanitizer's `tool` printed of a part of the work, its exit code, the seconds."""
    from harness.isolation.processes import end_descendants

    start = time.monotonic()
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [program(), "--tool", tool, "--kernel-regex", "kns=_kernel"]
    command += [sys.executable, __file__, "--work", *map(str, part)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            said, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            end_descendants(process.pid)  # the work hangs, not the tool that watches it
            process.kill()
            said, _ = process.communicate()
    code = process.returncode
    return said.decode(errors="replace"), code, time.monotonic() - start


def make_record(tool: str, version: str, runs: list[tuple[str, int, float]]) -> dict[str, Any]:
    """The record of a tool, from what `sanitize` returned for each part of the work."""
    ran, summaries, errors = [], [], []
    for text, code, _ in runs:
        ran += [line for line in text.splitlines() if line.startswith("stage ")]
        lines = [line.lstrip("= ") for line in text.splitlines() if "SUMMARY" in line]
        summaries.append(lines[-1] if lines else f"no summary, exit code {code}")
        found = FOUND.search(text)
        errors.append(int(found[1] or found[2]) if found and code == 0 else None)
    return {
        "kind": "sanitizer",
        "tool": tool,
        "version": version,
        "ran": sorted(ran),
        "summary": "; ".join(dict.fromkeys(summaries)),
        "errors": None if None in errors else sum(filter(None, errors)),
        "seconds": round(sum(seconds for *_, seconds in runs), 1),
    }


def main(out: Path) -> int:
    """Run every tool and write an env line and a record a tool to `out`, its output beside it."""
    sys.path.append(str(ROOT))
    from harness.isolation.roster import read_stages
    from harness.records import environment
    from harness.records.jsonl import Writer

    said = subprocess.run([program(), "--version"], capture_output=True, text=True, check=True)
    version = next(line for line in said.stdout.splitlines() if "ersion" in line).strip()
    stages = [stage.to_json() for stage in read_stages() if stage.number in WITH_KERNELS]
    env = environment.make_env("cuda", [], stages, {"command": "tools/sanitize.py"})
    clean = True
    with Writer.create(out, env) as writer, ThreadPoolExecutor(os.cpu_count()) as pool:
        started = {tool: [pool.submit(sanitize, tool, x) for x in parts(tool)] for tool in TOOLS}
        for tool, futures in started.items():
            runs = [future.result() for future in futures]
            log = "".join(text for text, *_ in runs)
            out.with_name(f"{out.stem}-{tool}.log").write_text(log, encoding="utf-8")
            record = make_record(tool, version, runs)
            writer.append(record)
            print(f"{tool}: {record['summary']} ({record['seconds']} s)", flush=True)
            whole = len(record["ran"]) == len(parts(tool)) * len(DTYPES)
            clean = clean and whole and record["errors"] == 0
    return int(not clean)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(int(given.work[0]), given.work[1], int(given.work[2]))
    elif given.out is None:
        parser.error("--out: a file for the records is needed")
    else:
        sys.exit(main(given.out))
