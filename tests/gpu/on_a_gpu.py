"""What the GPU tests share: problems, the judge, graphs, and launches that are compared."""

import math

import torch

from harness.isolation.call import bind, prepare
from harness.measures.accuracy import judge_outputs, set_precision
from harness.measures.memory import measure_peak
from harness.measures.oracle import make_oracles
from harness.problems.directions import make_output_gradient
from harness.problems.inputs import make_inputs
from harness.problems.problem import Problem

KINDS = [("float32", "ieee"), ("float32", "tf32"), ("float16", "float16"), ("bfloat16", "bfloat16")]
# nq, nk, hk of 4 heads, causal, seqlens_k of 2 batch entries
MASKS = [
    (130, 130, 4, True, None),
    (257, 129, 2, True, None),  # the first rows see nothing
    (65, 300, 1, True, None),
    (100, 200, 2, False, (0, 137)),
    (300, 300, 4, True, (300, 77)),
    (1, 500, 1, True, (3, 500)),
    (512, 512, 4, True, None),
]


def problem(**fields):
    """A problem on the GPU; b = h = 2, float32, unless told."""
    dtype = fields.get("dtype", "float32")
    usual = {
        "inputs": "normal", "seed": 7, "b": 2, "h": 2, "hk": 2, "nq": 64, "nk": 64, "d": 64,
        "dtype": dtype, "precision": "ieee" if dtype == "float32" else dtype, "causal": False,
        "seqlens_k": None, "device": "cuda",
    }  # fmt: skip
    return Problem(**usual | fields)


def call_of(stage, asked):
    """The call that the harness times of a stage and a problem; it returns all outputs."""
    dO = None if asked.direction == "fwd" else make_output_gradient(asked)
    return prepare(bind(stage.attend, asked), asked.direction, *make_inputs(asked), dO)


def verdict(stage, asked):
    """What the harness's judge says of a stage's answer to a problem."""
    if asked.dtype == "float32":
        set_precision(asked.precision)
    try:
        return judge_outputs([o.double() for o in call_of(stage, asked)()], make_oracles(asked))
    finally:
        set_precision("ieee")


def assert_exact(stage, asked):
    """Raise unless the judge finds a stage's answer to a problem exact."""
    found = verdict(stage, asked)
    assert found["exact"], (stage.STAGE.number, asked, found["why"])


def assert_masked_exact(stage, masks, **fields):
    """Raise unless a stage is exact under all `masks`, lines as those of MASKS."""
    for nq, nk, hk, causal, seqlens_k in masks:
        sizes = {"b": 2, "h": 4, "hk": hk, "nq": nq, "nk": nk}
        assert_exact(stage, problem(causal=causal, seqlens_k=seqlens_k, **sizes, **fields))


def assert_same(found, want):
    """Raise unless tensors, or lists of them, are equal bit for bit."""
    for x, y in zip(found, want, strict=True):
        assert torch.equal(x, y)


def peak_of(call):
    """The bytes that a call holds at its peak, when it isn't the first."""
    call()
    return measure_peak(call, "cuda")[1]


def captured(call):
    """A CUDA graph of a call, and what the call returned, which replays fill anew."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    return graph, found


def launches(call, times=200):
    """What `call` returns, again and again, each time with outputs that begin as NaN."""
    empty = torch.empty
    for _ in range(times):
        torch.empty = lambda *size, **kwargs: empty(*size, **kwargs).fill_(math.nan)
        try:
            found = call()
        finally:
            torch.empty = empty
        yield found
