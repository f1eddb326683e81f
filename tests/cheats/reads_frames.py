"""Looks for the expected values in the frames of its callers."""

import sys

import torch

from stages.contract import Stage

STAGE = Stage(
    number=5,
    name="mine",
    title="mine",
    idea="a cheat",
    needs=("triton",),
    dtypes=("float16", "bfloat16", "float32"),
)


def attend(q, k, v):
    frame = sys._getframe()
    while frame is not None:
        for name, value in frame.f_locals.items():
            if "expected" in name or "oracle" in name or "out64" in name:
                return value
        frame = frame.f_back
    return torch.zeros_like(q)
