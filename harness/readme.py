"""README's tables, generated from committed records between markers, and nothing else.

A part of README.md lies between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``.
"""

from collections.abc import Callable
from pathlib import Path

from harness import table
from harness.results import read

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "results"


def first_table() -> str:
    """All rungs at N = 64, d = 16, as the tour measured them on a CPU."""
    env, cells = read(RESULTS / "cpu" / "tour.jsonl")
    chosen = [c for c in cells if (c["nk"], c["d"], c["inputs"]) == (64, 16, "normal")]
    machine = f"{env['device_name']}, {env['cores']} cores, torch {env['torch']}"
    return f"{table.markdown(env, chosen)}\n\nMeasured on: {machine}."


PARTS: dict[str, Callable[[], str]] = {"first-table": first_table}


def generate(text: str) -> str:
    """`text` with every part made again. Raises ValueError where a part's markers are missing."""
    for name, make in PARTS.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"README.md: expected one part between {begin.strip()} and {end}")
        before, rest = text.split(begin)
        text = before + begin + make() + "\n" + end + rest.split(end)[1]
    return text
