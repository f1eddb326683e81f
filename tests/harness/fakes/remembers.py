"""A fake stage: computes once, by address."""

import stages
from stages.contract import Stage

STAGE = Stage(number=90, name="remembers", title="remembers", idea="computes once, by address")


answers = {}


def attend(q, k, v):
    key = (q.data_ptr(), k.data_ptr(), v.data_ptr(), q.shape)
    if key not in answers:
        answers[key] = stages.by_number(3).attend(q, k, v)
    return answers[key]
