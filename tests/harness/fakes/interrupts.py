"""A fake stage: raises what Ctrl-C raises."""

from stages.contract import Stage

STAGE = Stage(number=90, name="interrupts", title="interrupts", idea="raises what Ctrl-C raises")


def attend(q, k, v):
    raise KeyboardInterrupt
