"""A GPU that is not there: a clock that launches move on, under the names that torch.cuda has."""

import contextlib
from types import SimpleNamespace

import torch


class Kernel:
    """What the tuner asks of a Triton kernel."""

    def __init__(self, name="attention_kernel"):
        self.__name__ = name


class Card:
    """Launches take what `costs` says for their BLOCK_M: ms, a function of none, or an error."""

    def __init__(self, costs):
        self.costs, self.capturing = costs, False
        self.now, self.launched = 0.0, []

    @property
    def candidates(self):
        return [
            {"BLOCK_M": m, "BLOCK_N": 64, "BLOCK_D": 64, "num_warps": 4, "num_stages": 3}
            for m in self.costs
        ]

    def launch(self, config):
        cost = self.costs[config["BLOCK_M"]]
        if isinstance(cost, Exception):
            raise cost
        self.launched.append(config["BLOCK_M"])
        self.now += cost() if callable(cost) else cost

    def put_in(self, setattr):
        """Stand in for torch's own GPU, by `setattr` (such as monkeypatch's)."""
        card = self

        class Event:
            def __init__(self, enable_timing=False):
                assert enable_timing

            def record(self):
                self.at = card.now

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return end.at - self.at

        setattr(torch.cuda, "Event", Event)
        setattr(torch.cuda, "_sleep", lambda cycles: self.wait())
        setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)

    def wait(self):
        self.now += 1000.0  # nobody may count it


def like(dtype=torch.float16, device="cuda:0"):
    """A tensor of the dtype, on the device, as far as the tuner looks."""
    return SimpleNamespace(dtype=dtype, device=torch.device(device))
