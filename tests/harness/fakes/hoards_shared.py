"""A fake stage: takes memory that counts as nobody's data, so that only a watcher sees it."""

import mmap
import time

from stages.contract import Stage

STAGE = Stage(
    number=90,
    name="hoards_shared",
    title="hoards_shared",
    idea="shared memory, 16 MB at a time, up to 1 GB",
)


def attend(q, k, v):
    pieces = []
    for _ in range(64):  # no further: with nobody to watch it, it must not take the machine
        pieces.append(mmap.mmap(-1, 16 << 20))
        pieces[-1].write(b"\1" * (16 << 20))
        time.sleep(0.01)
    while True:
        time.sleep(1)
