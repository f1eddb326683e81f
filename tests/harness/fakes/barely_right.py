"""A fake stage: the truth, and one element off by 0.7 times what float32 is allowed."""

import torch

import stages
from stages.contract import Stage

STAGE = Stage(
    number=90,
    name="barely_right",
    title="barely_right",
    idea="one element off by 0.7 times the bound",
)


def attend(q, k, v):
    stage3 = stages.by_number(3).attend
    truth = stage3(q.double(), k.double(), v.double())
    e3 = (stage3(q, k, v).double() - truth).abs().max()
    s_max = (q.double() @ k.double().mT).abs().max() * q.shape[-1] ** -0.5
    # design.md's rule, written down a second time
    bound = 2 * e3 + 4 * torch.finfo(q.dtype).eps * (1 + s_max) * v.abs().max()
    truth[0, 0, 0, 0] += 0.7 * bound
    return truth.to(q.dtype)
