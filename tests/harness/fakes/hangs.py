"""A fake stage: never answers."""

import signal
import time

from stages.contract import Stage

STAGE = Stage(number=90, name="hangs", title="hangs", idea="never answers")


def attend(q, k, v):
    # politely asked, it stays
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        time.sleep(1)
