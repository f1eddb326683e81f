"""A fake stage: computes once, by address and torch's version of it."""

import stages
from stages.contract import Stage

STAGE = Stage(
    number=90,
    name="remembers_versions",
    title="remembers_versions",
    idea="computes once, by address and torch's version of it",
)


answers = {}


def attend(q, k, v):
    key = (v.data_ptr(), v._version, q.shape)
    if key not in answers:
        answers[key] = stages.by_number(3).attend(q, k, v)
    return answers[key]
