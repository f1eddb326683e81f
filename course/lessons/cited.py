"""Bandwidths of other machines, as sources cite them: an A100's memory, PCIe, NVLink.

Nothing in here was measured by this project. Source 002 has the cycles and the links, source 004 an
A100's sizes and bandwidths, NVIDIA's data sheets of V100, A100 and H100 what cards' NVLinks carry.
A figure is kept as text, as in its source; `ends` converts it to numbers.
"""

from typing import NamedTuple


class Level(NamedTuple):
    """A level of a GPU's memory: its size, latency in cycles, and rate in TB/s."""

    name: str
    size: str
    cycles: str
    rate: str


class Link(NamedTuple):
    """A link in one direction, by source 002: theoretical and achieved GB/s."""

    name: str
    theory: str
    achieved: str


class Card(NamedTuple):
    """A card's NVLink by its data sheet: GB/s of all links, both directions together."""

    name: str
    links: int
    both: int

    @property
    def each(self) -> float:
        """One link, one direction, GB/s."""
        return self.both / 2 / self.links


SRAM = Level("registers, shared memory", "192 KB x 108 multiprocessors", "1-30", "about 19")
HBM = Level("GPU memory (HBM)", "40-80 GB", "300-1000", "1.5-2.0")

# by generation
PCIE = {
    3: Link("PCIe 3 x16", "16", "12-13"),
    4: Link("PCIe 4 x16", "32", "25-30"),
    5: Link("PCIe 5 x16", "64", "50-60"),
}
NVLINK = {
    2: Link("NVLink 2, a link", "50", "45"),
    3: Link("NVLink 3, a link", "100", "90"),
    4: Link("NVLink 4, a link", "150", "140"),
}
CARDS = {2: Card("V100", 6, 300), 3: Card("A100", 12, 600), 4: Card("H100", 18, 900)}
(NVLINK_EACH,) = {f"{card.each:g}" for card in CARDS.values()}  # the same in every generation


def ends(figure: str) -> tuple[float, float]:
    """The two ends of a figure: 12 and 13 of "12-13", 19 and 19 of "about 19"."""
    low, _, high = figure.removeprefix("about ").partition("-")
    return float(low), float(high or low)
