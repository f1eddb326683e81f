"""A fake stage: prints records of its own making."""

import sys

import stages
from stages.contract import Stage

STAGE = Stage(
    number=90,
    name="prints_records",
    title="prints_records",
    idea="prints records of its own making",
)


RECORD = '{"kind": "cell", "stage": 90, "name": "prints_records", "status": "ok", "time_ms": 1e-9}'


def attend(q, k, v):
    print(RECORD)
    print(RECORD, file=sys.stderr, flush=True)
    print("\x1b[2J\x1b[31mnot for a terminal\x1b[0m")
    return stages.by_number(3).attend(q, k, v) + 1
