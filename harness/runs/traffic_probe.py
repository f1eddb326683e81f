"""The program that `ladder io` runs under ncu: one call of one stage between profiler marks.

``python -m harness.runs.traffic_probe STAGE_FILE PROBLEM_JSON``
"""

import json
import sys

import torch

import stages
from harness.isolation.call import bind
from harness.measures.accuracy import set_precision
from harness.problems.inputs import make_inputs
from harness.problems.problem import Problem


def main(path: str, problem_json: str) -> None:
    """Warm the stage up, empty the caches, and let the profiler see one call."""
    problem = Problem.from_json(json.loads(problem_json))
    if problem.dtype == "float32":
        set_precision(problem.precision)
    attend = bind(stages.load(path).attend, problem)
    q, k, v = make_inputs(problem)
    for _ in range(2):
        attend(q, k, v)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    attend(q, k, v)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(*sys.argv[1:3])
