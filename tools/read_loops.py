"""Compile stage 9 and its variants for a Hopper GPU that isn't here, and read their loops.

    python tools/make_variants.py build/hopper --stage 9
    python tools/read_loops.py build/hopper/in_turn ... --out results/cpu/hopper-loops.jsonl

Needs Triton, but no GPU. How many registers and instructions does the loop over KV tiles take, do
values spill, do the products run beside the rest? Without a mask, in bfloat16, in the configuration
that each file chooses for N = 4096. docs/log/hopper.md shows the record.

Fields: `given`, the registers that a thread of a consumer is given; the rest is of its loop:
`registers` that it names, `instructions`, `exponentials` among them (each for the 32 threads of a
warp), `products`, `groups` of products, each of which runs while the warps go on, and `spills`,
loads from and stores to the stack. Of several consumers' loops, the largest of each number.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SHIPPED = ROOT / "stages" / "s09_gluon_hopper" / "__init__.py"
DTYPE = "bfloat16"
COUNTS = {  # field of a record -> what cubins.py calls it
    "registers": "registers", "instructions": "instructions", "exponentials": "MUFU.EX2",
    "products": "HGMMA", "groups": "WARPGROUP.ARRIVE", "spills": "spills",
}  # fmt: skip


def compiled(jobs: Sequence[tuple[Path, int]]) -> list[dict[str, Any]]:
    """What tools/cubins.py says of each (file, d), in a process that interprets no kernel."""
    lines = [json.dumps([str(path), "gluon", d, DTYPE, "plan", "plain"]) for path, d in jobs]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("cubins.py"))],
        input="\n".join(lines), capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines()]


def main(files: Sequence[Path], sizes: Sequence[int], out: Path) -> None:
    """Write an env line, and a record for each file and each d, to `out`.

    Ends with a message where a file is no stage in Gluon, or `out` is there already.
    """
    sys.path.append(str(ROOT))
    from harness.isolation.roster import BadStage, describe_files
    from harness.records import environment
    from harness.records.jsonl import Writer

    try:
        stages = describe_files([SHIPPED, *files])
    except BadStage as error:
        raise SystemExit(f"read_loops: {error}") from None
    for stage in stages:
        if "gluon" not in stage.needs:
            raise SystemExit(f"read_loops: {stage.path}: not in Gluon; give variants of stage 9")
    if out.exists():
        raise SystemExit(f"read_loops: {out} is there already; give another name, or remove it")
    rungs = [stage.to_json() for stage in stages]
    env = environment.make_env("cpu", [], rungs, {"command": "tools/read_loops.py"})
    jobs = [(stage, d) for stage in stages for d in sizes]
    reports = compiled([(stage.path, d) for stage, d in jobs])
    with Writer.create(out, env) as writer:
        for (stage, d), report in zip(jobs, reports, strict=True):
            counts = {
                field: max(loop[said] for loop in report["loops"]) for field, said in COUNTS.items()
            }
            writer.append({
                "kind": "loop", "stage": stage.number, "name": stage.name, "d": d,
                "dtype": DTYPE, "given": report["config"]["CONSUMER_REGS"], **counts,
            })  # fmt: skip
            print(f"{stage.name}, d = {d}: {counts}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="variants; stage 9 itself comes first")
    parser.add_argument("--d", type=int, nargs="+", default=[64, 128], choices=[64, 128])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    main(given.files, given.d, given.out)
