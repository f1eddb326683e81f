"""Records made up by hand, so that the views are tested on records alone; and a usual problem."""

import json
from dataclasses import fields
from pathlib import Path

from harness.isolation.roster import StageInfo
from harness.problems import cost
from harness.problems.problem import DTYPES, Problem
from harness.records.schema import check_record
from harness.runs.ceilings import Ceiling, Done
from harness.views import cell_tables


def make_cell(stage=3, name="torch_three_gemm", **changes):
    """A valid cell record: stage 3, ok, at N = 128; `n` sets nq and nk at once."""
    if "n" in changes:
        changes["nq"] = changes["nk"] = changes.pop("n")
    cell = {
        "kind": "cell", "stage": stage, "name": name, "inputs": "normal", "seed": 1,
        "b": 1, "h": 1, "hk": 1, "nq": 128, "nk": 128, "d": 64, "dtype": "float32",
        "causal": False, "seqlens_k": None, "device": "cpu", "mode": "native", "status": "ok",
        "reason": "", "time_ms": 1.0, "time_iqr_ms": 0.01, "samples": 7, "first_call_ms": 2.0,
        "sm_clock_mhz": None, "peak_bytes": 3 << 20, "memory_meter": "process-rss",
        "precision": "ieee",
        "err_stage3_max": 1e-7, "err_stage3_rel": 2e-7, "err_f64_max": 3e-7, "err_f64_rel": 4e-7,
        "flops": 4194304, "hbm_bytes": 131072, "direction": "fwd", "paired": False,
        "page_size": None,
        "rounds_ms": None, "launch_ms": None, "launch_configs": None, "products": None,
        "skip_ratio": None, "world": 1, "x_one_gpu": None, "link_gb_s": None, "link_us": None,
    }  # fmt: skip
    assert changes.keys() <= cell.keys(), "a field that no record has"
    cell |= changes
    check_record(cell)
    return cell


def make_env(cells, titles=None, **changes):
    """A valid env record for a run of `cells`; `titles`: name -> title, else the name."""
    stages = sorted({(cell["stage"], cell["name"]) for cell in cells})
    env = {
        "kind": "env", "schema": 1, "plan": [],
        "rungs": [
            {"stage": stage, "name": name, "title": (titles or {}).get(name, name),
             "exact_up_to": None, "sha256": "0" * 64}
            for stage, name in stages
        ],
        "arguments": {}, "device": "cpu", "device_name": "a processor", "cpu": "a processor",
        "cores": 2, "memory_bytes": 1 << 34, "python": "3.11.0", "torch": "2.13.0",
        "triton": None, "numpy": "2.4.0", "driver": None, "system": "linux x86_64",
        "commit": None, "versions": {}, "sources": "0" * 16, "date": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip
    assert changes.keys() <= env.keys(), "a field that no record has"
    env |= changes
    check_record(env)
    return env


def write_run(path, env, cells):
    """A results file of these records; returns its path."""
    path.write_text("".join(json.dumps(record) + "\n" for record in [env, *cells]))
    return path


def make_ceiling(what="matmul", time_ms=2.0, **changes):
    """A valid ceiling record of a GPU."""
    dtype = {"dtype": "float16", "precision": "float16"} if what == "matmul" else {}
    fields = {"device": "cuda", "size": 1000, **dtype, **changes}
    record = Ceiling(what, **fields).record(Done(time_ms, 0.1, 9))
    check_record(record)
    return record


def problem(**changes):
    """A problem of the usual sizes but for `changes`."""
    usual = {
        "inputs": "normal", "seed": 7, "b": 1, "h": 1, "hk": 1, "nq": 130, "nk": 130, "d": 64,
        "dtype": "float32", "precision": "ieee", "causal": False, "seqlens_k": None,
        "device": "cpu",
    }  # fmt: skip
    return Problem(**{**usual, **changes})


def make_stage_info(number, **declared):
    """A stage as the roster knows it, that runs anywhere; what it does not declare is None."""
    anywhere = {"cpu": None, "cuda": None}
    usual = {
        "path": Path(f"stage{number}.py"), "number": number, "name": f"stage{number}",
        "title": f"stage{number}", "options": (), "worth_up_to": {}, "traffic": "fused",
        "modes": dict.fromkeys(anywhere, "native"), "unavailable": anywhere,
        "refused": dict.fromkeys(anywhere, dict.fromkeys(DTYPES)),
    }  # fmt: skip
    nothing = dict.fromkeys(field.name for field in fields(StageInfo))
    return StageInfo(**nothing | usual | declared)


def scores(q, k):
    """(b, h, nq, nk) scaled scores in float64, grouped heads told apart."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return q.double() @ k.mT * q.shape[-1] ** -0.5


# ---- comparisons on a GPU, and the tables that are made of them

NAMES = {3: "torch_three_gemm", 6: "triton_flash2", 7: "triton_training", 100: "sdpa_flash",
         103: "flex_attention", 104: "sdpa_math"}  # fmt: skip
TITLES = {"torch_three_gemm": "torch, three GEMMs", "triton_flash2": "Triton Flash 2",
          "triton_training": "Triton, training", "sdpa_flash": "SDPA, flash",
          "flex_attention": "FlexAttention", "sdpa_math": "SDPA, math"}  # fmt: skip
# TFLOP/s made up for each stage, so that times follow
RATES = {3: 80.0, 6: 550.0, 7: 500.0, 100: 400.0, 103: 520.0, 104: 8.0}
WORK = {"fwd": 1.0, "bwd": 0.7, "train": 0.8}  # of the rate, in each direction


def make_bench(stage=6, n=4096, **changes):
    """A cell of a comparison on a GPU, its time made up from RATES."""
    problem = {
        "inputs": "normal", "seed": 1, "b": max(1, 16384 // n), "h": 32, "hk": 32, "nq": n,
        "nk": n, "d": 64, "dtype": "float16", "precision": "float16", "causal": False,
        "seqlens_k": None, "device": "cuda", "direction": "fwd", "page_size": None,
    }  # fmt: skip
    problem |= {name: changes.pop(name) for name in list(changes) if name in problem}
    made = Problem.from_json(problem)
    measured = {
        "mode": "compiled" if stage in (6, 7) else "native", "samples": 30, "first_call_ms": 2000.0,
        "time_ms": cost.flops(made) / (RATES[stage] * WORK[made.direction]) / 1e9,
        "sm_clock_mhz": 1980, "peak_bytes": 64 << 20, "memory_meter": "cuda-allocator",
        "flops": cost.flops(made), "hbm_bytes": cost.hbm_bytes(made),
        "skip_ratio": 0.5 if stage == 6 and made.causal else None,
    }  # fmt: skip
    return make_cell(stage, NAMES[stage], paired=True, **{**problem, **measured, **changes})


def fell(stage, status, reason, **fields):
    """A cell of a stage that was not timed."""
    measured = ("time_ms", "time_iqr_ms", "skip_ratio", "peak_bytes", "memory_meter",
                "first_call_ms", "sm_clock_mhz")  # fmt: skip
    nothing = dict.fromkeys(measured)
    return make_bench(stage, **{**nothing, **fields}, status=status, reason=reason, samples=0)


SIZES = (512, 1024, 2048, 4096, 8192, 16384)


def make_run(stages=(3, 6, 100, 103), sizes=SIZES, directions=("fwd",), **fields):
    """A record each; stage 3 runs out of memory at the largest N."""
    records = []
    for direction in directions:
        for causal in (False, True):
            for n in sizes:
                for stage in stages:
                    where = {"n": n, "direction": direction, "causal": causal, **fields}
                    if (stage, n) == (3, 16384):
                        out = "OutOfMemoryError: CUDA out of memory"
                        records.append(fell(stage, "out-of-memory", out, **where))
                    else:
                        records.append(make_bench(stage, **where))
    return records


def make_bench_env(records, **changes):
    arguments = {"suite": changes.pop("suite", None), "graph": changes.pop("graph", False)}
    return make_env(
        records, TITLES, device="cuda", device_name="NVIDIA H200", driver="580.1", triton="3.6.0",
        arguments=arguments, **changes,
    )  # fmt: skip


def text_of(env, records, ceilings=(), width=80):
    """The tables as lines of text."""
    return cell_tables.page(env, records, ceilings).text(width).splitlines()


def cells_of(text):
    """The cells of each row of the first table of a text."""
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return [[x.strip() for x in row.replace("\xa0", " ").strip("|").split("|")] for row in rows]
