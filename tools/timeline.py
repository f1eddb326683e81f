"""Trace what the consumers of stage 9 do, KV tile by KV tile: products, or softmax.

    python tools/timeline.py --out results/h200/hopper-timeline.jsonl

Needs a Hopper GPU, and Proton, the profiler that comes with Triton for Linux. Stage 9 and its
variant without idea 3 (`in_turn`, docs/hopper.md) run once with marks at both ends of each part:
there a warp notes its multiprocessor's clock, in shared memory, which has room for each consumer's
last KV tiles. Marks take time, too, and keep the conversion of P from running among the
exponentials: compare the two kernels, not a kernel with other tables. No mask, d = 64, where three
consumers share the matrix unit.

Fields: `cycles`, by part, the median over all KV tiles that were traced, `tiles` of them;
`tile_cycles`, the median from one KV tile to the next; `spans` of one CTA, cut off at both ends of
`shown_cycles`.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import make_variants

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))

from course.edits import texts_of, write_texts  # noqa: E402

BEFORE = "in_turn"
# parts of the loop over KV tiles: from the start of the first product to the end of the wait for
# the last one, with the waits for K and V; and the online softmax
PRODUCTS, SOFTMAX = PARTS = "products", "softmax"
LOOP = "\ndef mainloop(\n"  # the function that has it
# lines of the loop
PRODUCT = r" = (start|finish)_(scores|output)\("
SCORES, P_V, STEP = r" = start_scores\(", r"acc = finish_output\(", r" = online_softmax\("
CYCLES_PER_US = "Frequency (MHz)"  # Proton's name for it
LIMIT = 120.0  # seconds for one kernel: a wrong barrier waits for ever
SHOWN = 5  # KV tiles in a record

Span = tuple[float, float, str]  # the cycles at which a part begins and ends, and which part


def marked(texts: Mapping[str, str]) -> dict[str, str]:
    """The files of stage 9 or of a variant with marks around each part.

    ptxas leaves products and exponentials between their marks. Without marks, at d = 64, it puts
    the wait for P V before the softmax (docs/hopper.md), so that is done here, too. ValueError
    where the loop isn't as expected.
    """
    found = [file for file, text in texts.items() if LOOP in text and re.search(STEP, text)]
    if len(found) != 1:
        raise ValueError(f"expected one file with {LOOP!r} and {STEP}, got {len(found)}")
    [file] = found
    above, name, rest = texts[file].partition(LOOP)
    loop, end, below = rest.partition("\n    return ")
    lines = loop.split("\n")

    def places(part: str) -> list[int]:
        return [index for index, line in enumerate(lines) if re.search(part, line)]

    if [len(places(part)) for part in (SCORES, P_V, STEP)] != [1, 2, 1]:
        raise ValueError(
            f"expected in the loop over KV tiles one line of {SCORES}, two of {P_V}, one of {STEP}"
        )
    [step], [_, wait] = places(STEP), places(P_V)
    # that of OVERLAP, with its `if`
    lines[step:step] = [lines.pop(wait - 1), lines.pop(wait - 1)]
    step += 2
    products = places(PRODUCT)
    for index, word, part in (  # from the bottom up, so that the places stay true
        (step + 1, "exit", SOFTMAX),
        (step, "enter", SOFTMAX),
        (products[-1] + 1, "exit", PRODUCTS),
        (products[0] - 1, "enter", PRODUCTS),  # its `if` is the line above
    ):
        lines.insert(index, f"        pl.{word}_scope({part!r})")
    marks = "import triton.profiler.language as pl\n"
    return {**texts, file: marks + above + name + "\n".join(lines) + end + below}


def spans(events: Iterable[dict[str, Any]]) -> dict[str, dict[int, list[Span]]]:
    """CTA -> consumer -> what it did, in order, from the events of Proton's trace.

    The first of a consumer's four warps stands for it: they wait for each other in each tile.
    """
    found: dict[str, dict[int, list[Span]]] = {}
    for event in events:
        if event["name"] not in PARTS:
            continue
        warp = int(event["tid"].split()[1])  # "warp 4 (line 0)"
        if warp % 4 == 0:
            scale = event["args"][CYCLES_PER_US]
            start, length = event["ts"] * scale, event["dur"] * scale
            span = (start, start + length, event["name"])
            found.setdefault(event["pid"], {}).setdefault(warp // 4, []).append(span)
    return {cta: {who: sorted(them[who]) for who in sorted(them)} for cta, them in found.items()}


def starts(each: Iterable[Span]) -> list[float]:
    """When a consumer's softmaxes begin: one in each KV tile."""
    return [start for start, _, part in each if part == SOFTMAX]


def summary(traced: dict[str, dict[int, list[Span]]]) -> dict[str, Any]:
    """The fields of a record: medians over all KV tiles of the trace, and SHOWN tiles of one CTA.

    Those are the ones of median length among all such rows of tiles of that CTA's first consumer.
    ValueError where there are too few.
    """
    every = [each for consumers in traced.values() for each in consumers.values()]
    if not every:
        raise ValueError("got no KV tiles in the trace; give a larger N")
    cycles = {
        part: median(end - start for each in every for start, end, name in each if name == part)
        for part in PARTS
    }
    consumers = traced[min(traced)]
    first = max(starts(each)[0] for each in consumers.values())
    last = min(starts(each)[-1] for each in consumers.values())
    begins = [start for start in starts(consumers[min(consumers)]) if first <= start <= last]
    rows = sorted((end - start, start) for start, end in zip(begins, begins[SHOWN:], strict=False))
    if not rows:
        raise ValueError(f"got {len(begins)} KV tiles of a CTA, expected more than {SHOWN}")
    length, begin = rows[len(rows) // 2]
    shown = [
        {
            "consumer": who,
            "part": part,
            "start": round(max(start - begin, 0)),
            "end": round(min(end - begin, length)),
        }
        for who, each in consumers.items()
        for start, end, part in each
        if end > begin and start < begin + length
    ]
    return {
        "cycles": cycles,
        "tile_cycles": median(b - a for each in every for a, b in pairwise(starts(each))),
        "tiles": sum(len(starts(each)) for each in every),
        "shown_cycles": round(length),
        "spans": shown,
    }


def trace(file: Path, n: int) -> dict[str, Any]:
    """Run the kernel of `file` with marks; the problem's and the summary's fields.

    Ends with a message where the marks change a bit of the result.
    """
    import torch
    import triton.profiler as proton
    from triton.profiler.mode import Default

    import stages
    from harness.problems.inputs import make_inputs
    from harness.problems.problem import Problem

    problem = Problem(
        "normal", 0, 1, 32, 32, n, n, 64, "bfloat16", "bfloat16", False, None, "cuda"
    )  # fmt: skip
    q, k, v = make_inputs(problem)
    with tempfile.TemporaryDirectory() as folder:
        stage = stages.load(write_texts(file, marked(texts_of(file)), Path(folder), "marked"))
        mode = Default(granularity="warp", optimizations="clock32")
        log = Path(folder) / "marks"
        proton.start(str(log), backend="instrumentation", data="trace", mode=mode)
        seen = stage.attend(q, k, v)
        torch.cuda.synchronize()
        proton.finalize()
        events = json.loads(log.with_suffix(".chrome_trace").read_bytes())["traceEvents"]
    if not torch.equal(seen, stages.load(file).attend(q, k, v)):
        raise SystemExit(f"timeline: {file}: with marks the result is another")
    return problem.to_json() | summary(spans(events))


def main(n: int, out: Path) -> None:
    """Write an env line, and a record for each of the two kernels, to `out`.

    Ends with a message where stage 9 can't run here, or `out` is there already.
    """
    import stages
    from harness.isolation.roster import describe_files
    from harness.records import environment
    from harness.records.jsonl import Writer
    from stages.common.contract import why_not

    shipped = stages.by_number(9)
    if reason := why_not(shipped.STAGE, "cuda"):
        raise SystemExit(f"timeline: stage 9: {reason}")
    if out.exists():
        raise SystemExit(f"timeline: {out} is there already; give another name, or remove it")
    with tempfile.TemporaryDirectory() as folder:
        before = write_texts(9, make_variants.variant(BEFORE), Path(folder), BEFORE)
        kernels = describe_files([before, Path(str(shipped.__file__))])
        rungs = [kernel.to_json() for kernel in kernels]
        env = environment.make_env("cuda", [], rungs, {"command": "tools/timeline.py"})
        records = []
        for kernel in kernels:
            command = [sys.executable, __file__, "--n", str(n), "--kernel", str(kernel.path)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
            except subprocess.TimeoutExpired:
                raise SystemExit(f"timeline: {kernel.name}: no trace in {LIMIT:g} s") from None
            if done.returncode:
                raise SystemExit(
                    f"timeline: {kernel.name}: exit code {done.returncode}\n{done.stderr}"
                )
            fields = json.loads(done.stdout.splitlines()[-1])
            records.append(
                {"kind": "timeline", "stage": kernel.number, "name": kernel.name} | fields
            )
            print(
                f"{kernel.name}: {fields['tile_cycles']:.0f} cycles, {fields['cycles']}", flush=True
            )
    with Writer.create(out, env) as writer:
        for record in records:
            writer.append(record)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--n", type=int, default=16384)
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--out", type=Path)
    wanted.add_argument("--kernel", type=Path, help="trace this file alone, and print the fields")
    given = parser.parse_args()
    if given.kernel:
        print(json.dumps(trace(given.kernel, given.n)))
    else:
        main(given.n, given.out)
