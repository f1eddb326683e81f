"""The streams that a rank's hops run on: two in turn, where copy engines bring what they need.

The last tiles of a kernel occupy a part of the GPU alone, 3% of a hop's time where there are 16
rounds of tiles. The next hop's first tiles take the rest at once if they are on another stream:
there the hop waits for its keys, not for the hop before. A hop's kernels still get a multiprocessor
only when the one before has no tiles left for it, so hops don't slow each other.

What is allocated on a stream is freed to that stream: whoever allocates there next may write to it,
in the stream's order, whatever other streams still read. So the other lane begins after all that
was computed before the call, a lane reads what the other made only after that, and at the end the
other lane waits for the caller's, which has read what was made there. Else a call on another stream
and of another group would write over it: all of a GPU's calls have the same other lane.
"""

import functools
from contextlib import AbstractContextManager, nullcontext

import torch


@functools.cache
def other_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream beside the caller's, the same at each call."""
    return torch.cuda.Stream(device)


class Lanes:
    """The current stream of `device`, and another one if there are `two`."""

    def __init__(self, device: torch.device, two: bool) -> None:
        self.streams: list[torch.cuda.Stream] = []
        if two and device.type == "cuda":
            self.streams = [torch.cuda.current_stream(device), other_stream(device)]
            self.streams[1].wait_stream(self.streams[0])

    def of(self, step: int) -> AbstractContextManager[object]:
        """The lane of a step, in whose context its work is launched."""
        return torch.cuda.stream(self.streams[step % 2]) if self.streams else nullcontext()

    def meet(self) -> None:
        """Have the current lane go on after all that both have been given so far."""
        for stream in self.streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def end(self) -> None:
        """Have the other lane's next work wait for all that the caller's lane has been given."""
        for other in self.streams[1:]:
            other.wait_stream(self.streams[0])
