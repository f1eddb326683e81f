"""Records made up by hand, so that the views are tested on records alone; and a usual problem."""

import json

from harness.problems.problem import Problem
from harness.records.schema import check_record
from harness.runs.ceilings import Ceiling, Done


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
        "rounds_ms": None, "launch_ms": None, "launch_configs": None, "skip_ratio": None,
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


def scores(q, k):
    """(b, h, nq, nk) scaled scores in float64, grouped heads told apart."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return q.double() @ k.mT * q.shape[-1] ** -0.5
