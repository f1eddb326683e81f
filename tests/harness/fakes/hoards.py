"""A fake stage: allocates without end, a little at a time."""

from stages.contract import Stage

STAGE = Stage(
    number=90, name="hoards", title="hoards", idea="allocates without end, a little at a time"
)


def attend(q, k, v):
    chunks = []
    while True:
        chunks.append(b"\1" * (8 << 20))
