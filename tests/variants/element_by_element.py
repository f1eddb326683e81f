"""Element by element, with a running max and a running sum; and it shows what it gives back."""

import functools
import itertools
import math
from dataclasses import dataclass

import torch

from stages.contract import Stage

STAGE = Stage(number=1, name="mine", title="mine", idea="loops on floats", devices=("cpu",))
torch.set_default_dtype(torch.float64)


@dataclass
class Past:
    m_i: float = -math.inf
    l_i: float = 0.0


@functools.lru_cache
def scale(d):
    return 1 / math.sqrt(d)


@torch.inference_mode()
def attend(q, k, v):
    """Attention, by loops on elements."""
    o = torch.zeros_like(q)
    for b, h, i in itertools.product(*map(range, q.shape[:3])):
        past, acc = Past(), [0.0] * q.shape[3]
        for j in range(k.shape[2]):
            products = (
                q[b, h].flatten()[i * len(acc) + at].item() * float(k[b][h][j][at])
                for at in range(len(acc))
            )
            s = sum(products) * scale(len(acc))
            m_new = max(past.m_i, s)
            alpha, p = math.exp(past.m_i - m_new), math.exp(s - m_new)
            past = Past(m_new, past.l_i * alpha + p)
            acc = [x * alpha + p * y for x, y in zip(acc, v[b, h, j].tolist(), strict=True)]
        for at, x in enumerate(acc):
            o[b, h, i, at] = x / past.l_i
    print(o)
    return o
