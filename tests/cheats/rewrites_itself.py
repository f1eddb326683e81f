"""Writes its own file, which could then be another's."""

from pathlib import Path

from stages.contract import Stage

STAGE = Stage(number=1, name="mine", title="mine", idea="a cheat", devices=("cpu",))

me = Path(__file__)
me.write_bytes(me.read_bytes())


def attend(q, k, v):
    return q.clone()
