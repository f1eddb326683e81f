"""A fake stage: the truth, all of it too large by 1.3 times the relative error allowed."""

import torch

import stages
from stages.contract import Stage

STAGE = Stage(
    number=90,
    name="faintly_wrong",
    title="faintly_wrong",
    idea="every element off by 1.3 times the relative bound",
)


def attend(q, k, v):
    stage3 = stages.by_number(3).attend
    truth = stage3(q.double(), k.double(), v.double())
    e3 = (stage3(q, k, v).double() - truth).norm() / truth.norm()
    s_max = (q.double() @ k.double().mT).abs().max() * q.shape[-1] ** -0.5
    # design.md's rule, written down a second time
    bound = 2 * e3 + 4 * torch.finfo(q.dtype).eps * (1 + s_max)
    return (truth * (1 + 1.3 * bound)).to(q.dtype)
